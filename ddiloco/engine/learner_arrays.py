"""A learner's arrays: state, anchors, residuals and fetched fragments.

Everything is dispatched and not waited for. Steps donate their state, so
whatever reads parameters is dispatched before the next step is.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco.algo import codecs
from ddiloco.algo.downlink import step_adder
from ddiloco.algo.rows import by_rows
from ddiloco.config import Config
from ddiloco.config.codecs import blocked
from ddiloco.engine.downlink import Held, make_downlink
from ddiloco.engine.learner_bytes import (
  Captured,
  Encoded,
  LearnerBytes,
  part_of,
)
from ddiloco.engine.loading import Model, make_outer, rounding_words
from ddiloco.engine.pieces import DevicePieces, Leaves
from ddiloco.engine.ports import StepResult
from ddiloco.engine.records import (
  fragment_norm,
  read_params,
)
from ddiloco.engine.state_bytes import StateBytes
from ddiloco.protocol import wire
from ddiloco.protocol.learner_types import (
  ApplyFragments,
  Encode,
  Settle,
  Step,
)
from ddiloco.protocol.messages import FragmentState


class LearnerArrays:
  """What the learner's plane needs of JAX."""

  def __init__(
    self, config: Config, model: Model, state: Any, *, overwritten: bool = True
  ):
    """Takes over `state`; its parameters are the first anchors.

    They are a commit's that its moments do not know of, if `overwritten`.
    """
    program, layout, codec = model.program, model.layout, model.codec
    self._program, self._state = program, state
    self._hook = getattr(program, "overwritten", None)
    self._layout, self._codec = layout, codec
    self._config, self._learner = config, model.learner
    self._schedule_clock = config.inner.clock
    outer = make_outer(config) if config.sync.eager else None
    leaves, self._treedef = jax.tree.flatten(program.params(state))
    self._pieces = DevicePieces(layout, leaves)
    self._anchors: list[Leaves] = []  # of every fragment
    self._encoders, self._residuals = [], []
    self._blenders, self._eager_steps = [], []
    for p in range(layout.num_fragments):
      where = self._pieces.shardings[p]
      self._anchors.append(self._pieces.copy(p, leaves))
      residual = codec.init(layout.shapes(p))
      self._encoders.append(encoder(codec, where, bool(residual)))
      self._blenders.append(blender(config.sync.blend, where))
      self._eager_steps.append(outer and _eager_step(outer, where))
      self._residuals.append(
        tuple(map(jax.device_put, residual, where[: len(residual)]))
      )
    # By round and attempt, until the round is decided.
    self._encoded: dict[tuple[int, int], Encoded] = {}
    self._fetched: dict[tuple[int, int], tuple[Leaves, Leaves]] = {}
    self.downlink = make_downlink(config, layout)
    self._held: dict[int, Held] = {}  # the newest anchors; where steps come
    self._samples = program.samples_per_step  # of the last step
    self._prefetched: tuple[Any, ...] = ()  # sample, count, batch, tokens
    if overwritten:
      self._state = self._overwritten(range(layout.num_fragments))
    self.last_metrics: dict[str, float] = {}
    self.travel = travelling(config, program, state)
    self.bytes = LearnerBytes(program, state, layout, codec)

  def warm_up(self, first_sample: int) -> None:
    """Opens the data and compiles the encoders before the first step."""
    self.prefetch(first_sample)
    leaves = jax.tree.leaves(self._program.params(self._state))
    for p in range(self._layout.num_fragments):
      words = rounding_words(self._config, self._learner, 0, 0, p)
      jax.block_until_ready(self._encode_fragment(p, leaves, words))
      self._pieces.put(p, leaves, self._pieces.take(p, leaves))
      if self.downlink is not None:
        jax.block_until_ready(self._add_nothing(p))
    self._take(leaves)
    jax.block_until_ready(_copy(self._state))

  def _add_nothing(self, p: int) -> Leaves:
    codec = self.downlink.codec
    specs = codec.payload_spec(self._layout.shapes(p))
    nothing = tuple(np.zeros(spec.shape, spec.dtype) for spec in specs)
    adder = step_adder(codec, self._pieces.shardings[p])
    return _copy(adder(self._anchors[p], nothing))

  # --- Steps ----------------------------------------------------------------

  def step(self, command: Step) -> StepResult:
    """Dispatches an inner step on the batch at `first_sample`."""
    samples = command.samples or self._program.samples_per_step
    if self._prefetched[:2] != (command.first_sample, samples):
      self._samples = samples
      self.prefetch(command.first_sample)
    *_, batch, tokens = self._prefetched
    by_tokens = self._schedule_clock == "tokens"
    clock = command.run_tokens if by_tokens else command.seen
    self._state, metrics = self._program.step(self._state, batch, clock)
    return StepResult(metrics, tokens, samples)

  def prefetch(self, first_sample: int) -> None:
    """Makes the batch that starts there, for the step to come."""
    batch = self._program.batch(first_sample, self._samples)
    tokens = self._program.tokens(batch)
    self._prefetched = first_sample, self._samples, batch, tokens

  def finish(self, result: StepResult) -> float:
    """The loss of a computed step; remembers all its metrics."""
    self.last_metrics = {name: float(v) for name, v in result.metrics.items()}
    loss = self.last_metrics.get("loss", 0.0)
    # A tape is JSON: a loss that is not finite is recorded as a huge one.
    return loss if np.isfinite(loss) else float(np.finfo(np.float32).max)

  def copy_state(self) -> Any:
    """A copy that survives the next step, which donates the state."""
    return _copy(self._state)

  def is_finite(self, state: Any) -> bool:
    """Whether all numbers of a copied state are; waits for it."""
    return bool(_all_finite(state))

  # --- Snapshots ------------------------------------------------------------

  @classmethod
  def resumed(
    cls, config: Config, model: Model, captured: Captured
  ) -> "LearnerArrays":
    """Those of a life that goes on where a snapshot was taken."""
    arrays = cls(config, model, captured.state, overwritten=False)
    where = arrays._pieces.shardings
    for p in range(model.layout.num_fragments):
      arrays._anchors[p] = _put(captured.anchors[p], where[p])
      arrays._residuals[p] = _put(captured.residuals[p], where[p])
    for key, item in captured.encoded.items():
      arrays._encoded[key] = item._replace(
        residuals={p: _put(r, where[p]) for p, r in item.residuals.items()}
      )
    return arrays

  def capture(self) -> Captured:
    """All there is to the learner now; what follows changes none of it."""
    return Captured(
      self.copy_state(),
      tuple(self._anchors),
      tuple(self._residuals),
      dict(self._encoded),
    )

  # --- Commits --------------------------------------------------------------

  def place(
    self, t: int, p: int, ref: FragmentState, data: bytes | None
  ) -> None:
    """Brings version t of a fragment to the devices; `ValueError` if bad.

    Two copies: the parameters get donated, the anchors stay.
    """
    tensors = read_params(data, ref, self._layout.shapes(p))
    where = list(self._pieces.shardings[p])
    params = tuple(jax.device_put(list(tensors), where, may_alias=False))
    anchors = tuple(jax.device_put(list(tensors), where, may_alias=False))
    self._hold(p, ref, anchors)
    self._fetched[t, p] = params, anchors

  def hold(self, refs: Sequence[FragmentState]) -> None:
    """Says which versions the first anchors are."""
    for p, ref in enumerate(refs):
      self._hold(p, ref, self._anchors[p])

  def held(self, p: int) -> Held | None:
    """What steps can be added to; None: take a version in full.

    One that is not what its commit names is let go: steps would carry the
    error on for ever. It is computed by now, so this waits for nothing.
    """
    held = self._held.get(p)
    if held is None:
      return None
    digest = wire.sha256(codecs.to_bytes(held.tensors))
    if digest != held.ref.params_sha256:
      del self._held[p]
      return None
    return held

  def add(
    self,
    t: int,
    p: int,
    ref: FragmentState,
    held: Held,
    payloads: Sequence[bytes],
  ) -> None:
    """Makes version t of a fragment from what is held; `ValueError` if bad."""
    where, anchors = self._pieces.shardings[p], held.tensors
    adder = step_adder(self.downlink.codec, where)
    for payload in payloads:
      anchors = adder(anchors, self.downlink.unpack(p, payload))
    self._hold(p, ref, anchors)
    self._fetched[t, p] = _copy(anchors), anchors

  def _hold(self, p: int, ref: FragmentState, anchors: Leaves) -> None:
    known = self._held.get(p)
    newer = known is None or ref.version >= known.ref.version
    if self.downlink is not None and newer:
      self._held[p] = Held(ref, anchors)

  def apply(self, command: ApplyFragments) -> None:
    """Anchors become what was placed; parameters too, or a blend with it."""
    leaves = jax.tree.leaves(self._program.params(self._state))
    for p in command.fragments:
      params, self._anchors[p] = self._fetched.pop((command.round, p))
      if self._blenders[p] is not None:
        params = self._blenders[p](self._pieces.take(p, leaves), params)
      self._pieces.put(p, leaves, params)
    for round_, p in list(self._fetched):
      if p in command.fragments and round_ < command.round:
        del self._fetched[round_, p]
    self._take(leaves)
    self._state = self._overwritten(command.fragments)

  def _overwritten(self, fragments: Iterable[int]) -> Any:
    """The state once the program knows that commits overwrote these."""
    if self._hook is None:
      return self._state
    pieces = [q for p in fragments for q in self._layout.pieces(p)]
    return self._hook(self._state, pieces)

  def _take(self, leaves: Sequence[jax.Array]) -> None:
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
    held = self._encoded.get((t, attempt - 1))
    if held is not None and held.contributions == command.contributions:
      self._encoded[t, attempt] = held
      return held
    leaves = jax.tree.leaves(self._program.params(self._state))
    payloads, norms, residuals = {}, [], {}
    for item in command.contributions:
      p = item.fragment
      words = rounding_words(self._config, self._learner, t, attempt, p)
      payloads[p], residuals[p], lengths = self._encode_fragment(
        p, leaves, words
      )
      norms.append(lengths)
    for array in jax.tree.leaves((payloads, norms)):
      array.copy_to_host_async()
    if any(self._eager_steps):
      self._step_eagerly(t, payloads, leaves)
    encoded = Encoded(command.contributions, payloads, norms, residuals)
    self._encoded[t, attempt] = encoded
    return encoded

  def norms(self, encoded: Encoded) -> tuple[int, ...] | None:
    """Of every fragment's outer gradient, in 1e-9; None if one is no number."""
    norms = [fragment_norm(np.asarray(lengths)) for lengths in encoded.norms]
    return None if None in norms else tuple(norms)

  def part(self, encoded: Encoded) -> bytes:
    """The bytes of computed encodings."""
    return part_of(encoded)

  def settle(self, command: Settle) -> None:
    """The residual of the attempt that was counted holds from here on."""
    for key in [k for k in self._encoded if k[0] == command.round]:
      encoded = self._encoded.pop(key)
      if key[1] == command.attempt:
        for p, residual in encoded.residuals.items():
          self._residuals[p] = residual

  def _step_eagerly(
    self, t: int, due: Iterable[int], leaves: list[jax.Array]
  ) -> None:
    """Goes on as if the own outer gradients were the merged ones."""
    for p in due:
      own = self._pieces.take(p, leaves)
      stepped = self._eager_steps[p](self._anchors[p], own, np.int32(t))
      self._pieces.put(p, leaves, stepped)
    self._take(leaves)

  def _encode_fragment(
    self, p: int, leaves: Sequence[jax.Array], words: np.ndarray
  ) -> Any:
    own = self._pieces.take(p, leaves)
    return self._encoders[p](self._residuals[p], self._anchors[p], own, words)


