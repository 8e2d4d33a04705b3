"""Learners join, leave and come back; each is soon counted."""

import pytest

from ddiloco.config import from_dict
from ddiloco.protocol.learner_types import CommitSeen, Joined, StepDone
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.world import SYNCER, World

ALL, INTERVAL = 8, 6


def make_world(seed):
  config = from_dict(
    {
      "stop": {"rounds": 120},
      "learners": {"count": ALL},
      "sync": {
        "num_fragments": INTERVAL,
        "interval_steps": INTERVAL,
        "quorum_min": 2,
      },
      # New members are looked for twice a second.
      "sim": {"step_s": 0.5},
    }
  )
  return World(
    config, NullCompute(config), seed=seed, code_version="x", logs=True
  )


def start(world, *learners):
  for i in learners:
    world.start(f"learner-{i}")


def rounds_until_counted(life):
  """From a life's first step to the first commit that counts it."""
  seen = begun = None
  for event, _ in life.log:
    match event:
      case Joined():
        seen = event.seen
      case StepDone() if begun is None:
        begun = seen
      case CommitSeen():
        seen = event.round
        if event.counted_attempt:
          return seen - begun
  return None


@pytest.mark.parametrize("seed", range(3))
def test_whoever_joins_is_counted_within_an_interval(seed):
  world = make_world(seed)
  world.start(SYNCER)
  start(world, 0, 1)
  world.run(lambda: world.committed >= 20, events_max=50_000)
  start(world, *range(2, ALL))  # four times as many as there were
  world.run(lambda: world.committed >= 60, events_max=50_000)
  for i in (0, 3):  # one of the first too
    world.crash(f"learner-{i}", None)
  world.run(lambda: world.committed >= 90, events_max=50_000)
  start(world, 0, 3)
  assert world.run(lambda: world.ended, events_max=100_000)
  world.audit.finish(world.lives, world.machines)
  lives = [life for life in world.lives if life.who != SYNCER]
  assert len(lives) == ALL + 2
  waits = [rounds_until_counted(life) for life in lives]
  assert all(wait is not None and wait <= INTERVAL for wait in waits), waits
