"""Carries out the syncer's commands: inspects, merges, stores, commits."""

from collections.abc import Callable
from typing import Any

from ddiloco.config import SnapshotConfig, seconds_to_ns
from ddiloco.engine import snapshots, startup
from ddiloco.engine.actor import Lane, Plane, Work
from ddiloco.engine.downlink import read_params, step_object
from ddiloco.engine.parts import check_object
from ddiloco.engine.ports import Call, DamagedRun, ExchangeError, Job, Ready
from ddiloco.engine.records import read_commit
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import keys, messages, retention, wire
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  FragmentState,
  Member,
  StepRef,
)
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.snapshots import Manifest
from ddiloco.protocol.syncer import OVERTAKEN
from ddiloco.protocol.syncer_types import (
  AnswerChecked,
  AnswerGarbled,
  AnswerSeen,
  Check,
  Committed,
  Drop,
  Followed,
  MemberSeen,
  Merge,
  Merged,
  Snapshot,
  StopRequested,
  Sweep,
  WriteCommit,
)
from ddiloco.types import Refusal

Key = tuple[int, int, int, int]  # round, learner, incarnation, attempt


class SyncerPlane(Plane):
  """One life of the syncer, or of a shard of it; its work in the exchange."""

  def __init__(
    self,
    *,
    arrays: Any,
    rules: Rules,
    epoch: int,
    tape: TapeWriter,
    snapshot: SnapshotConfig,
    say: Callable[[str], None] = lambda line: None,
  ):
    """Takes a `SyncerArrays`, or a `NullSyncerArrays`; `say` gets news."""
    self.arrays = arrays
    self._rules, self._epoch, self._tape = rules, epoch, tape
    self._owned = rules.owned(epoch)
    self._headers: dict[Key, AnswerHeader] = {}
    self._members: dict[int, tuple[int, int, bool]] = {}
    self._fragments: tuple[FragmentState, ...] = ()  # the newest versions
    self._commits: dict[int, tuple[Commit, str]] = {}  # the newest ones
    self._snapshot_options, self._say = snapshot, say
    self._snapshotting = False  # one is on its way

  # --- State ----------------------------------------------------------------

  def initialise(self) -> Job:
    """Stores round 0's fragments; returns their records."""
    states = []
    for p in range(self._rules.schedule.num_fragments):
      states.append((yield from self._store(0, p)))
    self.arrays.keep(self._owned)
    self._fragments = tuple(states)
    return self._fragments

  def load(self, commit: Commit, digest: str) -> Job:
    """Goes on from a commit: parameters and outer states."""
    for p in self._owned:
      ref = commit.fragments[p]
      try:
        self.arrays.load(p, ref, *(yield from self._read(p, ref)))
      except ValueError as error:
        raise DamagedRun(
          f"cannot go on from commit {commit.round}: {error}"
        ) from error
    self.arrays.keep(self._owned)
    self._fragments = commit.fragments
    self._know(commit, digest)

  def _read(self, p: int, ref: FragmentState) -> Job:
    """Parameters and outer state as they lie in the exchange."""
    params = yield from read_params(p, ref, self.arrays.downlink)
    outer = yield Call("get", (keys.outer_state(ref.version, p, ref.epoch),))
    return params, outer and outer.value

  def _store(self, t: int, p: int) -> Job:
    """Version 0, or what round t is going to commit."""
    params, outer = self.arrays.stored(p, t or None)
    payload = self.arrays.step(p, t)
    where, step = (t, p, self._epoch), None
    if payload is not None:
      data = step_object(payload, self._rules.run_id, p, self._fragments[p])
      yield _vital("put", keys.step(*where), data)
      full = retention.is_full(t, p, self._rules)
      step = StepRef(len(data), wire.sha256(data), full)
    if step is None or step.full:
      yield _vital("put", keys.params(*where), params)
    yield _vital("put", keys.outer_state(*where), outer)
    return FragmentState(
      version=t,
      epoch=self._epoch,
      params_bytes=len(params),
      params_sha256=wire.sha256(params),
      outer_bytes=len(outer),
      outer_sha256=wire.sha256(outer),
      step=step,
    )

  # --- Commands -------------------------------------------------------------

  def perform(self, command: Any) -> Work | None:
    """Turns a command into the job that carries it out."""
    match command:
      case Check():
        # Taken now: the round's commit, which may be faster, forgets it.
        header = self._headers[_key(command)]
        return Work(Lane.PARALLEL, self._check(_key(command), header))
      case Drop():
        self.arrays.drop(_key(command))
        self._headers.pop(_key(command), None)
      case Merge():
        return Work(Lane.COMPUTE, self._merge(command))
      case WriteCommit():
        return Work(Lane.ORDERED, self._commit(command.commit))
      case Sweep():
        return Work(Lane.PARALLEL, self._sweep(command))
      case Snapshot() if self._snapshotting:
        self._say(
          f"no snapshot of round {command.round}: the one before is still "
          "being written"
        )
      case Snapshot():
        self._snapshotting = True
        # Taken now: the next commit replaces them.
        captured = self.arrays.capture()
        newest = self._commits[command.round]
        job = self._snapshot(command, captured, newest)
        return Work(Lane.CHECKPOINT, job)
    return None

  def _check(self, key: Key, header: AnswerHeader) -> Job:
    data = []
    for number, part in enumerate(header.parts):
      try:
        # A round may wait for an answer that it has seen; it is not refused
        # because the store is away.
        item = yield Call("get", (keys.answer_part(*key, number),), vital=True)
      except ExchangeError:
        return AnswerChecked(0, *key, Refusal.MISSING_PART, ())
      if item is None:
        return AnswerChecked(0, *key, Refusal.MISSING_PART, ())
      if isinstance(item.value, wire.Unauthentic):
        return AnswerChecked(0, *key, Refusal.UNAUTHENTIC, ())
      if len(item.value) != part.bytes:
        return AnswerChecked(0, *key, Refusal.SIZE, ())
      if wire.sha256(item.value) != part.sha256:
        return AnswerChecked(0, *key, Refusal.CHECKSUM, ())
      data.append(item.value)
    due = [item.fragment for item in header.contributions]
    norms = self.arrays.inspect(key, due, b"".join(data))
    if norms is None:
      return AnswerChecked(0, *key, Refusal.NON_FINITE, ())
    return AnswerChecked(0, *key, None, norms)

  def _merge(self, command: Merge) -> Job:
    t, counted, states = command.round, command.counted, []
    due = [item.fragment for item in counted[0].contributions]
    for index, p in enumerate(due):
      yield Ready(self.arrays.merge(t, p, index, counted))
      states.append((yield from self._store(t, p)))
    return Merged(0, t, tuple(states))

  def _commit(self, commit: Commit) -> Job:
    t, data = commit.round, messages.encode(commit)
    yield from self._tape.flush(vital=True)
    won = yield _vital("put_if_absent", keys.commit(t), data)
    self.arrays.close(t, won)
    if won:
      self._fragments = commit.fragments
      self._know(commit, wire.sha256(data))
    # A copy of the keys: other threads add headers meanwhile.
    for key in [key for key in list(self._headers) if key[0] <= t]:
      self._headers.pop(key, None)
    return Committed(0, t, won, wire.sha256(data))

  def _snapshot(
    self, command: Snapshot, captured: dict, newest: tuple[Commit, str]
  ) -> Job:
    options, t = self._snapshot_options, command.round
    states = newest[0].fragments
    # What may be gone soon comes first: other shards', and the oldest.
    order = sorted(
      range(len(states)), key=lambda p: (p in captured, states[p].version)
    )
    found = yield from snapshots.write_rest(
      *newest,
      {p: self._captured(captured, p, states[p]) for p in order},
      command.learners,
      self._read_members(),
      patience_ns=seconds_to_ns(options.patience_s),
      keep=options.keep,
    )
    self._snapshotting = False
    self._say(_told(t, found))
    return None

  def _captured(self, captured: dict, p: int, ref: FragmentState) -> Job:
    """A fragment's bytes as of a commit; other shards' lie in the exchange."""
    if p in captured:  # packed when it is its turn
      return self.arrays.pack(captured[p])
    params, outer = yield from self._read(p, ref)
    what = f"outer state of fragment {p}, version {ref.version}"
    check_object(outer, ref.outer_bytes, ref.outer_sha256, what)
    return params, outer

  def _read_members(self) -> Job:
    """The newest record of every learner that ever joined."""
    found = []
    for learner, life in (yield from self.list_members()):
      item = yield Call("get", (keys.member(learner, life),))
      member = startup.read_member(item)
      if member is not None and member.run_id == self._rules.run_id:
        found.append(member)
    return tuple(found)

  def _sweep(self, command: Sweep) -> Job:
    """Deletes; what an outage leaves behind goes at the next start."""
    try:
      for t in command.answers:
        yield Call("delete_prefix", (keys.answers(t),))
      for version, p in command.states:
        yield from self._sweep_states(version, p)
      for t in command.commits:
        yield from _sweep_commit(keys.commit(t))
    except ExchangeError:
      pass
    return None

  def _sweep_states(self, version: int, p: int) -> Job:
    rules = self._rules
    gone = retention.outlived(version, p, rules.schedule, rules.full_every)
    for old in gone.versions:
      prefix = keys.states(old, p)
      if not gone.kinds:
        yield Call("delete_prefix", (prefix,))
        continue
      for name in (yield Call("list", (prefix,))):
        if name.endswith(gone.kinds):
          yield Call("delete", (name,))

  def sweep_all(self, commit: Commit) -> Job:
    """Deletes what earlier lives left that this commit does not need."""
    schedule = self._rules.schedule
    for name in (yield Call("list", (keys.STATES,))):
      if not self._keeps(name, commit):
        yield Call("delete", (name,))
    for name in (yield Call("list", (keys.ANSWERS,))):
      t = keys.answer_round(name)
      if t is None or t <= commit.round:
        yield Call("delete", (name,))
    # Those of an interval: a life leaves no older one unswept.
    oldest = commit.round - 2 * schedule.interval
    for name in (yield Call("list", (keys.COMMITS,))):
      t = keys.commit_round(name) or 0
      if max(oldest - schedule.interval, 0) < t <= oldest:
        yield from _sweep_commit(name)

  def _keeps(self, name: str, commit: Commit) -> bool:
    parts = keys.state_parts(name)
    if parts is None or parts[1] >= len(commit.fragments):
      return False
    version, p, kind = parts
    if p not in self._owned:
      return True
    newest = commit.fragments[p].version
    return retention.keeps(kind, version, newest, p, self._rules)

  # --- What to look for -----------------------------------------------------

  def poll_answer(self, key: Key) -> Job:
    """Looks for an answer's header."""
    item = yield Call("get", (keys.answer_header(*key),))
    if item is None:
      return None
    try:
      header = messages.decode(AnswerHeader, item.value)
    except wire.WireError as error:
      return AnswerGarbled(0, key, error.reason)
    self._headers[key] = header
    return AnswerSeen(0, key, header)

  def list_answers(self, t: int) -> Job:
    """The keys of all answers to round t.

    For those `poll_answer` is never asked for: a learner whose write failed
    goes on with its next attempt, and the one before is never there.
    """
    names = yield Call("list", (keys.answers(t),))
    return tuple(sorted(filter(None, map(keys.answer_of_header, names))))

  def poll_commit(self, t: int) -> Job:
    """Looks for another shard's commit of round t."""
    item = yield Call("get", (keys.commit(t),))
    if item is None:
      return None
    if item.value == SWEPT:  # 2 H rounds ago, this shard's among them
      return StopRequested(0, OVERTAKEN)
    commit = read_commit(item.value, t, self._rules.run_id)
    self._know(commit, digest := wire.sha256(item.value))
    return Followed(0, commit, digest)

  def _know(self, commit: Commit, digest: str) -> None:
    """For a snapshot of it; the one before may be about to be taken still."""
    before = self._rules.schedule.previous_round(commit.round)
    kept = {t: known for t, known in self._commits.items() if t == before}
    self._commits = kept | {commit.round: (commit, digest)}

  def poll_overtaken(self, t: int) -> Job:
    """Looks for another syncer's commit of round t.

    Its answers may be gone before this one has seen them, and nobody would
    ever answer the round again.
    """
    item = yield Call("get", (keys.commit(t),))
    if item is None:
      return None
    if item.value != SWEPT:
      commit = read_commit(item.value, t, self._rules.run_id)
      if commit.epoch == self._epoch:
        return None
    return StopRequested(0, OVERTAKEN)

  def list_members(self) -> Job:
    """The newest life of every learner that ever joined."""
    lives = keys.newest_lives((yield Call("list", (keys.MEMBERS,))))
    return tuple(lives.items())

  def poll_member(self, learner: int, incarnation: int) -> Job:
    """Looks whether a learner's record has changed."""
    item = yield Call("get", (keys.member(learner, incarnation),))
    if item is None:
      return None
    try:
      member = messages.decode(Member, item.value)
    except wire.WireError:
      return None  # garbage is no sign of life
    if member.run_id != self._rules.run_id:
      return None
    news = (incarnation, member.beat, member.left)
    if self._members.get(learner) == news:
      return None
    self._members[learner] = news
    return MemberSeen(0, learner, *news)


def _told(t: int, found: Manifest | str) -> str:
  """What there is to say of a snapshot that was tried."""
  if isinstance(found, str):
    return f"no snapshot of round {t}: {found}"
  learners = ", ".join(str(item.state.learner) for item in found.learners)
  left_out = "".join(f", without learner {m}" for m in found.left_out)
  return f"snapshot of round {t}: learners {learners or 'none'}{left_out}"


def _vital(method: str, key: str, value: bytes) -> Call:
  """Writes what no round is closed without."""
  return Call(method, (key, value), durable=True, vital=True)


def _sweep_commit(key: str) -> Job:
  """Replaced at once or not at all: a torn commit would be a damaged run."""
  item = yield Call("get", (key,))
  if item is not None and item.value != SWEPT:
    yield Call("compare_and_swap", (key, SWEPT, item.generation))


def _key(command: Check | Drop) -> Key:
  return (
    command.round,
    command.learner,
    command.incarnation,
    command.attempt,
  )
