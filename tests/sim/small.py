"""A run small enough for tests of simulated training and of replays.

Used as `--config=tests/sim/small.py` too.
"""

from typing import Any

import ml_collections

from ddiloco.config import Config
from ddiloco.engine.ports import Item
from tests.configs import override


def get_config() -> ml_collections.ConfigDict:
  """Two learners, one is enough for a round; P = H = 3."""
  config = ml_collections.ConfigDict(Config().to_dict())
  config.program = "tests.sim.program:build"
  config.learners = {
    "count": 2,
    "devices": (1,),
    "mesh": (-1, 1, 1),
    "batch_size": (4,),
    "slowdown": (1.0, 1.5),
    "threads": 2,
  }
  config.sync.num_fragments = 3
  config.sync.interval_steps = 3
  config.sync.quorum_min = 1
  config.eval.every_rounds = 20
  config.stop.rounds = 60
  config.live.checkpoint_every_steps = 10
  return config


def make_config(**groups: dict[str, Any]) -> Config:
  """The same config; `groups` override single keys."""
  values = get_config().to_dict()
  return override(values, groups)


class MemoryStore:
  """As much of an exchange as a simulation and a replay need."""

  url = "a store of a test"

  def __init__(self, objects: dict[str, bytes] | None = None):
    self.objects: dict[str, bytes] = dict(objects or {})

  def put(self, key: str, value: bytes, *, durable: bool = False) -> None:
    del durable
    self.objects[key] = value

  def delete(self, key: str) -> None:
    self.objects.pop(key, None)

  def delete_prefix(self, prefix: str) -> None:
    for key in self.list(prefix):
      del self.objects[key]

  def get(self, key: str) -> Item | None:
    value = self.objects.get(key)
    return None if value is None else Item(value, b"1")

  def list(self, prefix: str) -> list[str]:
    return sorted(key for key in self.objects if key.startswith(prefix))
