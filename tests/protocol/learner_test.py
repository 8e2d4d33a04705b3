"""The learner by script, under the default policy: it never waits."""

import pytest

from ddiloco.protocol import learner as machine
from ddiloco.protocol.learner_types import (
  CaughtUp,
  Checkpoint,
  Encode,
  Fetch,
  Joined,
  Settle,
  Step,
)
from ddiloco.protocol.messages import Contribution
from tests.protocol.scenario import (
  STEP_NS,
  STEP_SAMPLES,
  STEP_TOKENS,
  Learner,
  make_rules,
)


def test_a_life_starts_by_stepping():
  learner = Learner(make_rules())
  assert learner.first == [Step(1, 0, 0, 0)]
  assert machine.watched(learner.state, learner.rules) == 1
  assert machine.wake_ns(learner.state, 5) is None


def test_a_joiner_starts_from_the_newest_commit():
  learner = Learner(make_rules(), seen=6, run_tokens=70)
  assert learner.first == [Step(1, 0, 6, 70)]
  assert [view.anchor for view in learner.state.fragments] == [4, 5, 6, 3]
  assert learner.step().answers == [(7, 1)]


def test_a_joiner_of_an_ended_run_stops_at_once():
  assert Learner(make_rules(stop_rounds=6), seen=6).first.names == ["Stop"]
  learner = Learner(make_rules(stop_tokens=50), seen=1, run_tokens=50)
  assert learner.first.stop == machine.COMPLETED
  assert machine.watched(learner.state, learner.rules) is None


def test_an_answer_carries_what_the_syncer_must_know():
  learner = Learner(make_rules())
  encode, step = learner.step()
  assert encode == Encode(
    round=1,
    attempt=1,
    contributions=(Contribution(1, 0, 1, STEP_TOKENS),),
    step_ns=0,  # the first step compiles
    fetch_ns=0,
    life_steps=1,
    life_tokens=STEP_TOKENS,
    vector_clock=(("learner-0", 1), ("syncer", 0)),
  )
  assert step == Step(2, STEP_SAMPLES, 0, 0)


def test_a_counted_answer_is_settled_fetched_and_applied():
  learner = Learner(make_rules())
  learner.step()
  learner.written(1)
  assert learner.sees(1, attempt=1, run_tokens=9) == [
    Settle(1, 1),
    Fetch(1, 1, (1,)),
  ]
  assert learner.fetched(1) == []  # applies wait for the step boundary
  assert learner.fragment(1).steps == 1
  commands = learner.step()
  assert commands.names == ["ApplyFragments", "Encode", "Step"]
  assert commands.applies == [(1, (1,))]
  assert commands.answers == [(2, 1)]
  assert commands[-1] == Step(3, 2 * STEP_SAMPLES, 1, 9)
  applied, other = learner.fragment(1), learner.fragment(2)
  assert (applied.anchor, applied.steps, applied.tokens) == (1, 0, 0)
  assert (other.anchor, other.steps, other.tokens) == (0, 2, 20)


def test_a_whole_interval():
  learner = Learner(make_rules())
  answers, applies = [], []
  for t in range(1, 10):
    commands = learner.step()
    answers += commands.answers
    applies += commands.applies
    learner.written(t)
    learner.gets(t, attempt=1)
  assert answers == [(t, 1) for t in range(1, 10)]
  assert applies == [(t, (t % 4,)) for t in range(1, 9)]
  # Fragment 1 was applied at step 6, right after its own round 5.
  assert learner.fragment(1).anchor == 5
  assert learner.fragment(1).steps == 3


def test_nothing_is_answered_before_the_current_version_is_applied():
  learner = Learner(make_rules(1, 1, 1))
  assert learner.step().answers == [(1, 1)]
  learner.written(1)
  learner.sees(1, attempt=1)  # its fragments take long to fetch
  assert learner.step().answers == []
  learner.fetched(1)
  commands = learner.step()
  assert commands.applies == [(1, (0,))]
  assert commands.answers == []  # no own step since
  assert learner.step().answers == [(2, 1)]


def test_of_several_fetched_versions_only_the_newest_is_applied():
  learner = Learner(make_rules(2, 2, 1))
  for t in (1, 2, 3):
    learner.gets(t)
  commands = learner.step()
  assert commands.applies == [(2, (0,)), (3, (1,))]
  learner.sees(4)
  learner.gets(5)
  learner.gets(6)
  learner.fetched(4)  # an old one comes after a newer one
  assert learner.step().applies == [(5, (1,)), (6, (0,))]


def test_a_version_older_than_the_applied_one_is_left():
  learner = Learner(make_rules(1, 1, 1))
  learner.sees(1)
  learner.gets(2)
  assert learner.step().applies == [(2, (0,))]
  learner.fetched(1)
  assert learner.step().applies == []
  assert learner.fragment(0).anchor == 2


