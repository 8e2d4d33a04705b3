"""A learner as a snapshot has it, and as a restored run goes on with it."""

from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  Command,
  LearnerState,
  Resumed,
  Snapshot,
)
from ddiloco.protocol.rules import Rules


def record(
  state: LearnerState, rules: Rules, out: list[Command]
) -> LearnerState:
  """Has the learner recorded, once it needs no version but the newest ones.

  A snapshot has no others than those of its commit.
  """
  coming = (*state.fetching, *state.fetched)
  if not state.marked or any(
    state.fragments[p].seen > t
    for t in coming
    for p in rules.schedule.fragments(t)
  ):
    return state
  state = replace(state, marked=False)
  if state.step and not state.diverged:
    out.append(Snapshot(state.seen, at_rest(state)))
  return state


def at_rest(state: LearnerState) -> LearnerState:
  """A learner at a step boundary, without what is on its way to or from it.

  What it was fetching is fetched anew, its open answers are offered again.
  """
  return replace(
    state,
    stepping=False,
    fetching=(),
    fetched=(),
    answers=tuple(replace(a, writing=False) for a in state.answers),
    writes=0,
    seen_ns=(),
    step_started_ns=0,
    waiting_since_ns=0,
    asked=(),
    giving=(),
    marked=False,
    stopping="",
    done=False,
  )


def resumed(event: Resumed) -> LearnerState:
  """The state at rest, of the life that goes on with it."""
  state = event.state
  assert len(event.versions) == len(state.fragments)
  return replace(
    at_rest(state),
    incarnation=event.incarnation,
    run_tokens=event.run_tokens,
    fragments=tuple(
      replace(view, seen=version, epoch=epoch)
      for view, (version, epoch) in zip(
        state.fragments, event.versions, strict=True
      )
    ),
  )
