"""Swarm testing: many small worlds, each with troubles of its own.

Every seed draws which kinds of trouble exist at all, then how often each
happens. A run has two phases: in the first anything may happen and nothing
may break (safety); then the troubles end, and with at least K learners the
run must go on within a bounded number of events (liveness). At the end the
tapes are read, every decision is made again and the ledger is balanced.
"""

import collections
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from ddiloco.config import Config
from ddiloco.engine.version import code_version
from ddiloco.protocol import status
from ddiloco.protocol.invariants import InvariantError
from ddiloco.sim.clock import stream
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.draws import Plan, draw
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.process import Process
from ddiloco.sim.story import Story
from ddiloco.sim.world import World

_EVENTS_MAX = 20_000  # of the first phase
_LIVENESS_EVENTS = 10_000  # in which the rounds below must be committed
_LIVENESS_ROUNDS = 5
_QUIET_S = 2.0  # between two lines of progress


class _Reached(Exception):
  """The event asked for is next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
  """What one seed showed. `violation` is None if everything held."""

  seed: int
  events: int  # entries of the heap that ran
  transitions: int
  faults: dict[str, int]  # how often each kind took effect
  violation: str | None
  story: str  # plan and last events, to understand a violation


class _Run:
  """One seed's world, from the draw to the audit."""

  def __init__(
    self,
    seed: int,
    config: Config | None,
    machines: dict[str, Any] | None,
    until: int,
  ):
    self.seed, self.until = seed, until
    self.plan: Plan = draw(seed, config)
    self.world = World(
      self.plan.config,
      NullCompute(self.plan.config),
      seed=seed,
      code_version=code_version(),
      machines=machines,
      logs=True,
    )
    weather = self.plan.weather
    self.world.exchange.weather = weather
    self.world.on_event = self._on_event
    self.runner = FaultRunner(self.world, self.plan.faults)
    self.crashes = 0
    self._rng = stream(seed, "swarm")
    self._healed = False
    self._story = Story(self.world)

  def play(self) -> None:
    """Both phases and the audit; raises whatever is broken."""
    world, plan = self.world, self.plan
    for name in world.syncers:
      world.start(name)
    for name in self._learners():
      if not self.runner.absent_at_first(name):
        world.start(name)
    world.run(
      lambda: world.heap.now_ns >= plan.horizon_ns or world.ended,
      events_max=_EVENTS_MAX,
    )
    self._heal()
    self._expect(
      {f"commit {world.committed + _LIVENESS_ROUNDS}": self._commits()}
    )
    self._expect({f"a step of {m}": self._steps(m) for m in self._alive()})
    world.audit.finish(world.lives, world.machines)

  def _expect(self, goals: dict[str, Callable[[], bool]]) -> None:
    """Runs until all goals are reached, within a bounded number of events."""
    world = self.world
    if world.run(
      lambda: world.ended or all(reached() for reached in goals.values()),
      events_max=_LIVENESS_EVENTS,
    ):
      return
    missed = [name for name, reached in goals.items() if not reached()]
    raise InvariantError(
      f"no progress: {_LIVENESS_EVENTS} events after all trouble ended, with "
      f"{len(self._alive())} learners, K = {world.rules.quorum_min} and "
      f"commit {world.committed}, there is not yet {', '.join(missed)}. "
      f"{self._why()}"
    )

  def _commits(self) -> Callable[[], bool]:
    goal = self.world.committed + _LIVENESS_ROUNDS
    return lambda: self.world.committed >= goal

  def _steps(self, name: str) -> Callable[[], bool]:
    """Whether a learner has stepped since, or had to begin anew."""
    process = self.world.processes[name]
    before = process.actor.state.step if process.actor else 0

    def reached() -> bool:
      actor = process.actor
      return not process.alive or (
        actor is not None and actor.state.step > before
      )

    return reached

  def effects(self) -> dict[str, int]:
    """Every kind of trouble that took effect, and how often."""
    found = collections.Counter(self.world.exchange.effects)
    for kind in ("partition", "clog", "outage", "full"):
      found.pop(kind, None)  # counted by operation; below, by fault
    for outcome in self.runner.outcomes:
      found[outcome.fault.what] += outcome.took_effect
    found["crash"] += self.crashes
    return {kind: n for kind, n in sorted(found.items()) if n}

  def story(self) -> str:
    """What was drawn, and what every actor saw last."""
    return f"plan: {self.plan}\n{self._story.text()}"

  # --- Inside ---------------------------------------------------------------

  def _learners(self) -> list[str]:
    return [f"learner-{i}" for i in range(self.plan.config.learners.count)]

  def _alive(self) -> list[str]:
    found = self.world.processes
    return [m for m in self._learners() if m in found and found[m].alive]

  def _on_event(self, process: Process, event: Any, state: Any) -> None:
    world = self.world
    self._story.saw(process, event)
    if world.events == self.until - 1:
      raise _Reached
    if not self._healed and self._rng.random() < self.plan.crash_chance:
      # Anywhere in what follows from the event.
      delay_ns = self._rng.randrange(6 * self.plan.weather.delay_ns)
      restart_ns = self._rng.randrange(1, self.plan.restart_ns)

      def crash() -> None:
        if process.alive and not self._healed:
          self.crashes += 1
          world.crash(process.who, restart_ns)

      world.heap.after(delay_ns, process.guard(crash))

  def _heal(self) -> None:
    """Ends all trouble and starts who is missing: at least K learners."""
    world, rng = self.world, self._rng
    self._healed = True
    self.runner.heal()
    world.exchange.heal()
    if world.ended:
      return
    for name in (*world.syncers, *self._learners()):
      process = world.processes.get(name)
      if process and process.actor and process.actor.state.stopping:
        world.crash(name, None)  # it was about to leave
    for name in world.syncers:
      world.start(name)
    gone = [m for m in self._learners() if m not in self._alive()]
    rng.shuffle(gone)
    for name in gone:
      enough = len(self._alive()) >= world.rules.quorum_min
      if not enough or rng.random() < 0.7:
        world.start(name)
      else:
        world.stopped[name] = "gone for good"

  def _why(self) -> str:
    rules, found = self.world.rules, []
    for name in self.world.syncers:
      process = self.world.processes[name]
      if process.actor is None:
        found.append(f"The {name} has not opened the run.")
        continue
      now_ns = process.clock.now_ns()
      found.append(status.waiting_for(process.actor.state, now_ns, rules))
    return " ".join(found)


