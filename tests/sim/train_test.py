"""Training in virtual time leaves what a live run leaves, bit for bit again."""

import json

import pytest

from ddiloco.protocol import faults as fault_script
from ddiloco.protocol import keys, tape
from ddiloco.sim.train import simulate
from ddiloco.types import Exit
from tests.sim.small import MemoryStore, make_config

FAULTS = (
  "at round 15 kill learner 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 35 slow learner 0 by 3x for 1s"
)


def run(workdir, *, seed=7, faults="", **groups):
  """Returns the exit code and the exchange that the run has left."""
  workdir.mkdir(exist_ok=True)
  store = MemoryStore()
  code = simulate(
    make_config(**groups),
    workdir=workdir,
    store=store,
    seed=seed,
    faults=fault_script.parse(faults) if faults else (),
  )
  return code, store


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_leaves_what_a_live_run_leaves(tmp_path, capsys):
  code, store = run(tmp_path, faults=FAULTS)
  assert code is Exit.OK
  assert "60 rounds" in capsys.readouterr().out
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert (summary["status"], summary["rounds"]) == ("completed", 60)
  assert [fault["took_effect"] for fault in summary["faults"]] == [True] * 3
  assert summary["warnings"] == []
  evaluations = lines(tmp_path / "eval.jsonl")
  assert [e["round"] for e in evaluations] == [0, 20, 40, 60]
  assert evaluations[-1]["loss"] < 0.9 * evaluations[0]["loss"]
  assert summary["params_digest"] == evaluations[-1]["params_digest"]
  journal = lines(tmp_path / "launch.jsonl")
  exits = [(e["who"], e["code"]) for e in journal if e["what"] == "exit"]
  assert ("learner 1", -9) in exits and ("syncer", -9) in exits
  assert journal[-1]["status"] == "completed"
  for name in ("report.html", "trace.json", "tensorboard/syncer"):
    assert (tmp_path / name).exists()
  assert store.get(keys.commit(0)) and store.get(keys.commit(60))


def test_time_is_virtual(tmp_path):
  run(tmp_path, sim={"step_s": 60.0}, stop={"rounds": 6})
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["wall_s"] > 5 * 60
  assert summary["goodput"] > 0.9
  end = lines(tmp_path / "launch.jsonl")[-1]
  assert end["simulated_in_s"] < summary["wall_s"]


def test_a_seed_gives_the_same_bits_again(tmp_path):
  _, first = run(tmp_path / "a", faults=FAULTS)
  _, again = run(tmp_path / "b", faults=FAULTS)
  _, other = run(tmp_path / "c", faults=FAULTS, seed=8)
  assert first.objects == again.objects
  assert first.objects[keys.commit(60)] != other.objects[keys.commit(60)]


def test_a_restarted_learner_goes_on_from_its_own_checkpoint(tmp_path):
  _, store = run(tmp_path, faults="at round 15 kill learner 1 for 1s")
  segments = [store.objects[keys.tape("learner-1", n, 0)] for n in (1, 2)]
  headers = [tape.decode_segment(segment).header for segment in segments]
  assert headers[0].restored is None
  life, step = headers[1].restored
  assert life == 1 and step % 10 == 0


@pytest.mark.parametrize(
  "faults, why",
  [
    ("at round 9 stop learner 1", "gone for good: learner 1"),
    ("at round 9 partition learner 1 for 100000s", "waits for 1 more answers"),
    ("at round 9 stop syncer", "the syncer was told to leave"),
  ],
)
def test_a_run_that_cannot_go_on_says_so(tmp_path, capsys, faults, why):
  code, _ = run(tmp_path, faults=faults, sync={"quorum_min": 2})
  assert code is Exit.FAILED
  assert why in capsys.readouterr().err
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "failed" and why in summary["reason"]


def test_a_fault_without_effect_fails_the_run(tmp_path, capsys):
  code, _ = run(tmp_path, faults="at 100000s kill learner 1 for 1s")
  assert code is Exit.FAILED
  assert "took no effect" in capsys.readouterr().err


def test_interrupted_it_writes_what_there_is(tmp_path):
  code, store = run(tmp_path, options={"interrupt_at": 12})
  assert code is Exit.STOPPED
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "stopped" and summary["rounds"] > 0
  assert summary["reason"] == "SIGINT received"
  assert store.get(keys.commit(summary["rounds"]))
