"""TensorBoard event files, one folder per actor, written while it runs."""

import logging
import os
import pathlib
import time
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.protocol.learner_types import CommitSeen, LearnerState, StepDone
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import AnswerGarbled, Committed, SyncerState
from ddiloco.protocol.syncer_views import live, step_ns
from ddiloco.types import MILLISECOND_NS

_EVERY_STEPS = 10
_logger = logging.getLogger("ddiloco")


class Telemetry:
  """A writer that gives up, aloud, when its disk does.

  Not the library's `SummaryWriter`: its thread ends at the first error, and
  whoever adds to its bounded queue then waits for ever.
  """

  def __init__(self, workdir: pathlib.Path, actor: str):
    self._writer: EventsWriter | None = None
    folder = workdir / "tensorboard" / actor
    try:
      folder.mkdir(parents=True, exist_ok=True)
      self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
    except OSError as error:
      self._give_up(error)

  def _give_up(self, error: OSError) -> None:
    _logger.warning("no TensorBoard from here on: %s", error)
    self._writer = None

  def scalars(self, values: dict[str, float], step: int) -> None:
    """Writes some values; training goes on if the disk is full.

    They are in the file once its buffer is full, and at the end.
    """
    if self._writer is None:
      return
    summary = Summary(
      value=[
        Summary.Value(tag=name, simple_value=float(value))
        for name, value in values.items()
      ]
    )
    event = Event(wall_time=time.time(), step=step, summary=summary)
    try:
      self._writer.write_event(event)
    except OSError as error:
      self._give_up(error)

  def close(self) -> None:
    """Writes what is left, and ends the writer's thread."""
    if self._writer is not None:
      self._writer.close()
      self._writer = None


class LearnerTelemetry(Telemetry):
  """A learner's loss, speed and cost of the exchange, by tokens."""

  def __init__(self, workdir: pathlib.Path, learner: int, plane: LearnerPlane):
    super().__init__(workdir, f"learner-{learner}")
    self._plane = plane

  def observe(self, event: Any, state: LearnerState, busy_ns: int) -> None:
    """Called after every transition."""
    match event:
      case StepDone() if event.step % _EVERY_STEPS == 0:
        self.scalars(
          {f"train/{k}": v for k, v in self._plane.arrays.last_metrics.items()}
          | {
            "time/step_ms": state.step_ns / MILLISECOND_NS,
            "time/exchange_ms": event.exchange_ns / MILLISECOND_NS,
            "time/transition_ms": busy_ns / MILLISECOND_NS,
          },
          state.tokens,
        )
      case CommitSeen():
        self.scalars(
          {
            "exchange/counted": float(event.counted_attempt > 0),
            "exchange/fetch_ms": state.fetch_ns / MILLISECOND_NS,
          },
          event.round,
        )


class SyncerTelemetry(Telemetry):
  """Participation and timing of every round."""

  def __init__(self, workdir: pathlib.Path, rules: Rules, shard: int = 0):
    super().__init__(workdir, f"syncer-{shard}" if shard else "syncer")
    self._rules = rules
    self._counted: dict[int, int] = {}
    self._grace_ns: dict[int, int] = {}

  def observe(self, event: Any, state: SyncerState, busy_ns: int) -> None:
    """Called after every transition."""
    for view in state.rounds:
      self._counted[view.round] = sum(a.checked for a in view.answers)
      self._grace_ns[view.round] = view.grace_ns
    match event:
      case AnswerGarbled():
        _logger.warning("answer %s is refused: %s", event.key, event.reason)
      case Committed() if event.won:
        ms = MILLISECOND_NS
        self.scalars(
          {
            "round/participants": self._counted.pop(event.round, 0),
            "round/grace_ms": self._grace_ns.pop(event.round, 0) / ms,
            "round/live": len(live(state, event.now_ns, self._rules)),
            "round/tokens": state.tokens,
            "time/quorum_ms": state.xi_quorum_ns / ms,
            "time/sync_ms": state.xi_sync_ns / ms,
            "time/step_ms": step_ns(state, event.now_ns, self._rules) / ms,
            "time/transition_ms": busy_ns / ms,
          },
          event.round,
        )
