"""What the exchange keeps after every commit of a long run."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.protocol.retention import is_full, keeps, outlived, sweep
from ddiloco.protocol.schedule import Schedule
from tests.protocol.scenario import make_rules

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


def chain_of(schedule, p, version, every):
  """Versions up to this one from the newest full one on, oldest first."""
  own = [0]
  while own[-1] < version:
    own.append(schedule.version_after(p, own[-1]))
  assert [schedule.ordinal(p, v) for v in own] == list(range(len(own)))
  return own[(len(own) - 1) // every * every :]


@given(SCHEDULES, st.integers(1, 4), st.integers(1, 60))
@settings(max_examples=30)
def test_of_steps_a_chain_to_each_of_the_newest_two_stays(
  schedule, every, last
):
  rules = make_rules(
    schedule.num_fragments, schedule.interval, 1, full_every=every
  )
  stored = {
    (0, p, kind)
    for p in range(schedule.num_fragments)
    for kind in ("params", "outer")
  }
  t = 0
  while t < last:
    t = schedule.next_round(t)
    for p in schedule.fragments(t):
      stored |= {(t, p, "outer"), (t, p, "step")}
      if is_full(t, p, rules):
        stored.add((t, p, "params"))
    for version, p in sweep(t, schedule).states:
      gone = outlived(version, p, schedule, every)
      kinds = gone.kinds or ("params", "outer", "step")
      stored -= {(v, p, kind) for v in gone.versions for kind in kinds}
    needed = set()
    for p in range(schedule.num_fragments):
      newest = schedule.version_before(p, t + 1)
      for version in {newest, schedule.version_before(p, newest)}:
        full, *steps = chain_of(schedule, p, version, every)
        needed |= {(version, p, "outer"), (full, p, "params")}
        needed |= {(v, p, "step") for v in (*steps, version) if v}
      # A version that is full as well lies there in full at once.
      if newest and is_full(newest, p, rules):
        needed.add((newest, p, "params"))
    assert stored == needed
    for version, p, kind in needed:
      newest = schedule.version_before(p, t + 1)
      assert keeps(kind, version, newest, p, rules)


@given(SCHEDULES, st.integers(1, 4), st.integers(1, 60))
@settings(max_examples=30)
def test_what_a_start_keeps_is_what_sweeps_leave(schedule, every, last):
  rules = make_rules(
    schedule.num_fragments, schedule.interval, 1, full_every=every
  )
  for p in range(schedule.num_fragments):
    newest = schedule.version_before(p, last + 1)
    before = schedule.version_before(p, newest)
    version, swept = 0, set()
    while version < before:  # all that were outlived by then
      gone = outlived(version, p, schedule, every)
      kinds = gone.kinds or ("params", "outer", "step")
      swept |= {(v, kind) for v in gone.versions for kind in kinds}
      version = schedule.version_after(p, version)
    version = 0
    while version <= newest:
      for kind in ("params", "outer", "step"):
        there = kind != "params" or is_full(version, p, rules)
        if there:
          kept = keeps(kind, version, newest, p, rules)
          assert kept == ((version, kind) not in swept)
      version = schedule.version_after(p, version)


@given(SCHEDULES, st.integers(1, 60))
def test_answers_that_came_after_the_sweep_go_an_interval_later(schedule, t):
  t = schedule.next_round(t)
  assert t in sweep(t, schedule).answers
  assert t in sweep(t + schedule.interval, schedule).answers
