"""Tapes are read as far as they can be, and reports say how far."""

import pytest

from ddiloco.protocol import tape, wire
from ddiloco.report.tapes import TapeReader, find_lives
from tests.report.history import UNIX_NS, History, s


def make(records=6, segments=3):
  history = History()
  tape_ = history.learner(1, life=2, at=3).join(4)
  for i in range(records - 1):
    tape_.step(5 + i)
  tape_.write(segments)
  return history, tape_


def read(history):
  warnings = []
  (life,) = find_lives(history)
  reader = TapeReader(history, life, warnings)
  if reader.header is None:
    return None, warnings
  return list(reader.records()), warnings


def test_reads_a_whole_tape():
  history, tape_ = make()
  records, warnings = read(history)
  assert records == tape_.records and not warnings


def test_clocks_are_laid_beside_each_other():
  history, tape_ = make()
  (life,) = find_lives(history)
  clock = TapeReader(history, life, []).clock
  assert clock.unix_ns(tape_.now(4)) == UNIX_NS + s(4)


def test_finds_lives_in_order_and_nothing_else():
  history = History()
  for learner, life in ((10, 1), (2, 2), (2, 1)):
    history.learner(learner, life).join(0).write()
  history.syncer().open(0, history.make_commit(0)).write()
  for key in ("tape/x.1/000000000", "tape/learner-1.1/0", "tape/note"):
    history.objects[key] = b"?"
  found = [(life.learner, life.incarnation) for life in find_lives(history)]
  assert found == [(None, 1), (2, 1), (2, 2), (10, 1)]


def damaged(tape_, number):
  data = bytearray(tape_.history.objects[tape_.key(number)])
  data[-3] ^= 1
  return bytes(data)


def other(tape_, number):
  """A valid segment of the right place that does not follow."""
  records = [tape.Record(9, r.event, r.commands) for r in tape_.records[:1]]
  return tape.encode_segment(tape_.actor, tape_.life, number, None, records)


def foreign(tape_, number):
  return tape.encode_segment(tape_.actor, tape_.life, number + 1, None, [])


@pytest.mark.parametrize(
  "break_it, says",
  [
    (damaged, "is damaged: tape: checksum differs; read up to there"),
    (lambda t, n: b"", "is damaged"),
    (lambda t, n: damaged(t, n)[:40], "is damaged"),
    (other, "holds record 9 where"),
    (foreign, "is segment"),
    (lambda t, n: wire.frame("tape", {"actor": 3}), "is damaged"),
    (lambda t, n: wire.frame("tape", [1]), "is damaged"),
  ],
)
@pytest.mark.parametrize("number", [1, 2])
def test_reads_up_to_the_damage(break_it, says, number):
  history, tape_ = make()
  history.objects[tape_.key(number)] = break_it(tape_, number)
  records, warnings = read(history)
  assert records == tape_.records[: 2 * number]
  (warning,) = warnings
  assert warning.startswith(
    f"tape of learner-1, life 2: segment {number} {says}"
  )


def test_reads_up_to_a_missing_segment():
  history, tape_ = make()
  del history.objects[tape_.key(1)]
  records, warnings = read(history)
  assert records == tape_.records[:2]
  assert warnings == [
    "tape of learner-1, life 2: segment 1 is missing; read up to there"
  ]


@pytest.mark.parametrize("how", ["missing", "damaged", "headless"])
def test_a_tape_without_its_beginning_is_left_out(how):
  history, tape_ = make()
  key = tape_.key(0)
  match how:
    case "missing":
      del history.objects[key]
    case "damaged":
      history.objects[key] = damaged(tape_, 0)
    case "headless":
      history.objects[key] = tape.encode_segment(
        tape_.actor, tape_.life, 0, None, tape_.records[:2]
      )
  records, warnings = read(history)
  assert records is None
  assert warnings[0].startswith("tape of learner-1, life 2: segment 0 ")
