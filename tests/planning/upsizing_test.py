"""Newcomers and extra compute: Fig. 12 and Table 4 of the paper."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.planning.upsizing import (
  Scavenging,
  downtime_steps,
  free_copy_steps,
)


def test_the_figures_corners():
  """H = 24: none is lost up to 6 steps a copy, and both meet at 24."""
  assert free_copy_steps(interval=24) == 6
  for copy, decoupled in ((0, 0), (6, 0), (7, 4), (24, 72)):
    assert downtime_steps(copy, interval=24, decoupled=True) == decoupled
    assert downtime_steps(copy, interval=24, decoupled=False) == 3 * copy


@given(st.floats(0, 100), st.integers(1, 200))
def test_decoupled_learners_lose_less_until_a_copy_takes_an_interval(copy, h):
  lost = downtime_steps(copy, interval=h, decoupled=True)
  blocked = downtime_steps(copy, interval=h, decoupled=False)
  assert (lost <= blocked + 1e-9) == (copy <= h + 1e-9)


def test_less_to_carry_is_free_for_longer():
  """As ours: two copies beside answers in int4, where f32 is the state."""
  options = {"state_copies": 2.0, "regular_copies": 0.125}
  free = free_copy_steps(interval=24, **options)
  assert free == pytest.approx(24 / 2.125)
  for copy, is_free in ((free - 0.1, True), (free + 0.1, False)):
    lost = downtime_steps(copy, interval=24, decoupled=True, **options)
    assert (lost == 0) == is_free


@pytest.mark.parametrize(
  "extra, printed", [(0, 1.0), (0.25, 0.90), (0.5, 0.83), (1, 0.75), (3, 0.62)]
)
def test_decoupled_times_of_the_table_are_the_ideal(extra, printed):
  """All printed ones, to the rounding."""
  assert Scavenging(extra).ideal_time == pytest.approx(printed, abs=0.0051)


def test_comings_cost_everybody_or_the_extra_ones():
  run = Scavenging(1.0, upsizes=10, steps=1000)
  assert run.time(0, decoupled=True) == run.ideal_time == 0.75
  assert run.time(20, decoupled=False) == pytest.approx(0.95)
  assert run.time(20, decoupled=True) == pytest.approx(0.85)


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: Scavenging(-1), "extra = -1"),
    (lambda: Scavenging(1, share=2), "share = 2: from 0 to 1"),
    (lambda: Scavenging(1, steps=0), "steps = 0: at least 1"),
    (
      lambda: downtime_steps(-1, interval=24, decoupled=True),
      "copy_steps = -1",
    ),
    (lambda: downtime_steps(1, interval=0, decoupled=True), "interval = 0"),
  ],
)
def test_the_absurd_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()
