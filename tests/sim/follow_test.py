"""Training along a history: its decisions, new arrays, the same bits again."""

import dataclasses
import json
import signal

import pytest

from ddiloco.config import Config, ConfigError
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit
from ddiloco.sim import history as history_lib
from ddiloco.sim import islands
from ddiloco.sim.compute import intakes
from ddiloco.sim.follow import follow
from ddiloco.sim.history import BadTape
from ddiloco.sim.train import simulate
from ddiloco.types import Exit
from tests.sim import program, runs
from tests.sim.small import MemoryStore, make_config

FAULTS = (
  "at round 15 kill learner 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 30 kill learner 0 for 1s; at round 35 rival syncer for 2s;"
  " at round 45 partition learner 1 for 1s"
)


def record(workdir, *, arrays, faults=FAULTS, **groups):
  """The exchange that a simulated run has left."""
  config = make_config(**groups)
  code, store = runs.run(workdir, config, seed=11, faults=faults, arrays=arrays)
  assert code is Exit.OK
  return store


def train(history, folder, workdir, **groups):
  """The exit code, and the exchange of a run along that history."""
  workdir.mkdir(exist_ok=True)
  store = MemoryStore()
  config = make_config(**groups)
  code = follow(config, history, folder, workdir=workdir, store=store)
  return code, store


def commits(store):
  """Those that retention has left, by round."""
  found = {
    keys.commit_round(name): store.objects[name]
    for name in store.list(keys.COMMITS)
    if len(store.objects[name]) > 8
  }
  return {t: messages.decode(Commit, data) for t, data in found.items()}


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """The workdir of a history without arrays."""
  return tmp_path_factory.mktemp("history")


@pytest.fixture(scope="module")
def history(folder):
  """Its exchange."""
  return record(folder, arrays=False)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """Where a run along it is trained."""
  return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def trained(history, folder, workdir):
  """The exchange of that run."""
  code, store = train(history, folder, workdir)
  assert code is Exit.OK
  return store


# --- The history ------------------------------------------------------------


def test_without_arrays_it_leaves_a_history(history, folder):
  summary = json.loads((folder / "summary.json").read_text())
  assert (summary["status"], summary["rounds"]) == ("completed", 60)
  assert [fault["took_effect"] for fault in summary["faults"]] == [True] * 5
  assert "Simulated without arrays: nothing was trained." in summary["story"]
  assert summary["warnings"] == []
  assert (summary["bytes"], summary["eval"]["loss"]) == (None, None)
  total = summary["ledger"]["total"]
  lost = sum(total["lost"].values())
  assert total["processed"] == total["merged"] + total["pending"] + lost > 0
  assert summary["goodput"] > 0.3 and summary["uptime"] > 0.5
  page = (folder / "report.html").read_text()
  assert "<h2>Timeline" in page and "<h2>Token ledger" in page
  assert "<h2>Loss" not in page and "<h2>Traffic" not in page
  assert (folder / "trace.json").exists()
  assert not (folder / "eval.jsonl").exists()
  assert lines(folder / "launch.jsonl")[-1]["status"] == "completed"


def test_its_tokens_are_the_programs(history, folder):
  summary = json.loads((folder / "summary.json").read_text())
  steps = sum(facts["steps"] for facts in summary["learners"].values())
  assert summary["tokens_processed"] == 12 * steps  # 4 samples of 3 words


def test_the_language_model_need_not_be_built_to_tell():
  learners = {"batch_size": (4, 16), "devices": (64,), "mesh": (4, 1, -1)}
  config = make_config(learners=learners, data={"sequence_length": 32})
  config = dataclasses.replace(config, program=Config().program)
  found = intakes(config, "")
  assert [intake.samples_per_step for intake in found] == [4, 16]
  assert [intake.tokens(80, 3) for intake in found] == [96, 96]


