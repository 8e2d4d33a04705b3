"""The goodput model: by hand where that can be done, and its statistics."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.planning import goodput_table
from ddiloco.planning.failure_log import Outage
from ddiloco.planning.goodput import YEAR_S, Cluster, simulate
from ddiloco.planning.returns import Returns, with_mean

QUIET = Cluster(1280, mtbi_s=1e9 * YEAR_S)
SMALL = Cluster(
  8, learners=2, slices=8, step_s=1.0, down_s=3.0, up_s=2.0, mtbi_s=YEAR_S
)


def logged(cluster, *outages, hours=1 / 36, seeds=(0,)):
  """100 s with these outages: (start, end, chips, learner)."""
  log = [
    Outage(line, start, end, chips, learner)
    for line, (start, end, chips, learner) in enumerate(outages, 2)
  ]
  return simulate(cluster, hours=hours, seeds=seeds, log=log)


# --- By hand -----------------------------------------------------------------


def test_nothing_fails_and_all_time_is_useful():
  outcome = simulate(QUIET, hours=1, seeds=[0, 1])
  assert outcome.goodput == pytest.approx([1, 1])
  assert outcome.uptime == pytest.approx([1, 1])


def test_a_slice_that_leaves_and_returns():
  """Learner 0 of two: 10 steps, 3 s down, 17 of 3 in 4 slices, 2 s up."""
  outcome = logged(SMALL, (10.5, 30, 1, 0))
  spans = [
    (learner, start, end, live)
    for learner, start, end, live in zip(
      outcome.spans.learner,
      outcome.spans.start_s,
      outcome.spans.end_s,
      outcome.spans.live,
      strict=True,
    )
  ]
  assert sorted(spans) == [
    (0, 0, 10, 4),
    (0, 13, 30, 3),
    (0, 32, 100, 4),
    (1, 0, 100, 4),
  ]
  useful = 10 * 4 + 17 * 3 + 68 * 4 + 100 * 4
  assert outcome.goodput == pytest.approx([useful / 800])
  assert outcome.uptime == pytest.approx([1.0])  # the other one steps
  alone = dataclasses.replace(SMALL, learners=1, slices=4, chips=4)
  outcome = logged(alone, (10.5, 30, 1, None))
  assert outcome.uptime == pytest.approx([0.95])


def test_failures_of_one_step_make_one_pause():
  one = logged(SMALL, (10.5, 30, 1, 0), (10.7, 30, 1, 0))
  assert (one.spans.start_s[one.spans.learner == 0] == [0, 13, 32]).all()
  assert one.spans.live.min() == 2


def test_a_learner_without_a_slice_stands_until_one_is_back():
  outcome = logged(SMALL, (10.5, 40, 4, 0))
  own = outcome.spans.learner == 0
  assert outcome.spans.start_s[own].tolist() == [0, 42]
  assert outcome.spans.live[own].tolist() == [4, 4]


def test_without_elasticity_a_learner_stops_until_all_is_back():
  stiff = dataclasses.replace(SMALL, elastic=False, restart_s=5.0)
  outcome = logged(stiff, (10.5, 40, 1, 0))
  own = outcome.spans.learner == 0
  assert outcome.spans.start_s[own].tolist() == [0, 45]
  assert outcome.goodput == pytest.approx([(10 + 55 + 100) / 200])


def test_work_since_the_last_checkpoint_is_done_again():
  stiff = dataclasses.replace(SMALL, elastic=False, checkpoint_s=4.0)
  outcome = logged(stiff, (10.5, 40, 1, 0))
  assert outcome.goodput == pytest.approx([(8 + 60 + 100) / 200])


def test_an_outage_takes_as_many_slices_as_its_chips():
  wide = dataclasses.replace(SMALL, chips=80)  # slices of 10 chips
  for chips, live in ((1, 3), (10, 3), (11, 2)):
    assert logged(wide, (10.5, 30, chips, 0)).spans.live.min() == live


def test_what_was_over_before_anybody_stepped_is_no_failure():
  """Two of a step, of which one is back in the pause; a third in that pause."""
  outcome = logged(SMALL, (10.5, 30, 1, 0), (10.9, 12, 1, 0), (11.5, 12, 1, 0))
  own = outcome.spans.learner == 0
  assert outcome.spans.start_s[own].tolist() == [0, 15, 32]
  assert outcome.spans.live[own].tolist() == [4, 3, 4]


def test_an_outage_of_no_learner_hits_one_that_the_seed_draws():
  hit = {
    int(logged(SMALL, (10.5, 30, 1, None), seeds=[s]).outages.learner[0])
    for s in range(10)
  }
  assert hit == {0, 1}


def test_a_log_of_another_cluster_is_refused():
  with pytest.raises(ValueError, match=r"line 2 .* learner 2, but there are 2"):
    logged(SMALL, (1, 2, 1, 2))


# --- Statistics --------------------------------------------------------------


def test_what_a_seed_gives_depends_on_no_other():
  cluster = Cluster(600_000, 4)
  several = simulate(cluster, hours=3, seeds=[3, 4, 5])
  alone = simulate(cluster, hours=3, seeds=[4])
  assert several.goodput[1] == alone.goodput[0]
  assert several.uptime[1] == alone.uptime[0]
  assert len(set(several.goodput)) == 3


def test_failures_come_as_often_as_chips_say():
  """Of the time spent stepping: the paper draws them at executed steps."""
  cluster = Cluster(300_000, 2)
  outcome = simulate(cluster, hours=20, seeds=range(4))
  spans = outcome.spans
  share = spans.live / cluster.learner_slices / cluster.learners
  exposed_s = ((spans.end_s - spans.start_s) * share).sum()
  expected = exposed_s / cluster.mtbf_s
  count = len(outcome.outages.seed)
  assert abs(count - expected) < 4 * np.sqrt(expected)
  back_s = outcome.outages.end_s - outcome.outages.start_s
  assert back_s.mean() == pytest.approx(cluster.returns.mean_s, rel=0.05)


def test_uptime_is_as_of_independent_learners():
  alone = simulate(Cluster(600_000, 1), hours=20, seeds=range(3))
  both = simulate(Cluster(1_200_000, 2), hours=20, seeds=range(3))
  expected = 1 - (1 - alone.uptime.mean()) ** 2
  assert both.uptime.mean() == pytest.approx(expected, abs=0.02)


def test_slow_chips_make_learners_slow_by_their_slowest():
  """Of 1280 chips the slowest is some 3.2 standard deviations away."""
  spread = dataclasses.replace(QUIET, speed_std=0.01)
  spans = logged(spread, (1.5, 30, 1, 0), seeds=range(50)).spans
  step_s = spans.end_s[spans.start_s == 0]  # one step, and a failure
  assert len(set(step_s)) == 50
  assert 1.02 < step_s.mean() < 1.05


@settings(max_examples=40, deadline=None)
@given(
  chips=st.integers(1_000, 3_000_000),
  learners=st.sampled_from([1, 2, 3, 8]),
  elastic=st.booleans(),
  step_s=st.floats(0.1, 20),
  down_s=st.floats(0, 50),
  up_s=st.floats(0, 50),
  seed=st.integers(0, 2**32),
)
def test_a_lane_is_one_thing_at_a_time(
  chips, learners, elastic, step_s, down_s, up_s, seed
):
  cluster = Cluster(
    chips, learners, elastic, step_s=step_s, down_s=down_s, up_s=up_s
  )
  outcome = simulate(cluster, hours=0.3, seeds=[seed])
  assert 0 <= outcome.goodput[0] <= outcome.uptime[0] + 1e-9
  assert outcome.uptime[0] <= 1 + 1e-9
  spans = outcome.spans
  for learner in range(learners):
    own = spans.learner == learner
    start_s, end_s = spans.start_s[own], spans.end_s[own]
    assert (end_s[:-1] <= start_s[1:] + 1e-6).all()
    assert (spans.live[own] > 0).all()
    assert (spans.live[own] <= cluster.learner_slices).all()
    if not elastic:
      assert (spans.live[own] == cluster.learner_slices).all()


# --- Distributions -----------------------------------------------------------


def test_the_distribution_of_returns():
  exponential = Returns(1, 1, 60)
  assert exponential.mean_s == pytest.approx(60, rel=1e-3)
  assert exponential.quantile_s(np.array([0.5]))[0] == pytest.approx(
    60 * np.log(2)
  )
  found = with_mean(2, 1.5, 75)
  assert found.mean_s == pytest.approx(75)
  x = found.quantile_s(np.array([0.3]))[0]
  assert (1 - np.exp(-((x / found.scale_s) ** 1.5))) ** 2 == pytest.approx(0.3)


# --- The table ---------------------------------------------------------------


def test_a_row_has_its_interval():
  row = goodput_table.describe(simulate(SMALL, hours=1, seeds=range(3)))
  assert row["goodput_ci95"] is not None
  # Student's t of 2 degrees of freedom, for values 1, 2 and 3.
  width = goodput_table.interval(np.array([1.0, 2.0, 3.0]))
  assert width == pytest.approx(4.3027 / np.sqrt(3), rel=1e-4)
  row = goodput_table.describe(simulate(SMALL, hours=1, seeds=[0]))
  assert (row["learners"], row["goodput_ci95"]) == (2, None)


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"chips": 0}, "chips = 0"),
    ({"learners": 9}, "8 slices for 9 learners"),
    ({"mtbi_s": 0.0}, "mtbi_s = 0.0: must be positive"),
    ({"step_s": float("inf")}, "step_s = inf"),
    ({"up_s": -1.0}, "up_s = -1.0: must not be negative"),
    ({"down_s": float("nan")}, "down_s = nan"),
    ({"chips": 7}, "7 chips in 8 slices"),
  ],
)
def test_what_no_cluster_is_is_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
  "hours, seeds", [(0, [0]), (float("nan"), [0]), (1, [])]
)
def test_a_simulation_of_nothing_is_refused(hours, seeds):
  with pytest.raises(ValueError):
    simulate(SMALL, hours=hours, seeds=seeds)
