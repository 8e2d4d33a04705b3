"""What must hold after chaos, read from the tapes alone; see docs/chaos.md.

Every check returns what it has found wrong: plain records with `what`, and
`who` and `round` where there is one.
"""

import collections
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ddiloco.protocol import messages, wire
from ddiloco.protocol.learner_types import Stop
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.schedule import Schedule, make_schedule
from ddiloco.protocol.syncer_types import Committed
from ddiloco.report.tapes import Exchange
from ddiloco.sim import history as history_lib
from ddiloco.sim import islands
from ddiloco.sim.audit_ledger import check_ledger
from ddiloco.sim.audit_snapshots import check_snapshots
from ddiloco.sim.history import BadTape, History, Life

_SAY_EVERY_S = 5.0
Violation = dict[str, Any]
Say = Callable[[str], None]


class Seen(NamedTuple):
  """What an onlooker has seen of a run while it went on."""

  digests: Mapping[int, str]  # of commits, by round
  calm_round: int | None  # after which there were no faults; None: no such time
  alive: tuple[int, ...]  # the learners that were there then, to the end


class Found(NamedTuple):
  """What the tapes tell, and what is wrong with it."""

  history: History | None
  commits: list[Commit]
  violations: list[Violation]


def check(
  exchange: Exchange,
  seen: Seen,
  *,
  cache_dir: str,
  prepare: Callable[[], None],
  say: Say,
) -> Found:
  """Reads and checks a run that has ended.

  Args:
    exchange: of the run.
    seen: what was seen of it.
    cache_dir: for compiled programs.
    prepare: is called before JAX is imported.
    say: gets lines for whoever waits.
  """
  try:
    history = history_lib.load(exchange)
  except BadTape as error:
    return Found(None, [], [{"what": f"tapes: {error}"}])
  for shape in history.shapes[:1]:
    islands.set_environment(shape)
  prepare()
  try:
    commits, violations = _chain(history)
  except BadTape as error:
    return Found(history, [], [{"what": f"tapes: {error}"}])
  if violations:
    return Found(history, [], violations)
  violations += check_rounds(history, commits)
  violations += check_seen(history, commits, seen)
  violations += check_tokens(history, commits)
  violations += check_cuts(exchange, history, commits)
  violations += check_answering(commits, seen)
  if not violations:
    violations += check_replay(history, cache_dir=cache_dir, say=say)
  return Found(history, commits, violations)


def _chain(history: History) -> tuple[list[Commit], list[Violation]]:
  from ddiloco.sim import replay  # imports JAX

  decided: dict[str, Commit] = {}
  difference = replay.redecide_all(history, decided)
  if difference is not None:
    who = f"{difference.actor}, life {difference.life}"
    what = f"record {difference.index} is decided differently now"
    return [], [{"what": what, "who": who}]
  return history_lib.chain(history, decided, history.lives), []


def schedule_of(history: History) -> Schedule:
  """The rounds that a run has."""
  return make_schedule(history.config.sync)


def check_rounds(
  history: History, commits: Iterable[Commit]
) -> list[Violation]:
  """Every round up to the newest was committed, by one syncer."""
  schedule = schedule_of(history)
  first, newest = history.start.round, history.newest.round
  due = [t for t in range(first + 1, newest + 1) if schedule.is_round(t)]
  times = collections.Counter(commit.round for commit in commits)
  found = [
    {"what": f"the round has {times[t]} commits, not 1", "round": t}
    for t in sorted({*due, *times})
    if times[t] != (t in due)
  ]
  winners: dict[int, list[str]] = {}
  for life in history.lives:
    for record in life.records:
      event = record.event
      if isinstance(event, Committed) and event.won:
        winners.setdefault(event.round, []).append(life.name)
  for t, names in sorted(winners.items()):
    if len(names) > 1:
      what = f"{' and '.join(names)} both believe that it is theirs"
      found.append({"what": what, "round": t})
  return found


