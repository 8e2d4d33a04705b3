"""TensorBoard event files, one folder per actor, written while it runs."""

import pathlib
from typing import Any

from tensorboardX import SummaryWriter

from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.live.log import logger
from ddiloco.protocol.learner_types import CommitSeen, LearnerState, StepDone
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import AnswerGarbled, Committed, SyncerState
from ddiloco.protocol.syncer_views import live, step_ns
from ddiloco.types import MILLISECOND_NS

_EVERY_STEPS = 10


class Telemetry:
  """A writer that gives up, aloud, when its disk does."""

  def __init__(self, workdir: pathlib.Path, actor: str):
    self._writer: SummaryWriter | None = None
    try:
      self._writer = SummaryWriter(str(workdir / "tensorboard" / actor))
    except OSError as error:
      self._give_up(error)

  def _give_up(self, error: OSError) -> None:
    logger.warning("no TensorBoard from here on: %s", error)
    self._writer = None

  def scalars(self, values: dict[str, float], step: int) -> None:
    """Writes some values; training goes on if the disk is full."""
    if self._writer is None:
      return
    try:
      for name, value in values.items():
        self._writer.add_scalar(name, value, step)
    except OSError as error:
      self._give_up(error)


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

  def __init__(self, workdir: pathlib.Path, rules: Rules):
    super().__init__(workdir, "syncer")
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
        logger.warning("answer %s is refused: %s", event.key, event.reason)
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
