"""The syncer's machine: collect answers, close rounds, commit in order.

`step(state, event, rules)` returns the next state and the commands to carry
out (paper, Alg. 2; docs/protocol.md, "Syncer"). Rounds in flight are
collected and merged in parallel; commits are created in order. One of several
shards does this for the rounds it owns, and follows the others' commits.
"""

from ddiloco.protocol import quorum
from ddiloco.protocol.fields import replace
from ddiloco.protocol.messages import Commit, Counted, Progress
from ddiloco.protocol.retention import sweep
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_answers import (
  checked,
  heard_from_commit,
  refuse_key,
  saw_answer,
  saw_member,
)
from ddiloco.protocol.syncer_types import (
  AnswerChecked,
  AnswerGarbled,
  AnswerSeen,
  Command,
  Committed,
  Event,
  Followed,
  LearnerView,
  MemberSeen,
  Merge,
  Merged,
  Opened,
  RoundView,
  Snapshot,
  Stop,
  StopRequested,
  SyncerState,
  Tick,
  WriteCommit,
)
from ddiloco.protocol.syncer_views import (
  average,
  change_round,
  fastest_ns,
  live_views,
  own_gap,
  step_ns,
)

COMPLETED = "completed"
LEASE_LOST = "the lease was taken over"
OVERTAKEN = "another syncer has committed this round"
ANOTHER_CHAIN = "another shard's commit does not follow the newest one known"
_Commands = list[Command]


def start(event: Opened, rules: Rules) -> tuple[SyncerState, list[Command]]:
  """The state of a life that goes on from the newest commit."""
  commit = event.commit
  state = SyncerState(
    epoch=event.epoch,
    started_ns=event.now_ns,
    committed=commit.round,
    previous=event.digest,
    tokens=commit.tokens,
    fragments=commit.fragments,
    rounds=(),
    learners=tuple(
      LearnerView(
        learner=item.learner,
        incarnation=item.incarnation,
        beat=0,
        changed_ns=event.now_ns,
        left=False,
        step_ns=0,
        fetch_ns=0,
        steps=item.steps,
        tokens=item.tokens,
        earlier_tokens=item.earlier_tokens,
      )
      for item in commit.progress
    ),
    norms=((),) * rules.schedule.num_fragments,
    last_closed_ns=0,
    xi_quorum_ns=0,
    xi_sync_ns=0,
    stopping="",
    done=False,
  )
  if rules.ended(commit.round, commit.tokens):
    return replace(state, done=True), [Stop(COMPLETED)]
  out: _Commands = []
  # The life before may have died of it; a restored run begins with its own.
  if commit.epoch:
    _mark(state, event.now_ns, rules, out)
  return _open_rounds(state, event.now_ns, rules), out


def step(
  state: SyncerState, event: Event, rules: Rules
) -> tuple[SyncerState, list[Command]]:
  """One transition. Events after `Stop` change nothing."""
  out: _Commands = []
  if state.done:
    return state, out
  match event:
    case AnswerSeen():
      state = saw_answer(state, event, rules, out)
    case AnswerGarbled():
      state = refuse_key(state, event.key, event.reason)
    case AnswerChecked():
      state = checked(state, event, rules, out)
    case MemberSeen():
      state = saw_member(state, event)
    case Merged():
      state = change_round(state, event.round, merged=event.fragments)
    case Committed():
      state = _committed(state, event, rules, out)
    case Followed():
      state = _followed(state, event, rules, out)
    case StopRequested():
      state = replace(state, stopping=state.stopping or event.reason)
    case Tick():
      pass
    case Opened():
      raise AssertionError("a life starts once")
  if state.stopping and not any(r.committing for r in state.rounds):
    out.append(Stop(state.stopping))
    return replace(state, done=True), out
  state = _close(state, event.now_ns, rules, out)
  return _commit(state, event.now_ns, rules, out), out


def watched(state: SyncerState) -> tuple[tuple[int, int, int, int], ...]:
  """The (round, learner, incarnation, attempt) of answers to look for.

  Of each learner's newest life the attempt after the newest one seen, in
  every round that is not closed.
  """
  if state.done:
    return ()
  keys = []
  for view in state.rounds:
    if view.closed_ns:
      continue
    newest = {(m, n): attempt for m, n, attempt in sorted(view.tried)}
    for learner in state.learners:
      m, n = learner.learner, learner.incarnation
      keys.append((view.round, m, n, newest.get((m, n), 0) + 1))
  return tuple(keys)


def awaited(state: SyncerState, rules: Rules) -> int | None:
  """The round whose commit by another shard is to be looked for, if any."""
  t = rules.schedule.next_round(state.committed)
  return None if state.done or rules.owns(state.epoch, t) else t


def wake_ns(state: SyncerState, now_ns: int, rules: Rules) -> int | None:
  """When the machine wants a `Tick`: the end of a pace or grace window."""
  times = [
    verdict.at_ns
    for view in state.rounds
    if view.quorum_ns and not view.closed_ns  # before it, only events count
    for verdict in (verdict_on(state, view, now_ns, rules),)
    if verdict.at_ns is not None
  ]
  return min(times, default=None)


