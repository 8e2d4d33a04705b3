"""Trains in virtual time: a whole run in one process, one seed, one thread.

The arrays are real, so what comes out is a trained model; the same seed gives
the same history on any machine, and the same bits where `tape.Header` agrees.
"""

import pathlib
import signal
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console

from ddiloco.config import Config, learner_value
from ddiloco.engine.ports import Exchange
from ddiloco.engine.version import code_version
from ddiloco.protocol import status as status_lib
from ddiloco.protocol.faults import Fault, to_text
from ddiloco.protocol.invariants import InvariantError
from ddiloco.report import summary
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.jax_compute import JaxCompute
from ddiloco.sim.recorder import Recorder
from ddiloco.sim.world import SYNCER, World
from ddiloco.types import SECOND_NS, Exit, Status

_SHOW_EVERY_S = 5.0  # where lines are shown, not a terminal
_EVENTS_PER_STEP = 10  # more than a learner's inner step ever causes
_EXTENSIONS_MAX = 4  # of that time, for faults under way
_ROUNDS_MISSED = 3  # that every learner has had the time for


def simulate(
  config: Config,
  *,
  workdir: pathlib.Path,
  store: Exchange,
  seed: int,
  faults: Sequence[Fault] = (),
) -> Exit:
  """Trains to the end of the run; leaves in `workdir` what a live run leaves.

  Args:
    config: what the run is told.
    workdir: gets the journal, evaluations, event files and the report.
    store: gets the run's exchange once it is over.
    seed: of all chance that is not in the training itself.
    faults: the script.
  """
  training = _Training(config, workdir, seed, faults)
  before = {
    number: signal.signal(number, training.request_stop)
    for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    exit_ = training.run(store)
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  if training.world.commits:
    print(summary.text(summary.write(store, workdir)))
  return exit_


class _Training:
  """One simulated session: from start to completion, stop or failure."""

  def __init__(
    self,
    config: Config,
    workdir: pathlib.Path,
    seed: int,
    faults: Sequence[Fault],
  ):
    self._config = config
    self._compute = JaxCompute(config, str(workdir / "cache"))
    self.world = World(
      config, self._compute, seed=seed, code_version=code_version()
    )
    self._faults = FaultRunner(self.world, faults)
    self._recorder = Recorder(self.world, self._compute, workdir)
    self._stop = threading.Event()
    self._reason = ""
    self._quiet_since = 0  # events
    self._extensions = 0  # of the time without a commit
    self._console = _Console(self.world)

  def request_stop(self, number: int, frame: object) -> None:
    """A signal handler: ends the session in good order."""
    self._reason = f"{signal.Signals(number).name} received"
    self._stop.set()

  def run(self, store: Exchange) -> Exit:
    """Runs the session to its end and writes everything down."""
    begun_s, status = time.monotonic(), Status.FAILED
    try:
      with self._console:
        status = self._train()
    except InvariantError as error:
      self._reason = f"seed {self.world.seed}: {error}"
    finally:
      self._faults.heal()
      self._recorder.faults(self._faults)
      if self.world.commits:
        self._recorder.evaluate(final=True)
      wall_s = round(time.monotonic() - begun_s, 3)
      self._recorder.write(
        "end", status=status, reason=self._reason, simulated_in_s=wall_s
      )
      self._recorder.close()
      self._recorder.export(store)
    return self._exit(status)

  def _exit(self, status: Status) -> Exit:
    if status is Status.STOPPED:
      self._console.say(f"stopped: {self._reason}")
      return Exit.STOPPED
    if status is Status.FAILED:
      self._console.say(f"failed: {self._reason}")
      return Exit.FAILED
    if self._faults.idle:
      idle = to_text(self._faults.idle)
      self._console.say(f"these faults took no effect: {idle}")
      return Exit.FAILED
    return Exit.OK

  def _train(self) -> Status:
    world = self.world
    world.start(SYNCER)
    for i in range(self._config.learners.count):
      if not self._faults.absent_at_first(f"learner-{i}"):
        world.start(f"learner-{i}")
    while not world.ended:
      committed, moved = world.committed, self._go_on()
      self._console.update()
      if self._stop.is_set():
        return Status.STOPPED
      if world.committed > committed:
        self._quiet_since, self._extensions = world.events, 0
        self._recorder.evaluate()
      elif self._nobody_left() or (not moved and self._stuck()):
        return Status.FAILED
    self._let_finish()
    return Status.COMPLETED

  def _go_on(self) -> bool:
    """Until there is something to look at; False if there will be nothing."""
    world = self.world
    committed, gone = world.committed, len(world.stopped)
    quiet = world.events - self._quiet_since
    return world.run(
      lambda: (
        world.committed > committed
        or len(world.stopped) > gone
        or self._stop.is_set()
        or self._console.due()
      ),
      events_max=max(self._events_max() - quiet, 1),
    )

  def _let_finish(self) -> None:
    """Everybody sees the last commit and leaves."""
    world = self.world
    world.run(
      lambda: not any(p.alive for p in world.processes.values()),
      events_max=self._events_max(),
    )

  # --- Whether it goes on ---------------------------------------------------

  def _events_max(self) -> int:
    """Without a commit for so many events there will be none.

    Every learner, the slowest too, could have answered each fragment.
    """
    config, count = self._config, self._config.learners.count
    speeds = [learner_value(config.learners.slowdown, i) for i in range(count)]
    steps = max(speeds) / min(speeds) * max(config.sync.interval_steps, 10)
    beats = config.sim.step_s * max(speeds) / config.live.heartbeat_s
    events = count * steps * (_EVENTS_PER_STEP + 2 * beats)
    return round(_ROUNDS_MISSED * events)

  def _nobody_left(self) -> bool:
    """Whether those who could close a round are gone for good, and says so."""
    world, quorum = self.world, self._config.sync.quorum_min
    if self._faults.waiting:
      return False
    names = [f"learner-{i}" for i in range(self._config.learners.count)]
    gone = [name for name in names if name in world.stopped]
    left = len(names) - len(gone)
    if SYNCER in world.stopped:
      self._reason = "the syncer was told to leave"
    elif left < quorum:
      self._reason = (
        f"after round {max(world.committed, 0)} {left} learners are left where "
        f"sync.quorum_min = {quorum} are needed; gone for good: "
        f"{', '.join(name.replace('-', ' ') for name in gone)}. Lower "
        "sync.quorum_min, or change the fault script."
      )
    return bool(self._reason)

  def _stuck(self) -> bool:
    """Whether nothing will come any more, and says why."""
    world = self.world
    if self._fault_pending() and self._extensions < _EXTENSIONS_MAX:
      self._extensions += 1
      self._quiet_since = world.events
      return False
    self._reason = (
      f"after round {max(world.committed, 0)} nothing was committed for "
      f"{self._events_max() * (1 + self._extensions):,} events: "
      f"{self._waiting()}"
    )
    return True

  def _fault_pending(self) -> bool:
    """Whether the script is about to change something."""
    now_ns = self.world.heap.now_ns
    for item in self._faults.outcomes:
      fault = item.fault
      if item.began_ns is None and fault.at_ns is not None:
        return True
      if item.began_ns is not None and fault.for_ns is not None:
        if now_ns < item.began_ns + fault.for_ns:
          return True
    return False

  def _waiting(self) -> str:
    process = self.world.processes[SYNCER]
    if not process.alive or process.actor is None:
      return "the syncer is not at work"
    return status_lib.waiting_for(
      process.actor.state, process.clock.now_ns(), self.world.rules
    )


class _Console:
  """How far a simulation is: one line on a terminal, lines elsewhere."""

  def __init__(self, world: World):
    self._world = world
    self._console = Console(stderr=True)
    self._status = None
    if self._console.is_terminal:
      self._status = self._console.status("starting")
    self._every_s = 0.25 if self._status else _SHOW_EVERY_S
    self._begun_s = self._shown_s = time.monotonic()

  def __enter__(self) -> "_Console":
    if self._status is not None:
      self._status.start()
    return self

  def __exit__(self, *error: object) -> None:
    if self._status is not None:
      self._status.stop()

  def due(self) -> bool:
    """Whether it is time to show something."""
    return time.monotonic() - self._shown_s >= self._every_s

  def update(self) -> None:
    """Shows how far the run is, if that is due."""
    if not self.due():
      return
    self._shown_s = time.monotonic()
    if self._status is not None:
      self._status.update(self._line())
    else:
      self.say(self._line())

  def say(self, text: str) -> None:
    """A line that stays."""
    if self._status is not None:
      self._console.print(text, markup=False, highlight=False)
    else:
      print(text, file=sys.stderr, flush=True)

  def _line(self) -> str:
    world, stop = self._world, self._world.config.stop
    t = max(world.committed, 0)
    commit = world.commits.get(t)
    tokens = commit.tokens if commit else 0
    counted = len(commit.counted) if commit else 0
    return (
      f"{self._shown_s - self._begun_s:.0f} s: "
      f"{world.heap.now_ns / SECOND_NS:.1f} s simulated, round {t}"
      + (f"/{stop.rounds}" if stop.rounds else "")
      + f", {tokens:,}"
      + (f" of {stop.tokens:,}" if stop.tokens else "")
      + f" tokens, {counted} learners merged"
    )
