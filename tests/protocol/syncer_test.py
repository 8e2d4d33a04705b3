"""The syncer by script: answers come in, rounds close, commits go out."""

import dataclasses

import pytest

from ddiloco.protocol import syncer as machine
from ddiloco.protocol.admission import NORMS_KEPT
from ddiloco.protocol.messages import Counted, Progress, Refused
from ddiloco.protocol.quorum import Why
from ddiloco.protocol.syncer_types import (
  AnswerGarbled,
  Check,
  Drop,
  Opened,
  Sweep,
)
from ddiloco.types import Anchor, Refusal, Wait
from tests.protocol.scenario import (
  STEP_NS,
  STEP_TOKENS,
  Syncer,
  fragment_state,
  make_rules,
)


def why(syncer, t=1):
  view = syncer.round(t)
  return machine.verdict_on(syncer.state, view, syncer.now_ns, syncer.rules).why


def two_learners(rules, **kwargs):
  """A syncer that has heard of two learners."""
  syncer = Syncer(rules, **kwargs)
  syncer.member(0)
  syncer.member(1)
  return syncer


# --- A round, from its opening to its commit --------------------------------


def test_one_learner_answers_and_the_round_is_committed():
  syncer = Syncer(make_rules())
  assert syncer.first == []
  assert syncer.offers(1, 0, steps=4, life_steps=8) == [Check(1, 0, 1, 1)]
  assert syncer.checked(1, 0).merges == [(1, (0,))]
  assert syncer.round(1).closed_ns == syncer.now_ns
  commit = syncer.merged(1).commit
  assert (commit.round, commit.epoch, commit.previous) == (1, 1, "digest-0")
  contributions = syncer.header(1).contributions
  assert commit.counted == (Counted(0, 1, 1, contributions),)
  assert [f.version for f in commit.fragments] == [0, 1, 0, 0]
  assert commit.tokens == 80
  assert commit.progress == (Progress(0, 1, 8, 80, 0),)
  assert commit.vector_clock == (("learner-0", 8), ("syncer", 1))
  assert syncer.committed(1).names == ["Sweep"]
  assert syncer.state.committed == 1
  assert syncer.state.previous == "digest-1"
  assert [view.round for view in syncer.state.rounds] == [2]


def test_all_fragments_of_a_round_are_committed_together():
  syncer = Syncer(make_rules(6, 3, 1))
  syncer.answers(1)
  assert [f.version for f in syncer.finish(1).fragments] == [0, 0, 1, 1, 0, 0]


def test_retention_follows_every_commit():
  syncer = Syncer(make_rules(1, 1, 0, wait=Wait.EXACT))
  for t in range(1, 5):
    syncer.answers(t)
    syncer.merged(t)
    found = syncer.committed(t).of(Sweep)
    assert found[0].states == (((t - 2, 0),) if t > 1 else ())
    assert found[0].commits == ((t - 2,) if t > 2 else ())


def test_what_to_look_for():
  syncer = two_learners(make_rules(overlap=2))
  assert machine.watched(syncer.state) == (
    (1, 0, 1, 1),
    (1, 1, 1, 1),
    (2, 0, 1, 1),
    (2, 1, 1, 1),
  )
  syncer.offers(1, 0)
  syncer.member(1, incarnation=2)
  assert machine.watched(syncer.state) == (
    (1, 0, 1, 2),
    (1, 1, 2, 1),
    (2, 0, 1, 1),
    (2, 1, 2, 1),
  )
  syncer.checked(1, 0)
  syncer.wait(2 * STEP_NS)  # round 1 closes
  assert machine.watched(syncer.state) == ((2, 0, 1, 1), (2, 1, 2, 1))


def test_attempts_found_out_of_order_are_looked_beyond():
  syncer = two_learners(make_rules(quorum_min=2))
  syncer.offers(1, 0, attempt=2)
  syncer.offers(1, 0, attempt=1)
  assert (1, 0, 1, 3) in machine.watched(syncer.state)


# --- Quorum, grace and pace -------------------------------------------------


def test_a_round_waits_for_its_quorum():
  syncer = two_learners(make_rules(quorum_min=2))
  assert syncer.answers(1, 0).merges == []
  assert why(syncer) is Why.QUORUM_MISSING
  assert syncer.wait(10 * STEP_NS) == []
  assert syncer.wake_in_ns() is None
  assert syncer.answers(1, 1).merges == [(1, (0, 1))]


