"""Where the time went: goodput, badput by cause, uptime and the timeline.

goodput = time in inner steps / allocated time, overwritten steps included, as
in the paper (Sec. 4.1); badput itemises the rest. A learner is allocated from
its first process start of a session to the session's end, but for the time
between leaving on request and coming back. Of a step that took ten times its
life's median, and a second more, only the median counts: the rest is
compilation if it is the first, else a stall.
"""

import dataclasses
import itertools

import numpy as np

from ddiloco.config import seconds_to_ns
from ddiloco.protocol.learner import DIVERGED
from ddiloco.protocol.schedule import make_schedule
from ddiloco.report.lives import COMPLETED, LearnerLife
from ddiloco.report.run import Run
from ddiloco.report.workdir import Session
from ddiloco.types import SECOND_NS, Exit, Status

PROGRAM_STARTUP = "program_startup"
RECOVERY = "infrastructure_recovery"
EXCHANGE = "exchange"
WAITING = "waiting"
STALL = "stall"
OTHER = "other"
CAUSES = (PROGRAM_STARTUP, RECOVERY, EXCHANGE, WAITING, STALL, OTHER)

_STALL_FACTOR = 10
_STALL_MIN_NS = SECOND_NS


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
  """A stretch of one row of the timeline. Unix ns."""

  kind: str  # start | step | held | stall | dead
  begin_ns: int
  end_ns: int
  steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
  """The unplanned end of a life, and the return. Unix ns."""

  learner: int | None  # None: the syncer
  incarnation: int  # 0: it had not begun a recorded step
  at_ns: int
  back_ns: int  # training (or committing) again; 0: never
  code: int | None
  stopped: str  # the reason, if it ended in good order
  back_how: str = ""  # what the next life went on from, or who took its place
  shard: int | None = None  # of the syncer, if it has several


@dataclasses.dataclass(slots=True)
class LearnerTime:
  """One learner's time over all sessions, in ns."""

  learner: int
  allocated_ns: int = 0
  good_ns: int = 0
  bad_ns: dict[str, int] = dataclasses.field(
    default_factory=lambda: dict.fromkeys(CAUSES, 0)
  )
  spans: list[Span] = dataclasses.field(default_factory=list)
  left_ns: int = 0  # when it left on request; 0: it did not


@dataclasses.dataclass(slots=True)
class Accounting:
  """The time of a whole run."""

  origin_ns: int  # Unix time of the first process start
  end_ns: int
  learners: dict[int, LearnerTime]
  deaths: list[Death]
  goodput: float | None  # None: nothing was allocated
  badput: dict[str, float]
  uptime: float | None  # None: no step was ever dispatched
  wall_ns: int  # of all sessions


def account(run: Run) -> Accounting:
  """The accounting of a run."""
  ends = [_session_end(run, i) for i in range(len(run.sessions))]
  times = {}
  deaths = _syncer_deaths(run)
  for learner in _learners(run):
    times[learner] = time = LearnerTime(learner)
    for i in range(len(run.sessions)):
      _account_session(run, i, ends[i], time, deaths)
  allocated = sum(time.allocated_ns for time in times.values())
  badput, goodput = {}, None
  if allocated:
    goodput = sum(time.good_ns for time in times.values()) / allocated
    for cause in CAUSES:
      total = sum(time.bad_ns[cause] for time in times.values())
      badput[cause] = total / allocated
  starts = [session.started_ns for session in run.sessions]
  return Accounting(
    origin_ns=min(starts, default=0),
    end_ns=max(ends, default=0),
    learners=times,
    deaths=sorted(deaths, key=lambda death: death.at_ns),
    goodput=goodput,
    badput=badput,
    uptime=_uptime(run, ends),
    wall_ns=sum(e - s for s, e in zip(starts, ends, strict=True)),
  )


def _learners(run: Run) -> list[int]:
  """Everybody with a tape or a process."""
  found = set(run.learners)
  for session in run.sessions:
    for process in session.processes:
      kind, _, number = process.who.partition(" ")
      if kind == "learner" and number.isdecimal() and len(number) <= 6:
        found.add(int(number))
  return sorted(found)


def _session_end(run: Run, i: int) -> int:
  """The last thing that a session's tapes, or its failure, tell."""
  session = run.sessions[i]
  last = [
    # Once the run is complete, only a step that was under way still counts.
    int(life.end_ns[-1]) if life.steps and run.completed(i) else life.last_ns
    for life in itertools.chain(*run.learners.values())
    if run.session_of(life.started_ns) == i
    and (life.steps or not run.completed(i))
  ]
  last += [
    life.last_ns
    for life in run.syncer.lives
    if run.session_of(life.started_ns) == i
  ]
  if session.status == Status.FAILED or not last:
    # Nobody may have been left to record anything.
    last.append(session.ended_ns)
  return max([session.started_ns, *last])


# --- One learner, one session -----------------------------------------------


