"""Questions about the syncer's state, and small changes to it."""

from typing import Any

from ddiloco.protocol.fields import replace
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import (
  Answer,
  LearnerView,
  RoundView,
  SyncerState,
)


def live_views(
  state: SyncerState, now_ns: int, rules: Rules
) -> list[LearnerView]:
  """The learners whose objects changed within `dead_after`."""
  since_ns = now_ns - rules.dead_after_ns
  return [
    view
    for view in state.learners
    if not view.left and view.changed_ns > since_ns
  ]


def live(state: SyncerState, now_ns: int, rules: Rules) -> tuple[int, ...]:
  """The live learners by their numbers."""
  return tuple([view.learner for view in live_views(state, now_ns, rules)])


def fastest_ns(alive: list[LearnerView]) -> int:
  """xi_step: the fastest of these learners' step time; 0 if unknown."""
  return min([v.step_ns for v in alive if v.step_ns], default=0)


def step_ns(state: SyncerState, now_ns: int, rules: Rules) -> int:
  """xi_step of the live learners."""
  return fastest_ns(live_views(state, now_ns, rules))


def own_gap(t: int, rules: Rules) -> int:
  """Global steps between round t and the one before it that its shard owns."""
  return t - rules.schedule.previous_owned(t, rules.shards)


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
  return replace(
    state,
    rounds=tuple(
      [
        replace(view, **changes) if view.round == t else view
        for view in state.rounds
      ]
    ),
  )


def change_learner(
  state: SyncerState, learner: int, **changes: Any
) -> SyncerState:
  """The state with one learner changed."""
  return replace(
    state,
    learners=tuple(
      [
        replace(view, **changes) if view.learner == learner else view
        for view in state.learners
      ]
    ),
  )


def average(average_ns: int, sample_ns: int) -> int:
  """Moving average with decay 0.9, in integers."""
  return (9 * average_ns + sample_ns) // 10 if average_ns else sample_ns