def test_the_grace_window_lets_others_join():
  syncer = two_learners(make_rules(overlap=2))
  assert syncer.answers(1, 1).merges == []
  assert why(syncer) is Why.GRACE
  assert syncer.round(1).grace_ns == STEP_NS  # all of the slack, clipped
  assert syncer.wake_in_ns() == STEP_NS
  assert syncer.wait(STEP_NS - 1).merges == []
  assert syncer.answers(1, 0).merges == [(1, (0, 1))]  # by learner


def test_the_grace_window_ends():
  syncer = two_learners(make_rules(overlap=2))
  syncer.answers(1, 1)
  assert syncer.wait(STEP_NS).merges == [(1, (1,))]


def test_no_grace_once_every_live_learner_has_answered():
  syncer = Syncer(make_rules(overlap=2))
  assert syncer.answers(1, 0).merges == [(1, (0,))]


def test_no_grace_without_slack():
  syncer = two_learners(make_rules(overlap=2))
  # Both steps of overlap go into fetching what was committed.
  assert syncer.answers(1, 1, fetch_ns=2 * STEP_NS).merges == [(1, (1,))]


def test_xi_quorum_runs_from_the_first_answer_to_the_last():
  syncer = two_learners(make_rules(overlap=2, quorum_min=2))
  syncer.wait(5 * STEP_NS)
  syncer.answers(1, 0)
  syncer.wait(70)
  syncer.answers(1, 1)
  assert syncer.state.xi_quorum_ns == 70
  syncer.answers(2, 0)
  syncer.wait(170)
  syncer.answers(2, 1)
  assert syncer.state.xi_quorum_ns == 80


def test_xi_sync_runs_from_close_to_commit():
  syncer = Syncer(make_rules())
  syncer.answers(1)
  syncer.wait(30)
  syncer.merged(1)
  syncer.wait(12)
  syncer.committed(1)
  assert syncer.state.xi_sync_ns == 42


def test_xi_step_is_of_the_fastest_live_learner():
  rules = make_rules(overlap=2, quorum_min=2, dead_after_ns=9 * STEP_NS)
  syncer = two_learners(rules)
  syncer.member(2)
  syncer.answers(1, 0, step_ns=100)
  syncer.answers(1, 1, step_ns=500)
  assert syncer.round(1).grace_ns == 100
  syncer.wait(8 * STEP_NS)
  syncer.member(1, beat=2)
  syncer.member(2, beat=2)
  syncer.wait(STEP_NS)  # learner 0 is dead by now
  syncer.answers(2, 2, step_ns=0)
  syncer.answers(2, 1, step_ns=500)
  assert syncer.round(2).grace_ns == 500


def test_sparse_rounds_are_paced_by_the_fastest_learner():
  syncer = Syncer(make_rules(2, 10, 1))  # rounds 5, 10, 15, …
  assert syncer.answers(5).merges == [(5, (0,))], "nothing was closed before"
  syncer.finish(5)
  assert syncer.answers(10).merges == []
  assert why(syncer, 10) is Why.PACED
  assert syncer.wake_in_ns() == 4 * STEP_NS  # (g - 1) steps
  assert syncer.wait(4 * STEP_NS).merges == [(10, (0,))]


def test_rounds_are_not_paced_with_any_anchor():
  syncer = Syncer(make_rules(2, 10, 1, anchor=Anchor.ANY))
  syncer.answers(5)
  syncer.finish(5)
  assert syncer.answers(10).merges == [(10, (0,))]


def test_rounds_close_in_order():
  syncer = Syncer(make_rules(overlap=2))
  assert syncer.answers(2).merges == []
  assert why(syncer, 2) is Why.AFTER_EARLIER_ROUND
  assert syncer.answers(1).merges == [(1, (0,)), (2, (0,))]


def test_merges_may_finish_out_of_order_and_commits_may_not():
  syncer = Syncer(make_rules(overlap=2))
  syncer.answers(1)
  syncer.answers(2)
  assert syncer.merged(2) == []
  commit = syncer.merged(1).commit
  assert (commit.round, commit.previous) == (1, "digest-0")
  assert [f.version for f in commit.fragments] == [0, 1, 0, 0]
  commit = syncer.committed(1).commit
  assert (commit.round, commit.previous) == (2, "digest-1")
  assert [f.version for f in commit.fragments] == [0, 1, 2, 0]


def test_a_commit_is_written_once():
  syncer = Syncer(make_rules(overlap=2))
  syncer.answers(1)
  assert syncer.merged(1).commit is not None
  assert syncer.wait(STEP_NS).commit is None
  assert syncer.answers(2).commit is None


