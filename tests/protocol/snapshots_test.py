"""The machines' part in a snapshot: the marker, the record, the return."""

import dataclasses

import pytest

from ddiloco.protocol import keys, snapshots, wire
from ddiloco.protocol import learner as machine
from ddiloco.protocol.learner_types import (
  AnswerFailed,
  CaughtUp,
  Encode,
  Resumed,
  Snapshot,
)
from ddiloco.protocol.messages import Member, PartRef, Progress
from ddiloco.protocol.snapshots import Attempt, LearnerSnapshot, Manifest
from ddiloco.protocol.syncer_types import Snapshot as SyncerSnapshot
from ddiloco.types import Refusal, Wait
from tests.protocol.scenario import Learner, Syncer, first_commit, make_rules


@pytest.mark.parametrize(
  "shape, every, marks",
  [
    ((4, 4), 3, [3, 6, 9, 12]),
    ((2, 6), 4, [6, 9, 12, 18]),  # rounds are 3, 6, 9, …
    ((1, 5), 2, [5, 10, 15]),  # several multiples, one commit
    ((3, 3), 0, []),
  ],
  ids=str,
)
def test_the_first_commit_at_or_after_each_multiple(shape, every, marks):
  rules = make_rules(*shape, snapshot_every=every)
  rounds = [t for t in range(1, 100) if rules.schedule.is_round(t)]
  assert [t for t in rounds if rules.marks(t)][: len(marks)] == marks
  assert every or not any(map(rules.marks, rounds))


def marked_learner(t=2, **changes):
  """One that has seen commit t, which is a marker, in the middle of a step."""
  learner = Learner(make_rules(snapshot_every=t, **changes))
  for u in range(1, t):
    learner.step()
    learner.written(u)
    learner.gets(u, attempt=1)
  learner.step()
  learner.written(t)
  learner.sees(t, attempt=1)
  return learner


def test_a_marker_is_recorded_at_the_next_boundary_and_nothing_before():
  learner = marked_learner()
  assert machine.watched(learner.state, learner.rules) is None
  commands = learner.step()
  (snapshot,) = commands.of(Snapshot)
  assert snapshot.round == snapshot.state.seen == 2
  # Before the answer of this boundary: whoever resumes gives it again.
  assert commands.names.index("Snapshot") < commands.names.index("Encode")
  assert machine.watched(learner.state, learner.rules) == 3
  assert not learner.step().of(Snapshot)


def test_the_record_is_at_rest():
  learner = marked_learner()
  assert learner.state.fetching
  (snapshot,) = learner.step().of(Snapshot)
  state = snapshot.state
  assert (state.step, state.stepping, state.writes) == (3, False, 0)
  assert state.fetching == state.fetched == state.asked == state.giving == ()
  assert state.fragments[2].seen == 2 > state.fragments[2].anchor


def test_it_waits_for_what_is_older_than_the_marker():
  """A version that the snapshot does not have must not be applied after it."""
  learner = Learner(make_rules(1, 1, 1, snapshot_every=2))
  learner.step()
  learner.written(1)
  learner.sees(1, attempt=1)
  learner.step()
  learner.sees(2)
  assert learner.state.fetching == (1, 2)
  assert not learner.step().of(Snapshot)
  learner.fetched(1)
  commands = learner.step()
  assert commands.applies == [(1, (0,))]
  assert [c.round for c in commands.of(Snapshot)] == [2]


def test_a_failed_fetch_of_an_older_version_holds_nothing_up():
  learner = Learner(make_rules(1, 1, 1, snapshot_every=2))
  learner.step()
  learner.sees(1)
  learner.step()
  learner.sees(2)
  learner.fetch_failed(1)
  assert learner.step().of(Snapshot)


def test_whoever_is_beyond_the_marker_takes_no_part():
  learner = marked_learner()
  versions = ((4, 1), (5, 1), (6, 1), (7, 1))
  learner.feed(CaughtUp(learner.now_ns, 7, versions, 0))
  assert not learner.step().of(Snapshot)
  assert machine.watched(learner.state, learner.rules) == 8


def test_a_diverging_learner_does_not_record_itself():
  learner = marked_learner()
  learner.step()
  learner.feed(AnswerFailed(0, 3, 1, "no number", Refusal.NON_FINITE))
  learner.sees(3)
  learner.fetched(2)
  learner.sees(4)  # the next marker
  assert learner.state.marked
  assert not learner.step().of(Snapshot)
  assert machine.watched(learner.state, learner.rules) == 5


def resumed(learner_state, rules, incarnation=2, now_ns=77):
  event = Resumed(
    now_ns,
    incarnation,
    500,
    tuple((view.seen, 0) for view in learner_state.fragments),
    learner_state,
  )
  return machine.start(event, rules)


