"""Killed learners of a live run, and whose state they go on from."""

import json

import pytest

from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys
from ddiloco.sim import history as history_lib
from tests.live import processes

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module", params=["commit", "peer"])
def run(request, tmp_path_factory):
  """A run whose learner 1 is killed in its fifth interval, without a trace."""
  directory = tmp_path_factory.mktemp("run")
  workdir = directory / "workdir"
  with processes.commands_in(directory) as commands:
    command = commands.start(
      "local",
      *processes.run_flags(
        workdir,
        stop_rounds=60,
        live_checkpoint_every_steps=0,
        recovery_params=request.param,
        learners_slowdown="(40.0,)",
      ),
      "--faults=at round 25 kill learner 1 for 0.2s",
      workdir=workdir,
    )
    assert command.finish() == 0, command.explain()
    output = directory / "replay.json"
    replay = commands.start(
      "replay", f"--workdir={workdir}", f"--output={output}", workdir=workdir
    )
    assert replay.finish() == 0, replay.explain()
  return request.param, workdir, json.loads(output.read_text())


def test_it_goes_on_from_its_peer_and_the_replay_finds_the_same_bits(run):
  params, workdir, replay = run
  exchange = TensorStoreExchange(str(workdir / "exchange"))
  lives = {life.name: life for life in history_lib.load(exchange).lives}
  first, second = (lives[f"learner-1, life {n}"] for n in (1, 2))
  assert first.header.donor is None
  assert second.header.donor[:2] == (0, 1)
  assert second.records[0].event.borrowed == (params == "peer")
  assert exchange.list(keys.TRANSFERS) == []
  assert replay["matched"] == replay["commits"] == 60
  assert "has the state of learner 0" in processes.logs(workdir)
