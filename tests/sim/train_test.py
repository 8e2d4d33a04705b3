"""Training in virtual time leaves what a live run leaves, bit for bit again."""

import json

import pytest

from ddiloco.engine.version import code_version
from ddiloco.protocol import faults as fault_script
from ddiloco.protocol import keys, tape
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.mutants import retention_one_version_early
from tests.sim.small import make_config

FAULTS = (
  "at round 15 kill learner 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 35 slow learner 0 by 3x for 1s"
)


# What proves each kind, and when it happens.
PROOFS = {
  "start": ("at 1s start learner 3", "pid"),
  "kill": ("at 2s kill learner 1 for 1s", "life"),
  "pause": ("at 5s pause learner 2 for 1s", "held_actions"),
  "slow": ("at 7s slow learner 2 by 5x for 1s", "slow_steps"),
  "shrink": ("at 9s shrink learner 2 for 1s", "slices_left"),
  "partition": ("at 12s partition learner 1 for 1s", "operations"),
  "clog": ("at 14s clog syncer for 1s", "operations"),
  "jump": ("at 16s jump syncer for 5s", "jumped_ns"),
  "nan": ("at 17s nan learner 1", "answer"),
  "outlier": ("at 18s outlier learner 2 by 900x", "answer"),
  "layout": ("at 19s layout learner 1", "answer"),
  "outdated": ("at 21s outdated learner 2", "answer"),
  "rival": ("at 22s rival syncer for 2s", "opened"),
  "outage": ("at 26s outage exchange for 1s", "operations"),
  "full": ("at 28s full exchange for 1s", "operations"),
  "stop": ("at 31s stop learner 3", "pid"),
}


def run(workdir, *, seed=7, faults="", arrays=True, **groups):
  """Returns the exit code and the exchange that the run has left."""
  config = make_config(**groups)
  return runs.run(workdir, config, seed=seed, faults=faults, arrays=arrays)


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
    ("at round 9 start learner 1", "answered: learner 0"),
    ("at 3s outage exchange for 99999s", "way: at 3s outage exchange for 99"),
  ],
)
def test_a_run_that_cannot_go_on_says_so(tmp_path, capsys, faults, why):
  sync = {"quorum_min": 2}
  code, _ = run(tmp_path, faults=faults, arrays=False, sync=sync)
  assert code is Exit.FAILED
  assert why in capsys.readouterr().err
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "failed" and why in summary["reason"]


def test_a_violation_tells_how_it_came_about(tmp_path, capsys, monkeypatch):
  retention_one_version_early(monkeypatch)
  code, _ = run(tmp_path, arrays=False)
  assert code is Exit.FAILED
  told = capsys.readouterr().err
  assert "last events" in told and "Committed(" in told
  assert "  syncer/1 is alive: SyncerState(" in told
  assert f"failed: seed 7, code {code_version()}, after " in told
  assert "one of the newest two" in told
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "failed" and "seed 7" in summary["reason"]


def test_a_slow_store_is_no_reason_to_give_up(tmp_path):
  """Nor are merges that take many steps."""
  code, _ = run(
    tmp_path,
    arrays=False,
    sim={"delay_s": 2.0, "merge_s": 5.0},
    stop={"rounds": 6},
  )
  assert code is Exit.OK


def test_a_fault_without_effect_fails_the_run(tmp_path, capsys):
  faults = "at 100000s kill learner 1 for 1s"
  code, _ = run(tmp_path, faults=faults, arrays=False)
  assert code is Exit.FAILED
  assert "took no effect" in capsys.readouterr().err
  (fault,) = json.loads((tmp_path / "summary.json").read_text())["faults"]
  assert fault["took_effect"] is False
  assert fault["evidence"]["why"] == "the run ended before it was due"


def test_the_report_has_every_fault_with_its_proof(tmp_path):
  assert PROOFS.keys() == fault_script.KINDS.keys()
  code, _ = run(
    tmp_path,
    faults="; ".join(line for line, _ in PROOFS.values()),
    arrays=False,
    learners={"count": 4},
    stop={"rounds": 400},
    elastic={"slices": 2, "down_s": 0.5, "up_s": 0.5},
  )
  assert code is Exit.OK
  told = json.loads((tmp_path / "summary.json").read_text())["faults"]
  assert len(told) == len(PROOFS)
  for fault in told:
    _, proof = PROOFS[fault["fault"]["what"]]
    assert fault["took_effect"] and fault["evidence"][proof], fault
    assert fault["evidence"]["at_round"] >= 0


def test_interrupted_it_writes_what_there_is(tmp_path):
  code, store = run(tmp_path, options={"interrupt_at": 12})
  assert code is Exit.STOPPED
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "stopped" and summary["rounds"] > 0
  assert summary["reason"] == "SIGINT received"
  assert store.get(keys.commit(summary["rounds"]))
