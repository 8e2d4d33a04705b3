"""Numbers of a run under chaos."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.chaos import measure
from ddiloco.protocol.learner_types import CommitSeen, Encode, StepDone
from ddiloco.protocol.syncer_types import Committed
from ddiloco.protocol.tape import Record
from tests.report.history import s


def records(*events):
  return tuple(
    Record(i, *(e if isinstance(e, tuple) else (e, ())))
    for i, e in enumerate(events)
  )


def life(*events, learner=0, pid=7):
  header = types.SimpleNamespace(pid=pid)
  return types.SimpleNamespace(
    learner=learner, header=header, records=records(*events)
  )


def history(*lives):
  return types.SimpleNamespace(lives=lives)


def step(number):
  return StepDone(0, number, 64, 2, 1.0, 0)


def seen(t, now_ns):
  return CommitSeen(now_ns, t, 1, None, 0, 0)


def committed(t, now_ns, won=True):
  return Committed(now_ns, t, won, "")


def answered(number):
  return step(number), (Encode(1, 1, (), 0, 0, 0, 0, ()),)


def test_a_gap_is_from_the_first_sight_of_a_commit_to_the_next():
  found = measure.longest_gap_s(
    history(
      life(committed(1, s(1)), committed(2, s(2)), learner=None),
      # The first syncer died before it knew that round 3 was its own.
      life(committed(3, s(8), won=False), committed(4, s(9)), learner=None),
      life(seen(1, s(1.5)), seen(3, s(4.5)), seen(4, s(9.5))),
    )
  )
  assert found == pytest.approx(4.5)
  assert measure.longest_gap_s(history()) == 0


@pytest.mark.parametrize(
  "numbers, lost",
  [
    ([1, 2, 3], 0),
    ([], 0),
    ([4, 5], 0),  # goes on from a snapshot
    ([1, 2, 2, 3], 1),
    ([1, 4], 2),
    ([1, 3, 3], 2),
  ],
)
def test_steps_that_were_not_taken_or_taken_twice(numbers, lost):
  assert measure.steps_lost(history(life(*map(step, numbers))), []) == lost


def test_steps_that_no_answer_carried_of_a_life_that_nobody_had_hit():
  end = life(step(1), answered(2), step(3), step(4), pid=7)
  assert measure.steps_lost(history(end), []) == 0
  assert measure.steps_lost(history(end), [8]) == 0
  assert measure.steps_lost(history(end), [7]) == 2


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)))
def test_a_union_of_intervals_as_counted_one_by_one(spans):
  told = {x for a, b in spans for x in range(a, b)}
  assert measure.covered_ns(tuple(span) for span in spans) == len(told)


def learner(**times):
  fields = {"exited_ns": 0, "stopped": "", **times}
  steps = fields.pop("steps_ns")
  return types.SimpleNamespace(
    steps=len(steps),
    begin_ns=np.array([a for a, _ in steps], np.int64),
    end_ns=np.array([b for _, b in steps], np.int64),
    **fields,
  )


def test_uptime_counts_the_time_in_which_somebody_is_alive():
  one = learner(steps_ns=[(0, 10), (10, 20)], exited_ns=30)
  assert measure.uptime([one]) == pytest.approx(2 / 3)
  assert measure.uptime([one], unflushed_ns=10) == 1.0
  other = learner(steps_ns=[(15, 40)], stopped="SIGTERM", exited_ns=90)
  assert measure.uptime([one, other]) == 1.0
  # Nobody is alive from 30 to 50, so nobody is down.
  later = learner(steps_ns=[(50, 60)], exited_ns=60)
  assert measure.uptime([one, later]) == pytest.approx(30 / 40)
  assert measure.uptime([learner(steps_ns=[])]) is None
