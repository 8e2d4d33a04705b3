"""Starts a run's processes on this machine, restarts what dies, stops all.

A dead learner costs its own work only: the others are not told, and it is
started again with a growing delay. Safety is not this file's business: every
process may die at any instant, this one too.
"""

import pathlib
import signal
import threading
import time
from collections.abc import Sequence

from ddiloco.config import Config
from ddiloco.live.children import Child, Journal
from ddiloco.live.console import Progress
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.faults import FaultRunner
from ddiloco.live.monitor import Monitor
from ddiloco.protocol.faults import Fault
from ddiloco.protocol.schedule import make_schedule
from ddiloco.types import Exit, Status

_TICK_S = 0.02
_STOP_S = 8.0  # for a graceful end; then SIGKILL
_EVALUATOR_S = 300.0  # for the last evaluation
_HEALTHY_S = 60.0  # alive this long, earlier restarts are forgiven


class Supervisor:
  """One session of a run: from start to completion, stop or failure."""

  def __init__(
    self,
    config: Config,
    faults: tuple[Fault, ...],
    *,
    workdir: pathlib.Path,
    exchange: TensorStoreExchange,
    arguments: Sequence[str],
  ):
    """Takes the flags every role is started with as `arguments`."""
    self.config, self.workdir = config, workdir
    self.journal = Journal(workdir)
    self.children = {
      child.name: child for child in _roles(config, workdir, arguments)
    }
    schedule = make_schedule(config.sync)
    self._monitor = Monitor(exchange, schedule, config.syncer.shards)
    self._progress = Progress(config, self.children, workdir)
    self._faults = self._make_faults(faults)
    self._elsewhere: dict[int, bool] = {}  # learners of others: who is live
    self._stop = threading.Event()
    self.reason = ""
    self.exit = Exit.OK
    self.lost = False  # the run is gone from its exchange

  def request_stop(self, number: int, frame: object) -> None:
    """A signal handler: ends the session in good order."""
    self.reason = f"{signal.Signals(number).name} received"
    self._stop.set()

  def run(self) -> Status:
    """Runs the session to its end; leaves no process behind."""
    signal.signal(signal.SIGINT, self.request_stop)
    signal.signal(signal.SIGTERM, self.request_stop)
    status = Status.FAILED
    try:
      with self._progress:
        self._start_first()
        while (found := self._tick()) is None:
          self._stop.wait(_TICK_S)
        status = found
        if status is Status.COMPLETED:
          self._let_finish()
    finally:
      self._stop_all()
      idle = self._faults.finish()
      self.journal.write("end", status=status, reason=self.reason)
    if idle and status is Status.COMPLETED:
      self.exit = Exit.FAILED
      self.say(f"these faults took no effect: {'; '.join(idle)}")
    if status is not Status.COMPLETED:
      user_error = self.exit is Exit.USER_ERROR  # says so itself
      self.say(self.reason if user_error else f"{status}: {self.reason}")
    return status

  def _make_faults(self, faults: tuple[Fault, ...]) -> FaultRunner:
    return FaultRunner(
      faults, self.children, self.journal, at_work=self.at_work
    )

  # --- One look -------------------------------------------------------------

  def _tick(self) -> Status | None:
    """Looks after everything once; a status if the session is over."""
    self._monitor.poll()
    view = self._monitor.view
    self._note_ready()
    self._note_elsewhere()
    self._faults.tick(view.round)
    self._progress.update(view)
    if self._stop.is_set():
      self.exit = Exit.STOPPED
      return Status.STOPPED
    for child in self.children.values():
      code = child.poll(self.journal)
      if code is not None:
        self._faults.exited(child.name, code)
        status = self._ended(child, code)
        if status is not None:
          return status
    self._start_due()
    return self._nobody_left()

  def _ended(self, child: Child, code: int) -> Status | None:
    """What the end of a process means for the session."""
    if code == Exit.OK:
      child.over = True
      return Status.COMPLETED if child.merges else None
    if code == Exit.USER_ERROR and child.name == "evaluator":
      child.over = True
      self.say(f"nothing is evaluated: {child.last_words(1)}")
      return None
    if code == Exit.USER_ERROR and child.restarts == 0:
      return self._fail(child.last_words(1), Exit.USER_ERROR)
    if code == Exit.STOPPED or self._faults.leaves(child.name):
      self.say(f"{child.name} left")
      child.over = True
      return self._unmerged(child, "the syncer was told to leave")
    if code == Exit.SUPERSEDED:
      child.over = True
      self.say(f"{child.name} is not restarted: {child.last_words(1)}")
      return self._unmerged(child, "another syncer has taken over")
    return self._restart(child, code)

  def _restart(self, child: Child, code: int) -> Status | None:
    live = self.config.live
    if self._monitor.lost():  # else the next syncer would begin another run
      self.lost = True
      return self._fail(child.last_words(1))
    if child.started_s and time.monotonic() - child.started_s > _HEALTHY_S:
      child.restarts = 0
    scripted_s = self._faults.restart_s(child.name)
    if scripted_s is not None:
      child.restart_s = scripted_s
      self.say(f"{child.name} {_cause(code)}, as scripted; the others go on")
      return None
    if child.restarts >= live.restart_limit:
      child.over = True
      message = (
        f"{child.name} {_cause(code)} {child.restarts + 1} times and is given "
        f"up (live.restart_limit). Its last words in {child.log}:\n"
        f"{child.last_words()}"
      )
      self.journal.write("give_up", who=child.name, code=code)
      failed = self._unmerged(child, message)
      if failed is None:
        self.say(message)
      return failed
    delay_s = live.restart_backoff_s * 2**child.restarts
    child.restarts += 1
    child.restart_s = time.monotonic() + delay_s
    self.say(
      f"{child.name} {_cause(code)} at round {self._monitor.view.round}; it is "
      f"restarted in {delay_s:.1f} s ({child.restarts} of "
      f"{live.restart_limit}), the others go on; see {child.log}"
    )
    return None

  def _unmerged(self, child: Child, reason: str) -> Status | None:
    """Fails if a syncer is over, and no other one can take its place."""
    left = [c for c in self.children.values() if c.merges and not c.over]
    enough = len(left) >= self.config.syncer.shards
    return self._fail(reason) if child.merges and not enough else None

  def at_work(self, actor: str) -> str | None:
    """The process that an actor of the fault script is; None: nobody, yet."""
    role, _, shard = actor.partition(" ")
    syncers = [c for c in self.children.values() if c.merges]
    if role != "syncer" or len(syncers) == 1:
      return actor
    pid = self._monitor.view.syncer_pids.get(int(shard or 0))
    found = (c.name for c in syncers if c.process and c.process.pid == pid)
    return next(found, None)

  def _nobody_left(self) -> Status | None:
    """Fails once fewer than K learners can ever answer again."""
    learners = [c for c in self.children.values() if c.learner is not None]
    # A superseded one answers on: a newer life of it is at work elsewhere.
    able = [c for c in learners if not c.over or c.code == Exit.SUPERSEDED]
    completed = any(c.over and c.code == Exit.OK for c in learners)
    if completed or self._faults.waiting:
      return None
    quorum = self.config.quorum
    left = len(able) + sum(self._elsewhere.values())
    if left >= quorum:
      return None
    gone = ", ".join(c.name for c in learners if c not in able)
    return self._fail(
      f"after round {self._monitor.view.round} {left} learners are left "
      f"where sync.quorum_min = {quorum} are needed; gone for good: {gone}. "
      "Start again in the same workdir to go on from the last commit."
    )

  def _fail(self, reason: str, exit_: Exit = Exit.FAILED) -> Status:
    self.reason, self.exit = reason, exit_
    return Status.FAILED

  # --- Starting -------------------------------------------------------------

  def _start_first(self) -> None:
    """A syncer and a learner; the rest find the programs compiled."""
    learners = [c for c in self.children.values() if c.learner is not None]
    first = [c for c in learners if not self._faults.absent_at_first(c.name)]
    self.children["syncer"].start(self.journal)
    if first:
      first[0].start(self.journal)
    give_up_s = time.monotonic() + self.config.live.start_deadline_s
    syncers = [c for c in self.children.values() if c.merges]
    for child in (*first[1:], *syncers[1:]):
      child.restart_s = give_up_s  # or as soon as the first one is ready
    self.children["evaluator"].restart_s = give_up_s

  def _start_due(self) -> None:
    now_s = time.monotonic()
    for child in self.children.values():
      due = child.restart_s is not None and now_s >= child.restart_s
      if due and not child.running and not child.over:
        again = child.code is not None
        child.start(self.journal)
        if again:
          self.say(f"{child.name} is back in process {child.process.pid}")

  def _note_ready(self) -> None:
    """A learner is ready once it has stepped: its programs are compiled."""
    for child in self.children.values():
      if not child.running or child.ready:
        continue
      if child.learner is None:
        child.ready = child.name == "evaluator" or (
          self._monitor.view.commit is not None
        )
        continue
      member = self._monitor.view.members.get(child.learner)
      if member is None or member.pid != child.process.pid or not member.steps:
        continue
      child.ready = True
      self.journal.write(
        "ready",
        who=child.name,
        pid=member.pid,
        incarnation=member.incarnation,
        round=self._monitor.view.round,
      )
      self._faults.begin()
      self._hasten(child)

  def _note_elsewhere(self) -> None:
    """Says which learners that others have started come and go."""
    view, within_s = self._monitor.view, self.config.live.dead_after_s
    own = {child.learner for child in self.children.values()}
    for learner in view.elsewhere(own):
      live = view.is_live(learner, within_s)
      known = self._elsewhere.get(learner)
      if live == bool(known):
        continue
      self._elsewhere[learner] = live
      member = view.members[learner]
      came = "has joined" if known is None else "is back"
      gone = "has left" if member.left else "is silent"
      what = f"{came} on {member.host}" if live else gone
      self.say(f"learner {learner}, life {member.incarnation}, {what}")

  def _hasten(self, ready: Child) -> None:
    """The first learner is up, so the compilation cache is warm."""
    roles = [c for c in self.children.values() if c.name != "evaluator"]
    waiting = [c for c in roles if c.restart_s is not None]
    fresh = [c for c in waiting if c.code is None]
    for child in fresh:
      child.restart_s = time.monotonic()
    if not fresh:
      self.children["evaluator"].restart_s = time.monotonic()

  # --- Ending ---------------------------------------------------------------

  def _let_finish(self) -> None:
    """Learners see the last commit by themselves; the evaluator reads it."""
    self.say("the run is complete; the last evaluation is under way")
    evaluator = self.children["evaluator"]
    if not evaluator.running and not evaluator.over:
      evaluator.start(self.journal)
    stop_s = time.monotonic() + _STOP_S
    kill_s = stop_s + _STOP_S
    give_up_s = time.monotonic() + _EVALUATOR_S
    while not self._stop.is_set():
      running = []
      for child in self.children.values():
        code = child.poll(self.journal)
        if code is not None:
          self._faults.exited(child.name, code)
        if child.running:
          running.append(child)
      self._monitor.poll()
      self._note_ready()
      self._faults.tick(self._monitor.view.round)
      if not running or time.monotonic() > give_up_s:
        return
      for child in running:  # still starting, perhaps
        if child is not evaluator and time.monotonic() > stop_s:
          late = time.monotonic() > kill_s
          child.send(signal.SIGKILL if late else signal.SIGTERM)
      self._stop.wait(_TICK_S)

  def _stop_all(self) -> None:
    """SIGTERM, a while to write checkpoints, then SIGKILL."""
    for child in self.children.values():
      child.send(signal.SIGCONT)
      child.send(signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_S
    while any(child.running for child in self.children.values()):
      for child in self.children.values():
        child.poll(self.journal)
        if time.monotonic() > deadline_s:
          child.send(signal.SIGKILL)
      time.sleep(_TICK_S)

  def say(self, text: str) -> None:
    """A line for whoever watches."""
    self._progress.say(text)


def _roles(
  config: Config, workdir: pathlib.Path, arguments: Sequence[str]
) -> list[Child]:
  logs = workdir / "logs"
  shards = range(config.syncer.shards)
  syncers = {f"syncer {s}" if s else "syncer": f"--shard={s}" for s in shards}
  if config.live.standbys:
    # Who of them is at work changes; whoever comes back waits for its turn.
    standbys = [f"standby {i + 1}" for i in range(config.live.standbys)]
    syncers = dict.fromkeys((*syncers, *standbys), "--standby")
  children = [
    Child(
      name,
      ["-m", "launch.syncer", which, *arguments],
      logs / f"{name.replace(' ', '-')}.log",
    )
    for name, which in syncers.items()
  ]
  for i in range(config.learners.count):
    children.append(
      Child(
        f"learner {i}",
        ["-m", "launch.learner", f"--learner={i}", *arguments],
        logs / f"learner-{i}.log",
      )
    )
  children.append(
    Child(
      "evaluator",
      ["-m", "launch.evaluate", "--follow", *arguments],
      logs / "evaluator.log",
      niceness=10,
    )
  )
  return children


def _cause(code: int) -> str:
  if code < 0:
    return f"was killed by {signal.Signals(-code).name}"
  return f"failed with exit code {code}"
