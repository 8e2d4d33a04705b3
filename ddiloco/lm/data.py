"""Batches as a pure function of (seed, shard, first sample index, count).

Windows of `sequence_length` targets are cut from the training stream; window i
belongs to shard i mod `data.shards`. Grain shuffles a shard by index, anew in
every epoch, so any batch is found without reading the ones before it: a learner
that rejoins goes on where it was, and a replay sees the same data.
"""

from typing import NamedTuple

import grain
import numpy as np

from ddiloco.config import ConfigError


class Batch(NamedTuple):
  """Host arrays. Rows that hold no sample have mask 0."""

  tokens: np.ndarray  # [B, L + 1] int32: inputs and, one later, targets
  mask: np.ndarray  # [B] f32, 1 or 0


def num_windows(stream: np.ndarray, sequence_length: int) -> int:
  """Whole windows in a stream; neighbours share one token, no target."""
  return max(0, (len(stream) - 1) // sequence_length)


def gather(
  stream: np.ndarray, windows: list[int], sequence_length: int, rows: int
) -> Batch:
  """The given windows of a stream as a batch of `rows` rows."""
  tokens = np.zeros((rows, sequence_length + 1), np.int32)
  for row, window in enumerate(windows):
    start = window * sequence_length
    tokens[row] = stream[start : start + sequence_length + 1]
  mask = (np.arange(rows) < len(windows)).astype(np.float32)
  return Batch(tokens, mask)


class ShardReader:
  """The samples of one data shard, by index, without end."""

  def __init__(
    self,
    stream: np.ndarray,
    *,
    seed: int,
    shard: int,
    shards: int,
    sequence_length: int,
    batch_size: int,
  ):
    """Raises `ConfigError` if some shard has less than one batch."""
    windows = num_windows(stream, sequence_length)
    if windows // shards < batch_size:
      raise ConfigError(
        f"the training text has {len(stream)} tokens, {windows // shards} "
        f"windows of {sequence_length} in each of data.shards = {shards} "
        f"shards, but a batch has {batch_size}. Add text, or lower "
        "data.shards, data.sequence_length, data.heldout_documents or "
        "learners.batch_size."
      )
    self._stream, self._rows = stream, batch_size
    self._sequence_length = sequence_length
    # Seeds of neighbouring runs and shards must not give related orders, and
    # Grain adds the epoch to what it is given: so they are hashed.
    mixed = np.random.SeedSequence((seed, shard)).generate_state(1)[0]
    self._order = (
      grain.MapDataset.range(shard, windows, shards)
      .shuffle(seed=int(mixed))
      .repeat()
    )

  def batch(self, first_sample: int, count: int) -> Batch:
    """Samples first_sample .. first_sample + count - 1, in a full-size batch.

    `count` is at most the batch size; the rows left over are masked.
    """
    if not 0 < count <= self._rows or first_sample < 0:
      raise ValueError(
        f"batch({first_sample}, {count}): the first sample must be at least 0 "
        f"and the count between 1 and the batch size {self._rows}."
      )
    windows = [self._order[first_sample + i] for i in range(count)]
    return gather(self._stream, windows, self._sequence_length, self._rows)
