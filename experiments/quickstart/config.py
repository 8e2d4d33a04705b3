"""Quickstart: three learners and a syncer train a small byte model on speeches.

A decoder of 0.26 M parameters on the State of the Union addresses, the last 20
held out; P = H = 24 balanced tensors, tau = 2, int4 answers, RDA.

  python -m launch.local --config=experiments/quickstart/config.py \
    --workdir=runs/quickstart

After a colon, another algorithm of the family on the same model and data:
`config.py:data_parallel`, `:diloco`, `:streaming_diloco`, `:async_local_sgd`,
`:elastic_data_parallel` (simulated only).

Hardware: 2 CPU cores. Time: 2 to 3 minutes.
Expected: a held-out loss of about 1.72 nats per byte (2.5 bits), below 1.9.
Longer: --config.stop.tokens=6000000 --config.inner.decay=6000000
"""

import dataclasses
from typing import Any

import ml_collections
from ml_collections import config_dict

from ddiloco.config import Config, ModelConfig, algorithms

TOKENS = 1_200_000


def _tuples(value: Any) -> Any:
  """Sequences as tuples, which is what command-line overrides parse to."""
  if isinstance(value, dict):
    return {key: _tuples(item) for key, item in value.items()}
  return tuple(value) if isinstance(value, list) else value


def get_config(
  algorithm: str = "decoupled_diloco",
) -> ml_collections.ConfigDict:
  """Every key of a run, so that each can be overridden on the command line.

  Args:
    algorithm: a name of `ddiloco.config.algorithms`.
  """
  config = ml_collections.ConfigDict(_tuples(Config().to_dict()))
  # The model's shape is left unset, so that --config.model.preset can give it.
  for field in dataclasses.fields(ModelConfig):
    if field.name != "preset":
      config.model[field.name] = config_dict.placeholder(field.type)

  config.learners.count = 3
  config.learners.batch_size = (8,)  # x 64 tokens: about 0.1 s on 2 cores

  # Some 30 merges of each fragment: too few for outer momentum to pay.
  config.outer.learning_rate = 0.7
  config.outer.momentum = 0.0

  config.inner.learning_rate = 6e-3
  config.inner.warmup = 50_000  # tokens
  config.inner.decay = TOKENS
  config.stop.tokens = TOKENS
  if algorithm == "decoupled_diloco":
    config.faults = "at round 250 kill learner 1 for 5s"
  config.update_from_flattened_dict(algorithms.preset(algorithm))
  if config.learners.count == 1:  # the same global batch, of all the text
    config.learners.batch_size = (24,)
    config.data.shards = 1
  return config
