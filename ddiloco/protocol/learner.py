"""The learner's machine: when to step, apply, answer and wait.

`step(state, event, rules)` returns the next state and the commands to carry
out, in order (paper, Alg. 1; docs/protocol.md, "Learner"). Under the default
policy nothing here waits for the syncer or a peer: the transition that ends
an inner step starts the next one.
"""

from typing import Any

from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_answers import (
  answer_or_retry,
  answered,
  choose,
  offer,
)
from ddiloco.protocol.learner_fragments import apply, fetch, refetch
from ddiloco.protocol.learner_policies import boundary_exact, boundary_own
from ddiloco.protocol.learner_snapshots import record, resumed
from ddiloco.protocol.learner_types import (
  AnswerFailed,
  AnswerWritten,
  CaughtUp,
  Checkpoint,
  Command,
  CommitSeen,
  Event,
  Fetched,
  FetchFailed,
  FragmentView,
  Give,
  Joined,
  LearnerState,
  Resized,
  Resumed,
  Settle,
  Step,
  StepDone,
  Stop,
  StopRequested,
  Tick,
  TransferAsked,
  TransferEnded,
)
from ddiloco.protocol.learner_views import (
  out_of_reach,
)
from ddiloco.protocol.rules import Rules
from ddiloco.types import SECOND_NS, Apply, Refusal, Wait

COMPLETED = "completed"
DIVERGED = "its parameters are not finite"
SUPERSEDED = "superseded"  # and by whom
_DIVERGED_MAX = 3  # answers in a row: one may be a fragment's own trouble
_Commands = list[Command]


def start(
  event: Joined | Resumed, rules: Rules
) -> tuple[LearnerState, list[Command]]:
  """The state of a life that has just claimed its incarnation."""
  if isinstance(event, Resumed):
    return _resume(event, rules)
  assert len(event.versions) == rules.schedule.num_fragments
  state = LearnerState(
    learner=event.learner,
    incarnation=event.incarnation,
    base=event.seen,
    step=0,
    stepping=False,
    tokens=0,
    next_sample=event.next_sample,
    samples=event.samples,
    seen=event.seen,
    run_tokens=event.run_tokens,
    fragments=tuple(
      FragmentView(
        anchor=version,
        seen=version,
        epoch=epoch,
        steps=0,
        tokens=0,
        answered_step=0,
        borrowed=event.borrowed,
      )
      for version, epoch in event.versions
    ),
    fetching=(),
    fetched=(),
    answers=(),
    writes=0,
    paced_step=0,
    came_late=False,
    step_ns=0,
    fastest_ns=0,
    fetch_ns=0,
    seen_ns=(),
    step_started_ns=0,
    waiting_since_ns=0,
    diverged=0,
    asked=(),
    giving=(),
    marked=False,
    stopping="",
    done=False,
  )
  out: _Commands = []
  if rules.ended(event.seen, event.run_tokens):
    state = replace(state, stopping=COMPLETED)
    return _finish(state, out), out
  return _dispatch(state, event.now_ns, rules, out), out


def step(
  state: LearnerState, event: Event, rules: Rules
) -> tuple[LearnerState, list[Command]]:
  """One transition. Events after `Stop` change nothing."""
  out: _Commands = []
  if state.done:
    return state, out
  match event:
    case StepDone():
      state = _stepped(state, event)
    case CommitSeen():
      state = _saw_commit(state, event, rules, out)
    case CaughtUp():
      state = _caught_up(state, event, rules, out)
    case Fetched():
      state = _fetched(state, event)
    case FetchFailed():
      state = _drop_fetch(state, event.round)
    case AnswerWritten():
      state = replace(_answer_settled(state, event.round), diverged=0)
    case AnswerFailed():
      state = _answer_settled(state, event.round)
      if event.refusal is Refusal.NON_FINITE:
        state = _not_finite(state)
    case StopRequested():
      state = replace(state, stopping=state.stopping or event.reason)
    case Resized():
      state = replace(state, samples=event.samples)
    case TransferAsked():
      state = replace(state, asked=(*state.asked, event))
    case TransferEnded():
      giving = tuple(n for n in state.giving if n != event.nonce)
      state = replace(state, giving=giving)
    case Tick():
      pass
    case Joined() | Resumed():
      raise AssertionError("a life joins once")
  # What cannot be fetched is asked for again at the next boundary or tick,
  # not at once: a store that is down answers fast.
  if not state.stepping and not isinstance(event, FetchFailed):
    state = _boundary(state, event.now_ns, rules, out)
  return state, out


