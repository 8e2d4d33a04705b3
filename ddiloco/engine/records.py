"""Reads a run's records and arrays from the exchange, trusting nothing."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout, join, take
from ddiloco.engine.parts import check_object
from ddiloco.engine.ports import DamagedRun
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import Commit, FragmentState

_NORM_UNITS = 1e9  # norms reach the machines as integers of 1e-9


def read_commit(data: bytes, t: int, run_id: str | None) -> Commit:
  """A commit from the exchange; `DamagedRun` if it cannot be round t's."""
  try:
    commit = messages.decode(Commit, data)
  except wire.WireError as error:
    raise DamagedRun(f"{keys.commit(t)} is damaged: {error}") from error
  if commit.round != t or run_id not in (None, commit.run_id):
    raise DamagedRun(
      f"{keys.commit(t)} belongs to round {commit.round} of run "
      f"{commit.run_id}, not to round {t} of {run_id}. Two runs share this "
      "exchange: give each its own."
    )
  return commit


def read_params(
  data: bytes | None, ref: FragmentState, shapes: codecs.Shapes
) -> tuple[np.ndarray, ...]:
  """A fragment's tensors from its object; `ValueError` says what is wrong."""
  check_object(
    data, ref.params_bytes, ref.params_sha256, f"parameters of {ref.version}"
  )
  return unpack_params(data, shapes)


def unpack_params(data: bytes, shapes: codecs.Shapes) -> tuple[np.ndarray, ...]:
  """A fragment's tensors from bytes of the right size, else `ValueError`."""
  specs = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
  return codecs.unpack(specs, data)


def params_digest(layout: Layout, params: Any) -> str:
  """SHA-256 over the fragments' f32 parameters, in order."""
  leaves, digest = jax.tree.leaves(params), hashlib.sha256()
  host = {
    i: np.asarray(leaves[i], "<f4")
    for i, entry in enumerate(layout.assignment)
    if entry is not None
  }
  for p in range(layout.num_fragments):
    for piece in take(layout.pieces(p), host):
      digest.update(piece.tobytes())
  return digest.hexdigest()


def place_params(
  layout: Layout,
  params: Any,
  commit: Sequence[FragmentState],
  data: Sequence[bytes | None],
) -> Any:
  """Parameters as of a commit; `ValueError` if one is gone or damaged.

  Args:
    layout: of the parameters.
    params: what the program has. The result lies on devices as they do, and
      frozen ones are theirs.
    commit: the state of every fragment.
    data: the object of every fragment.
  """
  leaves, treedef = jax.tree.flatten(params)
  fragments = [
    read_params(item, ref, layout.shapes(p))
    for p, (ref, item) in enumerate(zip(commit, data, strict=True))
  ]
  for i, tensor in enumerate(join(layout, fragments)):
    if tensor is not None:
      leaves[i] = jax.device_put(tensor, leaves[i].sharding, may_alias=False)
  return jax.tree.unflatten(treedef, leaves)


def fragment_norm(lengths: np.ndarray) -> int | None:
  """The L2 norm of a fragment in 1e-9, as machines know it; None: no number.

  Args:
    lengths: f32[tensors], the norms of its tensors.
  """
  norm = float(np.linalg.norm(np.asarray(lengths, np.float64)))
  return round(norm * _NORM_UNITS) if math.isfinite(norm) else None
