"""What the syncer's tapes tell: rounds, refusals, sizes of answers."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ddiloco.protocol import admission, messages, tape
from ddiloco.protocol.ledger import AnswerKey
from ddiloco.protocol.messages import AnswerHeader, Commit, FragmentState
from ddiloco.protocol.rules import Rules
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
  Opened,
  Stop,
)
from ddiloco.protocol.tape import CommitDigest
from ddiloco.report.tapes import TapeReader
from ddiloco.types import Refusal

_Counted = tuple[tuple[int, int, int], ...]  # (learner, incarnation, attempt)


@dataclasses.dataclass(slots=True)
class Round:
  """One committed round. Times are Unix ns; 0: not on any tape."""

  number: int
  opened_ns: int = 0
  first_ns: int = 0  # arrival of the first valid answer
  quorum_ns: int = 0  # when the K-th was checked
  closed_ns: int = 0
  merged_ns: int = 0
  committed_ns: int = 0
  counted: _Counted = ()


@dataclasses.dataclass(slots=True)
class _Draft:
  """A round a life is collecting answers for."""

  round: Round
  arrived: dict[tuple[int, int, int], int] = dataclasses.field(
    default_factory=dict
  )
  valid: dict[int, tuple[int, int, int]] = dataclasses.field(
    default_factory=dict
  )
  digest: str = ""  # of the commit on its way


@dataclasses.dataclass(slots=True)
class SyncerLife:
  """When one life of the syncer was at work. Unix ns."""

  incarnation: int
  started_ns: int
  last_ns: int
  opened_ns: int = 0  # when it went on from the newest commit
  stopped: str = ""  # the reason, if it stopped in good order
  pid: int = 0  # of its process
  shard: int = 0

  @property
  def who(self) -> str:
    """The process that it runs in, if no standby has taken its place."""
    return f"syncer {self.shard}" if self.shard else "syncer"


class SyncerRecords:
  """Everything the syncer's lives recorded, taken in life by life."""

  def __init__(self):
    self.lives: list[SyncerLife] = []
    self.rounds: dict[int, Round] = {}
    self.refused: dict[AnswerKey, Refusal] = {}
    self.seen: set[AnswerKey] = set()
    self.answer_bytes: dict[AnswerKey, int] = {}  # parts and header
    self.undecided: list[tuple[Round, str]] = []  # commit on its way at death
    self.committed = 0
    self.header_bytes = 0  # of the longest header
    self.step_bytes: dict[tuple[int, int], int] = {}  # by version, fragment
    self._due_bytes: dict[tuple[int, ...], int] = {}

  def read(self, reader: TapeReader, rules: Rules) -> None:
    """Takes in the next life; `rules` are those it ran with."""
    life = _LifeReader(self, reader, rules)
    for record in reader.records():
      life.take(record)
    self.lives.append(life.life)
    last = life.uncommitted()
    if last is not None:
      self.undecided.append((last.round, last.digest))

  def take_commit(self, commit: Commit) -> None:
    """A commit itself: what it counts holds whatever the tapes say."""
    t = commit.round
    self.committed = max(self.committed, t)
    round_ = self.rounds.setdefault(t, Round(t)) if t else Round(t)
    round_.counted = tuple(
      (item.learner, item.incarnation, item.attempt) for item in commit.counted
    )
    for item in commit.refused:
      key = (t, item.learner, item.incarnation, item.attempt)
      self.refused.setdefault(key, item.reason)

  def resolve(self, digest_of: Callable[[int], str | None]) -> None:
    """Decides the commits whose outcome no tape tells.

    Args:
      digest_of: the SHA-256 of a round's commit in the exchange, if it is
        still there.
    """
    for round_, digest in self.undecided:
      t = round_.number
      known = self.rounds.get(t)
      if known is not None and known.committed_ns:
        continue
      stored = digest_of(t)
      if stored == digest or (stored is None and t <= self.committed):
        self.rounds[t] = round_
        self.committed = max(self.committed, t)
    self.rounds = dict(sorted(self.rounds.items()))

  def successions(self) -> list[tuple[SyncerLife | None, SyncerLife]]:
    """Every life, with the one of its shard before it."""
    newest: dict[int, SyncerLife] = {}
    found = []
    for life in self.lives:
      found.append((newest.get(life.shard), life))
      newest[life.shard] = life
    return found

  def due_bytes(self, fragments: tuple[int, ...]) -> int:
    """Encoded bytes of an answer for these fragments; 0 if none was seen."""
    return self._due_bytes.get(fragments, 0)

  def saw_sizes(self, header: AnswerHeader) -> None:
    """Learns from an admitted answer what its fragments take."""
    due = tuple(item.fragment for item in header.contributions)
    self._due_bytes[due] = sum(part.bytes for part in header.parts)


