"""Who is told what comes out when scripts compute a run again."""

from collections.abc import Callable
from typing import NamedTuple

from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.engine.ports import StepResult
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.protocol.learner_types import Step
from ddiloco.protocol.messages import Commit, FragmentState
from ddiloco.sim.history import Life


class Mismatch(NamedTuple):
  """A commit whose state came out differently."""

  round: int
  fragment: int
  recorded: str  # SHA-256 of its parameters, or of its outer state
  replayed: str


class Observer:
  """Is told what scripts compute; here it does not care."""

  def stepped(
    self, life: Life, arrays: LearnerArrays, step: Step, result: StepResult
  ) -> None:
    """An inner step of a learner is dispatched."""

  def answered(self, key: str, part: bytes) -> None:
    """An outer gradient is encoded; see `script.answer_key`."""

  def committed(
    self, commit: Commit, arrays: SyncerArrays, states: dict[int, FragmentState]
  ) -> None:
    """A commit's fragments are computed: what came out, by fragment."""


class Comparison(Observer):
  """Compares every commit: tells its round, and what differs or None."""

  def __init__(self, tell: Callable[[tuple[int, Mismatch | None]], None]):
    self._tell = tell

  def committed(
    self, commit: Commit, arrays: SyncerArrays, states: dict[int, FragmentState]
  ) -> None:
    """See `Observer`."""
    found = None
    for p, state in states.items():
      for name in ("params_sha256", "outer_sha256"):
        was, now = getattr(commit.fragments[p], name), getattr(state, name)
        if was != now and found is None:
          found = Mismatch(commit.round, p, was, now)
    self._tell((commit.round, found))
