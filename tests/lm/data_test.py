"""Batches: pure, random access, every window once an epoch, shards disjoint."""

import grain
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError
from ddiloco.lm.data import ShardReader
from ddiloco.lm.partition import num_windows

LENGTH = 5
WINDOWS = 43
# Token i is i: a row tells which window it is.
STREAM = np.arange(WINDOWS * LENGTH + 3, dtype=np.uint16)


def reader(shard: int = 0, shards: int = 4, seed: int = 0, batch_size: int = 4):
  return ShardReader(
    STREAM,
    tuple(range(s, WINDOWS, shards) for s in range(shards)),
    seed=seed,
    shard=shard,
    sequence_length=LENGTH,
    batch_size=batch_size,
  )


def windows(source: ShardReader, first: int, count: int) -> list[int]:
  """Which windows these samples are, each checked to be whole."""
  found = []
  for i in range(count):
    batch = source.batch(first + i, 1)
    start = int(batch.tokens[0, 0])
    np.testing.assert_array_equal(
      batch.tokens[0], np.arange(start, start + LENGTH + 1)
    )
    assert start % LENGTH == 0
    found.append(start // LENGTH)
  return found


def test_an_epoch_has_every_window_of_the_shard_once():
  assert num_windows(STREAM, LENGTH) == WINDOWS
  for shard in range(4):
    own = list(range(shard, WINDOWS, 4))
    for epoch in range(3):
      seen = windows(reader(shard), epoch * len(own), len(own))
      assert sorted(seen) == own


def test_shards_cover_the_stream_and_are_disjoint():
  seen = [
    window
    for shard in range(4)
    for window in windows(reader(shard), 0, len(range(shard, WINDOWS, 4)))
  ]
  assert sorted(seen) == list(range(WINDOWS))


def test_the_order_of_a_shard_does_not_depend_on_how_it_is_given():
  """Runs that were started before shards were lists of windows go on."""
  given = ShardReader(
    STREAM,
    (np.arange(4), np.arange(1, WINDOWS, 4)),
    seed=3,
    shard=1,
    sequence_length=LENGTH,
    batch_size=4,
  )
  order = (
    grain.MapDataset.range(1, WINDOWS, 4)
    .shuffle(seed=int(np.random.SeedSequence((3, 1)).generate_state(1)[0]))
    .repeat()
  )
  expected = [order[i] for i in range(25)]
  assert windows(given, 0, 25) == expected
  assert windows(reader(shard=1, seed=3), 0, 25) == expected


def test_order_differs_between_epochs_seeds_and_shards():
  size = len(range(0, WINDOWS, 4))
  orders = [
    windows(reader(), 0, size),
    windows(reader(), size, size),
    windows(reader(), 2 * size, size),
    windows(reader(seed=1), 0, size),
    windows(reader(seed=1), size, size),
    [w - 1 for w in windows(reader(shard=1), 0, size)],
    sorted(windows(reader(), 0, size)),
  ]
  assert len({tuple(order) for order in orders}) == len(orders)


@given(first=st.integers(0, 10_000), count=st.integers(1, 4))
def test_a_batch_is_a_pure_function_of_its_indices(first, count):
  source = reader(shard=2)
  batch = source.batch(first, count)
  source.batch(first + 3, 4)
  again = reader(shard=2).batch(first, count)
  np.testing.assert_array_equal(batch.tokens, again.tokens)
  np.testing.assert_array_equal(batch.mask, again.mask)
  assert batch.tokens.shape == (4, LENGTH + 1)
  assert batch.tokens.dtype == np.int32
  np.testing.assert_array_equal(batch.mask, [1] * count + [0] * (4 - count))
  for row in range(count):
    single = source.batch(first + row, 1)
    np.testing.assert_array_equal(batch.tokens[row], single.tokens[0])
  assert not batch.tokens[count:].any()


@pytest.mark.parametrize("first, count", [(0, 5), (0, 0), (-1, 1)])
def test_impossible_batches_are_refused(first, count):
  with pytest.raises(ValueError, match="batch size 4"):
    reader().batch(first, count)


def test_text_shorter_than_a_batch_per_shard_is_refused():
  with pytest.raises(ConfigError) as error:
    reader(shards=11)
  for word in ("218 tokens", "3 windows", "data.shards = 11", "batch has 4"):
    assert word in str(error.value)
