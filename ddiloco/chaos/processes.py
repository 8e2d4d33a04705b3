"""Faults of processes and of the machines that they run on."""

import contextlib
import os
import pathlib
import resource
import shutil
import signal
import time
from collections.abc import Iterator

from ddiloco.chaos import defects
from ddiloco.chaos.proxy import stall, swallow
from ddiloco.chaos.stage import (
  BACK_S,
  FIRST,
  LEARNER,
  STANDBY,
  SYNCER,
  Job,
  Stage,
  Steps,
  TooLate,
  file_limit,
  is_other,
)
from ddiloco.live.children import Child, is_stopped, slow_down
from ddiloco.live.workdir import RESOLVED
from ddiloco.protocol import keys
from ddiloco.types import Exit

EVALUATOR = "evaluator"
_LOCK = ".__lock"  # of the file an object is written to before it is named
_TRIES = 4


def kill(stage: Stage, job: Job) -> Steps:
  """SIGKILL of any role."""
  roles = (LEARNER, LEARNER, SYNCER, STANDBY, EVALUATOR)
  child = yield from stage.victim(job, *roles)
  yield from stage.kill(job, child)


# --- At a chosen moment -------------------------------------------------------


def kill_in_write(stage: Stage, job: Job) -> Steps:
  """SIGKILL while the victim has an object open for writing, or on its way."""
  child = yield from stage.victim(job, LEARNER, SYNCER)
  if stage.proxy is not None:
    yield from _kill_on_the_way(stage, job, child, _writes_of(stage, child))
    return
  folder, pid = str(stage.directory), child.process.pid
  job.evidence["writing"] = yield from stage.aim(
    child, lambda: _open_for_writing(pid, folder)
  )
  yield from stage.kill(job, child)


def kill_in_merge(stage: Stage, job: Job) -> Steps:
  """SIGKILL once a round's new state is there, and its commit is not."""
  child = yield from stage.victim(job, SYNCER)
  if stage.proxy is not None:
    yield from _kill_on_the_way(stage, job, child, _states_of(stage, child))
    return

  def merging() -> int | None:
    t = unfinished(stage.directory)
    return t if stage.owns(child, t) else None

  found = yield from stage.aim(child, merging)
  job.evidence["merging"] = found
  yield from stage.kill(job, child)


def kill_in_snapshot(stage: Stage, job: Job) -> Steps:
  """SIGKILL while a snapshot has objects and no manifest yet."""
  child = yield from stage.victim(job, LEARNER, FIRST)
  for _ in range(_TRIES):
    t = yield from stage.until(
      "snapshot under way", lambda: _half_taken(stage), BACK_S
    )
    stage.stop(child)
    if t == _half_taken(stage):
      job.evidence["snapshot"] = t
      yield from stage.kill(job, child)
      return
    child.send(signal.SIGCONT)
  raise TooLate("every snapshot was complete too soon")


def _half_taken(stage: Stage) -> int | None:
  """The round of a snapshot newer than all complete ones, if there is one."""
  found = map(keys.snapshot_round, stage.names(keys.SNAPSHOTS))
  rounds = dict(sorted(filter(None, found)))  # True comes after False
  newest = max(rounds, default=None)
  return None if newest is None or rounds[newest] else newest


def kill_in_transfer(stage: Stage, job: Job) -> Steps:
  """SIGKILL of a learner that gives its state, or of the one who asked."""
  yield from until_there_are_peers(stage)
  child = yield from stage.victim(job, LEARNER)
  give = job.rng.random() < 0.5
  for _ in range(_TRIES):
    ends = yield from lose_machine(stage, job, child)
    donors = [c for c in stage.learners() if c.learner == ends[0]]
    hit = donors[0] if give and donors else child
    request = keys.transfer_request(*ends)
    if hit.name in stage.busy - {child.name} or not hit.running:
      continue
    stage.stop(hit)
    if stage.get(request) is None:  # it was over already
      hit.send(signal.SIGCONT)
      continue
    job.evidence |= {"request": request, "hit": hit.name}
    if hit is not child:
      stage.take(job, hit)
    yield from stage.kill(job, hit)
    return
  raise TooLate("every transfer was over too soon")


def lose_machine(stage: Stage, job: Job, child: Child) -> Iterator[None]:
  """Kills a learner and its checkpoints; returns what it asks a peer for.

  The (donor, recipient, nonce) of its request. Raises `TooLate`.
  """
  pid = child.process.pid
  code = yield from stage.strike(child, 0.5)
  if code != -signal.SIGKILL:
    raise TooLate(f"{child.name} ended by itself, with exit code {code}")
  shutil.rmtree(checkpoints(stage, child), ignore_errors=True)

  def asked() -> tuple[int, int, str] | None:
    if not is_other(child, pid):
      return None
    found = map(keys.transfer_ends, stage.names(keys.TRANSFERS))
    return next((e for e in found if e and e[1] == child.learner), None)

  return (yield from stage.until("request of a peer's state", asked, BACK_S))


