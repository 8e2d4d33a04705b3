"""Carries out the learner's commands: dispatches arrays, writes answers.

What has to be waited for, and everything that touches the exchange, is a
job; see `ports`.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

from ddiloco.engine import snapshots
from ddiloco.engine.actor import Lane, Plane, Work
from ddiloco.engine.downlink import read_version
from ddiloco.engine.ports import Call, DamagedRun, ExchangeError, Job, Ready
from ddiloco.engine.records import read_commit
from ddiloco.engine.recovery import publish
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.admission import is_outlier, remember_norm
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
  Give,
  Settle,
  Snapshot,
  Step,
  StepDone,
  TransferAsked,
  TransferEnded,
)
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  FragmentState,
  TransferRequest,
)
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules
from ddiloco.types import Refusal

# Called with the state and its position; returns once both are on disk.
SaveCheckpoint = Callable[[Any, dict[str, int]], None]


class LearnerPlane(Plane):
  """One life of a learner, as far as the exchange is concerned."""

  def __init__(
    self,
    *,
    arrays: Any,
    rules: Rules,
    learner: int,
    incarnation: int,
    newest: tuple[str, Commit],
    tape: TapeWriter,
    now_ns: Callable[[], int],
    save_checkpoint: SaveCheckpoint | None,
    anchored: bool = True,
  ):
    """Takes the arrays of a life that starts.

    Args:
      arrays: a `LearnerArrays`, or a `NullLearnerArrays`.
      rules: the machine's.
      learner: its number.
      incarnation: the life claimed.
      newest: digest and record of the commit joined at.
      tape: where the life is recorded.
      now_ns: the clock that own-thread time is measured by.
      save_checkpoint: None: checkpoints are not taken.
      anchored: its anchors are the parameters of `newest`.
    """
    self.arrays = arrays
    self._rules = rules
    self._learner, self._incarnation = learner, incarnation
    self._tape, self._now_ns = tape, now_ns
    self._save_checkpoint = save_checkpoint
    self._previous, commit = newest
    self._refs = {p: {s.version: s} for p, s in enumerate(commit.fragments)}
    if anchored:
      self.arrays.hold(commit.fragments)
    self._fetched = dict.fromkeys(self._refs, 0)  # or asked for
    self._exchange_ns = 0
    self._norms: dict[int, tuple[int, ...]] = {}  # recent ones, by fragment
    # At most one copy waits for the tape: a newer one takes its place.
    self._unsaved: collections.deque = collections.deque(maxlen=1)
    self._saving = False  # a job that will take it is on its way
    self._snapshotting = False  # one is on its way
    self._asked: frozenset[str] = frozenset()  # requests found before

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
        self._fetched |= dict.fromkeys(refs, command.round)
        work = Work(Lane.PARALLEL, self._fetch(command.round, refs))
      case ApplyFragments():
        self.arrays.apply(command)
      case Encode():
        encoded = self.arrays.encode(command)
        work = Work(Lane.ORDERED, self._publish(command, encoded))
      case Settle():
        self.arrays.settle(command)
      case Checkpoint() if self._save_checkpoint is not None:
        self._unsaved.append((command, self.arrays.copy_state()))
        if not self._saving:  # else jobs pile up where the store is slow
          self._saving = True
          work = Work(Lane.ORDERED, self._record_checkpoint())
      case Give():
        copy = self.arrays.copy_state()
        work = Work(Lane.ORDERED, self._record_gift(command, copy))
      case Snapshot() if not self._snapshotting:
        # Where the store is too slow for it, the next one has this learner.
        self._snapshotting = True
        captured = self.arrays.capture()
        work = Work(Lane.ORDERED, self._record_snapshot(command, captured))
    self._exchange_ns += self._now_ns() - begin_ns
    return work

  def _step(self, command: Step) -> Job:
    result = self.arrays.step(command)
    exchange_ns, self._exchange_ns = self._exchange_ns, 0
    return self._finish_step(command, result, exchange_ns)

  def _finish_step(self, command: Step, result: Any, exchange_ns: int) -> Job:
    self.arrays.prefetch(command.first_sample + result.samples)
    yield Ready(result.metrics)
    loss = self.arrays.finish(result)
    return StepDone(
      0, command.step, result.tokens, result.samples, loss, exchange_ns
    )

  def _record_checkpoint(self) -> Job:
    """The tape goes first: a replay must know what a later life restores."""
    self._saving = False  # before it looks: what comes next needs a job
    try:
      command, copy = self._unsaved.popleft()
      yield from self._tape.flush()
    except (IndexError, ExchangeError):
      return None  # replaced by a newer one, or the next one will do
    return Work(Lane.CHECKPOINT, self._checkpoint(command, copy))

  def _checkpoint(self, command: Checkpoint, copy: Any) -> Job:
    yield Ready(copy)
    if not self.arrays.is_finite(copy):
      return None  # the one before is worth more
    position = {
      "incarnation": self._incarnation,
      "step": command.step,
      "seen": command.seen,
      "next_sample": command.next_sample,
    }
    self._save_checkpoint(copy, position)
    return None

  # --- Transfers to peers ---------------------------------------------------

  def poll_transfers(self) -> Job:
    """Looks for peers that ask for this learner's state: their events."""
    listed = yield Call("list", (keys.transfers(self._learner),))
    requests = {name for name in listed if keys.transfer_ends(name)}
    events = []
    for name in sorted(requests - self._asked):
      item = yield Call("get", (name,))
      _, recipient, nonce = keys.transfer_ends(name)
      try:
        request = item and messages.decode(TransferRequest, item.value)
      except wire.WireError:
        continue  # garbage asks for nothing
      if request and request.run_id == self._rules.run_id:
        events.append(TransferAsked(0, recipient, nonce, request.seen))
    self._asked = frozenset(requests)
    return tuple(events)

  def _record_gift(self, command: Give, copy: Any) -> Job:
    """The tape goes first: a replay must know what the recipient has got."""
    try:
      yield from self._tape.flush()
    except ExchangeError:
      return TransferEnded(0, command.nonce)
    return Work(Lane.CHECKPOINT, self._give(command, copy))

  def _give(self, command: Give, copy: Any) -> Job:
    yield Ready(copy)
    if self.arrays.is_finite(copy):
      travel = self.arrays.travel
      header = {
        "run_id": self._rules.run_id,
        "learner": self._learner,
        "incarnation": self._incarnation,
        "step": command.step,
        "seen": command.seen,
        "state": travel.digest,
      }
      ends = self._learner, command.recipient, command.nonce
      try:
        yield from publish(header, ends, travel.pack(copy))
      except ExchangeError:
        pass  # the recipient asks the next one
    return TransferEnded(0, command.nonce)

  # --- Snapshots ------------------------------------------------------------

  def _record_snapshot(self, command: Snapshot, captured: Any) -> Job:
    """The tape goes first: a replay begins where the snapshot was taken."""
    try:
      yield from self._tape.flush()
    except ExchangeError:
      self._snapshotting = False
      return None
    return Work(Lane.CHECKPOINT, self._snapshot(command, captured))

  def _snapshot(self, command: Snapshot, captured: Any) -> Job:
    yield Ready(captured.state)
    if self.arrays.is_finite(captured.state):
      record = {
        "run_id": self._rules.run_id,
        "round": command.round,
        "state": command.state,
        "attempts": captured.attempts,
        "shapes": self.arrays.bytes.digest,
      }
      try:
        data = self.arrays.bytes.pack(captured)
        yield from snapshots.write_learner(record, data)
      except ExchangeError:
        pass  # it is left out
    self._snapshotting = False
    return None

  # --- Answers --------------------------------------------------------------

  def _publish(self, command: Encode, encoded: Any) -> Job:
    yield Ready(encoded)
    t, n = command.round, command.attempt
    refusal = self._guard(command, self.arrays.norms(encoded))
    if refusal is not None:
      return AnswerFailed(0, t, n, "refused by its learner", refusal)
    part = self.arrays.part(encoded)
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
        for name, value in sorted(self.arrays.last_metrics.items())
        if math.isfinite(value)
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

  def _guard(
    self, command: Encode, norms: tuple[int, ...] | None
  ) -> Refusal | None:
    """What the syncer would refuse need not travel."""
    if norms is None:
      return Refusal.NON_FINITE
    refusal = None
    for item, norm in zip(command.contributions, norms, strict=True):
      recent = self._norms.get(item.fragment, ())
      if is_outlier(norm, recent, self._rules):
        refusal = Refusal.OUTLIER
      self._norms[item.fragment] = remember_norm(recent, norm)
    return refusal

  # --- Commits --------------------------------------------------------------

  def poll(self, t: int) -> Job:
    """Looks for the commit of round t: `CommitSeen`, or None."""
    item = yield Call("get", (keys.commit(t),))
    if item is None or item.value == SWEPT:
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
      # The one before may still be on its way here, and what was asked for
      # is asked for again if it does not come; none other is wanted.
      refs = self._refs[p]
      wanted = refs.keys() & {max(refs), self._fetched[p]}
      self._refs[p] = {v: refs[v] for v in wanted} | {t: commit.fragments[p]}
    return CommitSeen(
      now_ns=0,
      round=t,
      epoch=commit.fragments[self._rules.schedule.fragments(t)[0]].epoch,
      counted_attempt=commit.counted_attempt(self._learner, self._incarnation),
      run_tokens=commit.tokens,
      step_ns=commit.step_ns,
    )

  def catch_up(self, t: int) -> Job:
    """Looks past a missing commit t: `CaughtUp` if newer ones exist."""
    listed = yield Call("list", (keys.COMMITS,))
    # Sorted, and long: the keys of swept commits stay.
    rounds = map(keys.commit_round, reversed(listed))
    newest, item = next(filter(None, rounds), 0), None
    if newest > t:
      item = yield Call("get", (keys.commit(newest),))
    if item is None or item.value == SWEPT:
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
        yield from self._fetch_fragment(t, p, ref)
    except (ExchangeError, ValueError) as error:
      return FetchFailed(0, t, str(error))
    return Fetched(0, t)

  def _fetch_fragment(self, t: int, p: int, ref: FragmentState) -> Job:
    downlink, held = self.arrays.downlink, self.arrays.held(p)
    version = None if held is None else held.ref.version
    params, payloads = yield from read_version(
      p, ref, downlink, version, self._rules.schedule
    )
    if params is None:
      self.arrays.add(t, p, ref, held, payloads)
      return
    for payload in payloads:
      params = downlink.add(p, params, payload)
    self.arrays.place(t, p, ref, params)
