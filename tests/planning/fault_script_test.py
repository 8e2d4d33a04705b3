"""Simulated failures as a script, and a run that meets them."""

import json

from ddiloco.planning import fault_script
from ddiloco.planning.failure_log import Outage
from ddiloco.planning.goodput import Cluster, simulate
from ddiloco.protocol import faults as faults_lib
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.small import make_config

CLUSTER = Cluster(
  8, learners=2, slices=8, step_s=0.1, down_s=0.5, up_s=0.5, mtbi_s=1e9
)
LOG = [Outage(2, 2.0, 4.0, 1, 0), Outage(3, 3.0, 3.5, 2, 1)]


def test_every_lost_slice_is_a_fault():
  outcome = simulate(CLUSTER, hours=0.01, seeds=[0, 1], log=LOG)
  script = fault_script.faults(outcome, 1)
  assert faults_lib.to_text(script) == (
    "at 2s shrink learner 0 for 2s; at 3s shrink learner 1 for 0.5s; at 3s "
    "shrink learner 1 for 0.5s"
  )


def test_training_meets_what_was_simulated(tmp_path):
  """Under the cluster's settings every fault finds its slice."""
  outcome = simulate(CLUSTER, hours=0.01, seeds=[0], log=LOG)
  script = fault_script.faults(outcome)
  settings = fault_script.settings(outcome)
  groups: dict = {"learners": {"slowdown": (1.0,), "batch_size": (4,)}}
  for key, value in settings.items():
    group, name = key.split(".")
    groups.setdefault(group, {})[name] = value
  config = make_config(**groups)
  assert (config.elastic.slices, config.learners.count) == (4, 2)
  code, _ = runs.run(
    tmp_path, config, faults=faults_lib.to_text(script), arrays=False, seed=1
  )
  assert code is Exit.OK
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert [fault["took_effect"] for fault in summary["faults"]] == [True] * 3
  left = [fault["evidence"]["slices_left"] for fault in summary["faults"]]
  assert left == [3, 3, 2]