def test_any_other_program_is_asked_batch_by_batch(monkeypatch):
  def tokens(self, batch):
    return int((batch[0] > 5).sum())

  monkeypatch.setattr(program.Evaluated, "tokens", tokens)
  (intake, _) = intakes(make_config(), "")
  built = program.build(make_config(), 0, cache_dir="")
  assert intake.samples_per_step == 4
  counts = [intake.tokens(first, 4) for first in (0, 4, 8, 12)]
  assert counts == [tokens(built, built.batch(i, 4)) for i in (0, 4, 8, 12)]
  assert len(set(counts)) > 1


def test_its_decisions_can_be_replayed_and_nothing_else(history):
  loaded = history_lib.load(history)
  with pytest.raises(BadTape, match="--decisions_only"):
    islands.replay(loaded, cache_dir="", decisions_only=False, say=str)
  result = islands.replay(loaded, cache_dir="", decisions_only=True, say=str)
  assert (result["matched"], result["first_mismatch"]) == (60, None)


# --- The training -----------------------------------------------------------


def test_the_history_decides_who_is_counted(history, trained):
  before, after = commits(history), commits(trained)
  assert list(after) == [0, *range(55, 61)]  # those of the last 2 H
  for t, commit in after.items():
    assert commit.counted == before[t].counted
    assert commit.tokens == before[t].tokens
    assert commit.vector_clock == before[t].vector_clock
    assert commit.epoch == before[t].epoch
  refs = after[60].fragments
  assert sorted(ref.version for ref in refs) == [58, 59, 60]
  for p, ref in enumerate(refs):
    params = trained.objects[keys.params(ref.version, p, ref.epoch)]
    assert len(params) == ref.params_bytes > 8


def test_the_trained_run_is_like_any_other(trained, folder, workdir):
  summary = json.loads((workdir / "summary.json").read_text())
  told = json.loads((folder / "summary.json").read_text())
  for key in ("rounds", "wall_s", "ledger", "goodput", "badput", "faults"):
    assert summary[key] == told[key], key
  assert summary["warnings"] == [] and summary["bytes"]["down"] > 10_000
  evaluations = lines(workdir / "eval.jsonl")
  assert [e["round"] for e in evaluations] == [0, 20, 40, 60]
  assert evaluations[-1]["loss"] < 0.8 * evaluations[0]["loss"]
  assert summary["params_digest"] == evaluations[-1]["params_digest"]
  times = [e["unix_ns"] for e in evaluations]
  assert times == sorted(times) and times[-1] - times[0] > 5 * 10**9
  assert "<h2>Loss" in (workdir / "report.html").read_text()
  assert "trained_in_s" in lines(workdir / "launch.jsonl")[-1]


def test_its_tapes_tell_how_to_train_it_again(trained):
  result = runs.replay(trained)
  assert (result["matched"], result["first_mismatch"]) == (60, None)
  assert result["compared"] == "parameters"


def test_along_the_same_history_come_the_same_bits(
  trained, history, folder, tmp_path
):
  _, again = train(history, folder, tmp_path)
  assert again.objects == trained.objects


def test_along_a_trained_history_come_its_own_parameters(tmp_path):
  recorded = record(tmp_path / "history", arrays=True)
  code, again = train(recorded, tmp_path / "history", tmp_path / "trained")
  assert code is Exit.OK
  before, after = commits(recorded), commits(again)
  assert all(after[t].fragments == before[t].fragments for t in after)
  digests = [
    [(line["round"], line["params_digest"]) for line in lines(path)]
    for path in tmp_path.glob("*/eval.jsonl")
  ]
  assert len(digests) == 2 and digests[0] == digests[1]


def test_what_decides_nothing_may_be_another(history, folder, tmp_path):
  code, other = train(
    history,
    folder,
    tmp_path,
    outer={"learning_rate": 0.5},
    codec={"up": "bf16"},
  )
  assert code is Exit.OK and runs.replay(other)["matched"] == 60


