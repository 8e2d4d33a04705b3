"""A simulated and a live run, with somebody killed, again from their tapes."""

import json

import pytest

from ddiloco.live.workdir import exchange_url, open_exchange
from ddiloco.protocol import keys
from ddiloco.sim import history as history_lib
from ddiloco.types import Exit
from tests.launch.commands import launch

CONFIG = "--config=tests/sim/small.py"

pytestmark = pytest.mark.live


def replayed(workdir, *arguments):
  """What replay.json says of a run whose every commit is the same again."""
  output = workdir / "replay.json"
  code, _, errors = launch(
    "replay", f"--workdir={workdir}", f"--output={output}", *arguments
  )
  assert code == Exit.OK, errors
  result = json.loads(output.read_text())
  assert result["first_mismatch"] is None
  assert result["matched"] == result["commits"] > 0
  return result


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
  """The workdir of a simulated run."""
  workdir = tmp_path_factory.mktemp("simulated")
  code, output, errors = launch(
    "simulate",
    CONFIG,
    f"--workdir={workdir}",
    "--seed=7",
    "--faults=at round 15 kill learner 1 for 1s",
  )
  assert code == Exit.OK, errors
  assert "60 rounds" in output
  return workdir


def test_a_simulated_run_again(simulated):
  result = replayed(simulated)
  assert (result["commits"], result["compared"]) == (60, "parameters")


def test_other_commands_read_a_simulated_run(simulated):
  code, output, errors = launch("report", f"--workdir={simulated}")
  assert code == Exit.OK, errors
  assert "Learner 1 was killed" in output
  before = (simulated / "eval.jsonl").read_text()
  code, _, errors = launch("evaluate", f"--workdir={simulated}")
  assert code == Exit.OK, errors
  assert (simulated / "eval.jsonl").read_text() == before  # all was measured


def test_a_simulation_never_goes_on_with_another_run(simulated):
  code, _, errors = launch("simulate", CONFIG, f"--workdir={simulated}")
  assert code == Exit.USER_ERROR
  assert "holds a run already" in errors


def test_a_config_that_is_not_the_runs_is_refused(simulated):
  code, _, errors = launch(
    "replay", f"--workdir={simulated}", CONFIG, "--config.codec.up=f32"
  )
  assert code == Exit.USER_ERROR
  assert "codec.up" in errors


def test_a_replay_needs_a_run(tmp_path):
  code, _, errors = launch("replay", f"--workdir={tmp_path}")
  assert code == Exit.USER_ERROR
  assert errors.startswith("error: there is no run")


@pytest.mark.slow
def test_a_live_run_with_killed_processes_again(tmp_path):
  code, _, errors = launch(
    "local",
    CONFIG,
    f"--workdir={tmp_path}",
    "--config.learners.slowdown=(30.0,)",
    "--config.stop.rounds=200",
    "--config.sync.quorum_min=2",  # so the run waits for the next life
    "--config.live.checkpoint_every_steps=0",  # which goes on from its peer
    "--config.syncer.shards=2",
    "--faults=at round 60 kill learner 1 for 0.1s; at round 70 kill syncer 1",
  )
  assert code == Exit.OK, errors
  result = replayed(tmp_path)
  assert result["commits"] == 200
  assert result["lives"] == 6
  exchange = open_exchange(exchange_url(tmp_path, ""))
  lives = {life.name: life for life in history_lib.load(exchange).lives}
  assert {"syncer, life 1", "syncer, life 2", "syncer, life 4"} < lives.keys()
  assert lives["learner-1, life 2"].header.donor[:2] == (0, 1)
  assert exchange.list(keys.TRANSFERS) == []