def watched(state: LearnerState, rules: Rules) -> int | None:
  """The round whose commit to look for.

  None until the snapshot is taken that the newest one asks for: what comes
  after it must leave no trace there.
  """
  if state.done or state.marked:
    return None
  return rules.schedule.next_round(state.seen)


def wake_ns(state: LearnerState, now_ns: int) -> int | None:
  """When a held learner wants a `Tick`; None while it steps."""
  if state.done or not state.waiting_since_ns:
    return None
  tick_ns = state.step_ns or SECOND_NS
  ticks = (now_ns - state.waiting_since_ns) // tick_ns
  return state.waiting_since_ns + (ticks + 1) * tick_ns


# --- What events tell -------------------------------------------------------


def _stepped(state: LearnerState, event: StepDone) -> LearnerState:
  assert state.stepping and event.step == state.step + 1, event
  elapsed_ns = event.now_ns - state.step_started_ns
  # A life's first step compiles; it says nothing about the island's speed.
  step_ns = 0 if state.step == 0 else _average(state.step_ns, elapsed_ns)
  return replace(
    state,
    step=event.step,
    stepping=False,
    tokens=state.tokens + event.tokens,
    next_sample=state.next_sample + event.samples,
    step_ns=step_ns,
    fragments=tuple(
      [
        FragmentView(
          anchor=view.anchor,
          seen=view.seen,
          epoch=view.epoch,
          steps=view.steps + 1,
          tokens=view.tokens + event.tokens,
          answered_step=view.answered_step,
          borrowed=view.borrowed,
        )
        for view in state.fragments
      ]
    ),
  )


def _saw_commit(
  state: LearnerState, event: CommitSeen, rules: Rules, out: _Commands
) -> LearnerState:
  t = event.round
  assert t == rules.schedule.next_round(state.seen), (t, state.seen)
  came_late = state.came_late
  if answered(state, t):
    out.append(Settle(t, event.counted_attempt))
    came_late = event.counted_attempt == 0
  state = replace(
    state,
    seen=t,
    run_tokens=event.run_tokens,
    fastest_ns=event.step_ns or state.fastest_ns,
    came_late=came_late,
    answers=tuple([a for a in state.answers if a.round != t]),
  )
  if rules.ended(t, event.run_tokens):
    return replace(state, stopping=state.stopping or COMPLETED)
  state = replace(state, marked=rules.marks(t))
  mine = rules.apply is not Apply.OWN or event.counted_attempt > 0
  if not mine and not out_of_reach(state):
    return state
  due = rules.schedule.fragments(t)
  fragments = list(state.fragments)
  for p in due:
    fragments[p] = replace(fragments[p], seen=t, epoch=event.epoch)
  state = replace(state, fragments=tuple(fragments))
  return fetch(state, t, event.now_ns, out)


def _caught_up(
  state: LearnerState, event: CaughtUp, rules: Rules, out: _Commands
) -> LearnerState:
  assert event.round > state.seen, (event.round, state.seen)
  lost = tuple(a for a in state.answers if a.round <= event.round)
  out.extend(Settle(answer.round, 0) for answer in lost)
  state = replace(
    state,
    base=max(state.base, event.round - state.step),  # the clock of `exact`
    seen=event.round,
    marked=False,
    run_tokens=event.run_tokens,
    came_late=state.came_late or bool(lost),
    answers=tuple(a for a in state.answers if a not in lost),
    # What is newer than its anchor is fetched at the next boundary.
    fragments=tuple(
      replace(view, seen=version, epoch=epoch)
      for view, (version, epoch) in zip(
        state.fragments, event.versions, strict=True
      )
    ),
  )
  if rules.ended(event.round, event.run_tokens):
    return replace(state, stopping=state.stopping or COMPLETED)
  return state