def check_seen(
  history: History, commits: Iterable[Commit], seen: Seen
) -> list[Violation]:
  """No commit that anybody has seen is gone, or has become another."""
  return [
    {"what": "a commit that was seen is not in the run's history", "round": t}
    for t in lost(history, commits, seen)
  ]


def lost(history: History, commits: Iterable[Commit], seen: Seen) -> list[int]:
  """The rounds of the commits that are."""
  digests = {c.round: wire.sha256(messages.encode(c)) for c in commits}
  digests[history.start.round] = history.start_digest
  return [t for t, was in sorted(seen.digests.items()) if digests.get(t) != was]


def check_tokens(
  history: History, commits: Iterable[Commit]
) -> list[Violation]:
  """Every token is accounted for once, and learners and commits agree."""
  from ddiloco.sim import replay  # imports JAX

  found: list[Violation] = []

  def require(ok: Any, promise: str) -> None:
    if not ok:
      found.append({"what": f"this does not hold: {promise}"})

  by_round = {commit.round: commit for commit in (history.start, *commits)}
  lives = [_logged(life) for life in history.lives if life.records]
  rules = replay.rules_of(history, history.lives[0])
  try:
    check_ledger(lives, by_round, rules, require)
  except AssertionError as error:
    found.append({"what": f"the ledger does not balance: {error}"})
  return found


def check_cuts(
  exchange: Exchange, history: History, commits: Iterable[Commit]
) -> list[Violation]:
  """Every complete snapshot is whole, and what its learners were."""
  found: list[Violation] = []

  def require(ok: Any, promise: str) -> None:
    if not ok:
      found.append({"what": f"this does not hold: {promise}"})

  lives = [_logged(life) for life in history.lives if life.records]
  by_round = {commit.round: commit for commit in commits}
  check_snapshots(lives, by_round, _Onlooker(exchange), require)
  return found


class _Onlooker:
  """An exchange as the audit of a simulated one looks into it."""

  def __init__(self, exchange: Exchange):
    self.names = exchange.list
    self._get = exchange.get

  def peek(self, key: str) -> bytes | None:
    """What is there."""
    item = self._get(key)
    return None if item is None else item.value


def _logged(life: Life) -> Any:
  """A life as `check_ledger` knows them."""
  log = [(record.event, record.commands) for record in life.records]
  ended = any(isinstance(command, Stop) for command in log[-1][1])
  state = types.SimpleNamespace(done=ended)
  return types.SimpleNamespace(
    name=life.name,
    log=log,
    told=log,  # what is on no tape depends on nobody
    alive=False,
    actor=types.SimpleNamespace(state=state),
  )


def check_answering(commits: Iterable[Commit], seen: Seen) -> list[Violation]:
  """Once the faults are over, every learner that is there is counted."""
  if seen.calm_round is None:
    return []
  counted = {
    item.learner
    for commit in commits
    if commit.round > seen.calm_round
    for item in commit.counted
  }
  return [
    {
      "what": "it is alive, and no commit counts it after the last fault",
      "who": f"learner {m}",
      "round": seen.calm_round,
    }
    for m in sorted({*seen.alive} - counted)
  ]


def check_replay(
  history: History, *, cache_dir: str, say: Say
) -> list[Violation]:
  """Every commit has the bits that its tapes give again."""
  said_s = time.monotonic()

  def sometimes(line: str) -> None:
    nonlocal said_s
    if time.monotonic() - said_s > _SAY_EVERY_S:
      said_s = time.monotonic()
      say(f"replay: {line}")

  try:
    result = islands.replay(
      history, cache_dir=cache_dir, decisions_only=False, say=sometimes
    )
  except BadTape as error:
    return [{"what": f"replay: {error}"}]
  mismatch = result["first_mismatch"]
  if mismatch is not None:
    return [
      {
        "what": f"the replay of the tapes differs: {mismatch}",
        "round": mismatch.get("round"),
      }
    ]
  if result["matched"] != result["commits"]:
    return [
      {"what": f"{result['matched']} of {result['commits']} were replayed"}
    ]
  return []
