"""Runs whose syncer has shards: the same commits, whoever makes them."""

import json

import pytest

from ddiloco.config import ConfigError
from ddiloco.engine.snapshots import complete_rounds
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.retention import SWEPT
from ddiloco.sim import history as history_lib
from ddiloco.sim.follow import follow
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.small import MemoryStore, make_config

SHARDS = 3
FAULTS = (
  "at round 15 kill syncer 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 30 kill learner 0 for 1s; at round 40 rival syncer 2 for 2s;"
  " at round 50 pause syncer 1 for 1s"
)
BLOCKING = {"wait": "exact", "quorum_min": 2, "overlap_steps": 0}


def run(workdir, *, shards=SHARDS, faults="", arrays=True, **groups):
  config = make_config(syncer={"shards": shards}, **groups)
  return runs.run(workdir, config, seed=3, faults=faults, arrays=arrays)


def commits(store):
  found = {}
  for name in store.list(keys.COMMITS):
    if store.objects[name] != SWEPT:
      found[keys.commit_round(name)] = messages.decode(
        Commit, store.objects[name]
      )
  return found


def test_shards_compute_what_one_syncer_does(tmp_path):
  """Where everybody waits for everybody, timing decides nothing."""
  found = []
  for shards in (1, SHARDS):
    options = {"sync": BLOCKING, "stop": {"rounds": 24}}
    code, store = run(tmp_path / str(shards), shards=shards, **options)
    assert code is Exit.OK
    found.append(commits(store))
  one, several = found
  assert one.keys() == several.keys() and len(one) > 6
  for t, commit in one.items():
    bits = [(f.params_sha256, f.outer_sha256) for f in commit.fragments]
    other = [(f.params_sha256, f.outer_sha256) for f in several[t].fragments]
    assert bits == other
    assert commit.tokens == several[t].tokens
    assert commit.counted == several[t].counted
  assert {commit.epoch for commit in one.values()} == {1}
  owners = {t: several[t].epoch for t in sorted(several) if t}
  assert owners == {t: 1 + t % SHARDS for t in owners}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
  """A run in which every shard dies, stops or has a rival."""
  workdir = tmp_path_factory.mktemp("shards")
  code, store = run(workdir, faults=FAULTS)
  assert code is Exit.OK
  return workdir, store


def test_shards_may_die_and_return(faulty):
  workdir, store = faulty
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["rounds"] == 60 and summary["warnings"] == []
  assert all(fault["took_effect"] for fault in summary["faults"])
  found = commits(store)
  for t in found.keys() - {0}:  # whichever life it was
    assert (found[t].epoch - 1) % SHARDS == t % SHARDS
  lives = history_lib.load(store).lives
  epochs = [life.incarnation for life in lives if life.learner is None]
  assert {1, 2, 3, 4, 5} <= set(epochs) and max(epochs) > 5


def test_a_replay_gives_the_same_bits(faulty):
  result = runs.replay(faulty[1])
  assert (result["commits"], result["matched"]) == (60, 60)


def test_a_replay_from_a_snapshot_gives_the_same_bits(tmp_path):
  """Its fragments are of every shard."""
  snapshot, faults = {"every_rounds": 20}, "at round 50 kill syncer 1 for 1s"
  _, store = run(tmp_path, faults=faults, snapshot=snapshot)
  result = runs.replay(store, since=40)
  assert (result["commits"], result["matched"]) == (20, 20)


@pytest.mark.parametrize("t", [18, 19, 20])
def test_a_shard_that_dies_at_the_marker_takes_its_snapshot_later(tmp_path, t):
  """Another shard commits it; the first one's next life begins with it."""
  snapshot = {"every_rounds": 20, "keep": 9}
  _, store = run(
    tmp_path,
    faults=f"at round {t} kill syncer for 1s",
    arrays=False,
    snapshot=snapshot,
  )
  assert complete_rounds(store.list(keys.SNAPSHOTS)) == [20, 40]


def test_training_follows_a_sharded_history(tmp_path, faulty):
  code, source = run(tmp_path / "bare", faults=FAULTS, arrays=False)
  assert code is Exit.OK
  (tmp_path / "trained").mkdir()
  store = MemoryStore()
  config = make_config(syncer={"shards": SHARDS})
  trained = tmp_path / "trained"
  code = follow(config, source, tmp_path / "bare", workdir=trained, store=store)
  assert code is Exit.OK
  result = runs.replay(store)
  assert result["first_mismatch"] is None and result["matched"] == 60
  told = (tmp_path / "trained" / "eval.jsonl").read_text().splitlines()
  told = [json.loads(line) for line in told]
  assert [line["round"] for line in told] == [0, 20, 40, 60]
  assert told[-1]["loss"] < 0.9 * told[0]["loss"]


def test_learners_step_on_while_a_shard_is_gone(tmp_path, capsys):
  """Commits wait for it, and nobody loses a step."""
  faults = "at round 30 kill syncer 1 for 5s"
  code, _ = run(tmp_path, faults=faults, arrays=False)
  assert code is Exit.OK
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["uptime"] == 1.0
  assert [fault["took_effect"] for fault in summary["faults"]] == [True]
  assert "again after 6.2 s; no learner lost a step" in capsys.readouterr().out


@pytest.mark.parametrize("shards", [0, 4])
def test_a_shard_without_a_round_is_refused(shards):
  with pytest.raises(ConfigError, match="syncer.shards"):
    make_config(syncer={"shards": shards})


def test_the_number_of_shards_stays(tmp_path):
  """Whose epochs are whose depends on it."""
  config = make_config(syncer={"shards": 2})
  from ddiloco.config import check_resumable

  with pytest.raises(ConfigError, match=r"syncer.shards = 2.*with 1"):
    check_resumable(make_config(), config)