def verdict_on(
  state: SyncerState, view: RoundView, now_ns: int, rules: Rules
) -> quorum.Verdict:
  """Whether an open round closes now, and why."""
  valid = {answer.learner for answer in view.answers if answer.checked}
  alive = live_views(state, now_ns, rules)
  return quorum.decide(
    rules,
    now_ns=now_ns,
    gap=own_gap(view.round, rules),
    earlier_closed=all(
      [r.closed_ns for r in state.rounds if r.round < view.round]
    ),
    last_closed_ns=state.last_closed_ns,
    valid=len(valid),
    quorum_ns=view.quorum_ns,
    grace_ns=view.grace_ns,
    step_ns=fastest_ns(alive),
    unanswered_live=len({v.learner for v in alive} - valid),
  )


# --- Closing and committing -------------------------------------------------


def _close(
  state: SyncerState, now_ns: int, rules: Rules, out: _Commands
) -> SyncerState:
  for view in state.rounds:
    if view.closed_ns or not view.quorum_ns:
      continue
    if not verdict_on(state, view, now_ns, rules).close:
      continue
    out.append(Merge(view.round, _counted(view)))
    state = change_round(state, view.round, closed_ns=max(now_ns, 1))
    state = replace(state, last_closed_ns=max(now_ns, 1))
  return state


def _commit(
  state: SyncerState, now_ns: int, rules: Rules, out: _Commands
) -> SyncerState:
  view = state.rounds[0] if state.rounds else None
  if view is None or not view.merged or view.committing:
    return state
  if view.round != rules.schedule.next_round(state.committed):
    return state  # other shards' commits come first
  due = rules.schedule.fragments(view.round)
  new = dict(zip(due, view.merged, strict=True))
  tokens = sum(v.tokens + v.earlier_tokens for v in state.learners)
  out.append(
    WriteCommit(
      Commit(
        run_id=rules.run_id,
        round=view.round,
        epoch=state.epoch,
        previous=state.previous,
        counted=_counted(view),
        refused=view.refused,
        fragments=tuple(
          new.get(p, old) for p, old in enumerate(state.fragments)
        ),
        tokens=tokens,
        progress=tuple(
          Progress(
            v.learner, v.incarnation, v.steps, v.tokens, v.earlier_tokens
          )
          for v in state.learners
        ),
        vector_clock=(
          *((f"learner-{v.learner}", v.steps) for v in state.learners),
          ("syncer", view.round),
        ),
        genesis=None,
        step_ns=step_ns(state, now_ns, rules),
      )
    )
  )
  state = replace(state, tokens=tokens)
  return change_round(state, view.round, committing=True)


def _committed(
  state: SyncerState, event: Committed, rules: Rules, out: _Commands
) -> SyncerState:
  view = state.rounds[0]
  assert view.round == event.round and view.committing, event
  if not event.won:
    state = change_round(state, event.round, committing=False)
    return replace(state, stopping=OVERTAKEN)
  out.append(sweep(event.round, rules.schedule))
  new = dict(
    zip(rules.schedule.fragments(event.round), view.merged, strict=True)
  )
  # Another shard's delay is none of this one's.
  begun_ns = max(view.closed_ns, state.followed_ns)
  state = replace(
    state,
    committed=event.round,
    previous=event.digest,
    fragments=tuple(new.get(p, old) for p, old in enumerate(state.fragments)),
    rounds=state.rounds[1:],
    xi_sync_ns=average(state.xi_sync_ns, event.now_ns - begun_ns),
  )
  return _go_on(state, event.now_ns, rules, out)


def _followed(
  state: SyncerState, event: Followed, rules: Rules, out: _Commands
) -> SyncerState:
  commit = event.commit
  if commit.round != rules.schedule.next_round(state.committed):
    return state  # seen before
  if commit.previous != state.previous:
    return replace(state, stopping=state.stopping or ANOTHER_CHAIN)
  for item in commit.progress:
    state = heard_from_commit(state, item, event.now_ns)
  state = replace(
    state,
    committed=commit.round,
    previous=event.digest,
    tokens=commit.tokens,
    fragments=commit.fragments,
    followed_ns=event.now_ns,
  )
  return _go_on(state, event.now_ns, rules, out)


def _go_on(
  state: SyncerState, now_ns: int, rules: Rules, out: _Commands
) -> SyncerState:
  """After the newest commit: to the end, or to the next rounds."""
  if rules.ended(state.committed, state.tokens):
    return replace(state, stopping=state.stopping or COMPLETED)
  _mark(state, now_ns, rules, out)
  return _open_rounds(state, now_ns, rules)


def _mark(
  state: SyncerState, now_ns: int, rules: Rules, out: _Commands
) -> None:
  """Takes a snapshot of the newest commit, if that is a marker."""
  # All by one shard, or they would clear each other's unfinished ones away.
  if rules.marks(state.committed) and rules.shard_of(state.epoch) == 0:
    alive = live_views(state, now_ns, rules)
    lives = tuple((view.learner, view.incarnation) for view in alive)
    out.append(Snapshot(state.committed, lives))


def _open_rounds(state: SyncerState, now_ns: int, rules: Rules) -> SyncerState:
  known = {view.round for view in state.rounds}
  fresh = tuple(
    RoundView(t, now_ns, (), (), (), 0, 0, 0, 0, (), False)
    for t in rules.schedule.open_rounds(state.committed)
    if t not in known and rules.owns(state.epoch, t)
  )
  return replace(state, rounds=(*state.rounds, *fresh))


def _counted(view: RoundView) -> tuple[Counted, ...]:
  return tuple(
    Counted(a.learner, a.incarnation, a.attempt, a.contributions)
    for a in view.answers
    if a.checked
  )