def _account_session(
  run: Run, i: int, end_ns: int, time: LearnerTime, deaths: list[Death]
) -> None:
  lives = [
    life
    for life in run.learners.get(time.learner, [])
    if run.session_of(life.started_ns) == i
  ]
  who = f"learner {time.learner}"
  started = [p.started_ns for p in run.sessions[i].processes if p.who == who]
  started += [life.process_ns for life in lives]
  if not started:
    return
  begin_ns, stepped = min(started), _stepped(lives)
  last = stepped[-1][0] if stepped else None
  early = last is not None and _ended_early(run, i, last, end_ns)
  if early and last.stopped:  # it left on request, for good
    end_ns = time.left_ns = last.last_ns
  end_ns = max(end_ns, begin_ns)
  time.allocated_ns += end_ns - begin_ns
  cause, at_ns, used_ns = PROGRAM_STARTUP, begin_ns, 0
  for n, (life, kept) in enumerate(stepped):
    first_ns = int(life.begin_ns[0])
    used_ns += _spend(time, cause, at_ns, first_ns)
    _show_idle(time, life, cause, at_ns, first_ns)
    used_ns += _account_steps(time, life, kept, cause)
    at_ns, cause = int(life.end_ns[kept - 1]), RECOVERY
    after = stepped[n + 1][0] if life is not last else None
    if after and _left(life, after):  # it had no part until it came back
      away_ns = after.process_ns - life.last_ns
      time.allocated_ns -= away_ns
      used_ns += away_ns
      at_ns, cause = after.process_ns, PROGRAM_STARTUP
    elif after or (early and not last.stopped):
      deaths.append(_death(life, after))
  deaths += _deaths_before_stepping(run.sessions[i], who, stepped, end_ns)
  if last is None or (early and not last.stopped):
    used_ns += _spend(time, cause, at_ns, end_ns)
    kind = "start" if last is None else "dead"
    time.spans.append(Span(kind, at_ns, end_ns))
  time.bad_ns[OTHER] += end_ns - begin_ns - used_ns


def _stepped(lives: list[LearnerLife]) -> list[tuple[LearnerLife, int]]:
  """The lives that stepped, and how many steps of each count.

  Once a later life has joined, an earlier one that is still there does not.
  """
  found: list[tuple[LearnerLife, int]] = []
  joined_ns: int | None = None
  for life in reversed([life for life in lives if life.steps]):
    kept = life.steps
    if joined_ns is not None:
      kept = int(np.searchsorted(life.end_ns, joined_ns, side="right"))
    if kept:
      found.insert(0, (life, kept))
    joined_ns = min(joined_ns or life.joined_ns, life.joined_ns)
  return found


def _left(life: LearnerLife, after: LearnerLife) -> bool:
  """Whether a life ended on request, and nobody had taken its place."""
  asked = life.stopped not in ("", DIVERGED)
  return asked and life.last_ns <= after.process_ns


def _ended_early(run: Run, i: int, life: LearnerLife, end_ns: int) -> bool:
  """Whether a session's last life of a learner ended before the session."""
  if life.stopped == COMPLETED:
    return False
  if run.completed(i):
    return True
  broke = life.exit_code not in (None, Exit.OK, Exit.STOPPED)
  if broke and life.exited_ns <= end_ns:
    return True
  dead_after_ns = seconds_to_ns(run.config.live.dead_after_s)
  return end_ns - life.last_ns > dead_after_ns


def _spend(time: LearnerTime, cause: str, begin_ns: int, end_ns: int) -> int:
  spent_ns = max(end_ns - begin_ns, 0)
  time.bad_ns[cause] += spent_ns
  return spent_ns


def _account_steps(
  time: LearnerTime, life: LearnerLife, kept: int, cause: str
) -> int:
  """Books a life's first `kept` steps; returns the time they took."""
  steps_ns, excess_ns = life.step_ns[:kept], _excess_ns(life)[:kept]
  exchange_ns = (life.exchange_in_gap + life.exchange_in_step)[:kept]
  held_ns = (life.gap_ns - life.exchange_in_gap)[:kept]
  first_ns = int(excess_ns[0])
  time.good_ns += int(steps_ns.sum() - excess_ns.sum())
  time.bad_ns[cause] += first_ns
  time.bad_ns[STALL] += int(excess_ns.sum()) - first_ns
  time.bad_ns[EXCHANGE] += int(exchange_ns.sum())
  time.bad_ns[WAITING] += int(held_ns.sum())
  time.spans += _step_spans(life, kept, excess_ns)
  return int(steps_ns.sum() + exchange_ns.sum() + held_ns.sum())


def _excess_ns(life: LearnerLife) -> np.ndarray:
  """What of each step, `[steps]`, is no training: compilation, or a stall."""
  steps_ns = life.step_ns
  median = int(np.median(steps_ns[1:] if life.steps > 1 else steps_ns))
  excess = np.maximum(steps_ns - median, 0)
  long = (steps_ns > _STALL_FACTOR * median) & (excess > _STALL_MIN_NS)
  return np.where(long, excess, 0)


# --- The timeline -----------------------------------------------------------


