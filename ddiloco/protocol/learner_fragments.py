"""The way in of commits' fragments: asked for, fetched, applied."""

from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  ApplyFragments,
  Command,
  Fetch,
  LearnerState,
)
from ddiloco.protocol.learner_views import fills_gap
from ddiloco.protocol.rules import Rules
from ddiloco.types import Apply

_Commands = list[Command]


def fetch(
  state: LearnerState, t: int, now_ns: int, out: _Commands
) -> LearnerState:
  """Asks for what round t has committed last."""
  wanted = tuple(p for p, v in enumerate(state.fragments) if v.seen == t)
  out.append(Fetch(t, state.fragments[wanted[0]].epoch, wanted))
  return replace(
    state,
    fetching=tuple(sorted((*state.fetching, t))),
    seen_ns=(*state.seen_ns, (t, now_ns)),
  )


def apply(state: LearnerState, rules: Rules, out: _Commands) -> LearnerState:
  """Applies every fetched commit the policy allows, the newest only."""
  ready = state.fetched
  if rules.apply is Apply.AT_OVERLAP:
    due = state.base + state.step - rules.schedule.overlap
    ready = tuple(
      t for t in ready if t <= due or fills_gap(state, t, due, rules)
    )
  if not ready:
    return state
  fragments = list(state.fragments)
  newest: dict[int, int] = {}
  for t in ready:  # ascending, so the last one wins (paper, Alg. 1)
    for p in rules.schedule.fragments(t):
      view = fragments[p]
      if t > view.anchor or (view.borrowed and t == view.anchor):
        newest[p] = t
  for t in sorted(set(newest.values())):
    applied = tuple(p for p in sorted(newest) if newest[p] == t)
    out.append(ApplyFragments(t, applied))
    for p in applied:
      fragments[p] = replace(
        fragments[p], anchor=t, steps=0, tokens=0, borrowed=False
      )
  return replace(
    state,
    fragments=tuple(fragments),
    fetched=tuple(t for t in state.fetched if t not in ready),
  )


def refetch(
  state: LearnerState, now_ns: int, rules: Rules, out: _Commands
) -> LearnerState:
  """Asks again for what could not be fetched, or whose object was gone.

  And for what is still a peer's after an interval: its round may be waiting
  for this very learner.
  """
  patient = state.step < rules.schedule.interval
  missing = {
    v.seen
    for v in state.fragments
    if v.seen > v.anchor or (v.borrowed and not patient)
  }
  for t in sorted(missing):
    if t not in state.fetching and t not in state.fetched:
      state = fetch(state, t, now_ns, out)
  return state
