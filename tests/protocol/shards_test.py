"""The syncer in shards: who owns which round, and what follows from others'."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import status
from ddiloco.protocol import syncer as machine
from ddiloco.protocol.invariants import InvariantError, check_syncer
from ddiloco.protocol.messages import Progress
from ddiloco.protocol.syncer_types import Followed, Snapshot, WriteCommit
from tests.protocol.scenario import (
  STEP_NS,
  Syncer,
  first_commit,
  fragment_state,
  make_rules,
)
from tests.protocol.schedule_test import SCHEDULES


def rules(shards=2, **options):
  return dataclasses.replace(make_rules(**options), shards=shards)


def others_commit(syncer, t, **changes):
  """What another shard commits for round t, after the newest one known."""
  due = syncer.rules.schedule.fragments(t)
  commit = dataclasses.replace(
    first_commit(syncer.rules),
    round=t,
    epoch=2,
    previous=syncer.state.previous,
    fragments=tuple(
      fragment_state(t, 2) if p in due else state
      for p, state in enumerate(syncer.state.fragments)
    ),
    genesis=None,
  )
  return dataclasses.replace(commit, **changes)


def follow(syncer, t, **changes):
  commit = others_commit(syncer, t, **changes)
  return syncer.feed(Followed(syncer.now_ns, commit, f"digest-{t}"))


# --- Who owns what -----------------------------------------------------------


@given(SCHEDULES, st.integers(1, 5), st.integers(1, 200))
def test_offsets_are_dealt_whole_and_in_turn(schedule, shards, t):
  """Every round has one owner, each interval the same, neighbours differ."""
  rounds = [u for u in range(t, t + schedule.interval) if schedule.is_round(u)]
  owners = [schedule.shard(u, shards) for u in rounds]
  for u, owner in zip(rounds, owners, strict=True):
    assert schedule.shard(u + schedule.interval, shards) == owner
    before = schedule.previous_owned(u, shards)
    if before:
      assert schedule.shard(before, shards) == owner
    between = range(before + 1, u)
    assert owner not in [
      schedule.shard(v, shards) for v in between if schedule.is_round(v)
    ]
  counts = [owners.count(shard) for shard in range(shards)]
  assert max(counts) - min(counts) <= 1


@given(SCHEDULES, st.integers(1, 5), st.integers(1, 50))
def test_an_epoch_names_its_shard(schedule, shards, epoch):
  sharded = dataclasses.replace(make_rules(), schedule=schedule, shards=shards)
  shard = sharded.shard_of(epoch)
  assert sharded.shard_of(epoch + shards) == shard
  owned = sharded.owned(epoch)
  for t in range(1, 2 * schedule.interval):
    own = sharded.owns(epoch, t)
    assert own == (schedule.shard(t, shards) == shard)
    assert all((p in owned) == own for p in schedule.fragments(t))


# --- The machine -------------------------------------------------------------


def test_a_shard_opens_its_own_rounds_alone():
  """P = H = 4, two shards: one has rounds 2, 4, ..., the other 1, 3, ..."""
  first, second = (Syncer(rules(), epoch=e) for e in (1, 2))
  assert [view.round for view in first.state.rounds] == []
  assert [view.round for view in second.state.rounds] == [1]
  assert machine.awaited(first.state, first.rules) == 1
  assert machine.awaited(second.state, second.rules) is None
  follow(first, 1)
  assert [view.round for view in first.state.rounds] == [2]
  assert first.state.fragments[1].version == 1


def test_a_round_that_is_merged_waits_for_the_one_before():
  syncer = Syncer(rules(overlap=2))  # round 2 is open with round 1
  syncer.answers(2)
  assert syncer.round(2).closed_ns
  assert syncer.merged(2).commit is None
  commit = follow(syncer, 1, tokens=7).commit
  assert (commit.round, commit.previous) == (2, "digest-1")
  assert [f.version for f in commit.fragments] == [0, 1, 2, 0]
  assert syncer.committed(2).names == ["Sweep"]
  assert machine.awaited(syncer.state, syncer.rules) == 3


def test_a_commit_seen_twice_changes_nothing():
  syncer = Syncer(rules())
  follow(syncer, 1)
  before = syncer.state
  commit = others_commit(syncer, 1)
  assert syncer.feed(Followed(syncer.now_ns, commit, "another")) == []
  assert syncer.state == before


def test_another_chain_ends_the_life():
  syncer = Syncer(rules())
  assert follow(syncer, 1, previous="not it").stop == machine.ANOTHER_CHAIN


def test_the_end_is_another_shards_commit():
  syncer = Syncer(dataclasses.replace(rules(), stop_rounds=1))
  assert follow(syncer, 1).stop == machine.COMPLETED


@pytest.mark.parametrize(
  "known, told, sum_",
  [
    ((1, 8), Progress(0, 1, 12, 120, 0), 120),  # it has heard more
    ((1, 8), Progress(0, 1, 4, 40, 0), 80),  # or less
    ((1, 8), Progress(0, 2, 1, 10, 95), 105),  # of a later life, and of this
    ((1, 8), Progress(0, 2, 1, 10, 50), 90),
    ((2, 8), Progress(0, 1, 9, 90, 30), 200),  # of an earlier one
  ],
)
def test_what_shards_know_of_a_learner_is_put_together(known, told, sum_):
  """Nobody's tokens become fewer, whoever has heard what of which life."""
  syncer = Syncer(rules(quorum_min=2, overlap=2))
  life, steps = known
  syncer.offers(2, 0, incarnation=life, life_steps=steps)
  follow(syncer, 1, progress=(told,))
  (view,) = syncer.state.learners
  assert view.tokens + view.earlier_tokens == sum_
  assert view.incarnation == max(life, told.incarnation)