class _LifeReader:
  """One life, record by record."""

  def __init__(self, whole: SyncerRecords, reader: TapeReader, rules: Rules):
    self._whole, self._rules = whole, rules
    self._clock = reader.clock
    self._open: dict[int, _Draft] = {}
    self._committed_round = 0
    self._newest: dict[int, int] = {}  # life of each learner
    header = reader.header
    started_ns = header.started_unix_ns
    self.life = SyncerLife(
      header.incarnation,
      started_ns,
      started_ns,
      pid=header.pid,
      shard=rules.shard_of(header.incarnation),
    )

  def take(self, record: tape.Record) -> None:
    """The next record."""
    event = record.event
    now_ns = self._clock.unix_ns(event.now_ns)
    self.life.last_ns = max(self.life.last_ns, now_ns)
    match event:
      case Opened() | Followed():
        self._opened(event, now_ns)
      case AnswerSeen():
        self._seen(event, record.commands, now_ns)
      case AnswerGarbled():
        self._refuse(event.key, event.reason)
      case AnswerChecked():
        self._checked(event, record.commands, now_ns)
      case MemberSeen():
        self._heard(event.learner, event.incarnation)
      case Merged() if event.round in self._open:
        self._open[event.round].round.merged_ns = now_ns
        due = self._rules.schedule.fragments(event.round)
        for p, state in zip(due, event.fragments, strict=False):
          if state.step is not None:
            self._whole.step_bytes[event.round, p] = state.step.bytes
      case Committed():
        self._committed(event, now_ns)
    for command in record.commands:
      self._performed(command, now_ns)

  def uncommitted(self) -> _Draft | None:
    """The round whose commit was on its way at the end."""
    on_way = [draft for draft in self._open.values() if draft.digest]
    return on_way[0] if on_way else None

  def _performed(self, command: Any, now_ns: int) -> None:
    match command:
      case Merge() if command.round in self._open:
        round_ = self._open[command.round].round
        round_.closed_ns = now_ns
        round_.counted = tuple(
          (item.learner, item.incarnation, item.attempt)
          for item in command.counted
        )
      case CommitDigest() if command.round in self._open:
        self._open[command.round].digest = command.sha256
      case Stop():
        self.life.stopped = command.reason

  def _opened(self, event: Opened | Followed, now_ns: int) -> None:
    self._whole.take_commit(event.commit)
    self._committed_round = event.commit.round
    self.life.opened_ns = self.life.opened_ns or now_ns
    for item in event.commit.progress:
      self._heard(item.learner, item.incarnation)
    self._open_rounds(event.commit.round, now_ns)

  def _open_rounds(self, committed: int, now_ns: int) -> None:
    for t in self._rules.schedule.open_rounds(committed):
      own = self._rules.owns(self.life.incarnation, t)
      if own and t not in self._open:
        self._open[t] = _Draft(Round(t, opened_ns=now_ns))

  def _heard(self, learner: int, incarnation: int) -> None:
    known = self._newest.get(learner, 0)
    self._newest[learner] = max(known, incarnation)

  def _collecting(self, t: int) -> _Draft | None:
    draft = self._open.get(t)
    return None if draft is None or draft.round.closed_ns else draft

  def _refuse(self, key: AnswerKey, reason: Refusal) -> None:
    if self._collecting(key[0]) is not None:
      self._whole.refused.setdefault(key, reason)

  def _seen(self, event: AnswerSeen, commands: Any, now_ns: int) -> None:
    key, header, whole = event.key, event.header, self._whole
    fresh = key not in whole.seen
    whole.seen.add(key)
    parts = sum(part.bytes for part in header.parts)
    header_bytes = len(messages.encode(header))
    whole.header_bytes = max(whole.header_bytes, header_bytes)
    whole.answer_bytes[key] = parts + header_bytes
    draft = self._collecting(key[0])
    if any(isinstance(command, Check) for command in commands):
      whole.saw_sizes(header)
      self._heard(header.learner, header.incarnation)
      if draft is not None:
        draft.arrived[key[1:]] = now_ns
    elif draft is not None and fresh:
      reason = self._why_refused(header, key)
      if reason is not None:
        self._refuse(key, reason)

  def _why_refused(
    self, header: AnswerHeader, key: AnswerKey
  ) -> Refusal | None:
    """The tape holds that the syncer refused; the reason is its rule."""
    schedule = self._rules.schedule
    due = schedule.fragments(key[0])
    # Only the sum over the round's fragments is checked.
    stated = sum(part.bytes for part in header.parts)
    sizes = [0] * schedule.num_fragments
    sizes[due[0]] = self._whole.due_bytes(due) or max(stated, 1)
    rules = dataclasses.replace(self._rules, answer_bytes=tuple(sizes))
    current = tuple(
      FragmentState(
        schedule.version_before(p, self._committed_round + 1), 0, 0, "", 0, ""
      )
      for p in range(schedule.num_fragments)
    )
    reason = admission.check_header(header, key, rules, current)
    if reason is None and header.incarnation < self._newest.get(key[1], 0):
      reason = Refusal.SUPERSEDED
    return reason

  def _checked(self, event: AnswerChecked, commands: Any, now_ns: int) -> None:
    life = (event.learner, event.incarnation, event.attempt)
    draft, key = self._collecting(event.round), (event.round, *life)
    if draft is None:
      return
    if event.reason is not None:
      self._refuse(key, event.reason)
      return
    other = draft.valid.get(event.learner)
    dropped = {
      (c.learner, c.incarnation, c.attempt)
      for c in commands
      if isinstance(c, Drop)
    }
    if life in dropped:
      overtaken = other is not None and other > life
      if not overtaken:
        self._refuse(key, Refusal.OUTLIER)
      elif other[1] != life[1]:
        self._refuse(key, Refusal.SUPERSEDED)
      return
    if other is not None and other[1] != life[1]:
      self._refuse((event.round, *other), Refusal.SUPERSEDED)
    draft.valid[event.learner] = life
    round_ = draft.round
    arrived_ns = draft.arrived.get(life, now_ns)
    round_.first_ns = round_.first_ns or arrived_ns
    if len(draft.valid) >= self._rules.quorum_min and not round_.quorum_ns:
      round_.quorum_ns = now_ns

  def _committed(self, event: Committed, now_ns: int) -> None:
    draft = self._open.get(event.round)
    if draft is None or not event.won:
      self._open.pop(event.round, None)
      return
    del self._open[event.round]
    draft.round.committed_ns = now_ns
    self._committed_round = event.round
    self._whole.rounds[event.round] = draft.round
    self._whole.committed = max(self._whole.committed, event.round)
    self._open_rounds(event.round, now_ns)
