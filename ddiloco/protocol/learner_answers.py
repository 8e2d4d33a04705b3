"""Which round a learner answers, and when it offers an answer again."""

from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  Command,
  Encode,
  LearnerState,
  OpenAnswer,
)
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.rules import Rules
from ddiloco.types import SECOND_NS, Anchor, Wait

_Commands = list[Command]
_GAP_MAX = 32  # own steps between two attempts, where H is shorter


def answered(state: LearnerState, t: int) -> bool:
  """Whether round t has been answered and is not decided yet."""
  return any(answer.round == t for answer in state.answers)


def can_answer(state: LearnerState, t: int, rules: Rules) -> bool:
  """Whether all of round t is the learner's own, with an allowed anchor."""
  views = [state.fragments[p] for p in rules.schedule.fragments(t)]
  current = rules.anchor is Anchor.ANY or all(v.seen == v.anchor for v in views)
  return current and all(v.steps > 0 and not v.borrowed for v in views)


def own_interval(state: LearnerState, t: int, rules: Rules) -> int:
  """Own steps from one answer to the next, which is to be round t's.

  With dynamic steps (DyLU, arXiv 2401.09135) a slower learner takes fewer, so
  that all answer equally often. The paper rounds down, from speeds that are
  known; these are measured, and the fastest learner would lose a step by it.
  """
  gap = rules.schedule.gap(t)
  if not (rules.dynamic_steps and state.fastest_ns and state.step_ns):
    return gap
  nearest = (gap * state.fastest_ns + state.step_ns // 2) // state.step_ns
  return min(max(nearest, 1), gap)


def choose(state: LearnerState, rules: Rules) -> int | None:
  """The open round to answer now, if any.

  The newest after an answer that came late, else the one whose fragments
  went longest without an answer: with "the oldest open" a learner exactly
  twice as slow as the rest can miss every round.
  """
  schedule = rules.schedule
  since = state.step - state.paced_step
  rounds = [
    t
    for t in schedule.open_rounds(state.seen)
    if not answered(state, t)
    and since >= schedule.gap(t)
    and can_answer(state, t, rules)
  ]
  if not rounds:
    return None
  if state.came_late:
    return max(rounds)

  def neglect(t: int) -> tuple[int, int]:
    steps = [state.fragments[p].answered_step for p in schedule.fragments(t)]
    return min(steps), t

  return min(rounds, key=neglect)


def answer_or_retry(
  state: LearnerState,
  t: int | None,
  now_ns: int,
  rules: Rules,
  out: _Commands,
) -> LearnerState:
  """One answer per boundary at most, and a bounded number under way."""
  if t is None:
    return retry(state, now_ns, rules, out)
  if state.writes >= rules.writes_max or not can_answer(state, t, rules):
    return state
  return answer_now(state, t, now_ns, out, rules)


def retry(
  state: LearnerState, now_ns: int, rules: Rules, out: _Commands
) -> LearnerState:
  """Offers an undecided answer again after 2, 4, 8, … further own steps."""
  if state.writes >= rules.writes_max:
    return state
  ticks = _ticks(state, now_ns)
  for answer in state.answers:
    since = answer.last_step
    if rules.wait is Wait.EXACT:
      # Steps do not count: a later attempt would carry them.
      since = max(since, state.step)
    # The gaps grow, but not beyond an interval: a long outage must not be
    # followed by one as long.
    due = since + min(
      2**answer.attempts, max(rules.schedule.interval, _GAP_MAX)
    )
    if not answer.writing and ticks >= due:
      if can_answer(state, answer.round, rules):
        return answer_now(state, answer.round, now_ns, out, rules)
  return state


def _ticks(state: LearnerState, now_ns: int) -> int:
  """Own steps; while held, step times that have passed count as steps."""
  if not state.waiting_since_ns:
    return state.step
  waited_ns = now_ns - state.waiting_since_ns
  return state.step + waited_ns // (state.step_ns or SECOND_NS)


def answer_now(
  state: LearnerState,
  t: int,
  now_ns: int,
  out: _Commands,
  rules: Rules,
) -> LearnerState:
  """Offers an answer to round t: the first, or the next attempt."""
  due = rules.schedule.fragments(t)
  before = [answer for answer in state.answers if answer.round == t]
  attempt = before[0].attempts + 1 if before else 1
  if before and rules.wait is Wait.EXACT:
    # A round merges what learners had after that very step.
    contributions = before[0].contributions
  else:
    contributions = tuple(
      Contribution(p, view.anchor, view.steps, view.tokens)
      for p in due
      for view in (state.fragments[p],)
    )
  answer = OpenAnswer(t, attempt, _ticks(state, now_ns), True, contributions)
  state = offer(state, answer, out)
  if attempt > 1:
    return state
  return replace(
    state,
    paced_step=state.step,
    fragments=tuple(
      replace(view, answered_step=state.step) if p in due else view
      for p, view in enumerate(state.fragments)
    ),
  )


def offer(
  state: LearnerState, answer: OpenAnswer, out: _Commands
) -> LearnerState:
  """Sends an attempt on its way, in place of the one before."""
  out.append(
    Encode(
      round=answer.round,
      attempt=answer.attempts,
      contributions=answer.contributions,
      step_ns=state.step_ns,
      fetch_ns=state.fetch_ns,
      life_steps=state.step,
      life_tokens=state.tokens,
      vector_clock=(
        (f"learner-{state.learner}", state.step),
        ("syncer", state.seen),
      ),
    )
  )
  others = [a for a in state.answers if a.round != answer.round]
  return replace(
    state,
    writes=state.writes + 1,
    answers=tuple(sorted((*others, answer), key=lambda a: a.round)),
  )