def test_all_fragments_of_a_round_are_answered_together():
  learner = Learner(make_rules(6, 3, 1))
  encode = learner.step().of(Encode)[0]
  assert encode.round == 1
  assert [c.fragment for c in encode.contributions] == [2, 3]


def test_sparse_rounds_are_answered_a_gap_of_own_steps_apart():
  learner = Learner(make_rules(2, 10, 1))  # rounds 5, 10, 15, …
  found = []
  for step in range(1, 21):
    for t, attempt in learner.step().answers:
      found.append((step, t))
      learner.written(t, attempt)
      learner.gets(t, attempt=1)
  assert found == [(5, 5), (10, 10), (15, 15), (20, 20)]


def test_the_pace_counts_from_the_start_of_a_life():
  learner = Learner(make_rules(1, 3, 1), seen=300)
  steps = [learner.step().answers for _ in range(3)]
  assert steps == [[], [], [(303, 1)]]


def test_the_fragments_longest_unanswered_come_first():
  learner = Learner(make_rules(4, 4, 3))  # rounds 1, 2, 3 are open
  assert [learner.step().answers for _ in range(3)] == [
    [(1, 1)],
    [(2, 1)],
    [(3, 1)],
  ]
  for t in (1, 2, 3):
    learner.written(t)
    learner.gets(t, attempt=1)
  # Rounds 4, 5, 6 are open, and fragment 0 of round 4 has no answer yet.
  assert learner.step().answers == [(4, 1)]
  assert learner.step().answers == [(5, 1)]


def test_after_a_late_answer_the_newest_open_round_is_answered():
  learner = Learner(make_rules(8, 8, 3))
  assert learner.step().answers == [(1, 1)]
  learner.written(1)
  assert learner.gets(1, attempt=0).of(Settle) == [Settle(1, 0)]
  assert learner.step().answers == [(4, 1)]
  learner.written(4)
  learner.gets(2)
  learner.gets(3)
  assert learner.step().answers == [(6, 1)]  # nothing is decided since
  learner.gets(4, attempt=1)
  assert learner.step().answers == [(5, 1)]  # in time again: ties are old


def test_an_answer_is_tried_again_after_2_4_8_further_steps():
  learner = Learner(make_rules(1, 1, 1))
  tries = []
  for step in range(1, 40):
    for t, attempt in learner.step().answers:
      tries.append((step, t, attempt))
      learner.written(t, attempt)
  assert tries == [(1, 1, 1), (3, 1, 2), (7, 1, 3), (15, 1, 4), (31, 1, 5)]


def test_the_gaps_between_attempts_stop_growing():
  learner = Learner(make_rules(1, 1, 1))
  tries = []
  for step in range(1, 200):
    for t, attempt in learner.step().answers:
      tries.append(step)
      learner.written(t, attempt)
  gaps = [b - a for a, b in zip(tries, tries[1:], strict=False)]
  assert gaps[:6] == [2, 4, 8, 16, 32, 32] and max(gaps) == 32


def test_a_later_attempt_carries_the_steps_since():
  learner = Learner(make_rules(1, 1, 1))
  learner.step()
  learner.written(1)
  learner.step()
  encode = learner.step().of(Encode)[0]
  assert (encode.attempt, encode.contributions[0].steps) == (2, 3)
  assert learner.state.paced_step == 1  # the pace is of first answers


def test_an_answer_under_way_is_not_tried_again():
  learner = Learner(make_rules(1, 1, 1))
  assert learner.step().answers == [(1, 1)]
  assert [learner.step().answers for _ in range(9)] == [[]] * 9
  learner.write_failed(1)
  assert learner.step().answers == [(1, 2)]


def test_at_most_tau_plus_one_answers_are_under_way():
  learner = Learner(make_rules(8, 8, 2))
  assert learner.rules.writes_max == 3
  found = []
  for t in range(1, 7):  # commits come, but no write is ever confirmed
    found += learner.step().answers
    learner.gets(t)
  assert len(found) == 3
  learner.written(found[0][0])
  assert len(learner.step().answers) == 1
  assert learner.step().answers == []


def test_a_further_attempt_waits_for_a_write_to_end():
  learner = Learner(make_rules(8, 8, 2))
  for t in (1, 2):  # decided, though never confirmed
    learner.step()
    learner.gets(t, attempt=1)
  assert learner.step().answers == [(3, 1)]
  learner.written(3)
  assert learner.step().answers == [(4, 1)]
  assert [learner.step().answers for _ in range(5)] == [[]] * 5
  learner.written(1)
  assert learner.step().answers == [(3, 2)]


