"""The learner by script, under the policies of the baselines."""

import pytest

from ddiloco.protocol import learner as machine
from ddiloco.protocol.learner_types import Encode, Settle
from ddiloco.types import SECOND_NS, Anchor, Apply, Wait
from tests.protocol.scenario import STEP_NS, Learner, make_rules


def exact(*sizes, **changes):
  return make_rules(*sizes, wait=Wait.EXACT, **changes)


def own(interval=2, **changes):
  return make_rules(
    1, interval, 1, anchor=Anchor.ANY, apply=Apply.OWN, **changes
  )


# --- wait = exact -----------------------------------------------------------


def test_exact_without_overlap_waits_for_its_own_round():
  learner = Learner(exact(1, 1, 0))
  for t in range(1, 5):
    assert learner.step().names[-1] == "Encode"
    assert not learner.state.stepping
    assert learner.written(t) == []
    assert learner.sees(t, attempt=1).names == ["Settle", "Fetch"]
    assert learner.fetched(t).names == ["ApplyFragments", "Step"]
    assert learner.fragment(0).steps == 0


def test_exact_without_overlap_steps_freely_between_rounds():
  learner = Learner(exact(1, 3, 0))
  assert learner.step().names == ["Step"]
  assert learner.step().names == ["Step"]
  assert learner.step().names == ["Encode"]
  assert learner.gets(3, attempt=1).names[-2:] == ["ApplyFragments", "Step"]
  assert learner.step().names == ["Step"]


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_exact_answers_round_s_after_step_s_and_waits_tau_steps_later(tau):
  learner = Learner(exact(4, 4, tau))
  for s in range(1, tau + 1):
    commands = learner.step()
    assert commands.answers == [(s, 1)]
    assert commands.steps == [s + 1], "the first tau rounds overlap"
    learner.written(s)
  for s in range(tau + 1, 20):
    assert learner.step() == [], f"step {s} awaits round {s - tau}"
    assert learner.sees(s - tau, attempt=1).names == ["Settle", "Fetch"]
    commands = learner.fetched(s - tau)
    assert commands.names == ["ApplyFragments", "Encode", "Step"]
    assert commands.answers == [(s, 1)]
    learner.written(s)


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_exact_answers_of_full_steps_reach_back_to_the_apply(tau):
  learner = Learner(exact(4, 4, tau, apply=Apply.AT_OVERLAP))
  for s in range(1, 30):
    commands = learner.step()
    assert commands.steps == [s + 1]
    encode = commands.of(Encode)[0]
    assert encode.round == s
    steps = encode.contributions[0].steps
    assert steps == (s if s < 4 else 4 - tau if s > 4 else 4)
    learner.written(s)
    learner.gets(s, attempt=1)  # at once, tau steps before it may be applied


@pytest.mark.parametrize("tau", [1, 2, 3])
def test_at_overlap_a_commit_is_applied_tau_steps_after_its_round(tau):
  learner = Learner(exact(8, 8, tau, apply=Apply.AT_OVERLAP))
  applied = {}
  for s in range(1, 30):
    commands = learner.step()
    for t, _ in commands.applies:
      applied[t] = s
    learner.written(s)
    learner.gets(s, attempt=1)
  assert applied == {t: t + tau for t in range(1, 30 - tau)}


def test_exact_counts_from_the_commit_it_joined_at():
  learner = Learner(exact(4, 4, 1), seen=10)
  assert learner.step().answers == [(11, 1)]
  learner.written(11)
  assert learner.step() == []
  assert learner.gets(11, attempt=1).answers == [(12, 1)]


def test_exact_waits_on_while_an_earlier_answer_is_being_written():
  # Commits may be seen before the writes they count are confirmed.
  learner = Learner(exact(8, 8, 1))
  assert learner.step().answers == [(1, 1)]
  learner.gets(1, attempt=1)
  assert learner.step().answers == [(2, 1)]
  learner.gets(2, attempt=1)
  assert learner.step().names == ["ApplyFragments"]  # and no step
  commands = learner.written(1)
  assert commands.answers == [(3, 1)]
  assert commands.steps == [4]


