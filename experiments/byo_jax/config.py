"""Three learners train `model.py`, a program in plain JAX, on speeches.

  python -m launch.simulate --config=experiments/byo_jax/config.py \
    --workdir=runs/byo_jax

Hardware: 2 CPU cores. Time: under a minute.
Expected: a held-out loss of about 2.40 nats per byte, from 5.7 at the start.
`launch.local` trains the same in processes of their own.
"""

import ml_collections

from experiments.quickstart import config as quickstart


def get_config(
  algorithm: str = "decoupled_diloco",
) -> ml_collections.ConfigDict:
  """The quickstart's, with another program; its options are under options."""
  config = quickstart.get_config(algorithm)
  config.program = "experiments.byo_jax.model:build"
  config.options = {
    "batch_size": 256,  # bytes predicted in one step
    "width": 16,
    "hidden": 128,
    "learning_rate": 0.05,
  }
  config.sync.num_fragments = min(4, config.sync.num_fragments)  # 4 tensors
  config.faults = ""
  config.stop.rounds, config.stop.tokens = 400, 0
  return config
