"""What a seed draws."""

import collections

import pytest

from ddiloco.chaos import kinds
from ddiloco.chaos.harness import draw_plan, endless
from ddiloco.chaos.runner import PERFORM
from ddiloco.config import from_dict
from tests.sim.small import make_config

HOUR_S = 3600.0


def draw(seed, store="file"):
  left_out = kinds.missing(store)
  names = [kind for kind in kinds.KINDS if kind not in left_out]
  return kinds.draw(seed, HOUR_S, 10.0, names), names


def test_a_seed_is_a_script():
  assert draw(3) == draw(3)
  assert draw(3)[0] != draw(4)[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("store", kinds.STORES)
def test_every_kind_comes_before_any_comes_twice(store, seed):
  drawn, names = draw(seed, store)
  assert sorted(d.kind for d in drawn[: len(names)]) == sorted(names)
  again = [name for name in names if name not in kinds.ONCE]
  second = drawn[len(names) : len(names) + len(again)]
  assert sorted(d.kind for d in second) == sorted(again)
  counts = collections.Counter(d.kind for d in drawn)
  assert [counts[name] for name in kinds.ONCE] == [1]


def test_instants_are_random_and_as_many_as_told():
  numbers = [len(draw(seed)[0]) for seed in range(20)]
  assert 340 < sum(numbers) / 20 < 380 and len(set(numbers)) > 5
  (drawn, _) = draw(0)
  times = [d.at_s for d in drawn]
  assert times == sorted(times) and 0 < times[0] and times[-1] < HOUR_S
  assert len({d.seed for d in drawn}) == len(drawn)


def test_a_kind_is_performed_or_said_to_be_missing():
  assert PERFORM.keys() == kinds.KINDS.keys()
  assert kinds.missing(kinds.S3) == {}
  assert "outage" in kinds.missing(kinds.FILE)


def test_nothing_to_draw_is_an_error():
  with pytest.raises(ValueError, match="no kind"):
    kinds.draw(0, 60.0, 1.0, [])


def planned(config, **unavailable):
  return draw_plan(
    config,
    seed=1,
    minutes=60.0,
    every_s=10.0,
    store=kinds.S3,
    unavailable=unavailable,
  )


@pytest.mark.parametrize(
  "changes, left_out",
  [
    ({}, set()),
    (
      {"learners": {"count": 1}},
      {"late", "kill_in_transfer", "garble_transfer"},
    ),
    ({"data": {"shards": 2}}, {"join"}),
    (
      {"recovery": {"donors_max": 0}},
      {"kill_in_transfer", "garble_transfer"},
    ),
    ({"live": {"checkpoint_every_steps": 0}}, {"garble_checkpoint"}),
  ],
)
def test_what_a_run_cannot_have_is_not_drawn_and_named(changes, left_out):
  plan = planned(make_config(**changes))
  assert plan.left_out.keys() == left_out
  assert {d.kind for d in plan.draws} == kinds.KINDS.keys() - left_out


def test_what_the_machine_cannot_do_is_named_too():
  plan = planned(make_config(), read_only="it takes root")
  assert plan.left_out == {"read_only": "it takes root"}
  assert "read_only" not in {d.kind for d in plan.draws}


def test_the_run_has_a_standby_and_no_end_or_script_of_its_own():
  values = make_config().to_dict() | {"faults": "at round 5 kill syncer"}
  found = endless(from_dict(values))
  assert found.faults == "" and found.live.standbys == 1
  assert found.stop.rounds > 10**8 and found.stop.tokens == 0
  values["live"]["standbys"] = 2
  assert endless(from_dict(values)).live.standbys == 2
