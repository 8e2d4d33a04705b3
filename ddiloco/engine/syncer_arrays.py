"""The syncer's arrays: global parameters, outer states, answers held."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ddiloco.algo import codecs, downlink, merge
from ddiloco.algo.fragments import Layout, take
from ddiloco.algo.outer import (
  OuterStep,
  state_from_bytes,
  state_to_bytes,
)
from ddiloco.config import Config
from ddiloco.engine.downlink import ArrayDownlink, make_downlink
from ddiloco.engine.loading import make_outer, rounding_words
from ddiloco.engine.parts import check_object
from ddiloco.engine.records import fragment_norm, read_params
from ddiloco.protocol.messages import Counted, FragmentState

Key = tuple[int, int, int, int]  # round, learner, incarnation, attempt


class Fragment(NamedTuple):
  """One version of a fragment, as the syncer goes on from it."""

  params: tuple[Any, ...]
  outer: Any  # the outer optimizer's state
  residual: codecs.Residual = ()  # what steps down have left out
  payload: codecs.Payload | None = None  # the encoded step to it


class SyncerArrays:
  """What the syncer's plane needs of JAX."""

  @classmethod
  def from_config(
    cls,
    config: Config,
    layout: Layout,
    codec: codecs.Codec,
    *,
    device: jax.Device | None = None,
  ) -> "SyncerArrays":
    """With the merge rules and the outer optimizer of a config."""
    rules = config.merge
    return cls(
      layout,
      codec,
      merge_rules=merge.merge_rules(
        [spec.path for spec in layout.tensors],
        rules.rule,
        rules.embedding_rule,
        rules.embedding_pattern,
      ),
      rda_scope=rules.rda_scope,
      outer=make_outer(config),
      device=device,
      down=make_downlink(config, layout),
      words=functools.partial(rounding_words, config, None),
    )

  def __init__(
    self,
    layout: Layout,
    codec: codecs.Codec,
    *,
    merge_rules: Sequence[str],
    rda_scope: str = merge.TENSOR,
    outer: optax.GradientTransformation,
    device: jax.Device | None = None,
    down: ArrayDownlink | None = None,
    words: Callable[[int, int, int], np.ndarray] | None = None,
  ):
    """Takes the merge rule of every tensor, their scope, the outer optimizer.

    All is computed on `device` (None: JAX's default). `down` says how steps
    are encoded (None: they are not), and their rounding draws from the words
    of (round, 0, fragment).
    """
    self.downlink, self._words = down, words
    self._layout, self._codec, self._device = layout, codec, device
    shapes = [layout.shapes(p) for p in range(layout.num_fragments)]
    rules = [
      tuple(merge_rules[i] for i in layout.fragment(p))
      for p in range(layout.num_fragments)
    ]
    self._mergers = [
      _merger(codec, s, r, rda_scope)
      for s, r in zip(shapes, rules, strict=True)
    ]
    self._outer = [_outer_step(outer, s) for s in shapes]
    self._inspect = [_inspector(codec, s) for s in shapes]
    self._bytes = [codecs.payload_bytes(codec, s) for s in shapes]
    self._shapes = shapes
    self._fragments: dict[int, Fragment] = {}
    self._candidates: dict[int, dict[int, Fragment]] = {}
    self._answers: dict[Key, dict[int, codecs.Payload]] = {}

  # --- Parameters -----------------------------------------------------------

  def initialise(self, leaves: Sequence[np.ndarray]) -> None:
    """Takes a program's initial parameters, in the layout's order."""
    for p in range(self._layout.num_fragments):
      pieces = take(self._layout.pieces(p), leaves)
      params = tuple(np.array(piece, np.float32) for piece in pieces)
      outer = self._outer[p].init(params)
      residual = self._first_residual(p)
      self._fragments[p] = Fragment(params, outer, residual)

  def _first_residual(self, p: int) -> codecs.Residual:
    if self.downlink is None:
      return ()
    return self.downlink.codec.init(self._shapes[p])

  def load(
    self, p: int, ref: FragmentState, params: bytes | None, outer: bytes | None
  ) -> None:
    """Takes a stored version of a fragment; `ValueError` if it is damaged."""
    tensors = read_params(params, ref, self._shapes[p])
    what = f"outer state of fragment {p}, version {ref.version}"
    check_object(outer, ref.outer_bytes, ref.outer_sha256, what)
    template = self._outer[p].template, self._first_residual(p)
    self._fragments[p] = Fragment(tensors, *state_from_bytes(template, outer))

  def stored(self, p: int, t: int | None = None) -> tuple[bytes, bytes]:
    """The bytes of a fragment and its outer state; of round t's candidate.

    The downlink's residual follows the outer optimizer's own state.
    """
    return self.pack(
      self._fragments[p] if t is None else self._candidates[t][p]
    )

  def capture(self) -> dict[int, Fragment]:
    """The fragments as of the newest commit; nothing changes them."""
    return dict(self._fragments)

  def pack(self, fragment: Fragment) -> tuple[bytes, bytes]:
    """The bytes of a captured fragment, as `stored` has them."""
    state = state_to_bytes((fragment.outer, fragment.residual))
    return codecs.to_bytes(fragment.params), state

  def step(self, p: int, t: int) -> bytes | None:
    """The encoded step to round t's candidate; None if none is published."""
    if self.downlink is None or not t:
      return None
    return codecs.to_bytes(self._candidates[t][p].payload)

  def keep(self, fragments: Collection[int]) -> None:
    """Lets go of all others."""
    self._fragments = {p: self._fragments[p] for p in sorted(fragments)}

  def warm_up(self) -> None:
    """Compiles inspecting, merging and stepping before the first answer."""
    for p in self._fragments:
      shapes = self._shapes[p]
      payload = tuple(
        np.zeros(spec.shape, spec.dtype)
        for spec in self._codec.payload_spec(shapes)
      )
      self._inspect[p](payload)
      self._mergers[p].merge((payload,), (1.0,))
      merged = self._mergers[p].merge((payload,) * 2, (0.5, 0.5))
      jax.block_until_ready(self._step(1, p, merged))

  # --- Answers --------------------------------------------------------------

  def inspect(
    self, key: Key, due: Sequence[int], data: bytes
  ) -> tuple[int, ...] | None:
    """Holds an answer of the right size; its norms, None if not finite."""
    view, payloads, norms, offset = memoryview(data), {}, [], 0
    for p in due:
      end = offset + self._bytes[p]
      payloads[p] = codecs.from_bytes(
        self._codec, self._shapes[p], view[offset:end]
      )
      offset = end
      with jax.default_device(self._device):
        lengths = self._inspect[p](payloads[p])
      norm = fragment_norm(lengths)
      if norm is None:
        return None
      norms.append(norm)
    self._answers[key] = payloads
    return tuple(norms)

  def drop(self, key: Key) -> None:
    """Lets go of an answer, if it is held."""
    self._answers.pop(key, None)

  # --- Rounds ---------------------------------------------------------------

  def merge(
    self, t: int, p: int, index: int, counted: Sequence[Counted]
  ) -> Any:
    """Dispatches one fragment's merge and outer step, as round t's candidate.

    Args:
      t: the round.
      p: the fragment, the `index`-th of the round.
      index: where the answers' contributions have it.
      counted: the answers, in the order they are folded in.
    """
    weights = merge.token_weights(
      [
        (item.contributions[index].tokens, item.contributions[index].steps)
        for item in counted
      ]
    )
    held = [(t, a.learner, a.incarnation, a.attempt) for a in counted]
    with jax.default_device(self._device):
      merged = self._mergers[p].merge(
        (self._answers[key][p] for key in held), weights
      )
      fragment = self._step(t, p, merged)
    self._candidates.setdefault(t, {})[p] = fragment
    return fragment

  def _step(self, t: int, p: int, merged: Any) -> Fragment:
    """The outer step; what of it is published is the truth."""
    old = self._fragments[p]
    new, outer = self._outer[p].apply(old.params, old.outer, merged, t)
    if self.downlink is None:
      return Fragment(new, outer)
    codec = self.downlink.codec
    payload, residual = downlink.step_encoder(codec)(
      old.residual, old.params, new, self._words(t, 0, p)
    )
    params = downlink.step_adder(codec)(old.params, payload)
    return Fragment(params, outer, residual, payload)

  def close(self, t: int, won: bool) -> None:
    """Round t has a commit: ours, whose candidate becomes the truth, or not."""
    fragments = self._candidates.pop(t)
    if won:
      for p, fragment in fragments.items():
        fragment = fragment._replace(payload=None)
        self._fragments[p] = jax.tree.map(np.asarray, fragment)
    # A copy of the keys: other threads add answers meanwhile.
    for key in [key for key in list(self._answers) if key[0] <= t]:
      self._answers.pop(key, None)


# Fragments of equal shapes share their compiled functions, and so do all the
# syncer's lives that one process simulates or replays.
_merger = functools.cache(merge.Merger)
_outer_step = functools.cache(OuterStep)
_inspector = functools.cache(codecs.inspect)
