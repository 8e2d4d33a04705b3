"""Injects what was drawn into a session, and keeps its proofs."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddiloco.chaos import clocks, garbage, processes, weather
from ddiloco.chaos.kinds import KINDS, Draw
from ddiloco.chaos.stage import Job, Stage, Steps, TooLate
from ddiloco.engine.ports import ExchangeError
from ddiloco.types import Exit

PERFORM: dict[str, Callable[[Stage, Job], Steps]] = {
  "kill": processes.kill,
  "kill_in_write": processes.kill_in_write,
  "kill_in_merge": processes.kill_in_merge,
  "kill_in_snapshot": processes.kill_in_snapshot,
  "kill_in_transfer": processes.kill_in_transfer,
  "pause": processes.pause,
  "slow": processes.slow,
  "full": processes.full,
  "read_only": weather.read_only,
  "garble_answer": garbage.answer,
  "garble_state": garbage.state,
  "garble_heartbeat": garbage.heartbeat,
  "garble_lease": garbage.lease,
  "garble_checkpoint": garbage.checkpoint,
  "garble_transfer": garbage.transfer,
  "outage": weather.outage,
  "throttle": weather.throttle,
  "stall": weather.stall,
  "lossy": weather.lossy,
  "clock": clocks.clock,
  "jump": clocks.jump,
  "store_clock": weather.store_clock,
  "nan": processes.nan,
  "late": processes.late,
  "join": processes.join,
}
assert PERFORM.keys() == KINDS.keys()

_EXPECTED = (Exit.OK, Exit.STOPPED)
_AGAIN_S = 0.5  # after an end that a fault accounts for
_FINISH_S = 8.0  # for those that joined from outside


class Ended(NamedTuple):
  """A process that ended, though no fault accounts for that."""

  who: str
  pid: int
  code: int
  round: int
  words: str


class ChaosRunner:
  """Takes the place of the script's `FaultRunner` in a supervisor."""

  def __init__(
    self,
    stage: Stage,
    draws: Sequence[Draw],
    *,
    say: Callable[[str], None],
  ):
    """Begins nothing before `begin`."""
    self.jobs = [Job(draw) for draw in draws]
    self.ended: list[Ended] = []
    self._stage, self._say = stage, say
    self._origin_s: float | None = None

  # --- What a supervisor asks -----------------------------------------------

  def begin(self) -> None:
    """The first learner steps: instants count from now."""
    if self._origin_s is None:
      self._origin_s = time.monotonic()

  def tick(self, round_: int) -> None:
    """Begins what is due, and resumes what is under way."""
    self._note_processes()
    if self._origin_s is None:
      return
    elapsed_s = time.monotonic() - self._origin_s
    for job in self.jobs:
      if not job.done and job.steps is None and elapsed_s >= job.draw.at_s:
        job.steps = PERFORM[job.draw.kind](self._stage, job)
      if job.steps is not None:
        self._resume(job)

  def exited(self, name: str, code: int) -> None:
    """A process has ended."""
    stage = self._stage
    pid = stage.pids[name]
    stage.exits[pid] = code
    if code in _EXPECTED or stage.excused.get(pid) == code:
      return
    child = stage.session.children.get(name) or stage.joined[name]
    words = child.last_words(1)
    self.ended.append(Ended(name, pid, code, stage.round, words))

  def restart_s(self, name: str) -> float | None:
    """When it is to come back, if a fault accounts for its end."""
    stage = self._stage
    due_s = stage.restarts.pop(name, None)
    pid = stage.pids[name]
    if due_s is None and stage.excused.get(pid) == stage.exits[pid]:
      due_s = time.monotonic() + _AGAIN_S
    return due_s

  def absent_at_first(self, name: str) -> bool:
    """Whether this learner joins later."""
    return name in self._stage.absent

  def leaves(self, name: str) -> bool:
    """Nobody of the plan leaves for good."""
    return False

  @property
  def waiting(self) -> bool:
    """Whether a late joiner is still to come."""
    return bool(self._stage.absent)

  def heal(self) -> None:
    """Ends what is under way, and undoes it."""
    for job in self.jobs:
      if job.steps is not None:
        job.steps.close()
        job.cut_short = not job.took_effect
        job.evidence.setdefault("why", "the run ended before its proof")
        self._finish(job)
    self._end_outsiders()

  def finish(self) -> list[str]:
    """Heals and journals what is open; returns what took no effect."""
    self.heal()
    return [
      f"{job.draw.kind} of {job.who} ({job.evidence.get('why', 'no proof')})"
      for job in self.jobs
      if job.counts and not job.took_effect
    ]

  # --- What the harness asks ------------------------------------------------

  @property
  def elapsed_s(self) -> float:
    """Since the first inner step."""
    if self._origin_s is None:
      return 0.0
    return time.monotonic() - self._origin_s

  @property
  def busy(self) -> bool:
    """Whether a fault that has begun is not over yet."""
    return any(j.steps is not None and j.begun_s is not None for j in self.jobs)

  def withdraw(self) -> None:
    """What has found nothing to hit so far never will."""
    for job in self.jobs:
      if job.begun_s is None and not job.done:
        if job.steps is not None:
          job.steps.close()
        job.steps, job.done = None, True

  def counts(self) -> dict[str, dict[str, int]]:
    """By kind: how often it was injected, and took effect."""
    found: dict[str, dict[str, int]] = {}
    for job in self.jobs:
      if job.counts:
        entry = {"injected": 0, "took_effect": 0}
        entry = found.setdefault(job.draw.kind, entry)
        entry["injected"] += 1
        entry["took_effect"] += job.took_effect
    return dict(sorted(found.items()))

  # --- One fault ------------------------------------------------------------

  def _note_processes(self) -> None:
    stage = self._stage
    for child in (*stage.session.children.values(), *stage.joined.values()):
      if child.process is not None:
        stage.pids[child.name] = child.process.pid
    for child in stage.joined.values():
      code = child.poll(stage.session.journal)
      if code is not None:
        self.exited(child.name, code)

  def _resume(self, job: Job) -> None:
    begun = job.begun_s is not None
    try:
      next(job.steps)
    except StopIteration:
      self._finish(job)
    except (TooLate, ExchangeError, OSError) as error:
      job.evidence["why"] = str(error)
      self._finish(job)
    if job.begun_s is not None and not begun:
      what = KINDS[job.draw.kind]
      self._say(f"chaos: {job.draw.kind} of {job.who}: {what}")

  def _finish(self, job: Job) -> None:
    job.steps, job.done = None, True
    self._stage.busy.difference_update(job.names)
    if job.begun_s is None:
      return
    at_s = round(job.begun_s - (self._origin_s or 0.0), 3)
    self._stage.session.journal.write(
      "fault",
      who=job.who,
      fault={"at": {"s": at_s}, "who": job.who, "what": job.draw.kind},
      took_effect=job.took_effect,
      evidence=job.evidence,
    )
    effect = "took effect" if job.took_effect else "took NO effect"
    why = job.evidence.get("why", "")
    self._say(
      f"chaos: {job.draw.kind} of {job.who} {effect}{why and f': {why}'}"
    )

  def _end_outsiders(self) -> None:
    stage = self._stage
    end_s = time.monotonic() + _FINISH_S
    while any(c.running for c in stage.joined.values()):
      self._note_processes()
      if time.monotonic() > end_s:
        for child in stage.joined.values():
          child.send(signal.SIGKILL)
      time.sleep(0.02)


def told(ended: Ended) -> dict[str, Any]:
  """An unexplained end as a violation."""
  return {
    "what": f"ended by itself with exit code {ended.code}",
    "who": ended.who,
    "round": ended.round,
    "words": ended.words,
  }
