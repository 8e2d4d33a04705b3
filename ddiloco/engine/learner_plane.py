"""Carries out the learner's commands on the island's devices.

Array work is dispatched and not waited for; what has to be waited for, and
everything that touches the exchange, is a job. Steps donate their state, so
whatever reads parameters is dispatched before the next step is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout
from ddiloco.engine.actor import Lane, Plane, Work
from ddiloco.engine.ports import (
  Call,
  DamagedRun,
  ExchangeError,
  Job,
  Program,
  Ready,
)
from ddiloco.engine.records import (
  fragment_shapes,
  read_commit,
  read_params,
)
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.learner_types import (
  AnswerFailed,
  AnswerWritten,
  ApplyFragments,
  CaughtUp,
  Checkpoint,
  CommitSeen,
  Encode,
  Fetch,
  Fetched,
  FetchFailed,
  Settle,
  Step,
  StepDone,
)
from ddiloco.protocol.messages import AnswerHeader, Commit, FragmentState
from ddiloco.protocol.rules import Rules

Leaves = tuple[jax.Array, ...]
# Called with the state and its position; returns once both are on disk.
SaveCheckpoint = Callable[[Any, dict[str, int]], None]


class LearnerPlane(Plane):
  """The arrays of one learner: state, anchors, residuals, fetched commits."""

  def __init__(
    self,
    *,
    program: Program,
    state: Any,
    layout: Layout,
    codec: codecs.Codec,
    rules: Rules,
    learner: int,
    incarnation: int,
    newest: tuple[str, Commit],
    tape: TapeWriter,
    schedule_clock: str,
    now_ns: Callable[[], int],
    save_checkpoint: SaveCheckpoint | None,
  ):
    """Takes over `state`, whose parameters are those of `newest`."""
    self._program, self._state = program, state
    self._layout, self._codec, self._rules = layout, codec, rules
    self._learner, self._incarnation = learner, incarnation
    self._tape, self._schedule_clock = tape, schedule_clock
    self._now_ns = now_ns
    self._save_checkpoint = save_checkpoint
    leaves, self._treedef = jax.tree.flatten(program.params(state))
    self._shardings = [leaf.sharding for leaf in leaves]
    self._anchors = [jnp.copy(leaf) for leaf in leaves]
    self._previous, commit = newest
    self._refs = {p: {s.version: s} for p, s in enumerate(commit.fragments)}
    self._encoders, self._residuals = [], []
    for p in range(layout.num_fragments):
      where = tuple(self._shardings[i] for i in layout.fragment(p))
      residual = codec.init(self._shapes(p))
      self._encoders.append(_encoder(codec, where, bool(residual)))
      self._residuals.append(
        tuple(map(jax.device_put, residual, where[: len(residual)]))
      )
    self._next_residuals: dict[tuple[int, int], dict[int, Any]] = {}
    self._fetched: dict[tuple[int, int], tuple[Leaves, Leaves]] = {}
    self._prefetched: tuple[int, Any, int] | None = None
    self._exchange_ns = 0
    self.last_metrics: dict[str, float] = {}

  # --- Commands -------------------------------------------------------------

  def perform(self, command: Any) -> Work | None:
    """Dispatches a command's array work; returns what is left to do."""
    begin_ns = self._now_ns()
    work = None
    match command:
      case Step():
        return Work(Lane.COMPUTE, self._step(command))
      case Fetch():
        # Taken now: polls of later commits, which may be faster, drop them.
        refs = {p: self._refs[p][command.round] for p in command.fragments}
        work = Work(Lane.PARALLEL, self._fetch(command.round, refs))
      case ApplyFragments():
        self._apply(command)
      case Encode():
        work = Work(Lane.ORDERED, self._encode(command))
      case Settle():
        self._settle(command)
      case Checkpoint() if self._save_checkpoint is not None:
        work = Work(Lane.CHECKPOINT, self._checkpoint(command))
    self._exchange_ns += self._now_ns() - begin_ns
    return work

  def _step(self, command: Step) -> Job:
    batch, tokens = self._batch(command.first_sample)
    tokens_clock = self._schedule_clock == "tokens"
    clock = command.run_tokens if tokens_clock else command.seen
    self._state, metrics = self._program.step(self._state, batch, clock)
    exchange_ns, self._exchange_ns = self._exchange_ns, 0
    return self._finish_step(command, metrics, tokens, exchange_ns)

  def _finish_step(
    self,
    command: Step,
    metrics: dict[str, Any],
    tokens: int,
    exchange_ns: int,
  ) -> Job:
    samples = self._program.samples_per_step
    self._prefetch(command.first_sample + samples)
    yield Ready(metrics)
    self.last_metrics = {name: float(v) for name, v in metrics.items()}
    loss = self.last_metrics.get("loss", 0.0)
    # A tape is JSON: a loss that is not finite is recorded as a huge one.
    loss = loss if np.isfinite(loss) else float(np.finfo(np.float32).max)
    return StepDone(0, command.step, tokens, samples, loss, exchange_ns)

  def _batch(self, first_sample: int) -> tuple[Any, int]:
    if self._prefetched is None or self._prefetched[0] != first_sample:
      self._prefetch(first_sample)
    _, batch, tokens = self._prefetched
    return batch, tokens

  def _prefetch(self, first_sample: int) -> None:
    batch = self._program.batch(first_sample, self._program.samples_per_step)
    self._prefetched = first_sample, batch, self._program.tokens(batch)

  def _apply(self, command: ApplyFragments) -> None:
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

  def _settle(self, command: Settle) -> None:
    for key in [k for k in self._next_residuals if k[0] == command.round]:
      residuals = self._next_residuals.pop(key)
      if key[1] == command.attempt:
        for p, residual in residuals.items():
          self._residuals[p] = residual

  def _checkpoint(self, command: Checkpoint) -> Job:
    # The next step donates the state: a copy is what gets saved.
    copies = _copy(self._state)
    position = {
      "step": command.step,
      "seen": command.seen,
      "next_sample": command.next_sample,
    }
    return self._finish_checkpoint(copies, position)

  def _finish_checkpoint(self, copies: Any, position: dict[str, int]) -> Job:
    yield Ready(copies)
    self._save_checkpoint(copies, position)
    return None

  # --- Answers --------------------------------------------------------------

  def _encode(self, command: Encode) -> Job:
    leaves = jax.tree.leaves(self._program.params(self._state))
    payloads, finite, residuals = {}, [], {}
    for item in command.contributions:
      p = item.fragment
      payloads[p], residuals[p], ok = self._encode_fragment(p, leaves)
      finite.append(ok)
    for array in jax.tree.leaves((payloads, finite)):
      array.copy_to_host_async()
    self._next_residuals[command.round, command.attempt] = residuals
    return self._publish(command, payloads, finite)

  def _encode_fragment(self, p: int, leaves: list[jax.Array]) -> Any:
    tensors = self._layout.fragment(p)
    return self._encoders[p](
      self._residuals[p],
      tuple(self._anchors[i] for i in tensors),
      tuple(leaves[i] for i in tensors),
    )

  def warm_up(self, first_sample: int) -> None:
    """Opens the data and compiles the encoders before the first step."""
    self._prefetch(first_sample)
    leaves = jax.tree.leaves(self._program.params(self._state))
    for p in range(self._layout.num_fragments):
      jax.block_until_ready(self._encode_fragment(p, leaves))
    jax.block_until_ready(_copy(self._state))

  def _publish(
    self, command: Encode, payloads: dict[int, Any], finite: list[jax.Array]
  ) -> Job:
    yield Ready((payloads, finite))
    t, n = command.round, command.attempt
    if not all(bool(ok) for ok in finite):
      return AnswerFailed(0, t, n, "the outer gradient is not finite")
    part = b"".join(codecs.to_bytes(payloads[p]) for p in sorted(payloads))
    life = (t, self._learner, self._incarnation, n)
    header = AnswerHeader(
      run_id=self._rules.run_id,
      round=t,
      learner=self._learner,
      incarnation=self._incarnation,
      attempt=n,
      contributions=command.contributions,
      layout=self._rules.layout,
      codec=self._rules.codec,
      parts=(messages.PartRef(len(part), wire.sha256(part)),),
      step_ns=command.step_ns,
      fetch_ns=command.fetch_ns,
      life_steps=command.life_steps,
      life_tokens=command.life_tokens,
      vector_clock=command.vector_clock,
      metrics=tuple(
        (name, value)
        for name, value in sorted(self.last_metrics.items())
        if np.isfinite(value)
      ),
      mac="",
    )
    try:
      yield from self._tape.flush()
      yield Call("put", (keys.answer_part(*life, 0), part))
      # The header makes the answer visible, so it comes last.
      yield Call("put", (keys.answer_header(*life), messages.encode(header)))
    except ExchangeError as error:
      return AnswerFailed(0, t, n, str(error))
    return AnswerWritten(0, t, n)

  # --- Commits --------------------------------------------------------------

  def poll(self, t: int) -> Job:
    """Looks for the commit of round t: `CommitSeen`, or None."""
    item = yield Call("get", (keys.commit(t),))
    if item is None:
      return None
    commit = read_commit(item.value, t, self._rules.run_id)
    if commit.previous != self._previous:
      raise DamagedRun(
        f"commit {t} follows a commit with digest {commit.previous[:12]}, "
        f"but this learner has seen {self._previous[:12]}: the exchange holds "
        "two histories. Was it restored from a copy? Start from one history "
        "or use a new exchange."
      )
    self._previous = wire.sha256(item.value)
    for p in self._rules.schedule.fragments(t):
      # The one before may still be on its way here; none older is wanted.
      newest = max(self._refs[p])
      self._refs[p] = {newest: self._refs[p][newest], t: commit.fragments[p]}
    return CommitSeen(
      now_ns=0,
      round=t,
      epoch=commit.fragments[self._rules.schedule.fragments(t)[0]].epoch,
      counted_attempt=commit.counted_attempt(self._learner, self._incarnation),
      run_tokens=commit.tokens,
    )

  def catch_up(self, t: int) -> Job:
    """Looks past a missing commit t: `CaughtUp` if newer ones exist."""
    newest = 0
    for name in (yield Call("list", (keys.COMMITS,))):
      newest = max(newest, keys.commit_round(name) or 0)
    item = None
    if newest > t:
      item = yield Call("get", (keys.commit(newest),))
    if item is None:
      return None
    commit = read_commit(item.value, newest, self._rules.run_id)
    self._previous = wire.sha256(item.value)
    for p, ref in enumerate(commit.fragments):
      self._refs[p][ref.version] = ref
    versions = tuple((ref.version, ref.epoch) for ref in commit.fragments)
    return CaughtUp(0, newest, versions, commit.tokens)

  def _fetch(self, t: int, refs: dict[int, FragmentState]) -> Job:
    try:
      for p, ref in refs.items():
        item = yield Call("get", (keys.params(t, p, ref.epoch),))
        tensors = read_params(item and item.value, ref, self._shapes(p))
        self._fetched[t, p] = self._place(p, tensors)
    except (ExchangeError, ValueError) as error:
      return FetchFailed(0, t, str(error))
    return Fetched(0, t)

  def _place(
    self, p: int, tensors: Sequence[np.ndarray]
  ) -> tuple[Leaves, Leaves]:
    """Two device copies: the parameters get donated, the anchors stay."""
    where = [self._shardings[i] for i in self._layout.fragment(p)]
    params = tuple(jax.device_put(list(tensors), where, may_alias=False))
    anchors = tuple(jax.device_put(list(tensors), where, may_alias=False))
    return params, anchors

  def _shapes(self, p: int) -> codecs.Shapes:
    return fragment_shapes(self._layout, p)


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
