"""The schedule against a brute-force reading of the protocol."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.schedule import Schedule

SCHEDULES = st.builds(
  Schedule,
  num_fragments=st.integers(1, 40),
  interval=st.integers(1, 40),
  overlap=st.integers(0, 12),
)


def is_open(schedule: Schedule, t: int, seen: int) -> bool:
  """Whoever has seen every commit due up to t - max(tau, 1), and not t."""
  due = range(1, t - max(schedule.overlap, 1) + 1)
  return seen < t and all(u <= seen for u in due if schedule.fragments(u))


@given(SCHEDULES, st.integers(1, 200))
def test_every_fragment_is_due_once_in_an_interval(schedule, first):
  due = [
    p
    for t in range(first, first + schedule.interval)
    for p in schedule.fragments(t)
  ]
  assert sorted(due) == list(range(schedule.num_fragments))


@given(SCHEDULES)
def test_fragments_are_due_at_the_offsets_of_the_paper(schedule):
  big_p, big_h = schedule.num_fragments, schedule.interval
  for t in range(1, 3 * big_h):
    expected = [p for p in range(big_p) if t % big_h == p * big_h // big_p]
    assert list(schedule.fragments(t)) == expected
    assert schedule.is_round(t) == bool(expected)
  assert schedule.fragments(0) == ()


@given(SCHEDULES, st.integers(0, 100))
def test_neighbouring_rounds(schedule, t):
  rounds = [u for u in range(1, 200) if schedule.fragments(u)]
  assert schedule.next_round(t) == min(u for u in rounds if u > t)
  assert schedule.previous_round(t) == max(
    (u for u in rounds if u < t), default=0
  )
  assert schedule.gap(t) == t - schedule.previous_round(t)


@given(SCHEDULES, st.data())
def test_the_version_before_is_the_last_own_round(schedule, data):
  p = data.draw(st.integers(0, schedule.num_fragments - 1))
  t = data.draw(st.integers(0, 150))
  own = [u for u in range(1, t) if p in schedule.fragments(u)]
  assert schedule.version_before(p, t) == max(own, default=0)


@given(SCHEDULES, st.integers(0, 120))
def test_open_rounds(schedule, seen):
  seen = schedule.previous_round(seen + 1)  # one sees commits, not steps
  horizon = seen + schedule.interval + schedule.overlap + 2
  expected = tuple(
    t
    for t in range(1, horizon)
    if schedule.fragments(t) and is_open(schedule, t, seen)
  )
  assert schedule.open_rounds(seen) == expected
  assert expected, "some round is always open"


@given(SCHEDULES, st.integers(1, 120))
def test_opens_after_is_the_first_commit_that_opens_a_round(schedule, t):
  t = schedule.next_round(t)
  seen = schedule.opens_after(t)
  assert is_open(schedule, t, seen)
  before = schedule.previous_round(seen)
  assert seen == 0 or not is_open(schedule, t, before)


@pytest.mark.parametrize(
  "schedule, rounds",
  [
    (Schedule(1, 1, 0), {1: (0,), 2: (0,), 3: (0,)}),
    (Schedule(1, 3, 1), {3: (0,), 6: (0,)}),
    (Schedule(2, 5, 2), {2: (1,), 5: (0,), 7: (1,)}),
    (Schedule(3, 2, 1), {1: (2,), 2: (0, 1), 3: (2,), 4: (0, 1)}),
    (Schedule(4, 4, 2), {1: (1,), 2: (2,), 3: (3,), 4: (0,), 5: (1,)}),
  ],
)
def test_small_schedules(schedule, rounds):
  last = max(rounds)
  found = {t: schedule.fragments(t) for t in range(1, last + 1)}
  assert {t: due for t, due in found.items() if due} == rounds
