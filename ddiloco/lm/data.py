"""Batches as a pure function of (seed, shard, first sample index, count).

Windows of `sequence_length` targets are cut from the training stream, and each
belongs to one shard (see `partition`). Grain shuffles a shard by index, anew in
every epoch, so any batch is found without reading the ones before it: a learner
that rejoins goes on where it was, and a replay sees the same data.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import grain
import numpy as np

from ddiloco.config import ConfigError
from ddiloco.lm.partition import Shards


class Batch(NamedTuple):
  """Host arrays. Rows that hold no sample have mask 0."""

  tokens: np.ndarray  # [B, L + 1] int32: inputs and, one later, targets
  mask: np.ndarray  # [B] f32, 1 or 0
  images: np.ndarray | None = None  # [B, H, W, 3] uint8, in front of the text
  targets: np.ndarray | None = None  # [B, L] f32, 1 or 0; None: all are 1

  @property
  def num_targets(self) -> int:
    """Targets in the unmasked rows."""
    if self.targets is None:
      return int(self.mask.sum()) * (self.tokens.shape[1] - 1)
    return int((self.targets * self.mask[:, None]).sum())


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


class SampleReader:
  """The samples of one data shard, by index, without end."""

  def __init__(
    self,
    gather: Callable[[list[int], int], Batch],
    samples: Sequence[int],
    *,
    seed: int,
    shard: int,
    batch_size: int,
  ):
    """`gather` makes a batch of so many rows from some of `samples`."""
    self._gather, self._rows = gather, batch_size
    # Seeds of neighbouring runs and shards must not give related orders, and
    # Grain adds the epoch to what it is given: so they are hashed.
    mixed = np.random.SeedSequence((seed, shard)).generate_state(1)[0]
    self._order = (
      grain.MapDataset.source(samples).shuffle(seed=int(mixed)).repeat()
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
    samples = [self._order[first_sample + i] for i in range(count)]
    return self._gather(samples, self._rows)


class ShardReader(SampleReader):
  """The windows of one shard of a stream."""

  def __init__(
    self,
    stream: np.ndarray,
    shards: Shards,
    *,
    seed: int,
    shard: int,
    sequence_length: int,
    batch_size: int,
  ):
    """Raises `ConfigError` if some shard has less than one batch."""
    sizes = [len(windows) for windows in shards]
    if min(sizes) < batch_size:
      raise ConfigError(
        f"the training text has {len(stream)} tokens, {min(sizes)} windows of "
        f"{sequence_length} in the smallest of data.shards = {len(shards)} "
        f"shards, but a batch has {batch_size}. Add text, or lower "
        "data.shards, data.sequence_length, data.heldout_documents or "
        "learners.batch_size."
      )
    super().__init__(
      lambda windows, rows: gather(stream, windows, sequence_length, rows),
      shards[shard],
      seed=seed,
      shard=shard,
      batch_size=batch_size,
    )