# --- Who is awaited ---------------------------------------------------------


def test_a_dead_learner_is_not_awaited():
  rules = make_rules(overlap=2, dead_after_ns=10 * STEP_NS)
  syncer = two_learners(rules)
  syncer.wait(10 * STEP_NS)
  assert syncer.answers(1, 0).merges == [(1, (0,))]


def test_heartbeats_keep_a_learner_alive():
  rules = make_rules(overlap=2, dead_after_ns=10 * STEP_NS)
  syncer = two_learners(rules)
  syncer.wait(9 * STEP_NS)
  syncer.member(1, beat=2)
  syncer.wait(9 * STEP_NS)
  assert syncer.answers(1, 0).merges == []
  syncer.member(1, beat=2)  # the same record is no sign of life
  assert syncer.wait(STEP_NS).merges == [(1, (0,))]


def test_a_learner_that_left_is_not_awaited():
  syncer = two_learners(make_rules(overlap=2))
  syncer.answers(1, 0)
  assert why(syncer) is Why.GRACE
  assert syncer.member(1, left=True).merges == [(1, (0,))]


def test_a_last_answer_does_not_bring_a_learner_back():
  syncer = two_learners(make_rules(overlap=2))
  syncer.answers(1, 0)
  assert syncer.answers(1, 1).merges == [(1, (0, 1))]
  syncer.member(1, left=True)
  assert syncer.answers(2, 1).merges == [], "learner 0 is awaited"
  assert syncer.answers(2, 0).merges == [(2, (0, 1))]
  syncer.finish(1)
  assert syncer.answers(3, 0).merges == [(3, (0,))], "learner 1 is not"


def test_a_new_life_of_a_learner_that_left_is_awaited():
  syncer = two_learners(make_rules(overlap=2))
  syncer.member(1, left=True)
  syncer.member(1, incarnation=2)
  assert syncer.answers(1, 0).merges == []


# --- Answers that do not count ----------------------------------------------


@pytest.mark.parametrize(
  "changes, reason",
  [
    ({"run_id": "other"}, Refusal.FOREIGN_RUN),
    ({"layout": "other"}, Refusal.LAYOUT),
    ({"codec": "other"}, Refusal.CODEC),
    ({"life_steps": 1}, Refusal.COUNTERS),
  ],
)
def test_a_bad_header_is_refused_unread(changes, reason):
  syncer = two_learners(make_rules(grace=False))
  assert syncer.offers(1, 0, **changes) == []
  assert syncer.refusals(1) == [(0, reason)]
  assert syncer.answers(1, 1).merges == [(1, (1,))]
  commit = syncer.merged(1).commit
  assert commit.refused == (Refused(0, 1, 1, reason),)


@pytest.mark.parametrize(
  "reason",
  [
    Refusal.MISSING_PART,
    Refusal.SIZE,
    Refusal.CHECKSUM,
    Refusal.NON_FINITE,
  ],
)
def test_a_refused_answer_is_looked_for_again(reason):
  syncer = Syncer(make_rules())
  syncer.offers(1)
  assert syncer.checked(1, reason=reason) == [Drop(1, 0, 1, 1)]
  assert syncer.refusals(1) == [(0, reason)]
  assert machine.watched(syncer.state) == ((1, 0, 1, 2),)
  assert syncer.answers(1, attempt=2, steps=6).merges == [(1, (0,))]
  commit = syncer.merged(1).commit
  assert commit.counted_attempt(0, 1) == 2
  assert commit.refused == (Refused(0, 1, 1, reason),)


def test_garbage_where_a_header_should_be():
  syncer = two_learners(make_rules())
  event = AnswerGarbled(syncer.now_ns, (1, 0, 1, 1), Refusal.CHECKSUM)
  syncer.feed(event)
  syncer.feed(event)  # reported twice, refused once
  assert syncer.refusals(1) == [(0, Refusal.CHECKSUM)]
  assert (1, 0, 1, 2) in machine.watched(syncer.state)


def test_an_answer_found_twice_is_checked_once():
  syncer = two_learners(make_rules(quorum_min=2))
  assert syncer.offers(1).names == ["Check"]
  assert syncer.offers(1) == []
  syncer.checked(1)
  assert syncer.offers(1) == []
  assert len(syncer.round(1).answers) == 1