def _fetched(state: LearnerState, event: Fetched) -> LearnerState:
  seen_ns = dict(state.seen_ns)[event.round]
  return _drop_fetch(
    state,
    event.round,
    fetched=tuple(sorted((*state.fetched, event.round))),
    fetch_ns=_average(state.fetch_ns, event.now_ns - seen_ns),
  )


def _drop_fetch(state: LearnerState, t: int, **changes: Any) -> LearnerState:
  assert t in state.fetching, (t, state.fetching)
  return replace(
    state,
    fetching=tuple([u for u in state.fetching if u != t]),
    seen_ns=tuple([pair for pair in state.seen_ns if pair[0] != t]),
    **changes,
  )


def _answer_settled(state: LearnerState, t: int) -> LearnerState:
  return replace(
    state,
    writes=state.writes - 1,
    answers=tuple(
      replace(a, writing=False) if a.round == t else a for a in state.answers
    ),
  )


def _not_finite(state: LearnerState) -> LearnerState:
  """Nothing heals parameters that are no numbers; a new life may."""
  state = replace(state, diverged=state.diverged + 1)
  if state.diverged < _DIVERGED_MAX:
    return state
  return replace(state, stopping=state.stopping or DIVERGED)


# --- What happens at a step boundary ----------------------------------------


def _boundary(
  state: LearnerState, now_ns: int, rules: Rules, out: _Commands
) -> LearnerState:
  if state.stopping:
    return _finish(state, out)
  state = apply(state, rules, out)
  state = refetch(state, now_ns, rules, out)
  state = _give(state, rules, out)
  state = record(state, rules, out)
  if rules.apply is Apply.OWN:
    state, held = boundary_own(state, now_ns, rules, out)
  elif rules.wait is Wait.EXACT:
    state, held = boundary_exact(state, now_ns, rules, out)
  else:
    t = choose(state, rules)
    state = answer_or_retry(state, t, now_ns, rules, out)
    held = False
  if held:
    since_ns = state.waiting_since_ns or max(now_ns, 1)
    return replace(state, waiting_since_ns=since_ns)
  every = rules.checkpoint_every_steps
  if every and state.step and state.step % every == 0 and not state.diverged:
    out.append(Checkpoint(state.step, state.seen, state.next_sample))
  return _dispatch(state, now_ns, rules, out)


def _dispatch(
  state: LearnerState, now_ns: int, rules: Rules, out: _Commands
) -> LearnerState:
  share = rules.samples(state.learner, state.seen)
  samples = min(state.samples or share, share or state.samples)
  out.append(
    Step(
      state.step + 1, state.next_sample, state.seen, state.run_tokens, samples
    )
  )
  return replace(
    state, stepping=True, step_started_ns=now_ns, waiting_since_ns=0
  )


def _finish(state: LearnerState, out: _Commands) -> LearnerState:
  if state.step and not state.diverged:
    out.append(Checkpoint(state.step, state.seen, state.next_sample))
  out.append(Stop(state.stopping))
  return replace(state, done=True)


def _give(state: LearnerState, rules: Rules, out: _Commands) -> LearnerState:
  """Gives its state to peers that wait for one as new as what it has seen."""
  if not state.step or state.diverged:
    return state
  for asked in state.asked:
    if len(state.giving) >= rules.transfers_max:
      break
    if state.seen < asked.seen:
      continue
    out.append(Give(asked.recipient, asked.nonce, state.step, state.seen))
    state = replace(
      state,
      asked=tuple(other for other in state.asked if other is not asked),
      giving=(*state.giving, asked.nonce),
    )
  return state


# --- A restored run ---------------------------------------------------------


def _resume(event: Resumed, rules: Rules) -> tuple[LearnerState, list[Command]]:
  state = resumed(event)
  out: _Commands = []
  if rules.ended(state.seen, event.run_tokens):
    return _finish(replace(state, stopping=COMPLETED), out), out
  for answer in state.answers:
    # The bytes that were on their way: parameters have moved on since.
    again = replace(answer, attempts=answer.attempts + 1, writing=True)
    state = offer(state, again, out)
  return _boundary(state, event.now_ns, rules, out), out


def _average(average_ns: int, sample_ns: int) -> int:
  """Moving average with decay 0.9, in integers."""
  return (9 * average_ns + sample_ns) // 10 if average_ns else sample_ns
