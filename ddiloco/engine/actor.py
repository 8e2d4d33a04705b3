"""One machine, its plane and its tape: what a driver drives."""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from ddiloco.engine.ports import Job
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol.rules import Rules


class Lane(enum.StrEnum):
  """Where a job runs.

  Jobs of a lane run in order, one after the other; only `PARALLEL` promises
  nothing.
  """

  COMPUTE = "compute"  # the learner's inner steps, the syncer's merges
  ORDERED = "ordered"  # tape, answers and commits: order is safety
  PARALLEL = "parallel"
  CHECKPOINT = "checkpoint"


class Work(NamedTuple):
  """A job and the lane it belongs to."""

  lane: Lane
  job: Job


class Plane:
  """Carries out commands. Subclassed by the learner's and the syncer's."""

  def perform(self, command: Any) -> Work | None:
    """Dispatches a command's array work; returns what is left to do."""
    raise NotImplementedError


class Actor:
  """Feeds events to a machine, records them, performs its commands."""

  def __init__(
    self,
    *,
    start: Callable[..., tuple[Any, list[Any]]],
    step: Callable[..., tuple[Any, list[Any]]],
    check: Callable[..., None],
    rules: Rules,
    plane: Plane,
    tape: TapeWriter,
  ):
    self._start, self._step, self._check = start, step, check
    self.rules = rules
    self.plane = plane
    self.tape = tape
    self.state: Any = None

  def handle(self, event: Any) -> list[Work]:
    """One transition: decide, record, perform, in this order."""
    before = self.state
    if before is None:
      self.state, commands = self._start(event, self.rules)
    else:
      self.state, commands = self._step(before, event, self.rules)
      self._check(before, event, self.state, commands, self.rules)
    # Recorded before it is performed: a job may publish what depends on it.
    self.tape.record(event, tuple(commands))
    work = [self.plane.perform(command) for command in commands]
    return [item for item in work if item is not None]