def test_a_newer_attempt_takes_the_place_of_an_older_one():
  syncer = two_learners(make_rules(quorum_min=2))
  syncer.answers(1, 0, steps=2)
  syncer.offers(1, 0, attempt=2, steps=4)
  assert syncer.checked(1, 0, attempt=2) == [Drop(1, 0, 1, 1)]
  assert why(syncer) is Why.QUORUM_MISSING, "it is still one learner"
  commands = syncer.answers(1, 1)
  assert commands.merges == [(1, (0, 1))]
  commit = syncer.merged(1).commit
  assert [(c.attempt, c.contributions[0].steps) for c in commit.counted] == [
    (2, 4),
    (1, 4),
  ]


def test_an_older_attempt_does_not_replace_a_newer_one():
  syncer = two_learners(make_rules(quorum_min=2))
  syncer.offers(1, 0, attempt=1)
  syncer.answers(1, 0, attempt=2)
  assert syncer.checked(1, 0, attempt=1) == [Drop(1, 0, 1, 1)]
  syncer.answers(1, 1)
  assert syncer.merged(1).commit.counted_attempt(0, 1) == 2


def test_an_answer_of_an_earlier_life_is_superseded():
  syncer = two_learners(make_rules(quorum_min=2))
  syncer.member(0, incarnation=2)
  assert syncer.offers(1, 0, incarnation=1) == []
  assert syncer.refusals(1) == [(0, Refusal.SUPERSEDED)]


def test_a_new_life_overtakes_the_answer_of_the_one_before():
  syncer = two_learners(make_rules(quorum_min=2))
  syncer.answers(1, 0)
  syncer.offers(1, 0, incarnation=2)
  assert syncer.checked(1, 0, incarnation=2) == [Drop(1, 0, 1, 1)]
  assert syncer.refusals(1) == [(0, Refusal.SUPERSEDED)]
  assert why(syncer) is Why.QUORUM_MISSING


def test_the_answer_of_a_dead_life_counts_if_no_other_comes():
  syncer = two_learners(make_rules(quorum_min=2))
  syncer.answers(1, 0)
  syncer.member(0, incarnation=2)
  assert syncer.answers(1, 1).merges == [(1, (0, 1))]


def test_answers_to_closed_rounds_are_late():
  syncer = two_learners(make_rules(grace=False))
  syncer.answers(1, 0)
  assert syncer.offers(1, 1) == []
  assert syncer.merged(1).commit.refused == ()
  syncer.committed(1)
  assert syncer.offers(1, 1) == []


def test_an_answer_in_check_when_its_round_closes_is_dropped():
  syncer = two_learners(make_rules(grace=False))
  syncer.offers(1, 1)
  assert syncer.answers(1, 0).merges == [(1, (0,))]
  assert syncer.checked(1, 1) == [Drop(1, 1, 1, 1)]
  assert len(syncer.merged(1).commit.counted) == 1


def test_an_answer_to_a_round_that_is_not_open_yet_is_left_for_later():
  syncer = Syncer(make_rules())
  assert syncer.offers(2) == []
  assert syncer.round(2) is None


def test_a_stale_anchor_is_refused():
  syncer = Syncer(make_rules())
  for t in range(1, 5):
    syncer.answers(t)
    syncer.finish(t)
  header = syncer.header(5)
  stale = dataclasses.replace(header.contributions[0], anchor=0)
  syncer.offers(5, contributions=(stale,))
  assert syncer.refusals(5) == [(0, Refusal.STALE_ANCHOR)]


# --- Outliers ---------------------------------------------------------------


def one_round(syncer, t, norm):
  """Answers until one is accepted; how many were refused."""
  for attempt in range(1, 20):
    syncer.offers(t, attempt=attempt)
    if syncer.checked(t, attempt=attempt, norm=norm).merges:
      syncer.finish(t)
      return attempt - 1
  raise AssertionError("no attempt was accepted")


def test_an_outlier_is_refused_by_name():
  syncer = Syncer(make_rules(1, 1, 0, wait=Wait.EXACT))
  for t in range(1, 9):
    assert one_round(syncer, t, 1000) == 0
  syncer.offers(9)
  assert syncer.checked(9, norm=20_001) == [Drop(9, 0, 1, 1)]
  assert syncer.refusals(9) == [(0, Refusal.OUTLIER)]
  assert syncer.answers(9, attempt=2).merges == [(9, (0,))]