def _put(tensors: Sequence[Any], where: Sequence[Any]) -> Leaves:
  pairs = zip(tensors, where, strict=False)  # there may be no residual
  return tuple(jax.device_put(x, w, may_alias=False) for x, w in pairs)


def travelling(config: Config, program: Any, state: Any) -> StateBytes:
  """How states go from learner to learner, as `recovery.params` says."""
  whole = config.recovery.params == "peer"
  return StateBytes(program, state, whole=whole)


@functools.cache
def encoder(
  codec: codecs.Codec, shardings: tuple[Any, ...], has_residual: bool
) -> Callable[..., Any]:
  """Jitted: (residual, anchors, params, words) -> payload, residual, norms.

  The residual stays sharded as its tensors are, so that the second use of a
  residual compiles nothing the first one has not.
  """
  out = (None, shardings if has_residual else (), None)

  @functools.partial(jax.jit, out_shardings=out)
  def encode(residual, anchors, params, words):
    gradient = tuple(a - p for a, p in zip(anchors, params, strict=True))
    norms = jnp.stack([codecs.polar(g)[1] for g in gradient])
    if blocked(codec.name):
      residual = residual and by_rows(residual, shardings)
      gradient = by_rows(gradient, shardings)
    payload, residual = codec.encode(residual, gradient, words)
    return payload, residual, norms

  return encode


@functools.cache
def blender(
  alpha: float, shardings: tuple[Any, ...]
) -> Callable[[Leaves, Leaves], Leaves] | None:
  """Jitted: alpha own + (1 - alpha) global; None where alpha is 0."""
  if not alpha:
    return None

  @functools.partial(jax.jit, out_shardings=shardings, donate_argnums=1)
  def blend(own, placed):
    pairs = zip(own, placed, strict=True)
    return tuple(alpha * x + (1.0 - alpha) * y for x, y in pairs)

  return blend


@functools.cache
def _eager_step(
  outer: optax.GradientTransformationExtraArgs, shardings: tuple[Any, ...]
) -> Callable[..., Leaves]:
  """Jitted: (anchors, params, round) -> the outer step of their difference."""

  @functools.partial(jax.jit, out_shardings=shardings)
  def step(anchors, params, round):
    gradient = tuple(a - p for a, p in zip(anchors, params, strict=True))
    state = outer.init(anchors)
    updates, _ = outer.update(gradient, state, anchors, round=round)
    return optax.apply_updates(anchors, updates)

  return step


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
  floats = [
    x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


@jax.jit
def _copy(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)
