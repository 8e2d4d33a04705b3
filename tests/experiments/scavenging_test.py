"""Islands of unlike hardware that join and leave."""

import pytest

from ddiloco.config import from_dict
from ddiloco.protocol import faults as fault_script
from ddiloco.protocol.learner_types import Step
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.world import SYNCER, World
from experiments.scavenging import config as scavenging
from experiments.scavenging import hardware


def test_speed_follows_chips_peak_and_samples():
  found = hardware.islands([("v5p", 16, 8), ("v6e", 16, 8), ("v6e", 8, 8)])
  assert found["slowdown"] == (2.0, 1.0, 2.0)
  assert found["devices"] == (2, 2, 1)
  with pytest.raises(ValueError, match="v5p, v6e"):
    hardware.islands([("v4", 8, 8)])
  with pytest.raises(ValueError, match="12 chips"):
    hardware.islands([("v6e", 12, 8)])


@pytest.mark.parametrize(
  "batch, sizes", [("fixed", {16}), ("growing", {16, 40})]
)
def test_the_batch_of_all_together(batch, sizes):
  """Per global step, of those who are there by the newest commit."""
  values = scavenging.get_config(batch).to_dict()
  values["stop"] = {"rounds": 400}
  config = from_dict(values)
  world = World(
    config, NullCompute(config), seed=1, code_version="test", logs=True
  )
  runner = FaultRunner(world, fault_script.parse(config.faults))
  world.start(SYNCER)
  for i in range(config.learners.count):
    if not runner.absent_at_first(f"learner-{i}"):
      world.start(f"learner-{i}")
  assert world.run(lambda: world.ended, events_max=400_000)
  assert not runner.idle
  taken: dict[int, dict[int, int]] = {}
  for life in world.lives:
    for _, commands in life.log:
      for step in (c for c in commands if isinstance(c, Step)):
        learner = int(life.who.partition("-")[2])
        size = step.samples or config.learners.batch_size[learner]
        taken.setdefault(step.seen, {})[learner] = size
  steady = [
    sum(taken[t].values())
    for t in taken
    if len(taken[t]) == (4 if scavenging.JOIN <= t < scavenging.LEAVE else 2)
  ]
  assert len(steady) > 50 and set(steady) == sizes
