"""Where the planner sees slack, simulated rounds merge everybody; else one."""

import json

import pytest

from ddiloco.config import from_dict
from ddiloco.planning import plan, tpus
from ddiloco.planning.plan import Assumptions
from experiments.quickstart import config as quickstart
from tests.configs import override
from tests.launch.commands import launch

STEP_S = 1.0
CONFIG = "experiments/quickstart/config.py"


def planned_slack_s(delay_s, overlap):
  values = quickstart.get_config().to_dict()
  config = override(values, {"sync": {"overlap_steps": overlap}})
  model = plan.model_of(from_dict(values))
  # Links and merges take no time in this simulation, operations do.
  assumed = Assumptions(
    wan_gbps=1e6,
    syncer_cores=1e6,
    latency_s=delay_s,
    syncer_latency_s=delay_s,
  )
  of = tpus.parse_slice("v5e:1x1")
  islands = [plan.Island(of, 8, 1, STEP_S, 0, False)] * 3
  return plan.exchange(config, model, islands, assumed).slack_s


def participants(delay_s, overlap, workdir):
  flags = {
    "sim.step_s": STEP_S,
    "sim.delay_s": delay_s,
    "sim.merge_s": 0.0,
    "sync.overlap_steps": overlap,
    "faults": "",
    "stop.tokens": 200_000,
  }
  result = launch(
    "simulate",
    f"--config={CONFIG}",
    "--compute=none",
    f"--workdir={workdir}",
    *(f"--config.{key}={value}" for key, value in flags.items()),
  )
  assert result.code == 0, result.err
  return json.loads((workdir / "summary.json").read_text())["participants_mean"]


@pytest.mark.parametrize(
  "delay_s, overlap", [(0.1, 2), (0.2, 2), (0.2, 4), (0.35, 4)]
)
def test_slack_is_where_everybody_is_merged(delay_s, overlap, tmp_path):
  found = participants(delay_s, overlap, tmp_path / "run")
  if planned_slack_s(delay_s, overlap) > 0:
    assert found > 1.8
  else:
    assert found < 1.4
