"""The checker finds each kind of violation that it claims to find."""

import dataclasses

import pytest

from ddiloco.chaos import check as check_lib
from ddiloco.chaos.check import Seen
from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol.learner_types import StepDone
from ddiloco.protocol.syncer_types import Committed
from ddiloco.sim import history as history_lib
from ddiloco.sim import islands
from ddiloco.types import Exit
from tests.sim import program, runs
from tests.sim.small import MemoryStore, make_config

ROUNDS = 24
FAULTS = "at round 8 kill learner 1 for 1s; at round 12 kill syncer for 0.5s"
NOTHING = Seen({}, None, ())


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
  """What a run with two deaths has left."""
  config = make_config(stop={"rounds": ROUNDS})
  folder = tmp_path_factory.mktemp("run")
  code, store = runs.run(folder, config, seed=5, faults=FAULTS)
  assert code is Exit.OK
  return store.objects


@pytest.fixture
def store(objects):
  return MemoryStore(objects)


@pytest.fixture
def history(store):
  return history_lib.load(store)


@pytest.fixture
def commits(history):
  found, violations = check_lib._chain(history)
  assert violations == [] and len(found) == ROUNDS
  return found


@pytest.fixture
def check(monkeypatch):
  """The whole check; the environment of the tests stays as it is."""
  monkeypatch.setattr(islands, "set_environment", lambda shape: None)

  def run(store, seen=NOTHING):
    return check_lib.check(
      store,
      seen,
      cache_dir="",
      prepare=lambda: None,
      say=lambda line: None,
    )

  return run


def with_life(history, index, **changes):
  """A history with another life at that place."""
  lives = list(history.lives)
  lives[index] = dataclasses.replace(lives[index], **changes)
  return dataclasses.replace(history, lives=tuple(lives))


def digest(commit):
  return wire.sha256(messages.encode(commit))


def test_a_sound_run_has_none(store, commits, check):
  digests = {commit.round: digest(commit) for commit in commits}
  found = check(store, Seen(digests, 12, (0, 1)))
  assert found.violations == []
  assert [c.round for c in found.commits] == list(range(1, ROUNDS + 1))


def test_a_round_that_is_missing_or_there_twice(history, commits):
  assert check_lib.check_rounds(history, commits) == []
  (missing,) = check_lib.check_rounds(history, commits[:6] + commits[7:])
  assert missing == {"what": "the round has 0 commits, not 1", "round": 7}
  (twice,) = check_lib.check_rounds(history, [*commits, commits[6]])
  assert twice == {"what": "the round has 2 commits, not 1", "round": 7}


def test_two_syncers_that_both_believe_in_a_round(history, commits):
  first, second = (i for i, x in enumerate(history.lives) if x.learner is None)
  won = next(
    r
    for r in history.lives[first].records
    if isinstance(r.event, Committed) and r.event.won
  )
  records = (*history.lives[second].records, won)
  (found,) = check_lib.check_rounds(
    with_life(history, second, records=records), commits
  )
  assert found["round"] == won.event.round
  assert "syncer, life 1 and syncer, life 2 both" in found["what"]


def test_a_commit_that_was_seen_and_is_gone_or_another(
  store, history, commits, check
):
  seen = {c.round: digest(c) for c in commits}
  seen[0] = history.first_digest
  good = Seen(seen, None, ())
  assert check_lib.check_seen(history, commits, good) == []
  bad = Seen(seen | {9: "another", ROUNDS + 1: "gone"}, None, ())
  assert check_lib.lost(history, commits, bad) == [9, ROUNDS + 1]
  found = check(store, bad).violations
  assert [v["round"] for v in found] == [9, ROUNDS + 1]


def test_tokens_that_learners_and_commits_tell_differently(history, commits):
  assert check_lib.check_tokens(history, commits) == []
  commit = commits[10]
  item = commit.counted[0]
  parts = tuple(
    dataclasses.replace(part, tokens=part.tokens + 1)
    for part in item.contributions
  )
  counted = (dataclasses.replace(item, contributions=parts),)
  odd = dataclasses.replace(commit, counted=(*counted, *commit.counted[1:]))
  found = check_lib.check_tokens(history, [*commits[:10], odd, *commits[11:]])
  who = f"learner-{item.learner}, life {item.incarnation}"
  assert len(found) == 1 and f"{who} has " in found[0]["what"]


def test_tokens_that_do_not_balance(history, commits):
  """A step that says that it has taken tokens back."""
  index = next(i for i, x in enumerate(history.lives) if x.learner == 0)
  life = history.lives[index]
  records = [
    dataclasses.replace(
      record, event=dataclasses.replace(record.event, tokens=-5)
    )
    if isinstance(record.event, StepDone)
    else record
    for record in life.records
  ]
  found = check_lib.check_tokens(
    with_life(history, index, records=tuple(records)), commits
  )
  assert found and "balance" in found[0]["what"]


def test_a_learner_that_is_there_and_never_counted(store, commits, check):
  (found,) = check(store, Seen({}, 12, (0, 1, 7))).violations
  assert (found["who"], found["round"]) == ("learner 7", 12)
  assert check_lib.check_answering(commits, Seen({}, ROUNDS, (1,)))
  assert not check_lib.check_answering(commits, Seen({}, None, (7,)))


def test_other_bits(store, check, monkeypatch):
  monkeypatch.setattr(program, "TARGETS_SCALE", 1.01)
  (found,) = check(store).violations
  assert "the replay of the tapes differs" in found["what"]
  assert found["round"] <= 4


def test_other_decisions(store, check):
  key = store.list("tape/learner-1.1/")[1]
  segment = tape.decode_segment(store.objects[key])
  records = tuple(
    dataclasses.replace(record, commands=()) for record in segment.records
  )
  store.objects[key] = tape.encode_segment(
    segment.actor, segment.incarnation, segment.segment, None, records
  )
  (found,) = check(store).violations
  assert "decided differently" in found["what"]
  assert found["who"] == "learner-1, life 1"


@pytest.mark.parametrize(
  "spoil",
  [
    lambda objects, key: objects.pop(key),
    lambda objects, key: objects.update({key: objects[key][:-9]}),
  ],
)
def test_a_tape_that_is_damaged(store, check, spoil):
  spoil(store.objects, store.list("tape/syncer.1/")[1])
  found = check(store)
  assert found.history is None and found.commits == []
  (violation,) = found.violations
  assert "tapes: tape of syncer, life 1" in violation["what"]


def test_a_commit_that_no_tape_tells(store, check):
  data = store.objects[keys.commit(ROUNDS)]
  commit = dataclasses.replace(
    messages.decode(messages.Commit, data), tokens=10**9
  )
  store.objects[keys.commit(ROUNDS)] = messages.encode(commit)
  (violation,) = check(store).violations
  assert f"commit {ROUNDS}" in violation["what"]
