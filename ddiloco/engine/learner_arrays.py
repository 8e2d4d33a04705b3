"""A learner's arrays: state, anchors, residuals and fetched fragments.

Everything is dispatched and not waited for. Steps donate their state, so
whatever reads parameters is dispatched before the next step is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout
from ddiloco.engine.ports import Program, StepResult
from ddiloco.engine.records import fragment_shapes, read_params
from ddiloco.protocol.learner_types import (
  ApplyFragments,
  Encode,
  Settle,
  Step,
)
from ddiloco.protocol.messages import Contribution, FragmentState

Leaves = tuple[jax.Array, ...]


class Encoded(NamedTuple):
  """Dispatched encodings of a round's fragments."""

  contributions: tuple[Contribution, ...]
  payloads: dict[int, codecs.Payload]
  finite: list[jax.Array]


class LearnerArrays:
  """What the learner's plane needs of JAX."""

  def __init__(
    self,
    program: Program,
    state: Any,
    layout: Layout,
    codec: codecs.Codec,
    *,
    schedule_clock: str,
  ):
    """Takes over `state`; its parameters are the first anchors."""
    self._program, self._state = program, state
    self._layout, self._codec = layout, codec
    self._schedule_clock = schedule_clock
    leaves, self._treedef = jax.tree.flatten(program.params(state))
    self._shardings = [leaf.sharding for leaf in leaves]
    self._anchors = [jnp.copy(leaf) for leaf in leaves]
    self._encoders, self._residuals = [], []
    for p in range(layout.num_fragments):
      where = tuple(self._shardings[i] for i in layout.fragment(p))
      residual = codec.init(fragment_shapes(layout, p))
      self._encoders.append(_encoder(codec, where, bool(residual)))
      self._residuals.append(
        tuple(map(jax.device_put, residual, where[: len(residual)]))
      )
    self._next_residuals: dict[tuple[int, int], dict[int, Any]] = {}
    self._encoded: dict[int, Encoded] = {}  # of rounds not decided yet
    self._fetched: dict[tuple[int, int], tuple[Leaves, Leaves]] = {}
    self._prefetched: tuple[int, Any, int] | None = None
    self.last_metrics: dict[str, float] = {}

  def warm_up(self, first_sample: int) -> None:
    """Opens the data and compiles the encoders before the first step."""
    self.prefetch(first_sample)
    leaves = jax.tree.leaves(self._program.params(self._state))
    for p in range(self._layout.num_fragments):
      jax.block_until_ready(self._encode_fragment(p, leaves))
    jax.block_until_ready(_copy(self._state))

  # --- Steps ----------------------------------------------------------------

  def step(self, command: Step) -> StepResult:
    """Dispatches an inner step on the batch at `first_sample`."""
    if self._prefetched is None or self._prefetched[0] != command.first_sample:
      self.prefetch(command.first_sample)
    _, batch, tokens = self._prefetched
    by_tokens = self._schedule_clock == "tokens"
    clock = command.run_tokens if by_tokens else command.seen
    self._state, metrics = self._program.step(self._state, batch, clock)
    return StepResult(metrics, tokens, self._program.samples_per_step)

  def prefetch(self, first_sample: int) -> None:
    """Makes the batch that starts there, for the step to come."""
    batch = self._program.batch(first_sample, self._program.samples_per_step)
    self._prefetched = first_sample, batch, self._program.tokens(batch)

  def finish(self, result: StepResult) -> float:
    """The loss of a computed step; remembers all its metrics."""
    self.last_metrics = {name: float(v) for name, v in result.metrics.items()}
    loss = self.last_metrics.get("loss", 0.0)
    # A tape is JSON: a loss that is not finite is recorded as a huge one.
    return loss if np.isfinite(loss) else float(np.finfo(np.float32).max)

  def copy_state(self) -> Any:
    """A copy that survives the next step, which donates the state."""
    return _copy(self._state)

  # --- Commits --------------------------------------------------------------

  def place(
    self, t: int, p: int, ref: FragmentState, data: bytes | None
  ) -> None:
    """Brings version t of a fragment to the devices; `ValueError` if bad.

    Two copies: the parameters get donated, the anchors stay.
    """
    tensors = read_params(data, ref, fragment_shapes(self._layout, p))
    where = [self._shardings[i] for i in self._layout.fragment(p)]
    params = tuple(jax.device_put(list(tensors), where, may_alias=False))
    anchors = tuple(jax.device_put(list(tensors), where, may_alias=False))
    self._fetched[t, p] = params, anchors

  def apply(self, command: ApplyFragments) -> None:
    """Overwrites parameters and anchors with what was placed."""
    leaves = jax.tree.leaves(self._program.params(self._state))
    for p in command.fragments:
      params, anchors = self._fetched.pop((command.round, p))
      for i, tensor, anchor in zip(
        self._layout.fragment(p), params, anchors, strict=True
      ):
        leaves[i], self._anchors[i] = tensor, anchor
    for round_, p in list(self._fetched):
      if p in command.fragments and round_ < command.round:
        del self._fetched[round_, p]
    self._state = self._program.with_params(
      self._state, jax.tree.unflatten(self._treedef, leaves)
    )

  # --- Answers --------------------------------------------------------------

  def encode(self, command: Encode) -> Encoded:
    """Dispatches the encoding of a round's outer gradients.

    An attempt that states the counters of the one before offers its bytes
    again: parameters may have moved on since (wait = exact).
    """
    t, attempt = command.round, command.attempt
    held = self._encoded.get(t)
    if held is not None and held.contributions == command.contributions:
      self._next_residuals[t, attempt] = self._next_residuals[t, attempt - 1]
      return held
    leaves = jax.tree.leaves(self._program.params(self._state))
    payloads, finite, residuals = {}, [], {}
    for item in command.contributions:
      p = item.fragment
      payloads[p], residuals[p], ok = self._encode_fragment(p, leaves)
      finite.append(ok)
    for array in jax.tree.leaves((payloads, finite)):
      array.copy_to_host_async()
    self._next_residuals[t, attempt] = residuals
    self._encoded[t] = Encoded(command.contributions, payloads, finite)
    return self._encoded[t]

  def part(self, encoded: Encoded) -> bytes | None:
    """The bytes of computed encodings; None if one is not finite."""
    if not all(bool(ok) for ok in encoded.finite):
      return None
    payloads = encoded.payloads
    return b"".join(codecs.to_bytes(payloads[p]) for p in sorted(payloads))

  def settle(self, command: Settle) -> None:
    """The residual of the attempt that was counted holds from here on."""
    self._encoded.pop(command.round, None)
    for key in [k for k in self._next_residuals if k[0] == command.round]:
      residuals = self._next_residuals.pop(key)
      if key[1] == command.attempt:
        for p, residual in residuals.items():
          self._residuals[p] = residual

  def _encode_fragment(self, p: int, leaves: Sequence[jax.Array]) -> Any:
    tensors = self._layout.fragment(p)
    return self._encoders[p](
      self._residuals[p],
      tuple(self._anchors[i] for i in tensors),
      tuple(leaves[i] for i in tensors),
    )


@functools.cache
def _encoder(
  codec: codecs.Codec, shardings: tuple[Any, ...], has_residual: bool
) -> Callable[..., Any]:
  """Jitted: (residual, anchors, params) -> payload, residual, finite.

  The residual stays sharded as its tensors are, so that the second use of a
  residual compiles nothing the first one has not.
  """
  out = (None, shardings if has_residual else (), None)

  @functools.partial(jax.jit, out_shardings=out)
  def encode(residual, anchors, params):
    gradient = tuple(a - p for a, p in zip(anchors, params, strict=True))
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in gradient]))
    payload, residual = codec.encode(residual, gradient)
    return payload, residual, finite

  return encode


@jax.jit
def _copy(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)