def test_a_lasting_change_of_scale_is_accepted_after_a_few_answers():
  syncer = Syncer(make_rules(1, 1, 0, wait=Wait.EXACT))
  for t in range(1, 30):
    one_round(syncer, t, 1000)
  assert one_round(syncer, 30, 10**6) == NORMS_KEPT // 2 + 1
  for t in range(31, 40):
    assert one_round(syncer, t, 10**6) == 0


# --- Clocks and counters ----------------------------------------------------


def test_the_tokens_of_earlier_lives_are_kept():
  syncer = two_learners(make_rules())
  syncer.answers(1, 0, life_steps=8)
  assert syncer.finish(1).tokens == 8 * STEP_TOKENS
  syncer.answers(2, 0, incarnation=2, life_steps=5)
  commit = syncer.finish(2)
  assert commit.tokens == 13 * STEP_TOKENS
  assert commit.progress[0] == Progress(0, 2, 5, 50, 80)
  syncer.member(0, incarnation=3)
  syncer.answers(3, 1, life_steps=5)
  commit = syncer.finish(3)
  assert commit.tokens == 18 * STEP_TOKENS
  assert commit.progress[0] == Progress(0, 3, 0, 0, 130)
  assert commit.vector_clock == (
    ("learner-0", 0),
    ("learner-1", 5),
    ("syncer", 3),
  )


def test_answers_out_of_order_do_not_take_tokens_back():
  syncer = two_learners(make_rules(overlap=2, quorum_min=2))
  syncer.answers(2, 0, life_steps=9)
  syncer.answers(1, 0, life_steps=8)
  assert syncer.state.learners[0].steps == 9


def test_a_new_life_of_the_syncer_goes_on_from_the_newest_commit():
  rules = make_rules(overlap=2, quorum_min=2)
  first = two_learners(rules)
  first.answers(1, 0, life_steps=8)
  first.answers(1, 1, life_steps=7)
  commit = first.finish(1)
  second = Syncer(rules, commit=commit, epoch=2, now_ns=3)
  assert second.state.committed == 1
  assert second.state.fragments == commit.fragments
  assert [view.round for view in second.state.rounds] == [2, 3]
  # Nobody looks dead after an outage, and no tokens are forgotten.
  assert second.answers(2, 1, life_steps=9).merges == []
  second.answers(2, 0, incarnation=2, life_steps=5)
  commit = second.finish(2)
  assert commit.epoch == 2
  assert commit.tokens == (8 + 5 + 9) * STEP_TOKENS
  assert commit.fragments[2] == fragment_state(2, 2)


# --- The end ----------------------------------------------------------------


def test_a_lost_commit_ends_this_life():
  syncer = Syncer(make_rules(overlap=2))
  syncer.answers(1)
  syncer.answers(2)
  syncer.merged(2)
  syncer.merged(1)
  assert syncer.committed(1, won=False).stop == machine.OVERTAKEN
  assert syncer.state.done
  assert machine.watched(syncer.state) == ()
  assert syncer.wait(STEP_NS) == []


def test_a_stop_waits_for_the_commit_under_way():
  syncer = Syncer(make_rules())
  syncer.answers(1)
  syncer.merged(1)
  syncer.now_ns += 1
  stop = machine.StopRequested(syncer.now_ns, "signal")
  assert syncer.feed(stop) == []
  commands = syncer.committed(1)
  assert commands.names == ["Sweep", "Stop"]
  assert commands.stop == "signal"


def test_a_stop_between_commits_is_at_once():
  syncer = Syncer(make_rules())
  syncer.answers(1)
  stop = machine.StopRequested(syncer.now_ns, "signal")
  assert syncer.feed(stop).stop == "signal"


@pytest.mark.parametrize(
  "limits", [{"stop_rounds": 2}, {"stop_tokens": 160}, {"stop_tokens": 81}]
)
def test_a_run_ends_by_rounds_or_tokens(limits):
  syncer = Syncer(make_rules(**limits))
  syncer.answers(1, life_steps=8)
  syncer.merged(1)
  assert syncer.committed(1).stop is None
  syncer.answers(2, life_steps=16)
  commit = syncer.merged(2).commit
  assert syncer.committed(2).stop == machine.COMPLETED
  resumed = Syncer(syncer.rules, commit=commit, epoch=2)
  assert resumed.first.stop == machine.COMPLETED


def test_a_life_starts_once():
  syncer = Syncer(make_rules())
  opened = syncer.log[0][0]
  assert isinstance(opened, Opened)
  with pytest.raises(AssertionError, match="starts once"):
    syncer.feed(opened)
