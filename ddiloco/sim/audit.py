"""What must hold for a whole world: checked as it runs, and at its end.

The machines' own invariants (`protocol.invariants`) see one actor each; what
is checked here needs the view from outside: that what one actor believes is
what another did, and that the store holds what the protocol says it does.
The formulas are the paper's, written out again: a mistake in the schedule
must not hide itself.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.learner_types import (
  CommitSeen,
  Joined,
  Resumed,
  Settle,
)
from ddiloco.protocol.messages import AnswerHeader, Commit, FragmentState
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import Committed
from ddiloco.sim.audit_ledger import check_ledger
from ddiloco.sim.audit_snapshots import check_snapshots
from ddiloco.sim.exchange import SimExchange
from ddiloco.types import Anchor

Log = list[tuple[Any, tuple[Any, ...]]]  # events, and what was decided


class Audit:
  """Watches a world's store and its actors' decisions."""

  def __init__(
    self, rules: Rules, exchange: SimExchange, seed: int, *, history: bool
  ):
    """Without `history` only the newest commits are remembered."""
    self.rules, self._exchange, self._seed = rules, exchange, seed
    self._history = history
    self.commits: dict[int, Commit] = {}
    self.newest = -1
    self.spoilt: set[str] = set()  # headers of answers nobody may count
    self.ended = False  # by the newest commit
    self.on_commit: Callable[[int], None] = lambda t: None
    self._digests: dict[int, str] = {}
    self._headers: dict[str, list[bytes]] = {}  # of uncommitted rounds
    self._chains: dict[int, list[FragmentState]] = {}  # versions to keep
    self._needed: dict[int, set[str]] = {}  # their objects, by fragment
    exchange.on_create = self._created
    exchange.on_write = self._written
    exchange.on_delete = self._deleted

  # --- The store ------------------------------------------------------------

  def _written(self, key: str, value: bytes) -> None:
    """Remembers headers: what a commit counts must have been offered."""
    t = keys.commit_round(key)
    if t is not None and self._exchange.peek(key) is not None:
      self._require(value == SWEPT, f"{key} is written once")
      kept = self.newest - 2 * self.rules.schedule.interval
      self._require(0 < t <= kept, f"{key} is kept for 2 H rounds")
    answered = keys.answer_round(key) or 0
    if key.endswith(".header") and answered > self.newest:
      self._headers.setdefault(key, []).append(value)

  def _deleted(self, key: str) -> None:
    """Retention never takes what somebody may still need."""
    t = keys.answer_round(key)
    self._require(
      t is None or t <= self.newest, f"{key} is kept: it is not committed"
    )
    self._require(
      keys.commit_round(key) is None,
      f"{key} stays: whoever slept through it must not create it again",
    )
    self._require(
      not any(key in needed for needed in self._needed.values()),
      f"{key} is part of one of the newest two versions",
    )

  def _created(self, key: str, value: bytes) -> None:
    """A create has won: the only thing that changes global state."""
    t = keys.commit_round(key)
    if t is None:
      return
    commit = messages.decode(Commit, value)
    self._require(t > self.newest, f"round {t} is committed once")
    if t:
      self._check_follows(commit)
      self._check_counted(commit)
    self._check_fragments(commit)
    self.commits[t] = commit
    self.newest = max(self.newest, t)
    self.ended = self.rules.ended(t, commit.tokens)
    self._digests[t] = wire.sha256(value)
    if not self._history:
      self._forget(t - 4 * self.rules.schedule.interval)
    self._headers = {
      key: values
      for key, values in self._headers.items()
      if keys.answer_round(key) > t
    }
    self.on_commit(t)

  def adopt(self, commit: Commit, digest: str) -> None:
    """Takes the first commit of a restored run as it is found."""
    t = commit.round
    self._check_fragments(commit)
    for p, ref in enumerate(commit.fragments):
      if ref.version != t:
        self._check_stored(p, ref)
        self._keep(p, ref)
    self.commits[t], self._digests[t], self.newest = commit, digest, t

  def _forget(self, t: int) -> None:
    """Everything about the commits up to round t, long swept."""
    for old in [old for old in self.commits if old <= t]:
      del self.commits[old], self._digests[old]

  def _check_follows(self, commit: Commit) -> None:
    t = commit.round
    # The round before: the largest one at which any fragment is due.
    before = t - 1
    while before > 0 and not self._due(before):
      before -= 1
    self._require(before in self.commits, f"round {before} comes before {t}")
    self._require(
      commit.previous == self._digests[before],
      f"commit {t} names the digest of commit {before}",
    )
    earlier = self.commits[before]
    self._require(
      commit.tokens >= earlier.tokens, f"commit {t} loses no tokens"
    )
    for p, ref in enumerate(commit.fragments):
      self._require(
        p in self._due(t) or ref == earlier.fragments[p],
        f"commit {t} changes only the fragments that are due, not {p}",
      )

  def _due(self, t: int) -> list[int]:
    """F(t), by the definition: t_p = floor(p H / P)."""
    h, n = self.rules.schedule.interval, self.rules.schedule.num_fragments
    return [p for p in range(n) if t > 0 and t % h == p * h // n]

  def _version(self, p: int, t: int) -> int:
    """The newest version of a fragment once round t is committed."""
    h, n = self.rules.schedule.interval, self.rules.schedule.num_fragments
    return max(t - (t - p * h // n) % h, 0)

  def _check_counted(self, commit: Commit) -> None:
    t, rules = commit.round, self.rules
    learners = [item.learner for item in commit.counted]
    self._require(
      len(set(learners)) == len(learners) >= rules.quorum_min,
      f"commit {t} has at least K = {rules.quorum_min} distinct learners: "
      f"{learners}",
    )
    for item in commit.counted:
      key = keys.answer_header(t, item.learner, item.incarnation, item.attempt)
      self._require(
        key not in self.spoilt, f"{key} is no good, nobody counts it"
      )
      offered = [_contributions(data) for data in self._headers.get(key, ())]
      self._require(
        item.contributions in offered,
        f"commit {t} counts what {key} offers: {item}, {offered}",
      )
      fragments = [part.fragment for part in item.contributions]
      self._require(
        fragments == self._due(t), f"{key} is for the fragments due"
      )
      for part in item.contributions:
        current = self._version(part.fragment, t - 1)
        self._require(
          part.anchor == current or rules.anchor is Anchor.ANY,
          f"commit {t} counts {key} from version {part.anchor} of fragment "
          f"{part.fragment}, current is {current}",
        )

  def _check_fragments(self, commit: Commit) -> None:
    for p, ref in enumerate(commit.fragments):
      version = self._version(p, commit.round)
      self._require(
        ref.version == version,
        f"commit {commit.round} has fragment {p} at version {version}",
      )
      if version != commit.round:
        continue
      self._check_stored(p, ref)
      self._keep(p, ref)

  def _keep(self, p: int, ref: FragmentState) -> None:
    """The newest two versions, and what the older one is put together from."""
    chain = [*self._chains.get(p, []), ref]
    full = [i for i, x in enumerate(chain[:-1]) if _objects(p, x).params]
    chain = chain[full[-1] if full else 0 :]
    needed = set()
    for i, version in enumerate(chain):
      objects, newest = _objects(p, version), len(chain) - 2
      needed |= {objects.outer} if i >= newest else set()
      needed |= {objects.step} if i > 0 or i >= newest else set()
      needed |= {objects.params}
    self._chains[p], self._needed[p] = chain, needed - {None}

  def _check_stored(self, p: int, ref: FragmentState) -> None:
    told = _Objects(
      ref.params_sha256, ref.outer_sha256, ref.step and ref.step.sha256
    )
    for key, digest in zip(_objects(p, ref), told, strict=True):
      found = None if key is None else self._exchange.peek(key)
      self._require(
        key is None or (found is not None and wire.sha256(found) == digest),
        f"{key}, which a commit names, exists",
      )

  # --- The actors -----------------------------------------------------------

  def decided(self, learner: Any, event: Any, commands: Any) -> None:
    """What an actor was told is true, and it draws the right conclusion.

    Args:
      learner: (number, incarnation), or None for the syncer.
      event: what it took in.
      commands: what it decided.
    """
    match event:
      case CommitSeen():
        if not self._history and event.round not in self.commits:
          return  # forgotten
        commit = self.commits[event.round]
        counted = commit.counted_attempt(*learner)
        told = (event.counted_attempt, event.run_tokens)
        self._require(
          told == (counted, commit.tokens),
          f"learner {learner} is told what commit {event.round} says",
        )
        for command in commands:
          self._require(
            not isinstance(command, Settle) or command.attempt == counted,
            f"learner {learner} settles attempt {counted}: {command}",
          )
      case Committed():
        t = event.round
        won = self._digests.get(t) == event.digest
        # Whoever has to ask again finds nothing of its own 2 H rounds later.
        late = not event.won and self._exchange.peek(keys.commit(t)) == SWEPT
        self._require(event.won == won or late, f"commit {t} was won: {won}")

  def finish(self, lives: Iterable[Any], machines: dict[str, Any]) -> None:
    """The whole history: tapes, decisions, ledger.

    Args:
      lives: every process there was, with its `log`.
      machines: the module of each role, by `syncer` or `learner`.
    """
    begun = [life for life in lives if life.log]
    if not self.commits:
      return
    self._check_retention()
    for life in begun:
      self._check_tape(life)
      learner = isinstance(life.log[0][0], Joined | Resumed)
      self._replay(life, machines["learner" if learner else tape.SYNCER])
    check_ledger(begun, self.commits, self.rules, self._require)
    check_snapshots(begun, self.commits, self._exchange, self._require)

  def _check_retention(self) -> None:
    commit = self.commits[self.newest]
    for p, ref in enumerate(commit.fragments):
      self._check_stored(p, ref)
    for t in self.commits:
      kept = t == 0 or t > self.newest - 2 * self.rules.schedule.interval
      found = self._exchange.peek(keys.commit(t))
      self._require(
        not kept or (found and wire.sha256(found) == self._digests[t]),
        f"commit {t} is still there, unchanged",
      )

  def _check_tape(self, life: Any) -> None:
    """What lies in the store is a true beginning of what happened."""
    actor, incarnation = _tape_of(life)
    told: Log = []
    for key in self._exchange.names(f"tape/{actor}.{incarnation}/"):
      try:
        segment = tape.decode_segment(self._exchange.peek(key))
      except wire.WireError:
        break  # torn as its writer died
      told += [(r.event, r.commands) for r in segment.records]
    happened = [
      (event, tuple(map(tape.recorded, commands)))
      for event, commands in life.log[: len(told)]
    ]
    self._require(told == happened, f"the tape of {life.name} is true")
    for t, digest in self._digests.items():
      if actor == tape.SYNCER and self.commits[t].epoch == incarnation and t:
        self._require(
          any(tape.CommitDigest(t, digest) in given for _, given in told),
          f"commit {t} is on the tape of {life.name}",
        )
    life.told = told

  def _replay(self, life: Any, machine: Any) -> None:
    (first, commands), *rest = life.log
    state, again = machine.start(first, self.rules)
    for index, (event, commands_next) in enumerate(rest, 1):
      self._require(
        tuple(again) == commands, f"{life.name} decides {index - 1} again"
      )
      state, again = machine.step(state, event, self.rules)
      commands = commands_next
    self._require(
      tuple(again) == commands and state == life.actor.state,
      f"{life.name} decides {len(rest)} again and ends in the same state",
    )

  def _require(self, ok: Any, promise: str) -> None:
    if not ok:
      raise InvariantError(f"world, seed {self._seed}: {promise}")


def _contributions(data: bytes) -> Any:
  try:
    return messages.decode(AnswerHeader, data).contributions
  except wire.WireError:
    return None  # torn


class _Objects(NamedTuple):
  """Of one version of a fragment; None: it is not stored."""

  params: str | None
  outer: str
  step: str | None


def _objects(p: int, ref: FragmentState) -> _Objects:
  where = (ref.version, p, ref.epoch)
  return _Objects(
    keys.params(*where) if ref.step is None or ref.step.full else None,
    keys.outer_state(*where),
    keys.step(*where) if ref.step else None,
  )


def _tape_of(life: Any) -> tuple[str, int]:
  first = life.log[0][0]
  if isinstance(first, Joined | Resumed):
    return tape.learner_actor(first.learner), first.incarnation
  return tape.SYNCER, first.epoch