def checkpoints(stage: Stage, child: Child) -> pathlib.Path:
  """Where a learner's own checkpoints are."""
  return stage.workdir / "checkpoints" / f"learner-{child.learner}"


def until_there_are_peers(stage: Stage) -> Steps:
  """Before the first interval is over nobody asks for a state."""
  interval = stage.config.sync.interval_steps
  while stage.round <= interval or len(stage.learners()) < 2:
    yield


def _kill_on_the_way(
  stage: Stage, job: Job, child: Child, writes: str
) -> Steps:
  """SIGKILL while a write is held; then it is done, or lost."""
  late = job.rng.random() < 0.5
  held = stage.proxy.inject(stall if late else swallow, writes)
  try:
    yield from stage.until("write", lambda: held.hits)
    job.evidence |= {"held": held.hits, "done_afterwards": late}
    code = yield from stage.strike(child, job.span_s(0, 4))
    job.evidence["exit_code"] = code
    job.took_effect = code == -signal.SIGKILL
  finally:
    stage.proxy.lift(held)
  yield from stage.back(job, child, job.evidence["pid"])


def _epoch_of(stage: Stage, child: Child) -> int:
  beat = stage.beat(child)
  if beat is None:
    raise TooLate(f"{child.name} has no lease")
  return beat[1]


def _states_of(stage: Stage, child: Child) -> str:
  """What requests of a syncer look like that store a round's new state."""
  return rf"PUT .*/state/\d+\.\d+\.{_epoch_of(stage, child)}\."


def _writes_of(stage: Stage, child: Child) -> str:
  """What requests of a process look like that write."""
  if child.learner is None:
    epoch = _epoch_of(stage, child)
    shard = stage.merging().get(child.name, 0)
    own = rf"lease/{shard}|tape/syncer\.{epoch}/"
    if stage.config.syncer.shards == 1:
      own += "|commit/"
    return rf"{_states_of(stage, child)}|PUT .*/({own})"
  i = child.learner
  return rf"PUT .*/(answer/\d+\.{i}\.|members/{i}\.|tape/learner-{i}\.)"


def _open_for_writing(pid: int, folder: str) -> str | None:
  """The object of the exchange that a process is writing."""
  with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
    for entry in entries:
      with contextlib.suppress(OSError):
        path = os.readlink(entry.path)
        if path.startswith(folder) and path.endswith(_LOCK):
          return path[len(folder) + 1 : -len(_LOCK)]
  return None


def unfinished(directory: pathlib.Path) -> int | None:
  """The round whose state is stored and whose commit is not; or None."""
  try:
    states = os.listdir(directory / keys.STATES)
    commits = os.listdir(directory / keys.COMMITS)
  except OSError:
    return None
  found = [keys.state_parts(f"{keys.STATES}{name}") for name in states]
  newest = max((parts[0] for parts in found if parts), default=0)
  rounds = [keys.commit_round(f"{keys.COMMITS}{name}") or 0 for name in commits]
  return newest if newest > max(rounds, default=newest) else None


# --- Time ---------------------------------------------------------------------


def pause(stage: Stage, job: Job) -> Steps:
  """SIGSTOP, and SIGCONT later; longer than a lease lasts, at times."""
  child = yield from stage.victim(job, LEARNER, SYNCER, STANDBY, EVALUATOR)
  pid, end_s = child.process.pid, time.monotonic() + job.span_s(0.5, 8)
  child.send(signal.SIGSTOP)
  try:
    while time.monotonic() < end_s and not is_other(child, pid):
      job.took_effect |= is_stopped(pid)
      yield
  finally:
    child.send(signal.SIGCONT)


def slow(stage: Stage, job: Job) -> Steps:
  """Lets a learner run one part in so many of its time."""
  child = yield from stage.victim(job, LEARNER)
  pid, end_s = child.process.pid, time.monotonic() + job.span_s(5, 15)
  factor = job.evidence["factor"] = job.span_s(1.5, 6)
  stopped = ran = False
  try:
    while time.monotonic() < end_s and not is_other(child, pid):
      slow_down(child, factor)
      yield
      stopped |= is_stopped(pid)
      ran |= not is_stopped(pid)
    job.took_effect = stopped and ran
  finally:
    child.send(signal.SIGCONT)


# --- Disks and numbers --------------------------------------------------------


