"""How well a run went under chaos, from its tapes and its journal.

All its processes are on one machine, so their monotonic clocks are one.
"""

import itertools
from collections.abc import Collection, Iterable

import numpy as np

from ddiloco.protocol.learner_types import CommitSeen, Encode, StepDone
from ddiloco.protocol.syncer_types import Committed
from ddiloco.report.lives import LearnerLife
from ddiloco.sim.history import History, Life
from ddiloco.types import SECOND_NS


def longest_gap_s(history: History) -> float:
  """The longest time from one commit to the next, as anybody saw them."""
  first_ns: dict[int, int] = {}
  for life in history.lives:
    for record in life.records:
      event = record.event
      if (
        isinstance(event, Committed)
        and event.won
        or isinstance(event, CommitSeen)
      ):
        known_ns = first_ns.get(event.round, event.now_ns)
        first_ns[event.round] = min(known_ns, event.now_ns)
  times = [first_ns[t] for t in sorted(first_ns)]
  pairs = itertools.pairwise(times)
  return max((b - a for a, b in pairs), default=0) / SECOND_NS


def steps_lost(history: History, unexplained: Collection[int]) -> int:
  """Inner steps that learners have lost because others died.

  Of every life: steps that its numbering lacks, or has twice; and of lives
  that ended although no fault had hit them (`unexplained` pids), the steps
  that no answer carried.
  """
  lost = 0
  for life in history.lives:
    if life.learner is not None:
      lost += _odd_steps(life)
      if life.header.pid in unexplained:
        lost += _unanswered_steps(life)
  return lost


def _odd_steps(life: Life) -> int:
  numbers = [
    record.event.step
    for record in life.records
    if isinstance(record.event, StepDone)
  ]
  if not numbers:
    return 0
  known = set(numbers)
  repeated = len(numbers) - len(known)
  return repeated + max(known) - min(known) + 1 - len(known)


def _unanswered_steps(life: Life) -> int:
  steps = 0
  for record in life.records:
    steps += isinstance(record.event, StepDone)
    if any(isinstance(command, Encode) for command in record.commands):
      steps = 0
  return steps


def uptime(lives: Iterable[LearnerLife], unflushed_ns: int = 0) -> float | None:
  """Share of the time in which a learner was alive that one was training.

  A life is alive from its first step until it is told to stop, or its process
  is gone, and trains while a step of it is under way. None: there was no step.

  Args:
    lives: of all learners.
    unflushed_ns: the last moments of a killed process, which are on no tape.
  """
  lives = [life for life in lives if life.steps]
  alive = []
  for life in lives:
    over_ns = 0 if life.stopped else life.exited_ns - unflushed_ns
    alive.append((int(life.begin_ns[0]), max(over_ns, int(life.end_ns[-1]))))
  steps = [
    pair
    for life in lives
    for pair in zip(life.begin_ns.tolist(), life.end_ns.tolist(), strict=True)
  ]
  total = covered_ns(alive)
  return covered_ns(steps) / total if total else None


def covered_ns(spans: Iterable[tuple[int, int]]) -> int:
  """The length of a union of intervals."""
  ordered = np.array(sorted(spans), np.int64).reshape(-1, 2)
  if not len(ordered):
    return 0
  begin, end = ordered[:, 0], np.maximum.accumulate(ordered[:, 1])
  before = np.concatenate(([begin[0]], end[:-1]))
  return int(np.maximum(end - np.maximum(begin, before), 0).sum())