def test_exact_offers_again_what_is_not_decided():
  learner = Learner(exact(4, 4, 1))
  learner.step()
  learner.written(1)
  learner.step()
  tries = []
  started_ns = learner.now_ns
  for _ in range(20):
    for t, attempt in learner.tick().answers:
      tries.append(((learner.now_ns - started_ns) // STEP_NS, t, attempt))
      learner.written(t, attempt)
  assert tries == [(2, 1, 2), (6, 1, 3), (14, 1, 4)]
  assert learner.gets(1, attempt=3).of(Settle) == [Settle(1, 3)]


def test_exact_does_not_offer_later_steps_between_sparse_rounds():
  learner = Learner(exact(1, 9, 5))
  for _ in range(8):
    assert learner.step().names == ["Step"]
  assert learner.step().answers == [(9, 1)]
  learner.written(9)
  for _ in range(4):
    assert learner.step().names == ["Step"]
  assert learner.step() == []  # held: step 14 awaits round 9


def test_a_held_learner_without_a_step_time_ticks_by_the_second():
  learner = Learner(exact(1, 1, 0))
  learner.step()
  assert learner.state.step_ns == 0
  wake_ns = machine.wake_ns(learner.state, learner.now_ns)
  assert wake_ns == learner.now_ns + SECOND_NS


def test_a_held_learner_asks_for_a_failed_fetch_once_a_step_time():
  learner = Learner(exact(1, 1, 0))
  learner.step()
  assert learner.sees(1, attempt=1).fetches == [1]
  assert learner.fetch_failed(1) == [], "a store that is down is not flooded"
  assert learner.tick().fetches == [1]
  assert learner.fetched(1).steps == [2]


def test_a_held_learner_stops_at_once():
  learner = Learner(exact(1, 1, 0))
  learner.step()
  assert learner.stop("signal").names == ["Checkpoint", "Stop"]
  assert machine.wake_ns(learner.state, learner.now_ns) is None


def test_the_end_of_the_run_ends_the_wait():
  learner = Learner(exact(1, 1, 0, stop_rounds=1))
  learner.step()
  commands = learner.sees(1, attempt=1)
  assert commands.names == ["Settle", "Checkpoint", "Stop"]


# --- anchor = any -----------------------------------------------------------


def test_any_anchor_answers_before_the_newest_version_is_here():
  learner = Learner(make_rules(1, 1, 1, anchor=Anchor.ANY))
  assert learner.step().answers == [(1, 1)]
  learner.written(1)
  learner.sees(1, attempt=1)
  encode = learner.step().of(Encode)[0]
  assert (encode.round, encode.contributions[0].anchor) == (2, 0)


# --- apply = own ------------------------------------------------------------


def test_own_waits_for_the_commit_that_counts_its_answer():
  learner = Learner(own())
  assert learner.step().steps == [2]
  assert learner.step().answers == [(2, 1)]
  assert not learner.state.stepping
  learner.written(2)
  assert learner.sees(2, attempt=1).names == ["Settle", "Fetch"]
  assert learner.fetched(2).names == ["ApplyFragments", "Step"]
  assert learner.step().steps == [4]
  assert learner.step().answers == [(4, 1)]


def test_own_offers_a_late_answer_for_the_next_round():
  learner = Learner(own())
  learner.step()
  learner.step()
  learner.written(2)
  commands = learner.sees(2, attempt=0)
  assert commands.names == ["Settle", "Encode"]
  assert commands.answers == [(4, 1)]
  contribution = commands.of(Encode)[0].contributions[0]
  assert (contribution.anchor, contribution.steps) == (0, 2)
  learner.written(4)
  assert learner.gets(4, attempt=1).names[-2:] == ["ApplyFragments", "Step"]
  assert learner.fragment(0).anchor == 4


def test_own_does_not_apply_the_commits_of_others():
  learner = Learner(own())
  learner.step()
  assert learner.sees(2, attempt=0) == []
  assert learner.step().answers == [(4, 1)]
  assert learner.fragment(0).seen == 0


def test_own_tries_again_by_the_timer():
  learner = Learner(own())
  learner.step()
  learner.step()
  learner.written(2)
  tries = []
  for tick in range(1, 16):
    for t, attempt in learner.tick().answers:
      tries.append((tick, t, attempt))
      learner.written(t, attempt)
  assert tries == [(2, 2, 2), (6, 2, 3), (14, 2, 4)]


def test_own_stops_while_it_waits():
  learner = Learner(own())
  learner.step()
  learner.step()
  assert learner.stop().names == ["Checkpoint", "Stop"]


# --- What was due is gone ---------------------------------------------------


def test_at_overlap_a_newer_version_fills_the_gap_of_one_that_is_gone():
  learner = Learner(exact(1, 2, 1, apply=Apply.AT_OVERLAP))
  learner.step()
  assert learner.step().answers == [(2, 1)]
  learner.written(2)
  assert learner.step() == [], "round 2 is due, and it waits"
  learner.sees(2, attempt=1)
  learner.fetch_failed(2)
  assert learner.sees(4).fetches == [4]
  commands = learner.fetched(4)
  assert commands.applies == [(4, (0,))] and commands.steps == [4]


def test_at_overlap_a_newer_version_waits_for_one_on_its_way():
  learner = Learner(exact(1, 2, 1, apply=Apply.AT_OVERLAP))
  learner.step()
  learner.step()
  learner.written(2)
  learner.step()
  learner.sees(2, attempt=1)
  learner.sees(4)
  assert learner.fetched(4).applies == []
  assert learner.fetched(2).applies == [(2, (0,))]


def test_own_takes_the_next_commit_if_its_own_cannot_be_fetched():
  learner = Learner(own())
  learner.step()
  assert learner.step().answers == [(2, 1)]
  learner.written(2)
  assert learner.sees(2, attempt=1).fetches == [2]
  learner.fetch_failed(2)
  assert learner.tick().fetches == [2]
  assert learner.sees(4).fetches == [], "it may still come"
  learner.fetch_failed(2)
  assert learner.sees(6).fetches == [6]
  commands = learner.fetched(6)
  assert commands.applies == [(6, (0,))] and len(commands.steps) == 1
