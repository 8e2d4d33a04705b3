"""The invariants hold where they should, and each of them can fail."""

import dataclasses

import pytest

from ddiloco.protocol import invariants
from ddiloco.protocol.learner_types import Encode, Tick
from ddiloco.protocol.messages import Contribution, Counted
from ddiloco.protocol.syncer_types import Merge
from ddiloco.types import Anchor, Apply, Wait
from tests.protocol.scenario import (
  STEP_NS,
  Learner,
  Syncer,
  fragment_state,
  make_rules,
)

change = dataclasses.replace
TICK = Tick(0)


def learner_state():
  """A learner that has applied round 1 and seen round 2."""
  learner = Learner(make_rules())
  learner.step()
  learner.gets(1)
  learner.step()
  learner.gets(2)
  return learner.state


BEFORE = learner_state()
RULES = make_rules()


def with_fragment(state, p, **changes):
  fragments = list(state.fragments)
  fragments[p] = change(fragments[p], **changes)
  return change(state, fragments=tuple(fragments))


def encode(t, *contributions):
  return Encode(t, 1, contributions, 0, 0, 1, 1, ())


@pytest.mark.parametrize(
  "after, commands, rules, promise",
  [
    (with_fragment(BEFORE, 1, anchor=0), [], RULES, "anchor only grows"),
    (with_fragment(BEFORE, 2, seen=0), [], RULES, "version only grows"),
    (with_fragment(BEFORE, 2, anchor=2), [], RULES, "resets its counters"),
    (
      with_fragment(BEFORE, 3, anchor=2, steps=0),
      [],
      RULES,
      "its own rounds",
    ),
    (change(BEFORE, stepping=False), [], RULES, "ever held"),
    (BEFORE, [encode(2)], RULES, "only open rounds"),
    (BEFORE, [encode(4)], RULES, "once its commits are seen"),
    (
      BEFORE,
      [encode(3, Contribution(3, 0, 0, 0))],
      RULES,
      "at least one step",
    ),
    (
      BEFORE,
      [encode(3, Contribution(2, 0, 1, 1))],
      RULES,
      "from the current version",
    ),
  ],
)
def test_each_promise_of_the_learner_can_be_broken(
  after, commands, rules, promise
):
  with pytest.raises(invariants.InvariantError, match=promise):
    invariants.check_learner(BEFORE, TICK, after, commands, rules)


@pytest.mark.parametrize(
  "after, commands, rules",
  [
    (BEFORE, [], RULES),
    (change(BEFORE, stepping=False, done=True), [], RULES),
    (
      change(BEFORE, stepping=False),
      [],
      change(RULES, wait=Wait.EXACT),
    ),
    (
      change(BEFORE, stepping=False),
      [],
      change(RULES, apply=Apply.OWN),
    ),
    (
      BEFORE,
      [encode(3, Contribution(2, 0, 1, 1))],
      change(RULES, anchor=Anchor.ANY),
    ),
    (with_fragment(BEFORE, 2, anchor=2, steps=0), [], RULES),
  ],
)
def test_the_learner_is_free_to(after, commands, rules):
  invariants.check_learner(BEFORE, TICK, after, commands, rules)


def test_a_broken_promise_names_the_learner_and_the_event():
  with pytest.raises(AssertionError, match=r"learner 0, life 1.*Tick"):
    invariants.check_learner(
      BEFORE, TICK, change(BEFORE, stepping=False), [], RULES
    )


# --- The syncer -------------------------------------------------------------


def syncer_state():
  """A syncer whose round 1 has its quorum and is in its grace window."""
  syncer = Syncer(make_rules(overlap=2))
  syncer.member(1)
  syncer.answers(1, 0)
  return syncer


SYNCER = syncer_state()
QUORUM = SYNCER.log[-1][0]


def counted(*learners, anchor=0):
  return Merge(
    1,
    tuple(Counted(m, 1, 1, (Contribution(1, anchor, 1, 1),)) for m in learners),
  )


def check_syncer(after, commands=(), rules=SYNCER.rules, before=None):
  """From before the quorum to `after`."""
  early = change(
    SYNCER.state,
    rounds=tuple(change(r, quorum_ns=0) for r in SYNCER.state.rounds),
  )
  invariants.check_syncer(before or early, QUORUM, after, list(commands), rules)


def with_round(state, **changes):
  first, *rest = state.rounds
  return change(state, rounds=(change(first, **changes), *rest))


@pytest.mark.parametrize(
  "after, promise",
  [
    (change(SYNCER.state, committed=2), "in order"),
    (
      change(SYNCER.state, fragments=(fragment_state(1),) * 4),
      "is at version 0",
    ),
    (change(SYNCER.state, committed=1), "is at version 1"),
    (with_round(SYNCER.state, grace_ns=-1), "0 <= grace"),
    (with_round(SYNCER.state, grace_ns=2 * STEP_NS), "0 <= grace"),
    (
      # Within the slack, but not within gamma times the slack.
      change(
        with_round(SYNCER.state, grace_ns=95),
        xi_quorum_ns=2 * STEP_NS - 100,
      ),
      "0 <= grace",
    ),
  ],
)
def test_each_promise_of_the_syncer_can_be_broken(after, promise):
  with pytest.raises(invariants.InvariantError, match=promise):
    check_syncer(after)


@pytest.mark.parametrize(
  "merge, rules, promise",
  [
    (counted(), SYNCER.rules, "at least K = 1"),
    (counted(0), change(SYNCER.rules, quorum_min=2), "at least K = 2"),
    (counted(0, 0), SYNCER.rules, "at most once"),
    (counted(1, 0), SYNCER.rules, "at most once"),
    (counted(0, anchor=1), SYNCER.rules, "current version"),
  ],
)
def test_each_promise_of_a_commit_can_be_broken(merge, rules, promise):
  with pytest.raises(invariants.InvariantError, match=promise):
    check_syncer(SYNCER.state, [merge], rules)


def test_the_syncer_is_free_to():
  check_syncer(SYNCER.state)
  check_syncer(SYNCER.state, [counted(0, 1)])
  any_anchor = change(SYNCER.rules, anchor=Anchor.ANY)
  check_syncer(SYNCER.state, [counted(0, anchor=1)], any_anchor)


def test_a_window_is_judged_by_what_was_known_when_it_was_set():
  syncer = Syncer(make_rules(overlap=2))
  syncer.member(1)
  syncer.answers(1, 0)
  syncer.answers(1, 1)  # closes
  syncer.now_ns += 9 * STEP_NS
  syncer.answers(2, 0)
  assert syncer.round(2).grace_ns > 0
  syncer.merged(1)
  syncer.committed(1)  # at the same instant: no slack is left any more
  assert syncer.state.xi_sync_ns > 2 * STEP_NS
