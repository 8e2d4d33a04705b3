"""A whole run in virtual time: its actors, its store, what befalls them.

Everything is decided by one seed: the heap's order is total, and every kind
of chance draws from a stream of its own. What must hold is checked after
every event; a violation is an `InvariantError` with the way back to it.
"""

import random
from collections.abc import Callable
from typing import Any

from ddiloco.config import Config, learner_value, seconds_to_ns
from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.messages import Commit, Genesis
from ddiloco.protocol.rules import Rules, make_rules
from ddiloco.sim.clock import Clock, Heap, spread, stream
from ddiloco.sim.exchange import SimExchange
from ddiloco.sim.process import Process
from ddiloco.sim.roles import LearnerProcess, SyncerProcess

SYNCER = "syncer"
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
  ):
    """Builds the world; `machines` replaces a role's machine (mutants)."""
    self.config, self.compute, self.seed = config, compute, seed
    self.heap = Heap()
    self.exchange = SimExchange(self.heap, stream(seed, "exchange"))
    self.exchange.on_create = self._created
    self.rules: Rules = make_rules(
      config,
      run_id=f"sim-{seed}",
      layout=compute.layout_digest,
      answer_bytes=compute.answer_bytes,
    )
    self.processes: dict[str, Process] = {}
    self.events = 0
    self.commits: dict[int, Commit] = {}  # every one ever created
    self.stopped: dict[str, str] = {}  # who is not to come back, and why
    self.slow_permille: dict[str, int] = {}
    self.on_event: Callable[[Process, Any, Any], None] = lambda p, e, s: None
    self._machines = {
      "learner": learner_machine,
      SYNCER: syncer_machine,
    } | (machines or {})
    self._code_version = code_version
    self._digests: dict[int, str] = {}
    self._lives: dict[str, int] = {}
    self._clocks: dict[str, Clock] = {}

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
  def committed(self) -> int:
    """The newest commit there is."""
    return max(self.commits, default=-1)

  @property
  def ended(self) -> bool:
    """Whether the run has reached its end."""
    newest = self.commits.get(self.committed)
    return newest is not None and self.rules.ended(newest.round, newest.tokens)

  # --- Processes ------------------------------------------------------------

  def start(self, name: str) -> None:
    """Starts a life of `syncer` or `learner-<i>`."""
    if name in self.processes and self.processes[name].alive:
      return
    self.stopped.pop(name, None)
    life = self._lives[name] = self._lives.get(name, 0) + 1
    process = self._make(name, f"{name}/{life}")
    self.processes[name] = process
    start_ns = spread(process.rng, self._ns("start_s"), 0.5)
    self.heap.after(start_ns, process.guard(process.start))

  def crash(self, name: str, restart_ns: int | None = RESTART_NS) -> None:
    """Kills a life at once; None: it does not come back."""
    process = self.processes[name]
    if not process.alive:
      return
    process.alive = False  # `end` would restart it on its own terms
    if restart_ns is None:
      self.stopped[name] = "killed"
    else:
      self.heap.after(restart_ns, lambda: self._restart(name))

  def _restart(self, name: str) -> None:
    if name not in self.stopped and not self.ended:
      self.start(name)

  def _on_end(self, process: Process, reason: str) -> None:
    """A life has ended by itself; only what failed comes back."""
    name = process.name.partition("/")[0]
    if self.processes.get(name) is not process:
      return
    if reason in ("completed", "stopped"):
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
    if name == SYNCER:
      process = SyncerProcess(
        *where,
        genesis=self._genesis(),
        merge_ns=lambda: spread(rng, self._ns("merge_s"), 0.5),
        machine=self._machines[SYNCER],
        **common,
      )
    else:
      learner = int(name.partition("-")[2])
      process = LearnerProcess(
        *where,
        learner=learner,
        step_ns=self._step_ns(name, learner, rng),
        machine=self._machines["learner"],
        **common,
      )
    process.transition = lambda b, e, a: self._transition(process, e, a)
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
      return step_ns * self.slow_permille.get(name, 1000) // 1000

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
        backend="none",
        devices=0,
        processes=1,
        threads=0,
        cpu_features="",
        libraries=(),
        started_unix_ns=self.heap.now_ns,
        started_ns=self._clocks[name].now_ns(),
      )

    return make

  # --- What must hold for the whole -----------------------------------------

  def _transition(self, process: Process, event: Any, state: Any) -> None:
    self.events += 1
    self.on_event(process, event, state)

  def _created(self, key: str, value: bytes) -> None:
    """A create has won: the only thing that changes global state."""
    t = keys.commit_round(key)
    if t is None:
      return
    commit = messages.decode(Commit, value)
    self._require(t not in self.commits, f"round {t} is committed once")
    if t:
      before = self.rules.schedule.previous_round(t)
      self._require(before in self.commits, f"round {before} comes before {t}")
      self._require(
        commit.previous == self._digests[before],
        f"commit {t} names the digest of commit {before}",
      )
      self._check_counted(commit)
    self.commits[t] = commit
    self._digests[t] = wire.sha256(value)

  def _check_counted(self, commit: Commit) -> None:
    learners = [item.learner for item in commit.counted]
    self._require(
      len(set(learners)) == len(learners) >= self.rules.quorum_min,
      f"commit {commit.round} has at least K distinct learners: {learners}",
    )
    for p in self.rules.schedule.fragments(commit.round):
      self._require(
        commit.fragments[p].version == commit.round,
        f"commit {commit.round} renews fragment {p}",
      )
    for item in commit.counted:
      for part in item.contributions:
        current = self.rules.schedule.version_before(
          part.fragment, commit.round
        )
        self._require(
          part.anchor == current or self.rules.anchor == "any",
          f"commit {commit.round} counts learner {item.learner} from version "
          f"{part.anchor} of fragment {part.fragment}, current is {current}",
        )

  def _require(self, ok: bool, promise: str) -> None:
    if not ok:
      raise InvariantError(f"world, seed {self.seed}: {promise}")
