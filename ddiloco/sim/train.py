"""Trains in virtual time: a whole run in one process, one seed, one thread.

The arrays are real, so what comes out is a trained model; the same seed gives
the same history on any machine, and the same bits where `tape.Header` agrees.
Without arrays only the history comes out, for a training run to follow.
"""

import pathlib
import threading
import time
from collections.abc import Sequence

from ddiloco.config import Config, learner_value
from ddiloco.engine.ports import Exchange
from ddiloco.engine.version import code_version
from ddiloco.protocol import status as status_lib
from ddiloco.protocol.faults import Fault, to_text
from ddiloco.protocol.invariants import InvariantError
from ddiloco.report import summary
from ddiloco.sim.compute import NullCompute, intakes
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.jax_compute import JaxCompute
from ddiloco.sim.recorder import Recorder
from ddiloco.sim.terminal import Progress, interruptible
from ddiloco.sim.world import World
from ddiloco.types import SECOND_NS, Exit, Status

_EVENTS_PER_STEP = 10  # more than a learner's inner step ever causes
_CALLS_PER_ROUND = 20  # one after the other, from answer to commit seen
_EXTENSIONS_MAX = 4  # of that time, for faults under way
_ROUNDS_MISSED = 3  # that every learner has had the time for


def simulate(
  config: Config,
  *,
  workdir: pathlib.Path,
  store: Exchange,
  seed: int,
  faults: Sequence[Fault] = (),
  arrays: bool = True,
) -> Exit:
  """Trains to the end of the run; leaves in `workdir` what a live run leaves.

  Args:
    config: what the run is told.
    workdir: gets the journal, evaluations, event files and the report.
    store: gets the run's exchange once it is over.
    seed: of all chance that is not in the training itself.
    faults: the script.
    arrays: False: only the protocol runs, and nothing is trained.
  """
  cache_dir = str(workdir / "cache")
  compute = (
    JaxCompute(config, cache_dir)
    if arrays
    else NullCompute(config, intakes(config, cache_dir))
  )
  training = _Training(config, compute, workdir, seed, faults)
  with interruptible(training.request_stop):
    exit_ = training.run(store)
  if training.world.commits:
    print(summary.text(summary.write(store, workdir)))
  return exit_


class _Training:
  """One simulated session: from start to completion, stop or failure."""

  def __init__(
    self,
    config: Config,
    compute: JaxCompute | NullCompute,
    workdir: pathlib.Path,
    seed: int,
    faults: Sequence[Fault],
  ):
    self._config = config
    self.world = World(config, compute, seed=seed, code_version=code_version())
    self._faults = FaultRunner(self.world, faults)
    self._recorder = Recorder(self.world, workdir)
    self._stop = threading.Event()
    self._reason = ""
    self._quiet_since = 0  # events
    self._extensions = 0  # of the time without a commit
    self._console = Progress(self._line)

  def request_stop(self, reason: str) -> None:
    """Ends the session in good order, soon."""
    self._reason = reason
    self._stop.set()

  def run(self, store: Exchange) -> Exit:
    """Runs the session to its end and writes everything down."""
    begun_s, status = time.monotonic(), Status.FAILED
    try:
      with self._console:
        status = self._train()
    except InvariantError as error:
      self._reason = (
        f"seed {self.world.seed}, code {code_version()}, after "
        f"{self.world.events} events: {error}"
      )
      self._console.say(self._recorder.story.text())
      self._console.say("the same command leads there again")
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
    for name in world.syncers:
      world.start(name)
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

    Every learner, the slowest too, could have answered each fragment, and
    been heard by the syncer.
    """
    config, count = self._config, self._config.learners.count
    speeds = [learner_value(config.learners.slowdown, i) for i in range(count)]
    steps = max(speeds) / min(speeds) * max(config.sync.interval_steps, 10)
    merges = max(config.sync.num_fragments / config.sync.interval_steps, 1)
    trip_s = merges * config.sim.merge_s + _CALLS_PER_ROUND * config.sim.delay_s
    steps += trip_s / config.sim.step_s
    beats = config.sim.step_s * max(speeds) / config.live.heartbeat_s
    events = count * steps * (_EVENTS_PER_STEP + 2 * beats)
    return round(_ROUNDS_MISSED * events)

  def _nobody_left(self) -> bool:
    """Whether those who could close a round are gone for good, and says so."""
    world, quorum = self.world, self._config.quorum
    if self._faults.waiting:
      return False
    names = [f"learner-{i}" for i in range(self._config.learners.count)]
    gone = [name for name in names if name in world.stopped]
    left = len(names) - len(gone)
    if not world.stopped.keys().isdisjoint(world.syncers):
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
    if self._faults.under_way:
      self._reason += f"; under way: {to_text(self._faults.under_way)}"
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
    found = []
    for name in self.world.syncers:
      process = self.world.processes[name]
      if not process.alive or process.actor is None:
        return f"the {name.replace('-', ' ')} is not at work"
      now_ns, rules = process.clock.now_ns(), self.world.rules
      found.append(status_lib.waiting_for(process.actor.state, now_ns, rules))
    return "; ".join(found)

  def _line(self) -> str:
    world, stop = self.world, self._config.stop
    t = max(world.committed, 0)
    commit = world.commits.get(t)
    tokens = commit.tokens if commit else 0
    counted = len(commit.counted) if commit else 0
    return (
      f"{world.heap.now_ns / SECOND_NS:.1f} s simulated, round {t}"
      + (f"/{stop.rounds}" if stop.rounds else "")
      + f", {tokens:,}"
      + (f" of {stop.tokens:,}" if stop.tokens else "")
      + f" tokens, {counted} learners merged"
    )
