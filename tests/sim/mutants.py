"""Deliberately wrong variants of the protocol, each a small slip.

A mutant patches one thing with pytest's `monkeypatch`, and may replace a
role's machine. The swarm must kill every one of them: what it cannot tell
from the right protocol, it does not test.
"""

import dataclasses
import itertools
import types
from typing import Any

from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.engine.null_arrays import NORM, NullSyncerArrays
from ddiloco.engine.ports import Call
from ddiloco.engine.syncer_plane import SyncerPlane
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import (
  admission,
  learner,
  learner_answers,
  learner_policies,
  quorum,
  retention,
  schedule,
  syncer,
  syncer_answers,
)
from ddiloco.protocol.learner_types import Settle, StepDone
from ddiloco.protocol.syncer_views import (
  change_learner,
  learner_view,
)
from ddiloco.types import Refusal

replace = dataclasses.replace
Machines = dict[str, Any] | None


def machine(real: Any, **changes: Any) -> types.SimpleNamespace:
  """A machine with some of its functions replaced."""
  functions = {"start", "step", "watched", "awaited", "wake_ns"} & vars(
    real
  ).keys()
  return types.SimpleNamespace(
    **{name: getattr(real, name) for name in functions} | changes
  )


def quorum_of_one_less(patch) -> Machines:
  def step(state, event, rules):
    lower = replace(rules, quorum_min=max(rules.quorum_min - 1, 1))
    return syncer.step(state, event, lower)

  return {"syncer": machine(syncer, step=step)}


def no_incarnation_check(patch) -> Machines:
  real = syncer.saw_answer

  def saw_answer(state, event, rules, out):
    header = event.header
    known = learner_view(state, header.learner)
    if known and header.incarnation < known.incarnation:
      state = change_learner(
        state, header.learner, incarnation=header.incarnation
      )
    return real(state, event, rules, out)

  patch.setattr(syncer, "saw_answer", saw_answer)


def weights_swapped(patch) -> Machines:
  real = syncer._counted

  def counted(view):
    found = real(view)
    others = (*found[1:], *found[:1])
    return tuple(
      replace(mine, contributions=other.contributions)
      for mine, other in zip(found, others, strict=True)
    )

  patch.setattr(syncer, "_counted", counted)


def _decide_with(patch, **changes) -> None:
  real = quorum.decide
  patch.setattr(
    quorum, "decide", lambda rules, **facts: real(rules, **facts | changes)
  )


def grace_ignored(patch) -> Machines:
  _decide_with(patch, grace_ns=0)


def grace_without_end(patch) -> Machines:
  patch.setattr(quorum, "grace_ns", lambda rules, step_ns, *_: 3 * step_ns)


def pace_ignored(patch) -> Machines:
  _decide_with(patch, gap=1)


def stale_anchor_accepted(patch) -> Machines:
  real = admission.check_header

  def check_header(*args):
    reason = real(*args)
    return None if reason is Refusal.STALE_ANCHOR else reason

  patch.setattr(admission, "check_header", check_header)


def borrowed_steps_offered(patch) -> Machines:
  real = learner_answers.can_answer

  def can_answer(state, t, rules):
    own = tuple(replace(view, borrowed=False) for view in state.fragments)
    return real(replace(state, fragments=own), t, rules)

  patch.setattr(learner_answers, "can_answer", can_answer)


def counters_not_reset(patch) -> Machines:
  real = learner.apply

  def apply(state, rules, out):
    after = real(state, rules, out)
    fragments = tuple(
      replace(new, steps=old.steps, tokens=old.tokens)
      for old, new in zip(state.fragments, after.fragments, strict=True)
    )
    return replace(after, fragments=fragments)

  patch.setattr(learner, "apply", apply)


def commit_out_of_order(patch) -> Machines:
  real = syncer._commit

  def commit(state, rules, out):
    merged = [view for view in state.rounds if view.merged]
    if not merged or state.rounds[0].merged:
      return real(state, rules, out)
    others = [view for view in state.rounds if view is not merged[0]]
    state = real(replace(state, rounds=(merged[0], *others)), rules, out)
    rounds = tuple(sorted(state.rounds, key=lambda view: view.round))
    return replace(state, rounds=rounds)

  _decide_with(patch, earlier_closed=True)
  patch.setattr(syncer, "_commit", commit)


def lost_create_taken_for_won(patch) -> Machines:
  real = SyncerPlane._commit

  def commit(self, record):
    event = yield from real(self, record)
    return replace(event, won=True)

  patch.setattr(SyncerPlane, "_commit", commit)


def retention_one_version_early(patch) -> Machines:
  def sweep(t, schedule):
    states = [(schedule.version_before(p, t), p) for p in schedule.fragments(t)]
    return replace(retention.sweep(t, schedule), states=tuple(states))

  patch.setattr(syncer, "sweep", sweep)


def retention_of_commits_too_early(patch) -> Machines:
  def sweep(t, schedule):
    old = schedule.previous_round(t - schedule.interval + 1)
    return replace(retention.sweep(t, schedule), commits=(old,) if old else ())

  patch.setattr(syncer, "sweep", sweep)


