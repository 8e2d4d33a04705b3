"""Held-out loss per byte, comparable between tokenizers."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ddiloco.config import ConfigError, EvalConfig
from ddiloco.lm.data import Batch, gather
from ddiloco.lm.moe import load_entropy
from ddiloco.lm.partition import num_windows
from ddiloco.lm.train_step import Trainer


def spread(available: int, wanted: int) -> list[int]:
  """`wanted` of `available` windows, evenly spread; all, if there are fewer."""
  count = min(available, wanted)
  return [i * available // count for i in range(count)]


def evaluate(
  trainer: Trainer,
  params: Any,
  stream: np.ndarray,
  token_bytes: np.ndarray,
  sequence_length: int,
  config: EvalConfig,
) -> dict[str, float]:
  """Nats per byte ("loss") and "bits_per_byte" on the held-out stream.

  Separators are predicted too and count no bytes: `loss` is what it takes to
  encode the text and its ends. `token_bytes` gives the bytes of each token id.
  """
  available = num_windows(stream, sequence_length)
  if not available:
    raise ConfigError(
      f"the held-out text has {len(stream)} tokens, fewer than the "
      f"{sequence_length + 1} of one window. Raise data.heldout_documents, or "
      "lower data.sequence_length."
    )
  windows = spread(available, config.sequences)
  num_bytes, batches = 0, []
  for first in range(0, len(windows), config.batch_size):
    some = windows[first : first + config.batch_size]
    batch = gather(stream, some, sequence_length, config.batch_size)
    num_bytes += int(token_bytes[batch.tokens[: len(some), 1:]].sum())
    batches.append(batch)
  return per_byte(measure(trainer, params, batches), num_bytes)


def measure(
  trainer: Trainer, params: Any, batches: Iterable[Batch]
) -> dict[str, np.ndarray]:
  """What the trainer measures, summed over the batches in f64."""
  where = jax.tree.map(lambda x: x.sharding, trainer.abstract.params)
  params = jax.device_put(params, where)
  sums = [
    trainer.measure(params, jax.device_put(batch, trainer.batch_sharding))
    for batch in batches
  ]
  host = jax.device_get(sums)
  return {
    name: np.sum([np.float64(one[name]) for one in host], 0) for name in host[0]
  }


def per_byte(sums: dict[str, np.ndarray], num_bytes: int) -> dict[str, float]:
  """The "loss" and "bits_per_byte" of `measure`; experts' "load_entropy"."""
  loss = float(sums["nats"]) / max(num_bytes, 1)
  result = {"loss": loss, "bits_per_byte": loss / math.log(2.0)}
  if "load" in sums:
    load = sums["load"] / sums["load"].sum(-1, keepdims=True)
    result["load_entropy"] = float(np.mean(load_entropy(load)))
  return result
