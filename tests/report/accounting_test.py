"""Where the time went: each second of a learner has one cause."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import learner_types as lt
from ddiloco.report import accounting
from ddiloco.report.accounting import Span, account
from ddiloco.report.run import load
from ddiloco.types import SECOND_NS
from tests.report.history import (
  UNIX_NS,
  History,
  apply,
  encode,
  journal,
  killed_run,
  ms,
  s,
)


def seconds(ns):
  return round(ns / SECOND_NS, 6)


def times_of(history, path, learner=0):
  """(allocated, good, {cause: bad}) of a learner, in seconds."""
  time = account(load(history, path)).learners[learner]
  bad = {c: seconds(ns) for c, ns in time.bad_ns.items() if ns}
  return seconds(time.allocated_ns), seconds(time.good_ns), bad


def test_every_second_of_a_killed_learner(tmp_path):
  history = killed_run(tmp_path)
  assert times_of(history, tmp_path, 1) == (
    9.95,
    5,  # 1 to 5 s, and 9 to 10 s
    {"program_startup": 0.9, "infrastructure_recovery": 4, "other": 0.05},
  )
  result = account(load(history, tmp_path))
  (death,) = result.deaths
  assert (death.learner, death.incarnation, death.code) == (1, 1, -9)
  assert death.at_ns == UNIX_NS + s(6) and death.back_ns == UNIX_NS + s(9)
  assert result.goodput + sum(result.badput.values()) == pytest.approx(1)
  assert seconds(result.wall_ns) == 10.05
  # From the first dispatch at 1 s to the end at 10.05 s; no step at the last.
  assert result.uptime == pytest.approx(9 / 9.05)


def test_exchange_and_steps(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(1).step(2, encode(1, 1))
  tape.step(3, exchange=ms(250)).stop(3)
  assert times_of(tape.write(), tmp_path) == (
    3,
    1.75,
    {"program_startup": 1, "exchange": 0.25},
  )


def test_waiting_is_what_the_exchange_leaves_of_it(tmp_path):
  history = History(wait="exact")
  tape = history.learner(0, at=0).join(1)
  tape.step(2, encode(1, 1), hold=True).go(4, apply(1, 1))
  tape.step(5, exchange=ms(500)).stop(5)
  assert times_of(tape.write(), tmp_path) == (
    5,
    2,
    {"program_startup": 1, "exchange": 0.5, "waiting": 1.5},
  )


def test_more_exchange_than_gap_comes_out_of_the_step(tmp_path):
  history = History(wait="exact")
  tape = history.learner(0, at=0).join(1)
  tape.step(2, hold=True).go(2.5).step(5, exchange=s(9)).stop(5)
  assert times_of(tape.write(), tmp_path) == (
    5,
    1,
    {"program_startup": 1, "exchange": 3},
  )


def test_compilation_and_stalls_are_no_goodput(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(1)
  at = 8  # The first step compiles for 7 s.
  tape.step(at)
  for _ in range(20):
    at += 0.1
    tape.step(at)
  tape.step(at + 5.1)
  tape.stop(at + 5.1)
  assert times_of(tape.write(), tmp_path) == (
    15.1,
    2.2,
    {"program_startup": 7.9, "stall": 5},
  )
  spans = account(load(history, tmp_path)).learners[0].spans
  assert [(x.kind, seconds(x.end_ns - x.begin_ns), x.steps) for x in spans] == [
    ("start", 1, 0),
    ("start", 6.9, 0),
    ("step", 2.1, 21),
    ("stall", 5, 0),
    ("step", 0.1, 1),
  ]


def test_slow_steps_are_no_stall(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(0)
  for at in (1, 2, 3, 4, 13):
    tape.step(at)
  assert times_of(tape.stop(13).write(), tmp_path) == (13, 13, {})


def test_a_learner_that_leaves_is_allocated_until_then(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(1)
  for at in range(2, 21):
    tape.step(at)
  tape.stop(20).write()
  history.learner(1, at=0).join(1).step(4).stop(4, "SIGTERM").write()
  assert times_of(history, tmp_path, 1) == (4, 3, {"program_startup": 1})
  result = account(load(history, tmp_path))
  assert result.learners[1].left_ns == UNIX_NS + s(4)
  assert not result.deaths


def test_a_learner_that_left_and_came_back_had_no_part_meanwhile(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(1)
  for at in range(2, 31):
    tape.step(at)
  tape.stop(30).write()
  first = history.learner(1, at=0).join(1)
  first.step(3).step(5).stop(5, "SIGTERM").write()
  again = history.learner(1, life=2, at=20).join(22)
  again.step(24).step(26).step(28).step(30).stop(30).write()
  expected = (15, 12, {"program_startup": 3})
  assert times_of(history, tmp_path, 1) == expected
  result = account(load(history, tmp_path))
  assert not result.deaths and not result.learners[1].left_ns
  kinds = [(span.kind, span.begin_ns - UNIX_NS, span.end_ns - UNIX_NS)
           for span in result.learners[1].spans]  # fmt: skip
  assert ("start", s(20), s(22)) in kinds
  assert not [k for k in kinds if k[0] == "dead"]


def test_a_process_is_not_that_of_the_life_which_took_its_place(tmp_path):
  history = History()
  first = history.learner(0, at=0).join(1)
  first.step(3).step(9).stop(9, "superseded by life 2").write()
  other = history.learner(0, life=2, at=6).join(8)
  for at in range(9, 21):
    other.step(at)
  other.write()
  journal(
    tmp_path,
    (0, "start", {"who": "learner 0", "pid": 1}),
    (10, "exit", {"who": "learner 0", "pid": 1, "code": 3}),
    (20, "end", {"status": "stopped", "reason": "SIGINT"}),
  )
  run = load(history, tmp_path)
  assert [life.exit_code for life in run.learners[0]] == [3, None]
  times = account(run).learners[0]
  assert seconds(times.allocated_ns) == 20
  assert times.spans[-1] == Span("step", UNIX_NS + s(8), UNIX_NS + s(20), 12)


def test_a_learner_that_never_came_back(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(1)
  for at in range(2, 21):
    tape.step(at)
  tape.stop(20).write()
  history.learner(1, at=0).join(1).step(4).write()
  assert times_of(history, tmp_path, 1) == (
    20,
    3,
    {"program_startup": 1, "infrastructure_recovery": 16},
  )
  (death,) = account(load(history, tmp_path)).deaths
  assert (death.learner, death.back_ns) == (1, 0)


def test_a_process_that_never_joined(tmp_path):
  history = History()
  history.learner(0, at=0).join(1).step(10).stop(10).write()
  journal(
    tmp_path,
    (0, "start", {"who": "learner 0", "pid": 1}),
    (4, "start", {"who": "learner 1", "pid": 2}),
    (4, "start", {"who": "learner x", "pid": 2}),
  )
  assert times_of(history, tmp_path, 1) == (6, 0, {"program_startup": 6})


def test_time_between_sessions_does_not_count(tmp_path):
  history = History()
  history.learner(0, at=0).join(1).step(2).stop(2, "SIGTERM").write()
  history.learner(0, life=2, at=100).join(101).step(103).stop(103).write()
  journal(
    tmp_path,
    (0, "start", {"who": "learner 0", "pid": 1}),
    (2.5, "exit", {"who": "learner 0", "pid": 1, "code": 4}),
    (2.6, "end", {"status": "stopped", "reason": "SIGINT"}),
    (99, "start", {"who": "learner 0", "pid": 1}),
    (103.5, "end", {"status": "completed", "reason": ""}),
  )
  assert times_of(history, tmp_path) == (6, 3, {"program_startup": 3})
  result = account(load(history, tmp_path))
  assert seconds(result.wall_ns) == 6
  assert result.uptime == 1 and not result.deaths


def test_roles_started_by_hand_have_sessions_too(tmp_path):
  history = History()
  history.learner(0, at=0).join(1).step(2).stop(2, "SIGTERM").write()
  history.learner(0, life=2, at=100).join(101).step(103).stop(103).write()
  assert times_of(history, tmp_path) == (5, 3, {"program_startup": 2})


def test_a_life_that_woke_up_after_its_successor_is_cut(tmp_path):
  history = History()
  zombie = history.learner(0, at=0).join(1)
  for at in (2, 3, 20, 21):
    zombie.step(at)
  zombie.stop(21, "superseded by life 2").write()
  new = history.learner(0, life=2, at=8).join(10)
  for at in range(11, 31):
    new.step(at)
  new.stop(30).write()
  assert times_of(history, tmp_path) == (
    30,
    22,
    {"program_startup": 1, "infrastructure_recovery": 7},
  )


def test_nothing_ran(tmp_path):
  history = History()
  history.syncer().open(1, history.make_commit(0)).write()
  result = account(load(history, tmp_path))
  assert result.goodput is None and result.uptime is None
  assert result.badput == {} and result.learners == {}


def test_a_syncer_death(tmp_path):
  history = History()
  history.syncer(at=0).open(1, history.make_commit(0)).write()
  second = history.syncer(life=2, at=5).open(6, history.make_commit(0))
  second.whole_round(1, 7, [0]).write()
  history.learner(0, at=0).join(1).step(8).write()
  journal(
    tmp_path,
    (0, "start", {"who": "syncer", "pid": 1}),
    (2, "exit", {"who": "syncer", "pid": 1, "code": -9}),
    (4, "start", {"who": "syncer", "pid": 2}),
  )
  (death,) = account(load(history, tmp_path)).deaths
  assert (death.learner, death.code) == (None, -9)
  assert seconds(death.at_ns - UNIX_NS) == 2
  assert seconds(death.back_ns - UNIX_NS) == 7.04


def test_a_shard_is_back_with_a_commit_of_its_own(tmp_path):
  """Of two shards the second dies; the first commits round 2 meanwhile."""
  history = History(syncer={"shards": 2})
  first = history.syncer(at=0).open(1, history.make_commit(0))
  first.follow(1.5, history.make_commit(1)).whole_round(2, 6, [0]).write()
  second = history.syncer(life=2, at=0).open(1, history.make_commit(0))
  second.whole_round(1, 1.2, [0]).write()
  again = history.syncer(life=4, at=31).open(32, history.make_commit(2))
  again.whole_round(3, 33, [0]).write()
  history.learner(0, at=0).join(1).step(40).write()
  journal(
    tmp_path,
    (0, "start", {"who": "syncer", "pid": 1}),
    (0, "start", {"who": "syncer 1", "pid": 2}),
    (2, "exit", {"who": "syncer 1", "pid": 2, "code": -9}),
    (4, "start", {"who": "syncer 1", "pid": 3}),
  )
  run = load(history, tmp_path)
  assert {t for t, r in run.syncer.rounds.items() if r.committed_ns} == {
    1,
    2,
    3,
  }
  (death,) = account(run).deaths
  assert (death.shard, seconds(death.back_ns - UNIX_NS)) == (1, 33.04)


STEPS = st.lists(
  st.tuples(
    st.integers(1, 30_000),  # ms a step takes
    st.integers(0, 2_000),  # ms it is held before
    st.integers(0, 40_000),  # ms of the exchange
  ),
  max_size=12,
)


@given(
  lives=st.lists(
    st.tuples(STEPS, st.sampled_from(["", "SIGTERM", "completed"])),
    min_size=1,
    max_size=4,
  ),
  pause=st.integers(0, 9_000),
)
def test_all_time_is_booked_once(tmp_path_factory, lives, pause):
  history, at = History(), 0.0
  for number, (steps, reason) in enumerate(lives, 1):
    tape = history.learner(0, life=number, at=at)
    at += 0.5
    tape.join(at)
    for long, held, exchange in steps:
      at += long / 1000
      tape.step(at, exchange=ms(exchange), hold=held > 0)
      if held:
        at += held / 1000
        tape.go(at)
    if reason:
      tape.stop(at, reason)
    tape.write()
    at += pause / 1000
  result = account(load(history, tmp_path_factory.mktemp("run")))
  for time in result.learners.values():
    assert time.good_ns >= 0
    assert min(time.bad_ns.values()) >= 0
    assert time.good_ns + sum(time.bad_ns.values()) == time.allocated_ns
    assert all(span.end_ns >= span.begin_ns for span in time.spans)
  if result.uptime is not None:
    assert 0 <= result.uptime <= 1
  if result.goodput is not None:
    assert result.goodput + sum(result.badput.values()) == pytest.approx(1)


def test_every_kind_of_event_is_read(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(0).step(1)
  tape.record(lt.FetchFailed(tape.now(1), 1, "gone"))
  tape.record(lt.AnswerFailed(tape.now(1), 1, 1, "no reply"))
  tape.record(lt.CaughtUp(tape.now(1.5), 3, ((3, 1), (2, 1)), 9))
  assert times_of(tape.stop(2).write(), tmp_path) == (2, 1, {"other": 1})


def test_causes_are_the_documented_ones():
  assert set(accounting.CAUSES) >= {
    "program_startup",
    "infrastructure_recovery",
    "exchange",
    "waiting",
    "other",
  }
  assert Span("step", 0, 1).steps == 0


def test_overlapping_lives_are_counted_once(tmp_path):
  history = History()
  history.learner(0, at=0).join(1).step(20).step(21).write()
  history.learner(0, life=2, at=2).join(9).step(10).step(22).write()
  history.learner(0, life=3, at=2).join(8).step(25).stop(25).write()
  assert times_of(history, tmp_path) == (25, 17, {"program_startup": 8})


def test_deaths_before_the_first_step(tmp_path):
  history = History()
  history.learner(0, at=0).join(1).step(15).write()
  history.learner(1, life=2, at=9).join(10).step(12).step(14).write()
  who = {"who": "learner 1"}
  journal(
    tmp_path,
    (2, "start", {**who, "pid": 2}),
    (5, "exit", {**who, "pid": 2, "code": 1}),
    (8, "start", {**who, "pid": 3}),
  )
  (death,) = account(load(history, tmp_path)).deaths
  assert (death.learner, death.incarnation, death.code) == (1, 0, 1)
  assert death.at_ns == UNIX_NS + s(5) and death.back_ns == UNIX_NS + s(10)


def test_a_life_that_came_after_the_end_does_not_move_it(tmp_path):
  history = History()
  sync = history.syncer(at=0).open(1, history.make_commit(0))
  sync.whole_round(1, 4, [0]).stop(4.1).write()
  history.learner(0, at=0).join(1).step(5).stop(5).write()
  history.learner(1, at=8).join(9, seen=1).stop(9).write()
  end = {"status": "completed", "reason": ""}
  journal(tmp_path, (0, "start", {"who": "learner 0"}), (9, "end", end))
  result = account(load(history, tmp_path))
  assert seconds(result.end_ns - UNIX_NS) == 5
  assert result.learners[1].allocated_ns == 0


def test_uptime_is_the_union_of_all_steps(tmp_path):
  history = History()
  history.learner(0, at=0).join(1).step(12).step(13).stop(13).write()
  other = history.learner(1, at=0).join(2)
  other.step(3).step(4, hold=True).go(5).step(6, hold=True).go(14)
  other.step(15).stop(21).write()
  # Stepping from 1 to 13 and from 14 to 15 s, of the time from 1 to 21 s.
  assert account(load(history, tmp_path)).uptime == pytest.approx(13 / 20)


@pytest.mark.parametrize("learner", [0, None])
def test_a_wall_clock_that_is_wrong_is_put_right_by_the_launchers(
  tmp_path, learner
):
  history = History()
  right = history.learner(0, at=0).join(1)
  for at in range(2, 21):
    right.step(at)
  right.stop(20).write()
  if learner is None:
    odd = history.syncer(life=1, at=2).open(3, history.make_commit(0)).stop(9)
  else:
    odd = history.learner(1, at=2).join(3).step(9).stop(9)
  odd.header = dataclasses.replace(
    odd.header, pid=7, started_unix_ns=UNIX_NS + s(5 * 3600)
  )
  odd.write()
  who = "standby 1" if learner is None else "learner 1"
  # The launcher started the process a second before its life began.
  start = {"who": who, "pid": 7, "clock_ns": s(1000 - 1)}
  journal(
    tmp_path,
    (0, "start", {"who": "learner 0", "pid": 1, "clock_ns": s(5)}),
    (1, "start", start),
    (21, "end", {"status": "stopped", "reason": "SIGINT"}),
  )
  run = load(history, tmp_path)
  life = run.syncer.lives[0] if learner is None else run.learners[1][0]
  assert life.started_ns == UNIX_NS + s(2)
  assert seconds(account(run).wall_ns) == 20


def test_a_life_of_elsewhere_keeps_its_own_wall_clock(tmp_path):
  history = History()
  tape = history.learner(0, at=50).join(51).step(52).stop(52)
  tape.header = dataclasses.replace(tape.header, pid=7)
  tape.write()
  ended = {"who": "learner 0", "pid": 7, "code": 1}
  for pid, clock_ns in ((7, s(900)), (8, s(999)), (7, "odd")):
    line = {"who": "learner 0", "pid": pid, "clock_ns": clock_ns}
    journal(tmp_path, (1, "start", line), (9, "exit", ended))
  run = load(history, tmp_path)
  assert run.learners[0][0].started_ns == UNIX_NS + s(50)
