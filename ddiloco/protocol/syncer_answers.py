"""The syncer and its answers: admission, quorum and signs of life."""

from typing import Any

from ddiloco.protocol import admission, quorum
from ddiloco.protocol.fields import replace
from ddiloco.protocol.messages import Progress, Refused
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import (
  Answer,
  AnswerChecked,
  AnswerSeen,
  Check,
  Command,
  Drop,
  LearnerView,
  MemberSeen,
  SyncerState,
)
from ddiloco.protocol.syncer_views import (
  average,
  change_learner,
  change_round,
  fastest_ns,
  learner_view,
  life,
  live_views,
  round_view,
)
from ddiloco.types import Refusal

_Commands = list[Command]


def saw_answer(
  state: SyncerState, event: AnswerSeen, rules: Rules, out: _Commands
) -> SyncerState:
  """An answer's header was found: check it, then its parts."""
  header, key = event.header, event.key
  view = round_view(state, key[0])
  if view is None or view.closed_ns:
    return state  # late: the ledger finds it on the learner's own tape
  if key[1:] in view.tried:
    return state
  reason = admission.check_header(header, key, rules, state.fragments)
  if reason is not None:
    return refuse_key(state, key, reason)
  known = learner_view(state, header.learner)
  if known and header.incarnation < known.incarnation:
    return refuse_key(state, key, Refusal.SUPERSEDED)
  state = _heard(
    state,
    header.learner,
    header.incarnation,
    event.now_ns,
    step_ns=header.step_ns,
    fetch_ns=header.fetch_ns,
    steps=header.life_steps,
    tokens=header.life_tokens,
  )
  answer = Answer(
    learner=header.learner,
    incarnation=header.incarnation,
    attempt=header.attempt,
    contributions=header.contributions,
    arrived_ns=event.now_ns,
    checked=False,
  )
  out.append(Check(*key))
  return change_round(
    state,
    view.round,
    answers=(*view.answers, answer),
    tried=(*view.tried, key[1:]),
  )


def refuse_key(
  state: SyncerState, key: tuple[int, int, int, int], reason: Refusal
) -> SyncerState:
  """Leaves an answer out, by its key, for a reason."""
  view = round_view(state, key[0])
  if view is None or view.closed_ns:
    return state
  refused = Refused(*key[1:], reason)
  return change_round(
    state,
    key[0],
    refused=tuple(dict.fromkeys((*view.refused, refused))),
    tried=tuple(dict.fromkeys((*view.tried, key[1:]))),
  )


def checked(
  state: SyncerState, event: AnswerChecked, rules: Rules, out: _Commands
) -> SyncerState:
  """An answer's parts were inspected: it counts, or it does not."""
  view = round_view(state, event.round)
  arrived = (event.learner, event.incarnation, event.attempt)
  if view is None or view.closed_ns:
    out.append(Drop(event.round, *arrived))
    return state
  reason = event.reason
  if reason is None:
    state, reason = _judge_norms(state, event, rules)
  answers = [a for a in view.answers if life(a) != arrived]
  if reason is not None:
    out.append(Drop(event.round, *arrived))
    state = change_round(state, event.round, answers=tuple(answers))
    return refuse_key(state, (event.round, *arrived), reason)
  answer = next(a for a in view.answers if life(a) == arrived)
  refused = list(view.refused)
  for other in tuple(answers):
    if other.learner == event.learner and other.checked:
      # The newest attempt of the highest incarnation stands for its learner.
      loser = min(other, answer, key=life)
      out.append(Drop(event.round, *life(loser)))
      if other.incarnation != answer.incarnation:
        refused.append(Refused(*life(loser), Refusal.SUPERSEDED))
      answers.remove(other)
      answer = max(other, answer, key=life)
  answers.append(replace(answer, checked=True))
  state = change_round(
    state,
    event.round,
    answers=tuple(sorted(answers, key=life)),
    refused=tuple(refused),
  )
  return _reach_quorum(state, event.round, event.now_ns, rules)


