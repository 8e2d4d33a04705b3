"""Policies under which a learner waits: what it does at a step boundary.

Each returns the next state, and whether the learner is held.
"""

from ddiloco.protocol.learner_answers import (
  answer_now,
  answer_or_retry,
  answered,
  own_interval,
  retry,
)
from ddiloco.protocol.learner_types import Command, LearnerState
from ddiloco.protocol.learner_views import applied_up_to
from ddiloco.protocol.rules import Rules

_Commands = list[Command]


def boundary_exact(
  state: LearnerState, now_ns: int, rules: Rules, out: _Commands
) -> tuple[LearnerState, bool]:
  """Policy wait = exact: own steps are the global clock."""
  clock, schedule = state.base + state.step, rules.schedule
  if not applied_up_to(state, clock - max(schedule.overlap, 1), rules):
    return retry(state, now_ns, rules, out), True
  due = schedule.is_round(clock) and clock > state.seen
  if due and not answered(state, clock):
    state = answer_or_retry(state, clock, now_ns, rules, out)
    if not answered(state, clock):
      return state, True  # a round left out would never be answered
  held = schedule.overlap == 0 and not applied_up_to(state, clock, rules)
  return retry(state, now_ns, rules, out), held


def boundary_own(
  state: LearnerState, now_ns: int, rules: Rules, out: _Commands
) -> tuple[LearnerState, bool]:
  """Policy apply = own: after an answer, wait for the commit counting it."""
  view = state.fragments[0]
  if not state.answers and view.seen == view.anchor:
    t = rules.schedule.next_round(state.seen)
    due = state.step - state.paced_step >= own_interval(state, t, rules)
    if view.steps and (due or state.came_late):
      state = answer_now(state, t, now_ns, out, rules)
    else:
      return state, False
  return retry(state, now_ns, rules, out), True
