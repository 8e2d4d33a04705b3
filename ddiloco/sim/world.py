"""A whole run in virtual time: its actors, its store, what befalls them.

Everything is decided by one seed: the heap's order is total, and every kind
of chance draws from a stream of its own. What must hold is checked after
every event; a violation is an `InvariantError` with the way back to it.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.config import Config, learner_value, seconds_to_ns
from ddiloco.engine.ports import DamagedRun
from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.messages import Commit, Genesis
from ddiloco.protocol.rules import Rules, make_rules
from ddiloco.sim.audit import Audit
from ddiloco.sim.clock import EPOCH_NS, Clock, Heap, spread, stream
from ddiloco.sim.exchange import SimExchange, Weather
from ddiloco.sim.learner_process import LearnerProcess
from ddiloco.sim.process import Process
from ddiloco.sim.syncer_process import SyncerProcess

SYNCER = "syncer"
RIVAL = "rival"  # a second syncer; it does not come back
KILLED = "killed"
RESTART_NS = 1_000_000_000  # from a death to the next start, unless told


class World:
  """Runs one config under one seed."""

  def __init__(
    self,
    config: Config,
    compute: Any,
    *,
    seed: int,
    code_version: str,
    machines: dict[str, Any] | None = None,
    logs: bool = False,
    history: bool = True,
  ):
    """Builds the world, with nobody in it yet.

    Args:
      config: what the run is told.
      compute: a `NullCompute`, or one that computes.
      seed: of every chance.
      code_version: for the run's records.
      machines: replaces a role's machine (mutants).
      logs: keep every decision of every life, for `audit.finish`.
      history: keep all commits and tapes. Without, no memory is used up by a
        long run, and what reads tapes (reports, `audit.finish`) has nothing.
    """
    self.config, self.compute, self.seed = config, compute, seed
    self.heap = Heap()
    self.exchange = SimExchange(self.heap, stream(seed, "exchange"))
    self.exchange.weather = Weather(delay_ns=self._ns("delay_s"))
    self.exchange.deadline_ns = seconds_to_ns(config.live.store_deadline_s)
    self.rules: Rules = make_rules(
      config,
      run_id=f"sim-{seed}",
      layout=compute.layout_digest,
      answer_bytes=compute.answer_bytes,
    )
    self.audit = Audit(self.rules, self.exchange, seed, history=history)
    if not history:
      self.exchange.unkept = (keys.TAPES,)
    self.processes: dict[str, Process] = {}
    self.lives: list[Process] = []  # all there ever were, if `logs`
    self.events = 0
    self.stopped: dict[str, str] = {}  # who is not to come back, and why
    self.slow_permille: dict[str, int] = {}
    self.slowed: dict[str, int] = {}  # steps that this has hit
    self.lost_slices: dict[str, int] = {}
    self.on_event: Callable[[Process, Any, Any], None] = lambda p, e, s: None
    self.on_start: Callable[[Process], None] = lambda p: None
    self.on_end: Callable[[Process, str], None] = lambda p, reason: None
    self.machines = {
      "learner": learner_machine,
      SYNCER: syncer_machine,
    } | (machines or {})
    self._code_version = code_version
    self._logs = logs
    self._lives: dict[str, int] = {}
    self._clocks: dict[str, Clock] = {}

  @property
  def syncers(self) -> list[str]:
    """The syncer's shards, by the names of their processes."""
    others = range(1, self.rules.shards)
    return [SYNCER, *(f"{SYNCER}-{shard}" for shard in others)]

  def adopt(self, objects: Mapping[str, bytes]) -> None:
    """Takes a restored run's exchange as its own; nobody may be there yet."""
    for key, value in objects.items():
      self.exchange.plant(key, value)
    newest = max(filter(None, map(keys.commit_round, objects)))
    data = objects[keys.commit(newest)]
    commit = messages.decode(Commit, data)
    self.rules = self.audit.rules = dataclasses.replace(
      self.rules, run_id=commit.run_id
    )
    self.audit.adopt(commit, wire.sha256(data))

  # --- Running --------------------------------------------------------------

  def run(self, until: Callable[[], bool], *, events_max: int) -> bool:
    """Runs until `until()`; False if the events were spent before."""
    limit = self.events + events_max
    idle = 0
    while not until():
      count = self.events
      if not self.heap.step():
        return False
      idle = 0 if self.events > count else idle + 1
      if self.events >= limit or idle > 100 * events_max:
        return False
    return True

  @property
  def commits(self) -> dict[int, Commit]:
    """Every commit ever created (of the last ones without `history`)."""
    return self.audit.commits

  @property
  def committed(self) -> int:
    """The newest commit there is."""
    return self.audit.newest

  @property
  def ended(self) -> bool:
    """Whether the run has reached its end."""
    return self.audit.ended

  # --- Processes ------------------------------------------------------------

  def start(self, name: str) -> None:
    """Starts a life of `learner-<i>`, `syncer` or `rival`.

    The syncer's shards after the first, and their rivals, are `syncer-<s>`.
    """
    before = self.processes.get(name)
    if before is not None:
      if before.alive:
        return
      before.bury()
    self.stopped.pop(name, None)
    life = self._lives[name] = self._lives.get(name, 0) + 1
    process = self._make(name, f"{name}/{life}")
    self.processes[name] = process
    if self.lost_slices.get(name, 0) == self.config.elastic.slices:
      process.pause()  # until it has a slice to start on
    self.on_start(process)
    start_ns = spread(process.rng, self._ns("start_s"), 0.5)
    self.heap.after(start_ns, process.guard(process.start))

  def crash(self, name: str, restart_ns: int | None = RESTART_NS) -> None:
    """Kills a life at once; None: it does not come back."""
    process = self.processes[name]
    if not process.alive:
      return
    process.alive = False  # `end` would restart it on its own terms
    self.on_end(process, KILLED)
    if restart_ns is None:
      self.stopped[name] = KILLED
    else:
      self.heap.after(restart_ns, lambda: self._restart(name))

  def resize(self, name: str, lost: int) -> None:
    """A learner's island loses a slice, or (-1) gets one back.

    It stands still for as long as that takes, and while it has none.
    """
    elastic, process = self.config.elastic, self.processes[name]
    before = self.lost_slices.get(name, 0)
    after = self.lost_slices[name] = before + lost
    if not process.alive:
      return  # the next life counts its slices
    process.pause()
    process.resize(self._samples(name))
    if after < elastic.slices:
      cost_s = elastic.down_s if lost > 0 else elastic.up_s
      self.heap.after(seconds_to_ns(cost_s), process.resume)
    if before == elastic.slices:
      process.resume()  # it had stood still for want of any

  def _samples(self, name: str) -> int:
    """Per inner step, with the slices that are left; 0: with all."""
    lost, slices = self.lost_slices.get(name, 0), self.config.elastic.slices
    if not lost:
      return 0
    learner = int(name.partition("-")[2])
    full = learner_value(self.config.learners.batch_size, learner)
    return max(full * (slices - lost) // slices, 1)

  def _restart(self, name: str) -> None:
    if name not in self.stopped and not self.ended:
      self.start(name)

  def _on_end(self, process: Process, reason: str) -> None:
    """A life has ended by itself; only what failed comes back."""
    name = process.who
    role, shard = _role(name)
    starting_syncer = shard is not None and process.actor is None
    if isinstance(process.failure, DamagedRun) and not starting_syncer:
      # One that starts may have read what is not current any more.
      raise InvariantError(f"{process.name} finds damage: {process.failure}")
    if self.processes.get(name) is not process:
      return
    self.on_end(process, reason)
    if reason in ("completed", "stopped") or role == RIVAL:
      self.stopped[name] = reason
    else:
      self.heap.after(RESTART_NS, lambda: self._restart(name))

  def _make(self, name: str, life: str) -> Process:
    rng = stream(self.seed, life)
    if name not in self._clocks:
      drift = self.config.sim.drift_ppm
      self._clocks[name] = Clock(
        self.heap, rng.randrange(1, 10**12), rng.randint(-drift, drift)
      )
    common = {
      "ended": self._on_end,
      "config": self.config,
      "rules": self.rules,
      "compute": self.compute,
      "header": self._header(name),
    }
    where = (life, self.heap, self._clocks[name], self.exchange, rng)
    _, shard = _role(name)
    if shard is not None:
      process = SyncerProcess(
        *where,
        shard=shard,
        genesis=self._genesis(),
        merge_ns=lambda: spread(rng, self._ns("merge_s"), 0.5),
        machine=self.machines[SYNCER],
        **common,
      )
    else:
      learner = int(name.partition("-")[2])
      process = LearnerProcess(
        *where,
        learner=learner,
        step_ns=self._step_ns(name, learner, rng),
        samples=lambda: self._samples(name),
        machine=self.machines["learner"],
        **common,
      )
    process.transition = lambda b, e, a: self._transition(process, e, a)
    process.decided = lambda e, c: self._decided(process, e, c)
    if self._logs:
      self.lives.append(process)
    return process

  def _step_ns(
    self, name: str, learner: int, rng: random.Random
  ) -> Callable[[], int]:
    sim = self.config.sim
    slowdown = learner_value(self.config.learners.slowdown, learner)
    mean_ns = round(seconds_to_ns(sim.step_s) * slowdown)

    def draw() -> int:
      step_ns = spread(rng, mean_ns, sim.jitter)
      if rng.random() < sim.spell_chance:
        step_ns = round(step_ns * sim.spell_factor)
      if name in self.slow_permille:
        self.slowed[name] = self.slowed.get(name, 0) + 1
        step_ns = step_ns * self.slow_permille[name] // 1000
      return step_ns

    return draw

  def _ns(self, key: str) -> int:
    return seconds_to_ns(getattr(self.config.sim, key))

  def _genesis(self) -> Genesis:
    return Genesis(
      config=wire.canonical_json(self.config.to_dict()).decode(),
      config_sha256=self.config.digest,
      layout=self.compute.layout_json,
      code_version=self._code_version,
    )

  def _header(self, name: str) -> Callable[[str, int], tape.Header]:
    def make(actor: str, incarnation: int) -> tape.Header:
      return tape.Header(
        run_id=self.rules.run_id,
        actor=actor,
        incarnation=incarnation,
        seed=self.seed,
        config=wire.canonical_json(self.config.to_dict()).decode(),
        config_sha256=self.config.digest,
        code_version=self._code_version,
        **self.compute.facts,
        started_unix_ns=EPOCH_NS + self.heap.now_ns,
        started_ns=self._clocks[name].now_ns(),
      )

    return make

  # --- What must hold for the whole -----------------------------------------

  def _transition(self, process: Process, event: Any, state: Any) -> None:
    self.events += 1
    self.on_event(process, event, state)

  def _decided(self, process: Process, event: Any, commands: Any) -> None:
    learner = None
    if isinstance(process, LearnerProcess):
      state = process.actor.state
      learner = (state.learner, state.incarnation)
    self.audit.decided(learner, event, commands)
    if self._logs:
      process.log.append((event, commands))


def _role(name: str) -> tuple[str, int | None]:
  """What a process is, and which shard of the syncer; None: a learner."""
  role, _, number = name.partition("-")
  return role, int(number or 0) if role in (SYNCER, RIVAL) else None
