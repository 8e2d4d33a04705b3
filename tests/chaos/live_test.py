"""A short live run under chaos, by the command that users give."""

import json

import pytest

from ddiloco.chaos import kinds
from tests.live import processes

pytestmark = [pytest.mark.live, pytest.mark.slow]


def flags(workdir, *more):
  return [
    *processes.run_flags(workdir, live_store_deadline_s=5.0),
    *more,
  ]


def test_a_short_run_survives_what_a_seed_draws(tmp_path):
  workdir, output = tmp_path / "run", tmp_path / "chaos.json"
  with processes.commands_in(tmp_path) as commands:
    run = commands.start(
      "chaos",
      *flags(workdir, f"--output={output}", "--seed=3599"),
      "--minutes=0.12",
      "--every_s=1.2",
      workdir=workdir,
    )
    assert run.finish() == 0, run.explain()
    assert processes.processes_of(workdir) == {}
    again = commands.start("chaos", *flags(workdir), workdir=workdir)
    elsewhere = commands.start(
      "chaos", *flags(tmp_path / "other", "--exchange=/tmp/x"), workdir=workdir
    )
    assert (again.finish(), elsewhere.finish()) == (2, 2)
  assert "holds a run already" in again.stderr
  assert "--exchange: chaos garbles what is there" in elsewhere.stderr
  result = json.loads(output.read_text())
  assert json.loads(run.stdout) == result
  assert result["violations"] == [] and result["commits_lost"] == 0
  assert result["inner_steps_lost_to_others"] == 0
  assert result["commits"] > 0 and result["status"] == "stopped"
  assert 0 < result["goodput"] < 1 and result["uptime"] > 0.9
  assert result["longest_commit_gap_s"] > 0
  faults = result["faults"]
  assert len(faults) >= 2 and faults.keys() <= kinds.KINDS.keys()
  assert all(x["injected"] == x["took_effect"] > 0 for x in faults.values())
  told = [x for x in processes.journal(workdir) if x["what"] == "fault"]
  assert sorted(x["fault"]["what"] for x in told) == sorted(
    kind for kind, x in faults.items() for _ in range(x["injected"])
  )
  assert (workdir / "report.html").exists()