def test_a_failed_fetch_is_asked_for_again_at_every_boundary():
  learner = Learner(make_rules())
  assert learner.sees(1).fetches == [1]
  assert learner.fetch_failed(1) == []
  assert learner.step().fetches == [1]
  assert learner.step().fetches == []  # on its way
  learner.fetch_failed(1)
  assert learner.step().fetches == [1]
  learner.fetched(1)
  assert learner.step().applies == [(1, (1,))]


def test_a_gone_version_is_replaced_by_the_newest_one():
  learner = Learner(make_rules(1, 1, 1))
  learner.sees(1)
  learner.sees(2)
  learner.fetch_failed(1)  # swept: commit 2 replaced it
  assert learner.step().fetches == []
  learner.fetched(2)
  assert learner.step().applies == [(2, (0,))]


def test_after_a_stall_longer_than_retention():
  learner = Learner(make_rules())
  learner.step()
  learner.written(1)
  versions = ((40, 2), (41, 2), (38, 1), (39, 2))
  commands = learner.feed(CaughtUp(learner.now_ns, 41, versions, 77))
  assert commands == [Settle(1, 0)]
  assert machine.watched(learner.state, learner.rules) == 42
  commands = learner.step()
  assert commands.of(Fetch) == [
    Fetch(38, 1, (2,)),
    Fetch(39, 2, (3,)),
    Fetch(40, 2, (0,)),
    Fetch(41, 2, (1,)),
  ]
  assert commands.answers == []
  for t in (38, 39, 40, 41):
    learner.fetched(t)
  assert learner.step().applies == [
    (38, (2,)),
    (39, (3,)),
    (40, (0,)),
    (41, (1,)),
  ]
  assert learner.step().answers == [(42, 1)]


def test_catching_up_with_an_ended_run():
  learner = Learner(make_rules(stop_rounds=41))
  versions = ((40, 2), (41, 2), (38, 1), (39, 2))
  learner.feed(CaughtUp(learner.now_ns, 41, versions, 77))
  assert learner.step().stop == machine.COMPLETED


def test_a_stop_waits_for_the_step_under_way():
  learner = Learner(make_rules())
  learner.step()
  assert learner.stop("signal") == []
  learner.stop("another")
  commands = learner.step()
  assert commands == [Checkpoint(2, 0, 2 * STEP_SAMPLES)] + commands[-1:]
  assert commands.stop == "signal"
  assert learner.state.done
  assert machine.watched(learner.state, learner.rules) is None
  assert learner.written(1) == []  # nothing happens after the end
  assert learner.sees(1) == []


@pytest.mark.parametrize(
  "limits, t, run_tokens",
  [
    ({"stop_rounds": 2}, 2, 0),
    ({"stop_tokens": 60}, 2, 60),
    ({"stop_tokens": 60}, 1, 61),
    ({"stop_rounds": 5, "stop_tokens": 60}, 2, 60),
  ],
)
def test_a_run_ends_by_rounds_or_tokens(limits, t, run_tokens):
  learner = Learner(make_rules(**limits))
  for u in range(1, t):
    learner.gets(u, 0)
    assert learner.step().stop is None
  learner.sees(t, 0, run_tokens)
  assert learner.step().names == ["Checkpoint", "Stop"]


def test_checkpoints_are_taken_every_so_many_steps():
  learner = Learner(make_rules(checkpoint_every_steps=3))
  found = [learner.step().of(Checkpoint) for _ in range(7)]
  assert [c[0].step for c in found if c] == [3, 6]
  assert found[2] == [Checkpoint(3, 0, 3 * STEP_SAMPLES)]


def test_the_step_time_is_an_average_without_the_first_step():
  learner = Learner(make_rules())
  learner.step(50 * STEP_NS)
  assert learner.state.step_ns == 0
  learner.step(100)
  assert learner.state.step_ns == 100
  learner.step(200)
  assert learner.state.step_ns == 110


def test_the_fetch_time_runs_from_commit_seen_to_fetched():
  learner = Learner(make_rules())
  learner.sees(1)
  learner.now_ns += 70
  learner.fetched(1)
  assert learner.state.fetch_ns == 70


@pytest.mark.parametrize("event", ["skip", "twice"])
def test_commits_must_come_in_order(event):
  learner = Learner(make_rules())
  learner.sees(1)
  with pytest.raises(AssertionError):
    learner.sees({"skip": 3, "twice": 1}[event])


def test_a_life_joins_once():
  learner = Learner(make_rules())
  joined = learner.log[0][0]
  assert isinstance(joined, Joined)
  with pytest.raises(AssertionError, match="joins once"):
    learner.feed(joined)