def _step_spans(
  life: LearnerLife, kept: int, excess_ns: np.ndarray
) -> list[Span]:
  """Steps in unbroken rows, and what lies between them."""
  begin, end = life.begin_ns[:kept], life.end_ns[:kept]
  held = life.gap_ns[:kept]
  gap_min = np.maximum((end - begin) // 20, 1)
  breaks = held > gap_min
  breaks[1:] |= excess_ns[1:] > 0
  first = np.flatnonzero(np.concatenate(([True], breaks[1:])))
  last = np.concatenate((first[1:], [len(begin)])) - 1
  spans = []
  for a, b in zip(first.tolist(), last.tolist(), strict=True):
    if held[a] > gap_min[a]:
      spans.append(Span("held", int(begin[a] - held[a]), int(begin[a])))
    cut_ns = int(begin[a] + excess_ns[a])
    if excess_ns[a]:
      spans.append(Span("stall" if a else "start", int(begin[a]), cut_ns))
    spans.append(Span("step", cut_ns, int(end[b]), b - a + 1))
  return spans


def _show_idle(
  time: LearnerTime, life: LearnerLife, cause: str, at_ns: int, first_ns: int
) -> None:
  start_ns = min(max(life.process_ns, at_ns), first_ns)
  if cause == RECOVERY and start_ns > at_ns:
    time.spans.append(Span("dead", at_ns, start_ns))
  time.spans.append(Span("start", start_ns, first_ns))


def _back_ns(life: LearnerLife) -> int:
  """When a life's first step began, compiled."""
  return int(life.begin_ns[0] + _excess_ns(life)[0])


def _death(life: LearnerLife, after: LearnerLife | None) -> Death:
  back_ns = _back_ns(after) if after else 0
  at_ns = life.exited_ns or life.last_ns
  return Death(
    learner=life.learner,
    incarnation=life.incarnation,
    at_ns=at_ns,
    back_ns=back_ns,
    code=life.exit_code,
    stopped=life.stopped,
    back_how=after.source if after else "",
  )


def _deaths_before_stepping(
  session: Session,
  who: str,
  stepped: list[tuple[LearnerLife, int]],
  end_ns: int,
) -> list[Death]:
  """Processes of a learner that failed before a step was recorded."""
  deaths = []
  known = {life.exited_ns for life, _ in stepped}
  for process in session.processes:
    failed = process.code not in (None, Exit.OK, Exit.STOPPED)
    if process.who != who or not failed or process.exited_ns > end_ns:
      continue
    if process.exited_ns not in known:
      at_ns = process.exited_ns
      later = [life for life, _ in stepped if life.started_ns > at_ns]
      back_ns = _back_ns(later[0]) if later else 0
      learner = int(who.removeprefix("learner "))
      how = later[0].source if later else ""
      deaths.append(Death(learner, 0, at_ns, back_ns, process.code, "", how))
  return deaths


def _syncer_deaths(run: Run) -> list[Death]:
  deaths = []
  schedule = make_schedule(run.config.sync)
  shards = run.config.syncer.shards
  commits = sorted(
    (round_.committed_ns, schedule.shard(t, shards))
    for t, round_ in run.syncer.rounds.items()
  )
  sharded = any(life.shard for life in run.syncer.lives)
  for life, after in run.syncer.successions():
    if life is None:
      continue
    same = run.session_of(life.started_ns) == run.session_of(after.started_ns)
    if same and not life.stopped:
      own = [ns for ns, shard in commits if shard == life.shard]
      back = [ns for ns in own if ns > after.started_ns]
      back_ns = back[0] if back else 0
      process = run.process_of(life.who, life.started_ns, life.pid)
      at_ns = (process.exited_ns if process else 0) or life.last_ns
      code = process.code if process else None
      other = run.process_of(after.who, after.started_ns, after.pid)
      taken = process and other and process.who != other.who
      deaths.append(
        Death(
          None,
          life.incarnation,
          at_ns,
          back_ns,
          code,
          stopped="",
          back_how=f"by {other.who}" if taken else "",
          shard=life.shard if sharded else None,
        )
      )
  return deaths


def _uptime(run: Run, ends: list[int]) -> float | None:
  """Share of the time since the first step with a step under way."""
  up_ns = total_ns = 0
  for i, end_ns in enumerate(ends):
    lives = [
      life
      for lives in run.learners.values()
      for life in lives
      if life.steps and run.session_of(life.started_ns) == i
    ]
    if not lives:
      continue
    begin = np.concatenate([life.begin_ns for life in lives])
    end = np.concatenate([life.end_ns for life in lives])
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.minimum(end[order], end_ns)
    # Each interval adds what reaches beyond all that began before it.
    reached = np.maximum.accumulate(end)
    before = np.concatenate(([begin[0]], reached[:-1]))
    up_ns += int(np.maximum(end - np.maximum(begin, before), 0).sum())
    total_ns += end_ns - int(begin[0])
  return up_ns / total_ns if total_ns else None
