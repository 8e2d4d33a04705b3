"""The algorithms that are no variant of the quickstart's, as real processes."""

import json
import math

import pytest

from ddiloco.config import algorithms
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys, messages
from ddiloco.protocol.retention import SWEPT
from tests.live import processes

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROUNDS = 12  # of whole intervals


@pytest.mark.parametrize(
  "name, counted",
  [
    ("data_parallel", {1}),
    ("streaming_diloco", {2}),
    ("async_local_sgd", {1}),
  ],
)
def test_it_runs_live(name, counted, tmp_path):
  """Each commit counts as many answers as the algorithm merges."""
  workdir = tmp_path / "run"
  changes = algorithms.preset(name) | {"stop.rounds": ROUNDS}
  flags = [f"--config.{key}={value}" for key, value in changes.items()]
  with processes.commands_in(tmp_path) as commands:
    run = commands.start(
      "local", *processes.run_flags(workdir), *flags, workdir=workdir
    )
    assert run.finish() == 0, run.explain()
  summary = json.loads((workdir / "summary.json").read_text())
  assert (summary["status"], summary["rounds"]) == ("completed", ROUNDS)
  assert math.isfinite(summary["eval"]["loss"])
  exchange = TensorStoreExchange(str(workdir / "exchange"))
  found = [exchange.get(key).value for key in exchange.list(keys.COMMITS)]
  kept = [messages.decode(messages.Commit, x) for x in found if x != SWEPT]
  assert {len(c.counted) for c in kept if c.round} == counted
