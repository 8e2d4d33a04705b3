"""A supervisor whose faults are chaos; it ends when that is over."""

import dataclasses
import signal
import time
from typing import Any

from ddiloco.chaos import clocks
from ddiloco.chaos.kinds import Draw
from ddiloco.chaos.runner import ChaosRunner
from ddiloco.chaos.stage import Stage, decode
from ddiloco.engine.ports import Exchange
from ddiloco.live.console import Progress
from ddiloco.live.monitor import View
from ddiloco.live.supervisor import Supervisor
from ddiloco.protocol import keys, wire
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.schedule import make_schedule
from ddiloco.sim.clock import stream
from ddiloco.types import Exit, Status

_CALM_S = 180.0  # for every learner to be counted once the faults are over
_END_S = 60.0  # to end in good order, on a busy machine too
_LOOK_MAX = 50  # commits that one look of the supervisor reads


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is to happen."""

  seed: int
  minutes: float
  every_s: float
  store: str  # of `kinds.STORES`
  draws: tuple[Draw, ...]
  left_out: dict[str, str]  # kinds that are not drawn, and why


class Session(Supervisor):
  """From the first process to the last, with a time of calm at the end."""

  def __init__(self, plan: Plan, stage: Stage, exchange: Exchange):
    """Takes where things happen, and what an onlooker reads from."""
    self._plan, self._stage = plan, stage
    self.calm_round: int | None = None  # the newest when all was healed
    self._calm_s = 0.0
    self.alive: tuple[int, ...] = ()  # the learners that were there then
    self.digests: dict[int, str] = {}  # of every commit seen
    config = stage.config
    super().__init__(
      config,
      (),
      arguments=stage.arguments,
      workdir=stage.workdir,
      exchange=exchange,
    )
    self._schedule = make_schedule(config.sync)
    self._progress = _Progress(config, self.children, stage.workdir)
    rng = stream(plan.seed, "chaos/processes")
    for child in self.children.values():
      clocks.with_defects(child, rng)
    if any(item.kind == "late" for item in plan.draws):
      stage.absent.add(f"learner {rng.randrange(config.learners.count)}")

  @property
  def runner(self) -> ChaosRunner:
    """What injects the faults."""
    return self._faults

  @property
  def view(self) -> View:
    """What an onlooker knows of the run."""
    return self._monitor.view

  def _make_faults(self, faults: Any) -> ChaosRunner:
    self._stage.session = self
    return ChaosRunner(self._stage, self._plan.draws, say=self.say)

  def _tick(self) -> Status | None:
    found = super()._tick()
    self._look_at_commits()
    self._progress.done = self.runner.counts()
    self._progress.left_s = 60 * self._plan.minutes - self.runner.elapsed_s
    if found is None and self._is_over():
      self.reason = "the chaos is over"
      self._stop.set()
    return found

  def _look_at_commits(self) -> None:
    """Remembers every commit, before its content is swept."""
    t = max(self.digests, default=-1)
    for _ in range(_LOOK_MAX):
      t = self._schedule.next_round(t) if t >= 0 else 0
      if t > self.view.round or self.view.commit is None:
        return
      data = self._stage.get(keys.commit(t))
      commit = decode(Commit, data)
      if commit is None:
        return
      self._stage.commits[t] = commit
      self.digests[t] = wire.sha256(data)

  def _is_over(self) -> bool:
    """Once the time is up, all is healed and every learner is counted."""
    if self.runner.elapsed_s < 60 * self._plan.minutes:
      return False
    if self.calm_round is None:
      self.runner.withdraw()
      learners = [c for c in self.children.values() if c.learner is not None]
      waiting = [c for c in learners if not c.over and not c.ready]
      if self.runner.busy or (waiting and not self._late):
        return False
      self.calm_round, self._calm_s = self.view.round, time.monotonic()
      self.alive = tuple(c.learner for c in learners if c.running)
      self.say(f"chaos: all is healed at round {self.calm_round}")
    counted = {
      item.learner
      for t in self._stage.commits
      if t > self.calm_round
      for item in self._stage.commits[t].counted
    }
    everybody = {*self.alive} <= counted
    rounds = self.view.round - self.calm_round
    enough = everybody and rounds >= self.config.sync.interval_steps
    return enough or time.monotonic() - self._calm_s > _CALM_S

  @property
  def _late(self) -> bool:
    """Whether who starts has had all the time there is."""
    return self.runner.elapsed_s > 60 * self._plan.minutes + _CALM_S

  def _stop_all(self) -> None:
    self.runner.heal()  # or processes could not end in good order
    end_s = time.monotonic() + _END_S
    asked = [child for child in self.children.values() if child.running]
    for child in asked:
      child.send(signal.SIGTERM)
    while any(c.running for c in asked) and time.monotonic() < end_s:
      for child in asked:
        child.poll(self.journal)
      time.sleep(0.02)
    super()._stop_all()
    for child in asked:
      # Who has just been started has no handler yet.
      if child.code not in (Exit.OK, Exit.STOPPED, -signal.SIGTERM):
        self.runner.exited(child.name, child.code)


class _Progress(Progress):
  """How far the chaos is, beside how far the run is."""

  left_s = 0.0
  done: dict[str, dict[str, int]] = {}

  def _goal(self, view: View) -> str:
    faults = sum(entry["injected"] for entry in self.done.values())
    left = f"{max(self.left_s, 0):.0f} s of chaos left"
    tokens = 0 if view.commit is None else view.commit.tokens
    counted = len(view.commit.counted) if view.commit else 0
    return (
      f"round {view.round}, {tokens:,} tokens, {counted} learners merged; "
      f"{faults} faults, {left}"
    )
