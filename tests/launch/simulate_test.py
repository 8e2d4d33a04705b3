"""Histories alone, training along them, and what is refused at the door."""

import json

import pytest

from ddiloco.protocol.fault_kinds import KINDS
from ddiloco.types import Exit
from tests.launch.commands import (
  assert_user_error,
  contents,
  launch,
)

CONFIG = "--config=tests/sim/small.py"

pytestmark = pytest.mark.slow


def test_a_configs_script_may_be_a_file(command, tmp_path):
  script = tmp_path / "faults.txt"
  script.write_text("at round 2 kill learner 1 for 1s\n")
  result = command(
    "simulate",
    CONFIG,
    "--compute=none",
    "--config.stop.rounds=6",
    f"--config.faults={script}",
    f"--workdir={tmp_path / 'run'}",
  )
  assert result.code == 0, result
  summary = json.loads((tmp_path / "run" / "summary.json").read_text())
  assert [fault["took_effect"] for fault in summary["faults"]] == [True]


def test_a_history_then_training_along_it(command, tmp_path):
  history, trained = tmp_path / "history", tmp_path / "trained"
  result = launch(
    "simulate",
    CONFIG,
    "--compute=none",
    f"--workdir={history}",
    "--seed=7",
    "--faults=at round 15 kill learner 1 for 1s; at round 25 kill syncer",
  )
  assert result.code == Exit.OK, result.err
  assert "nothing was trained" in result.out and "60 rounds" in result.out
  result = launch(
    "simulate", CONFIG, f"--history={history}", f"--workdir={trained}"
  )
  assert result.code == Exit.OK, result.err
  assert "Held-out loss went from" in result.out
  assert "Learner 1 was killed" in result.out
  before = (trained / "eval.jsonl").read_text()
  result = launch("evaluate", f"--workdir={trained}")
  assert result.code == Exit.OK, result.err
  assert (trained / "eval.jsonl").read_text() == before  # all was measured
  summary = json.loads((trained / "summary.json").read_text())
  assert [fault["took_effect"] for fault in summary["faults"]] == [True] * 2
  told = contents(history)
  result = command("local", f"--workdir={history}")
  assert_user_error(result, "simulated without arrays", "--history")
  assert contents(history) == told


REFUSED = {
  "a swarm's flag for one run": (
    [CONFIG, "--compute=none", "--workdir={}", "--seeds=5"],
    ["--seeds means nothing for one run"],
  ),
  "a swarm's flag for training": (
    [CONFIG, "--workdir={}", "--until=5"],
    ["--until means nothing for one run"],
  ),
  "a swarm's output for one run": (
    [CONFIG, "--compute=none", "--workdir={}", "--output=x.json"],
    ["--output means nothing for one run"],
  ),
  "a script for a swarm": (
    ["--compute=none", "--faults=at 1s kill syncer"],
    ["--faults means nothing for a swarm", "--workdir"],
  ),
  "an exchange for a swarm": (
    ["--compute=none", "--exchange=x"],
    ["--exchange means nothing for a swarm"],
  ),
  "a seed along a history": (
    [CONFIG, "--workdir={}", "--history=x", "--seed=3"],
    ["--seed means nothing with --history"],
  ),
  "a script along a history": (
    [CONFIG, "--workdir={}", "--history=x", "--faults=at 1s kill syncer"],
    ["--faults means nothing with --history"],
  ),
  "no arrays along a history": (
    [CONFIG, "--workdir={}", "--history=x", "--compute=none"],
    ["--compute means nothing with --history"],
  ),
  "no such history": (
    [CONFIG, "--workdir={}", "--history=no/such"],
    ["--history=no/such is no directory"],
  ),
  "no workdir": ([CONFIG], ["--workdir is missing"]),
  "killed twice at once": (
    [CONFIG, "--workdir={}", "--faults=at 5s kill syncer; at 5s kill syncer"],
    ["fault 2", "syncer is already under kill by record 1"],
  ),
  "paused while it is down": (
    [
      CONFIG,
      "--workdir={}",
      "--faults=at 5s kill learner 1 for 5s; at 7s pause learner 1 for 1s",
    ],
    ["fault 2", "learner 1 is already under kill by record 1"],
  ),
  "cut off twice at once": (
    [
      CONFIG,
      "--workdir={}",
      "--compute=none",
      "--faults=at 5s partition syncer for 5s; at 7s partition syncer for 5s",
    ],
    ["fault 2", "syncer is already under partition by record 1"],
  ),
  "a fault after the end": (
    [CONFIG, "--workdir={}", "--faults=at round 60 kill learner 1"],
    ["fault 1", "never happens: the run ends at round 60"],
  ),
  "a fault of nobody": (
    [CONFIG, "--workdir={}", "--faults=at round 6 nan learner 2"],
    ["fault 1", "the run's learners are 0 to 1"],
  ),
  "a fault that is none": (
    [CONFIG, "--workdir={}", "--faults=at round 6 explode learner 1"],
    ["unknown kind 'explode'", "kill, pause"],
  ),
}


@pytest.mark.parametrize("argv, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused_at_the_door(command, tmp_path, argv, words):
  workdir = tmp_path / "run"
  result = command("simulate", *[arg.format(workdir) for arg in argv])
  assert_user_error(result, *words)
  assert not workdir.exists() or list(workdir.iterdir()) == []


def test_help_names_every_flag_and_every_kind_of_fault(command):
  result = command("simulate", "--help")
  for name in ("config", "workdir", "faults", "history", "seeds", "until"):
    assert f"  --{name}: " in result.out
  for kind in KINDS:
    assert f"    {kind} " in result.out