def test_interrupted_it_leaves_what_it_has(
  history, folder, tmp_path, capsys, monkeypatch
):
  evaluate, rounds = program.Evaluated.evaluate, iter((0, 20, 40))

  def interrupt(self, params):
    if next(rounds, None) == 40:
      signal.raise_signal(signal.SIGINT)
    return evaluate(self, params)

  monkeypatch.setattr(program.Evaluated, "evaluate", interrupt)
  code, store = train(history, folder, tmp_path)
  assert code is Exit.STOPPED
  assert "stopped: SIGINT received" in capsys.readouterr().err
  summary = json.loads((tmp_path / "summary.json").read_text())
  told = (summary["status"], summary["reason"], summary["rounds"])
  assert told == ("stopped", "SIGINT received", 40)
  assert max(commits(store)) == 40
  assert summary["params_digest"]
  faults = [fault["fault"]["who"] for fault in summary["faults"]]
  assert faults[:2] == ["learner 1", "syncer"] and len(faults) < 5
  result = runs.replay(store)
  assert (result["matched"], result["first_mismatch"]) == (40, None)


def test_training_that_diverges_says_where(
  history, folder, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(program, "TARGETS_SCALE", float("nan"))
  code, store = train(history, folder, tmp_path)
  assert code is Exit.FAILED
  assert "round 1 counts the answer of learner" in capsys.readouterr().err
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "failed"
  assert "training has diverged" in summary["reason"]
  assert store.get(keys.commit(0)) and not store.get(keys.commit(1))


# --- What does not fit ------------------------------------------------------


@pytest.mark.parametrize(
  "groups, was",
  [
    ({"learners": {"count": 3}}, "with 2"),
    ({"learners": {"batch_size": (8,)}}, "with [4]"),
    ({"sync": {"quorum_min": 2}}, "with 1"),
    ({"sync": {"interval_steps": 6}}, "with 3"),
    ({"stop": {"rounds": 90}}, "with 60"),
    ({"live": {"dead_after_s": 20.0}}, "with 10.0"),
    ({"live": {"checkpoint_every_steps": 0}}, "with 10"),
  ],
  ids=str,
)
def test_another_protocol_is_refused(history, folder, tmp_path, groups, was):
  with pytest.raises(ConfigError, match="decides what happens") as refused:
    train(history, folder, tmp_path, **groups)
  ((group, ((key, _),)),) = ((g, k.items()) for g, k in groups.items())
  message = str(refused.value)
  assert message.startswith(f"{group}.{key} = ") and was in message
  assert list(tmp_path.iterdir()) == []


def test_whatever_else_tells_the_machines_is_compared(
  history, folder, tmp_path, monkeypatch
):
  monkeypatch.setattr(history_lib, "DECIDING", ())
  with pytest.raises(ConfigError) as refused:
    train(history, folder, tmp_path, sync={"quorum_min": 2})
  assert "recorded with quorum_min = 1" in str(refused.value)
  assert "this config gives 2" in str(refused.value)


def test_a_program_that_takes_other_steps_is_refused(tmp_path):
  language = {"sequence_length": 16}
  config = make_config(data=language)
  config = dataclasses.replace(config, program=Config().program)
  store = MemoryStore()
  simulate(config, workdir=tmp_path, store=store, seed=1, arrays=False)
  with pytest.raises(BadTape) as refused:
    train(store, tmp_path, tmp_path / "trained", data=language)
  message = str(refused.value)
  assert "step 1 of learner-" in message
  assert "took 4 samples, 64 tokens, in the history" in message
  assert "4 samples, 12 tokens, in this config's program" in message


def test_an_edited_history_is_refused(history, folder, tmp_path):
  spoilt = MemoryStore()
  spoilt.objects = dict(history.objects)
  for name in spoilt.list("tape/learner-0.1/")[3:]:
    del spoilt.objects[name]
  with pytest.raises(BadTape, match="truncated"):
    train(spoilt, folder, tmp_path)


def test_there_must_be_a_history(tmp_path):
  with pytest.raises(ConfigError, match="no run in this exchange"):
    train(MemoryStore(), tmp_path, tmp_path / "trained")