def _judge_norms(
  state: SyncerState, event: AnswerChecked, rules: Rules
) -> tuple[SyncerState, Refusal | None]:
  norms, reason = list(state.norms), None
  due = rules.schedule.fragments(event.round)
  for p, norm in zip(due, event.norms, strict=True):
    if admission.is_outlier(norm, norms[p], rules):
      reason = Refusal.OUTLIER
    norms[p] = admission.remember_norm(norms[p], norm)
  return replace(state, norms=tuple(norms)), reason


def _reach_quorum(
  state: SyncerState, t: int, now_ns: int, rules: Rules
) -> SyncerState:
  view = round_view(state, t)
  valid = [answer for answer in view.answers if answer.checked]
  first_ns = view.first_ns or min(answer.arrived_ns for answer in valid)
  if len(valid) < rules.quorum_min or view.quorum_ns:
    return change_round(state, t, first_ns=first_ns)
  state = replace(
    state, xi_quorum_ns=average(state.xi_quorum_ns, now_ns - first_ns)
  )
  alive = live_views(state, now_ns, rules)
  fetch_ns = [view.fetch_ns for view in alive]
  return change_round(
    state,
    t,
    first_ns=first_ns,
    quorum_ns=max(now_ns, 1),
    grace_ns=quorum.grace_ns(
      rules,
      fastest_ns(alive),
      state.xi_quorum_ns,
      state.xi_sync_ns + max(fetch_ns, default=0),
    ),
  )


def saw_member(state: SyncerState, event: MemberSeen) -> SyncerState:
  """A heartbeat, a new life, or a good-bye."""
  known = learner_view(state, event.learner)
  if known and known.incarnation > event.incarnation:
    return state
  new_life = known is None or known.incarnation < event.incarnation
  if not new_life and known.beat == event.beat and known.left == event.left:
    return state
  state = _heard(
    state, event.learner, event.incarnation, event.now_ns, left=event.left
  )
  return change_learner(state, event.learner, beat=event.beat)


def heard_from_commit(
  state: SyncerState, item: Progress, now_ns: int
) -> SyncerState:
  """What another shard knew of a learner; nobody's tokens become fewer."""
  known = learner_view(state, item.learner)
  if known is None or _progress(item) > _progress(known):
    counters = {"steps": item.steps, "tokens": item.tokens}
    state = _heard(state, item.learner, item.incarnation, now_ns, **counters)
    known = learner_view(state, item.learner)
  earlier_tokens = item.earlier_tokens
  if known.incarnation > item.incarnation:
    earlier_tokens += item.tokens
  return change_learner(
    state,
    item.learner,
    earlier_tokens=max(known.earlier_tokens, earlier_tokens),
  )


def _progress(of: Progress | LearnerView) -> tuple[int, int]:
  return of.incarnation, of.steps


def _heard(
  state: SyncerState,
  learner: int,
  incarnation: int,
  now_ns: int,
  **changes: Any,
) -> SyncerState:
  """Notes a sign of life; a new life keeps the tokens of those before."""
  known = learner_view(state, learner)
  if known is None:
    known = LearnerView(learner, incarnation, 0, now_ns, False, 0, 0, 0, 0, 0)
    state = replace(
      state,
      learners=tuple(
        sorted((*state.learners, known), key=lambda view: view.learner)
      ),
    )
  if known.incarnation < incarnation:
    earlier_tokens = known.earlier_tokens + known.tokens
    fresh = {"beat": 0, "step_ns": 0, "fetch_ns": 0, "steps": 0, "tokens": 0}
    fresh |= {"left": False, "earlier_tokens": earlier_tokens}
    changes = fresh | changes
  for counter in ("steps", "tokens"):  # answers may arrive out of order
    if known.incarnation == incarnation and counter in changes:
      changes[counter] = max(changes[counter], getattr(known, counter))
  return change_learner(
    state, learner, incarnation=incarnation, changed_ns=now_ns, **changes
  )
