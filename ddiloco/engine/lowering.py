"""The exchange's work on a learner's devices, lowered without any array."""

import jax
import numpy as np

from ddiloco.algo.downlink import step_adder
from ddiloco.algo.fragments import Layout
from ddiloco.config import Config
from ddiloco.engine.learner_arrays import blender, encoder
from ddiloco.engine.loading import make_codec, make_down_codec, rounding_words
from ddiloco.engine.pieces import DevicePieces


def lower_exchange(
  config: Config, layout: Layout, params: object, p: int
) -> dict[str, jax.stages.Lowered]:
  """What a learner's devices do once for a round of fragment p.

  Args:
    config: of the run.
    layout: of `params`.
    params: `jax.ShapeDtypeStruct`s with shardings.
    p: the fragment.

  Returns:
    "encode": its outer gradient, from parameters and anchors; and "apply":
    what a commit brings, into the parameters.
  """
  leaves = jax.tree.leaves(params)
  pieces = DevicePieces(layout, leaves)
  where = pieces.shardings[p]
  codec, down = make_codec(config), make_down_codec(config)
  shapes = layout.shapes(p)

  def structs(specs):
    return tuple(
      jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w)
      for s, w in zip(specs, where, strict=False)  # there may be no residual
    )

  anchors = structs([jax.ShapeDtypeStruct(s, np.float32) for s in shapes])
  residual = structs(jax.eval_shape(lambda: codec.init(shapes)))
  payload = down and down.payload_spec(shapes)
  mixed = blender(config.sync.blend, where)

  def encode(residual, anchors, leaves, words):
    own = pieces.take(p, leaves)
    encode_own = encoder(codec, where, bool(residual))
    return encode_own(residual, anchors, own, words)

  def apply(leaves, arrived, payload):
    if down is not None:
      arrived = step_adder(down, where)(arrived, payload)
    if mixed is not None:
      arrived = mixed(pieces.take(p, leaves), arrived)
    leaves = list(leaves)
    pieces.put(p, leaves, arrived)
    return leaves

  words = rounding_words(config, 0, 0, 0, p)
  return {
    "encode": jax.jit(encode).lower(residual, anchors, leaves, words),
    "apply": jax.jit(apply, donate_argnums=0).lower(leaves, anchors, payload),
  }