def test_a_shard_keeps_the_pace_of_its_own_rounds():
  """Global steps pass between its rounds, whoever commits those between."""
  syncer = Syncer(rules(overlap=2))
  syncer.member(1)
  syncer.answers(2)
  syncer.wait(2 * STEP_NS)
  syncer.merged(2)
  follow(syncer, 1)
  syncer.committed(2)
  follow(syncer, 3)
  closed_ns = syncer.state.last_closed_ns
  syncer.now_ns = closed_ns + STEP_NS // 2
  syncer.answers(4, 0)
  syncer.answers(4, 1)
  assert not syncer.round(4).closed_ns
  assert syncer.now_ns + syncer.wake_in_ns() == closed_ns + STEP_NS


def test_the_first_shard_takes_every_snapshot():
  marked = dataclasses.replace(rules(), snapshot_every=1)
  first, second = (Syncer(marked, epoch=e) for e in (1, 2))
  first.member(3)
  assert follow(first, 1).of(Snapshot) == [Snapshot(1, ((3, 1),))]
  first.answers(2)
  first.merged(2)
  assert [s.round for s in first.committed(2).of(Snapshot)] == [2]
  second.answers(1)
  second.merged(1)
  assert second.committed(1).of(Snapshot) == []


def test_a_life_that_begins_at_a_marker_takes_the_snapshot():
  """The one before may have died of it; a restored run begins with its own."""
  marked = dataclasses.replace(rules(), snapshot_every=1)
  for epoch, taken in ((2, [1]), (0, [])):
    commit = dataclasses.replace(
      first_commit(marked),
      round=1,
      epoch=epoch,
      fragments=tuple(fragment_state(int(p == 1)) for p in range(4)),
    )
    assert [s.round for s in Syncer(marked, commit=commit).first] == taken
  assert Syncer(marked, commit=commit, epoch=2).first == []


def test_another_shards_delay_is_no_latency_of_this_one():
  """Or it would have no grace for many rounds after a shard has been away."""
  syncer = Syncer(rules(overlap=2))
  syncer.answers(2)
  syncer.merged(2)
  syncer.now_ns += 1000 * STEP_NS
  follow(syncer, 1)
  syncer.committed(2)
  assert syncer.state.xi_sync_ns == 0


def test_a_commit_of_anothers_round_is_a_broken_promise():
  syncer = Syncer(rules(overlap=2))
  syncer.answers(2)
  syncer.merged(2)
  before = syncer.state
  event = Followed(syncer.now_ns, others_commit(syncer, 1), "digest-1")
  after, commands = machine.step(before, event, syncer.rules)
  (command,) = [c for c in commands if isinstance(c, WriteCommit)]
  wrong = WriteCommit(dataclasses.replace(command.commit, round=3))
  with pytest.raises(InvariantError, match="commits the rounds that it owns"):
    check_syncer(before, event, after, [wrong], syncer.rules)


def test_the_message_names_the_shard_that_is_waited_for():
  syncer = Syncer(rules())
  message = status.waiting_for(syncer.state, syncer.now_ns, syncer.rules)
  assert message == "round 1 is for shard 1 of the syncer to commit"
