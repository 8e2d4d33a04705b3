"""Failure logs: what is read, and what is refused by its line."""

import pytest

from ddiloco.planning import failure_log
from ddiloco.planning.failure_log import Outage

GOOD = """start,end,chips,learner
2026-01-31T12:01:00,2026-01-31T12:02:30,64,
2026-01-31T12:00:00+00:00,2026-01-31T12:03:00Z,8,1
"""


def test_times_count_from_the_first_outage():
  assert failure_log.parse(GOOD, chips=72) == [
    Outage(3, 0.0, 180.0, 8, 1),
    Outage(2, 60.0, 150.0, 64, None),
  ]
  seconds = "Start, End, Chips\n100,160,4\n\n90.5, 95, 1\n"
  assert failure_log.parse(seconds, chips=4) == [
    Outage(4, 0.0, 4.5, 1),
    Outage(2, 9.5, 69.5, 4),
  ]


@pytest.mark.parametrize(
  "text, words",
  [
    ("", "the log's first line is empty: it needs a header"),
    ("start,end\n1,2\n", "first line is start, end: it needs"),
    ("start,end,chips,why\n", "first line is start, end, chips, why"),
    ("start,end,chips\n", "no outage"),
    ("start,end,chips\n1,2\n", "line 2 of the log has not one value for each"),
    ("start,end,chips\n1,2,3,4\n", "line 2 of the log has not one value"),
    ("start,end,chips\n1,2,3\n4,,1\n", "line 3 of the log has no end"),
    ("start,end,chips\n5,5,1\n", "line 2 of the log ends at 5, not after"),
    ("start,end,chips\nnan,5,1\n", "start = 'nan' is neither seconds nor"),
    ("start,end,chips\n1,later,1\n", "end = 'later' is neither seconds nor"),
    ("start,end,chips\n1,2,0\n", "chips = '0' is no whole number from 1 on"),
    ("start,end,chips\n1,2,1.5\n", "chips = '1.5' is no whole number"),
    (
      "start,end,chips,learner\n1,2,1,-1\n",
      "learner = '-1' is no whole number",
    ),
    (
      "start,end,chips\n0,9,6\n3,8,5\n",
      "line 3 of the log makes 11 chips that are away at once, and there are 1",
    ),
  ],
)
def test_what_is_wrong_is_named_with_its_line(text, words):
  with pytest.raises(ValueError) as error:
    failure_log.parse(text, chips=10)
  assert words in str(error.value)


def test_chips_that_are_back_may_leave_again():
  log = "start,end,chips\n0,9,10\n9,12,10\n"
  assert len(failure_log.parse(log, chips=10)) == 2