def full(stage: Stage, job: Job) -> Steps:
  """No byte can be written: what the kernel says of it, and silent beats."""
  child = yield from stage.victim(job, LEARNER, SYNCER)
  live = stage.config.live
  every_s = live.heartbeat_s if child.learner is not None else live.lease_s / 2
  pid, span_s = child.process.pid, job.span_s(3 * every_s + 1, 3 * every_s + 5)
  before = file_limit(pid)
  _limit(pid, 0)
  try:
    yield from stage.wait(every_s / 4)  # what was on its way is there
    begun = yield from stage.until("beat of it", lambda: stage.beat(child))
    end_s = time.monotonic() + span_s
    while time.monotonic() < end_s and pid not in stage.exits:
      yield
    if pid not in stage.exits:
      silent = stage.beat(child) in (None, begun)
      job.evidence["file_bytes_max"] = file_limit(pid)
      job.evidence["silent_s"] = span_s if silent else 0
      job.took_effect = silent and file_limit(pid) == 0
  finally:
    with contextlib.suppress(ProcessLookupError):
      _limit(pid, before)


def _limit(pid: int, num_bytes: int) -> None:
  _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
  resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def nan(stage: Stage, job: Job) -> Steps:
  """A learner's parameters become no numbers; its life ends by that."""
  child = yield from stage.victim(job, LEARNER)
  pid, end = child.process.pid, stage.log_end(child)
  stage.excused[pid] = Exit.FAILED
  child.send(defects.NAN)
  yield from stage.until("end of the life", lambda: pid in stage.exits, BACK_S)
  job.evidence["exit_code"] = stage.exits[pid]
  words = "its parameters are not finite" in stage.log_since(child, end)
  job.took_effect = words and stage.exits[pid] == Exit.FAILED
  yield from stage.back(job, child, pid)


# --- Who comes ----------------------------------------------------------------


def late(stage: Stage, job: Job) -> Steps:
  """A learner of the plan that was absent so far."""
  children = stage.session.children.values()
  child = next((c for c in children if c.name in stage.absent), None)
  if child is None:
    raise TooLate("nobody is absent")
  stage.absent.discard(child.name)
  job.begin(child.name)
  child.restart_s = time.monotonic()
  yield from stage.until("step of it", lambda: child.ready, BACK_S)
  job.evidence |= {"pid": child.process.pid, "at_round": stage.round}
  job.took_effect = True
  yield from _until_counted(stage, job, child.learner)


def join(stage: Stage, job: Job) -> Steps:
  """One with a workdir of its own joins by hand, steps, and leaves."""
  number = stage.next_number()
  if number is None:
    raise TooLate("every number below data.shards is taken")
  child = _outsider(stage, number)
  job.begin(child.name)
  stage.busy.add(child.name)
  job.names.append(child.name)
  child.start(stage.session.journal)
  stage.joined[child.name] = child
  try:
    pid = job.evidence["pid"] = child.process.pid
    yield from stage.until("step of it", lambda: _steps(stage, child), BACK_S)
    child.ready = True
    job.took_effect = True
    yield from _until_counted(stage, job, number)
    yield from stage.wait(job.span_s(3, 15))
  finally:
    killed = job.rng.random() < 0.5
    wanted = signal.SIGKILL if killed else signal.SIGTERM
    stage.excused[pid] = -wanted if killed else Exit.STOPPED
    child.send(wanted)
  yield from stage.until("end of it", lambda: pid in stage.exits)
  job.evidence["exit_code"] = stage.exits[pid]


def _outsider(stage: Stage, number: int) -> Child:
  """A learner that has only the config and the exchange of the others."""
  home = stage.workdir / "elsewhere" / f"learner-{number}"
  home.mkdir(parents=True, exist_ok=True)
  shutil.copy(stage.workdir / RESOLVED, home / RESOLVED)
  given = [a for a in stage.arguments if not a.startswith("--workdir=")]
  arguments = ["-m", "launch.learner", f"--learner={number}", *given]
  log = stage.workdir / "logs" / f"learner-{number}.log"
  return Child(f"learner {number}", [*arguments, f"--workdir={home}"], log)


def _steps(stage: Stage, child: Child) -> int:
  """What the record says of it that it has written into the exchange."""
  member = stage.member(child.learner)
  own = member is not None and member.pid == child.process.pid
  return member.steps if own else 0


def _until_counted(stage: Stage, job: Job, learner: int) -> Steps:
  """Until a commit counts an answer of it, which takes luck if K is small."""

  def counted() -> int | None:
    for t in sorted(stage.commits):
      if learner in [item.learner for item in stage.commits[t].counted]:
        return t
    return None

  with contextlib.suppress(TooLate):
    found = yield from stage.until("commit with its answer", counted)
    job.evidence["counted_in_round"] = found