def run_seed(
  seed: int,
  *,
  config: Config | None = None,
  machines: dict[str, Any] | None = None,
  until: int = 0,
) -> Result:
  """Runs one seed.

  Args:
    seed: of everything that is drawn.
    config: None: drawn too.
    machines: replaces a role's machine (mutants).
    until: stops just before this transition; 0: at the end.
  """
  run = _Run(seed, config, machines, until)
  violation = None
  try:
    run.play()
  except _Reached:
    pass
  except Exception as error:  # whatever it is, it must not happen
    where = traceback.extract_tb(error.__traceback__)[-1]
    violation = f"{type(error).__name__}: {error}"
    if not isinstance(error, InvariantError):
      violation += f" ({where.filename}:{where.lineno})"
  return Result(
    seed,
    run.world.heap.count,
    run.world.events,
    run.effects(),
    violation,
    run.story() if violation or until else "",
  )


def show(seed: int, config: Config | None, until: int) -> str:
  """Where everybody stands just before a transition."""
  result = run_seed(seed, config=config, until=until)
  if result.violation:
    return f"violated before: {result.violation}\n{result.story}"
  return f"seed {seed}, after {result.transitions} events\n{result.story}"


def describe(result: Result, arguments: Iterable[str] = ()) -> str:
  """A violation in full: what, where, and the way back to it."""
  command = " ".join(
    [
      "python -m launch.simulate --compute=none",
      *arguments,
      f"--seeds=1 --seed={result.seed}",
    ]
  )
  return (
    f"VIOLATION: seed {result.seed}, code {code_version()}, after "
    f"{result.transitions} events: {result.violation}\n{result.story}\n"
    f"reproduce: {command}\n"
    f"stop before: {command} --until={result.transitions + 1}"
  )


def run(
  first: int,
  seeds: int,
  *,
  config: Config | None = None,
  report: Callable[[str], None] = print,
  arguments: Iterable[str] = (),
) -> dict[str, Any]:
  """Runs `seeds` seeds from `first` on; returns what `swarm.json` holds.

  Ctrl-C ends it with what was found so far.
  """
  totals = collections.Counter()
  events = violations = done = 0
  begin_s, said_s = time.process_time(), time.monotonic()
  for seed in range(first, first + seeds):
    try:
      result = run_seed(seed, config=config)
    except KeyboardInterrupt:
      report(f"interrupted: {done} of {seeds} seeds, {violations} violations")
      break
    done += 1
    events += result.events
    totals.update(result.faults)
    if result.violation:
      violations += 1
      report(describe(result, arguments))
    if time.monotonic() - said_s > _QUIET_S or done == seeds:
      said_s = time.monotonic()
      rate = events / max(time.process_time() - begin_s, 1e-9)
      report(
        f"{done} of {seeds} seeds, {events} events, {rate:.0f} events/s, "
        f"{violations} violations"
      )
  elapsed_s = max(time.process_time() - begin_s, 1e-9)
  return {
    "seeds": done,
    "first_seed": first,
    "code_version": code_version(),
    "events": events,
    "events_per_s": events / elapsed_s,
    "violations": violations,
    "faults": dict(sorted(totals.items())),
  }
