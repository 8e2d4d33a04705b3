"""Questions about the learner's state: what it has, and what it lacks."""

from ddiloco.protocol.learner_types import LearnerState
from ddiloco.protocol.rules import Rules


def applied_up_to(state: LearnerState, t: int, rules: Rules) -> bool:
  """Whether every commit up to round t is applied."""
  due = rules.schedule.previous_round(t + 1)
  return state.seen >= due and all(
    view.anchor >= rules.schedule.version_before(p, due + 1)
    for p, view in enumerate(state.fragments)
  )


def out_of_reach(state: LearnerState) -> bool:
  """Whether a version was to be fetched and could not be.

  By the time another commit is seen it may be gone for good; that one then
  takes its place, whoever it counts.
  """
  coming = (*state.fetching, *state.fetched)
  return any(
    v.seen > v.anchor and v.seen not in coming for v in state.fragments
  )


def fills_gap(state: LearnerState, t: int, due: int, rules: Rules) -> bool:
  """Whether a version that is due is gone, and round t the oldest after it."""
  coming = (*state.fetching, *state.fetched)

  def fills(p: int) -> bool:
    version = rules.schedule.version_before(p, due + 1)
    return state.fragments[p].anchor < version and not any(
      version <= u < t and p in rules.schedule.fragments(u) for u in coming
    )

  return any(fills(p) for p in rules.schedule.fragments(t))