def test_a_resumed_life_goes_on_at_that_very_boundary():
  learner = marked_learner()
  before = learner.step()
  (snapshot,) = before.of(Snapshot)
  state, commands = resumed(snapshot.state, learner.rules)
  assert (state.step, state.tokens) == (3, 30)
  assert state.next_sample == learner.state.next_sample
  names = [type(command).__name__ for command in commands]
  assert names == ["Fetch", "Encode", "Step"]
  fetch, encode, step = commands
  assert (fetch.round, fetch.epoch) == (2, 0)  # what was on its way, anew
  assert encode == before.of(Encode)[0]
  assert (step.step, step.run_tokens) == (4, 500)
  assert state.incarnation == 2


def test_open_answers_are_offered_again_with_their_own_counters():
  learner = Learner(make_rules(4, 4, 2, snapshot_every=1))
  learner.step()
  learner.step()
  assert [a.round for a in learner.state.answers] == [1, 2]
  learner.sees(1, attempt=1)
  (snapshot,) = learner.step().of(Snapshot)
  (answer,) = snapshot.state.answers
  _, commands = resumed(snapshot.state, learner.rules)
  again = commands[0]
  assert isinstance(again, Encode)
  assert (again.round, again.attempt) == (2, 2)
  assert again.contributions == answer.contributions
  assert again.contributions[0].steps == 2 < snapshot.state.step


def test_a_held_learner_records_itself_at_once():
  learner = Learner(
    make_rules(1, 1, 0, wait=Wait.EXACT, snapshot_every=1, quorum_min=1)
  )
  learner.step()
  learner.written(1)
  assert not learner.state.stepping
  commands = learner.sees(1, attempt=1)
  assert commands.of(Snapshot)


def test_a_resumed_life_of_an_ended_run_stops():
  learner = marked_learner()
  (snapshot,) = learner.step().of(Snapshot)
  rules = dataclasses.replace(learner.rules, stop_rounds=2)
  state, commands = resumed(snapshot.state, rules)
  assert state.done and commands[-1].reason == machine.COMPLETED


# --- The syncer -------------------------------------------------------------


def commit_round(syncer, t):
  syncer.answers(t)
  syncer.merged(t)
  return syncer.committed(t).of(SyncerSnapshot)


def test_the_syncer_records_a_marker_with_those_at_work():
  syncer = Syncer(make_rules(snapshot_every=2))
  syncer.member(7)
  syncer.member(8, left=True)
  assert commit_round(syncer, 1) == []
  assert commit_round(syncer, 2) == [SyncerSnapshot(2, ((0, 1), (7, 1)))]


def test_a_lost_or_last_commit_is_no_marker():
  syncer = Syncer(make_rules(snapshot_every=1))
  syncer.answers(1)
  syncer.merged(1)
  assert syncer.committed(1, won=False).of(SyncerSnapshot) == []
  syncer = Syncer(make_rules(snapshot_every=1, stop_rounds=1))
  assert commit_round(syncer, 1) == []


# --- Records ----------------------------------------------------------------


def make_manifest():
  (snapshot,) = marked_learner().step().of(Snapshot)
  header = LearnerSnapshot(
    run_id="run",
    round=2,
    state=snapshot.state,
    attempts=(Attempt(3, 1, ()),),
    shapes="shapes",
    parts=(PartRef(3, "sha"),),
  )
  rules = make_rules()
  commit = dataclasses.replace(
    first_commit(rules),
    round=2,
    genesis=None,
    progress=(Progress(0, 1, 3, 30, 7), Progress(5, 4, 1, 10, 0)),
  )
  members = tuple(
    Member("run", m, n, "nonce", "host", 1, 2, 2, 3, 30, 6, False)
    for m, n in ((0, 1), (5, 4))
  )
  return Manifest(commit, "digest", (header,), members)


def test_records_survive_their_bytes():
  manifest = make_manifest()
  data = snapshots.encode(manifest)
  assert snapshots.decode(Manifest, data) == manifest
  (header,) = manifest.learners
  data = snapshots.encode(header)
  assert snapshots.decode(LearnerSnapshot, data) == header
  with pytest.raises(wire.WireError, match="expected a snapshot"):
    snapshots.decode(Manifest, data)
  with pytest.raises(wire.WireError, match="checksum"):
    snapshots.decode(LearnerSnapshot, data.replace(b'"seen":2', b'"seen":3'))


def test_who_was_at_work_and_left_no_record():
  assert make_manifest().left_out == (5,)


def test_a_restored_commit_counts_the_work_as_that_of_the_next_lives():
  manifest = make_manifest()
  commit = snapshots.restored(manifest, "new", "previous")
  assert commit.progress == (Progress(0, 2, 3, 30, 7), Progress(5, 4, 1, 10, 0))
  assert (commit.run_id, commit.previous, commit.epoch) == (
    "new",
    "previous",
    0,
  )
  assert commit.tokens == manifest.commit.tokens
  assert {ref.epoch for ref in commit.fragments} == {0}


def test_keys_of_snapshots_and_of_none():
  prefix = keys.snapshot(12)
  assert keys.snapshot_round(keys.manifest(prefix)) == (12, True)
  assert keys.snapshot_round(keys.snapshot_params(prefix, 3)) == (12, False)
  assert keys.snapshot_round(keys.manifest(keys.ORIGIN)) is None
  assert keys.snapshot_round("snapshot/garbage") is None
