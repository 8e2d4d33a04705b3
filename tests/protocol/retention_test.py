"""What the exchange keeps after every commit of a long run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol.retention import sweep
from ddiloco.protocol.schedule import Schedule

SCHEDULES = st.builds(
  Schedule,
  num_fragments=st.integers(1, 12),
  interval=st.integers(1, 12),
  overlap=st.just(1),
)


@given(SCHEDULES, st.integers(1, 60))
@settings(max_examples=30)
def test_the_newest_two_states_and_the_last_commits_stay(schedule, last):
  fragments = range(schedule.num_fragments)
  commits = {0}
  states = {(0, p) for p in fragments}
  answers = set()
  t = 0
  while t < last:
    t = schedule.next_round(t)
    answers.add(t)
    commits.add(t)
    states |= {(t, p) for p in schedule.fragments(t)}
    gone = sweep(t, schedule)
    assert set(gone.commits) <= commits and set(gone.states) <= states
    commits -= set(gone.commits)
    states -= set(gone.states)
    answers -= set(gone.answers)
    newest = {(schedule.version_before(p, t + 1), p) for p in fragments}
    before = {(schedule.version_before(p, v), p) for v, p in newest}
    assert states == newest | before
    kept = [
      u
      for u in range(max(t - 2 * schedule.interval, 0) + 1, t + 1)
      if schedule.is_round(u)
    ]
    assert sorted(commits) == [0, *kept]
    assert not answers


@given(SCHEDULES, st.integers(1, 60))
def test_answers_that_came_after_the_sweep_go_an_interval_later(schedule, t):
  t = schedule.next_round(t)
  assert t in sweep(t, schedule).answers
  assert t in sweep(t + schedule.interval, schedule).answers
