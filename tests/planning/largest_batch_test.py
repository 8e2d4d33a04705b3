"""The search for the largest batch that fits."""

import hypothesis
from hypothesis import strategies as st

from ddiloco.planning.largest_batch import Found, Tried, largest_batch

GIB = 2.0**30


def search(memory, limit, *, unit, first, about=1.0):
  """Searches with a limit that the caller knows `about`; and what it tried."""
  tried = []

  def ask(batch):
    assert batch % unit == 0 and batch > 0 and batch not in tried
    tried.append(batch)
    return told(batch)

  def told(batch):
    fits = memory(batch) <= limit
    return Tried(fits, memory(batch), None if fits else limit)

  found = largest_batch(
    ask,
    unit=unit,
    batch=first,
    first=told(first),
    fixed_bytes=memory(0),
    limit_bytes=limit * about,
  )
  return found, tried


@hypothesis.given(
  fixed=st.floats(0, 30),
  slope=st.floats(1e-3, 4),
  floor=st.floats(0, 8),
  unit=st.sampled_from([1, 16, 256]),
  first=st.integers(1, 40),
  about=st.floats(0.95, 1.05),
)
def test_finds_where_memory_ends(fixed, slope, floor, unit, first, about):
  limit = 32 * GIB

  def memory(batch):
    # What does not grow with the batch hides behind what does.
    return GIB * (fixed + max(floor, slope * batch / unit))

  found, tried = search(
    memory, limit, unit=unit, first=first * unit, about=about
  )
  assert len(tried) <= 7
  assert found.batch == 0 or memory(found.batch) <= limit
  if found.refused is not None:
    assert found.batch < found.refused and memory(found.refused) > limit
    close = max(unit, 0.02 * found.batch)
    if len(tried) < 7:
      assert found.refused - found.batch <= close


def test_a_line_is_found_at_once():
  found, tried = search(lambda batch: batch * GIB, 100 * GIB, unit=1, first=4)
  # First well beyond, which is refused at once.
  assert (found, tried) == (Found(100, 101), [300, 110, 100, 101])


def test_memory_that_follows_no_line():
  found, tried = search(
    lambda batch: GIB * (31 + 2.0 ** (batch / 16)), 33 * GIB, unit=1, first=64
  )
  assert found.batch <= 16 < found.refused
  assert found.refused - found.batch <= 4 and len(tried) <= 7


def test_nothing_fits():
  found, tried = search(
    lambda batch: 40 * GIB + batch, 32 * GIB, unit=8, first=64
  )
  assert found == Found(0, 8) and tried[-1] == 8
