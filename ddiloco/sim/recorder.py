"""Leaves of a simulated run what a live one leaves, in virtual Unix time."""

import json
import pathlib
import signal
from typing import Any

from ddiloco.engine.downlink import read_now, read_params
from ddiloco.engine.ports import Exchange
from ddiloco.engine.telemetry import (
  LearnerTelemetry,
  SyncerTelemetry,
  Telemetry,
)
from ddiloco.protocol import keys
from ddiloco.protocol.faults import to_json
from ddiloco.report.workdir import JOURNAL
from ddiloco.sim.clock import EPOCH_NS
from ddiloco.sim.evaluations import Evaluations
from ddiloco.sim.faults import FaultRunner, Outcome
from ddiloco.sim.learner_process import LearnerProcess
from ddiloco.sim.process import Process
from ddiloco.sim.story import Story
from ddiloco.sim.world import KILLED, World
from ddiloco.types import Exit

_TAPES = "tape/"
_KEPT = (
  keys.STATES,
  keys.ANSWERS,
  keys.MEMBERS,
  keys.LEASES,
  keys.SNAPSHOTS,
  keys.ORIGIN,
  _TAPES,
)


class Recorder:
  """Watches a world and writes into its workdir."""

  def __init__(self, world: World, workdir: pathlib.Path):
    """Begins to watch; nobody may have started yet."""
    self._world, self._workdir = world, workdir
    self._pids: dict[str, int] = {}  # of lives: numbers in order of start
    self._who_started: dict[str, list[tuple[int, int]]] = {}
    self._telemetry: dict[str, Telemetry] = {}
    # A world without arrays has no model.
    model = getattr(world.compute, "model", None)
    self._evaluations = Evaluations(world.config, model, workdir)
    (workdir / JOURNAL).unlink(missing_ok=True)  # of one that was cut short
    self.story = Story(world)
    world.on_start, world.on_end = self._started, self._ended
    world.on_event = self._observed

  # --- The journal ----------------------------------------------------------

  def write(self, what: str, at_ns: int | None = None, **facts: Any) -> None:
    """A line of the launcher's journal, at the world's time."""
    now_ns = self._world.heap.now_ns if at_ns is None else at_ns
    line = {"unix_ns": EPOCH_NS + now_ns, "what": what, **facts}
    with open(self._workdir / JOURNAL, "a") as file:
      file.write(json.dumps(line) + "\n")

  def _started(self, process: Process) -> None:
    pid = self._pids[process.name] = len(self._pids) + 1
    lives = self._who_started.setdefault(process.who, [])
    lives.append((self._world.heap.now_ns, pid))
    self.write("start", who=_role(process), pid=pid)

  def _ended(self, process: Process, reason: str) -> None:
    telemetry = self._telemetry.pop(process.name, None)
    if telemetry is not None:
      telemetry.close()
    self.write(
      "exit",
      who=_role(process),
      pid=self._pids[process.name],
      code=_exit_code(reason),
    )

  def faults(self, runner: FaultRunner) -> None:
    """The script's faults, each with the proof that it took effect."""
    for item in runner.outcomes:
      fault, evidence = item.fault, dict(item.evidence)
      if item.began_ns is None:
        evidence["why"] = "the run ended before it was due"
      else:
        evidence["at_round"] = item.began_round
        pid = self._pid_hit(item)
        if pid is not None:
          evidence["pid"] = pid
      # A fault's line is written once it is over.
      began_ns = item.began_ns or 0
      over_ns = item.ended_ns or began_ns + (fault.for_ns or 0)
      self.write(
        "fault",
        over_ns,
        who=fault.actor,
        fault=to_json((fault,))[0],
        took_effect=item.took_effect,
        evidence=evidence,
      )

  def _pid_hit(self, item: Outcome) -> int | None:
    who = item.fault.actor.replace(" ", "-")
    lives = self._who_started.get(who, [])
    begun = [pid for start_ns, pid in lives if start_ns <= item.began_ns]
    return begun[-1] if begun else None

  # --- Event files ----------------------------------------------------------

  def _observed(self, process: Process, event: Any, state: Any) -> None:
    self.story.saw(process, event)
    telemetry = self._telemetry.get(process.name)
    if telemetry is None:
      if isinstance(process, LearnerProcess):
        plane = process.actor.plane
        telemetry = LearnerTelemetry(self._workdir, process.learner, plane)
      else:
        rules = self._world.rules
        shard = rules.shard_of(state.epoch)
        telemetry = SyncerTelemetry(self._workdir, rules, shard)
      self._telemetry[process.name] = telemetry
    telemetry.observe(event, state, 0)

  # --- Evaluations ----------------------------------------------------------

  def evaluate(self, *, final: bool = False) -> None:
    """Measures the newest commit, if that is due."""
    world = self._world
    commit = world.commits[world.committed]

    def params(p: int) -> bytes | None:
      ref, downlink = commit.fragments[p], world.compute.downlink
      return read_now(read_params(p, ref, downlink), world.exchange.peek)

    unix_ns = EPOCH_NS + world.heap.now_ns
    self._evaluations.evaluate(commit, params, unix_ns, final=final)

  def close(self) -> None:
    """Ends the event files."""
    for telemetry in (*self._telemetry.values(), self._evaluations):
      telemetry.close()

  # --- The exchange ---------------------------------------------------------

  def export(self, store: Exchange) -> None:
    """Copies the world's store; commit 0, which makes it a run, comes last."""
    exchange = self._world.exchange
    names = [name for prefix in _KEPT for name in exchange.names(prefix)]
    names += reversed(exchange.names(keys.COMMITS))
    for name in names:
      store.put(name, exchange.peek(name))


def _role(process: Process) -> str:
  return process.who.replace("-", " ")


def _exit_code(reason: str) -> int:
  if reason == KILLED:
    return -signal.SIGKILL
  if reason == "completed":
    return Exit.OK
  if reason.startswith("superseded"):
    return Exit.SUPERSEDED
  return Exit.STOPPED if reason == "stopped" else Exit.FAILED