def swept_commits_vanish(patch) -> Machines:
  real = SyncerPlane._sweep

  def sweep(self, command):
    job, answer = real(self, command), None
    for _ in itertools.count():
      try:
        call = job.send(answer)
      except StopIteration:
        return None
      if call.method == "compare_and_swap":
        call = Call("delete", call.args[:1])
      answer = yield call

  patch.setattr(SyncerPlane, "_sweep", sweep)


def a_start_sweeps_what_another_syncer_stores(patch) -> Machines:
  real = retention.keeps

  def keeps(kind, version, newest, *rest):
    return version <= newest and real(kind, version, newest, *rest)

  patch.setattr(retention, "keeps", keeps)


def a_fragment_never_due(patch) -> Machines:
  real = schedule._residues

  def residues(of):
    fewer = max(of.num_fragments - 1, 1)
    return real(
      types.SimpleNamespace(
        num_fragments=fewer, interval=of.interval, offset=of.offset
      )
    )

  patch.setattr(schedule, "_residues", residues)


def residual_advanced_for_what_was_not_counted(patch) -> Machines:
  real = learner._saw_commit

  def saw_commit(state, event, rules, out):
    tried = {answer.round: answer.attempts for answer in state.answers}
    state = real(state, event, rules, out)
    out[:] = [
      replace(command, attempt=tried[command.round])
      if isinstance(command, Settle)
      else command
      for command in out
    ]
    return state

  patch.setattr(learner, "_saw_commit", saw_commit)


def counted_whatever_it_is_told(patch) -> Machines:
  real = LearnerPlane.poll

  def poll(self, t):
    event = yield from real(self, t)
    return event and replace(event, counted_attempt=1)

  patch.setattr(LearnerPlane, "poll", poll)


def nan_counted(patch) -> Machines:
  real = NullSyncerArrays.inspect

  def inspect(self, key, due, data):
    norms = real(self, key, due, data)
    if norms is None:
      self._answers.add(key)
      norms = (NORM,) * len(due)
    return norms

  patch.setattr(NullSyncerArrays, "inspect", inspect)


def another_layout_accepted(patch) -> Machines:
  real = admission.check_header

  def check_header(header, key, rules, fragments):
    return real(replace(header, layout=rules.layout), key, rules, fragments)

  patch.setattr(admission, "check_header", check_header)


def no_second_attempt(patch) -> Machines:
  def retry(state, now_ns, rules, out):
    return state

  patch.setattr(learner_answers, "retry", retry)
  patch.setattr(learner_policies, "retry", retry)


def answer_before_its_tape(patch) -> Machines:
  real = TapeWriter.flush

  def flush(self):
    if self._actor.startswith("learner"):
      return
    yield from real(self)

  patch.setattr(TapeWriter, "flush", flush)


def tape_out_of_step(patch) -> Machines:
  real = TapeWriter.record

  def record(self, event, commands):
    if isinstance(event, StepDone):
      event = replace(event, tokens=event.tokens + 1)
    real(self, event, commands)

  patch.setattr(TapeWriter, "record", record)


def tokens_of_earlier_lives_forgotten(patch) -> Machines:
  real = syncer_answers._heard

  def heard(state, learner_, incarnation, now_ns, **changes):
    state = real(state, learner_, incarnation, now_ns, **changes)
    return change_learner(state, learner_, earlier_tokens=0)

  patch.setattr(syncer_answers, "_heard", heard)


def held_by_a_round(patch) -> Machines:
  real = learner._boundary

  def boundary(state, now_ns, rules, out):
    if state.answers and state.step % 7 == 0 and not state.stopping:
      return replace(state, waiting_since_ns=max(now_ns, 1))
    return real(state, now_ns, rules, out)

  patch.setattr(learner, "_boundary", boundary)


def decides_by_more_than_its_inputs(patch) -> Machines:
  calls = itertools.count()

  def step(state, event, rules):
    state, commands = learner.step(state, event, rules)
    return replace(state, came_late=next(calls) % 50 == 0), commands

  return {"learner": machine(learner, step=step)}


MUTANTS = (
  quorum_of_one_less,
  no_incarnation_check,
  weights_swapped,
  grace_ignored,
  grace_without_end,
  pace_ignored,
  stale_anchor_accepted,
  borrowed_steps_offered,
  counters_not_reset,
  commit_out_of_order,
  lost_create_taken_for_won,
  retention_one_version_early,
  retention_of_commits_too_early,
  swept_commits_vanish,
  a_start_sweeps_what_another_syncer_stores,
  a_fragment_never_due,
  residual_advanced_for_what_was_not_counted,
  counted_whatever_it_is_told,
  nan_counted,
  another_layout_accepted,
  no_second_attempt,
  answer_before_its_tape,
  tape_out_of_step,
  tokens_of_earlier_lives_forgotten,
  held_by_a_round,
  decides_by_more_than_its_inputs,
)
