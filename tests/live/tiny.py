"""A run small enough for tests of live processes: seconds on two cores.

Used as `--config=tests/live/tiny.py --config.data.path=...`.
"""

import ml_collections

from ddiloco.config import Config


def get_config() -> ml_collections.ConfigDict:
  """Two learners, both needed for a round; one layer; P = H = 6."""
  config = ml_collections.ConfigDict(Config().to_dict())
  config.learners = {
    "count": 2,
    "devices": (1,),
    "mesh": (-1, 1, 1),
    "batch_size": (2,),
    "slowdown": (4.0,),  # A round takes some 10 ms then, not 2.
    "threads": 1,
    "global_batch": 0,
  }
  config.sync.quorum_min = 2
  config.sync.num_fragments = 6
  config.sync.interval_steps = 6
  config.model.width = 16
  config.model.layers = 1
  config.model.heads = 2
  config.model.kv_heads = 1
  config.model.head_width = 8
  config.model.hidden = 32
  config.data.source = "text"
  config.data.sequence_length = 16
  config.data.shards = 4
  config.data.heldout_documents = 2
  config.eval.sequences = 8
  config.eval.batch_size = 8
  config.inner.warmup = 100
  config.inner.decay = 10_000
  config.stop.rounds = 30
  config.live.heartbeat_s = 0.2
  config.live.dead_after_s = 5.0
  config.live.restart_backoff_s = 0.1
  return config
