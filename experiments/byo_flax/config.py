"""Three learners train `model.py`, a network of Flax, on speeches.

  python -m launch.simulate --config=experiments/byo_flax/config.py \
    --workdir=runs/byo_flax

Hardware: 2 CPU cores. Time: under a minute.
Expected: a held-out loss of about 2.17 nats per byte, from 5.6 at the start.
`launch.local` trains the same in processes of their own.
"""

import ml_collections

from experiments.quickstart import config as quickstart


def get_config(
  algorithm: str = "decoupled_diloco",
) -> ml_collections.ConfigDict:
  """The quickstart's, with another program; its options are under options."""
  config = quickstart.get_config(algorithm)
  config.program = "experiments.byo_flax.model:build"
  config.options = {
    "batch_size": 8,  # sequences in one step
    "width": 64,
    "learning_rate": 5e-3,
  }
  config.sync.num_fragments = min(4, config.sync.num_fragments)
  config.faults = ""
  config.stop.rounds, config.stop.tokens = 400, 0
  return config
