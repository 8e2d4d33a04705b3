"""Questions about the syncer's state, and small changes to it."""

import dataclasses
from typing import Any

from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import (
  Answer,
  LearnerView,
  RoundView,
  SyncerState,
)

_replace = dataclasses.replace


def live(state: SyncerState, now_ns: int, rules: Rules) -> tuple[int, ...]:
  """The learners whose objects changed within `dead_after`."""
  return tuple(
    view.learner
    for view in state.learners
    if not view.left and now_ns - view.changed_ns < rules.dead_after_ns
  )


def step_ns(state: SyncerState, now_ns: int, rules: Rules) -> int:
  """xi_step: the fastest live learner's step time; 0 if unknown."""
  alive = live(state, now_ns, rules)
  known = [
    v.step_ns for v in state.learners if v.learner in alive and v.step_ns
  ]
  return min(known, default=0)


def life(answer: Answer) -> tuple[int, int, int]:
  """(learner, incarnation, attempt): what names an answer in its round."""
  return answer.learner, answer.incarnation, answer.attempt


def round_view(state: SyncerState, t: int) -> RoundView | None:
  """The uncommitted round t, if it is open."""
  return next((view for view in state.rounds if view.round == t), None)


def learner_view(state: SyncerState, learner: int) -> LearnerView | None:
  """A learner, if it was ever heard of."""
  return next((v for v in state.learners if v.learner == learner), None)


def change_round(state: SyncerState, t: int, **changes: Any) -> SyncerState:
  """The state with one round changed."""
  return _replace(
    state,
    rounds=tuple(
      _replace(view, **changes) if view.round == t else view
      for view in state.rounds
    ),
  )


def change_learner(
  state: SyncerState, learner: int, **changes: Any
) -> SyncerState:
  """The state with one learner changed."""
  return _replace(
    state,
    learners=tuple(
      _replace(view, **changes) if view.learner == learner else view
      for view in state.learners
    ),
  )


def average(average_ns: int, sample_ns: int) -> int:
  """Moving average with decay 0.9, in integers."""
  return (9 * average_ns + sample_ns) // 10 if average_ns else sample_ns
