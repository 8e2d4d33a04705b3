"""Bytes of answers up and of parameters down, by round."""

import collections

from ddiloco.protocol.retention import last_full
from ddiloco.protocol.schedule import Schedule, make_schedule
from ddiloco.report.lives import LearnerLife
from ddiloco.report.run import Run

UpDown = tuple[dict[int, int], dict[int, int]]


def traffic(run: Run) -> UpDown:
  """(up, down): bytes by the round they belong to.

  Up are the parts and headers of every answer written, also of those the
  syncer never looked at: these are taken to be as long as the others. Down
  are parameters, or the encoded steps to them, those a life starts from
  included.
  """
  up: collections.Counter[int] = collections.Counter()
  down: collections.Counter[int] = collections.Counter()
  syncer = run.syncer
  for lives in run.learners.values():
    for life in lives:
      for t, attempt, fragments in life.encodes:
        key = (t, life.learner, life.incarnation, attempt)
        if key in syncer.answer_bytes:
          up[t] += syncer.answer_bytes[key]
        elif (t, attempt) in life.written:
          up[t] += syncer.due_bytes(fragments) + syncer.header_bytes
      _add_down(down, run, life)
  return dict(sorted(up.items())), dict(sorted(down.items()))


def _add_down(
  down: collections.Counter[int], run: Run, life: LearnerLife
) -> None:
  """What one life has read; who held the version before read a step alone."""
  schedule = make_schedule(run.config.sync)
  held: dict[int, int] = {}

  def read(t: int, p: int, version: int) -> None:
    before = schedule.version_before(p, version)
    down[t] += _version_bytes(run, schedule, p, version, held.get(p) == before)
    held[p] = max(version, held.get(p, 0))

  if life.joined_ns:
    for p in range(run.num_fragments):
      version = schedule.version_before(p, life.joined_round + 1)
      read(life.joined_round, p, version)
  for t, fetches in life.fetched.items():
    for fragments in fetches:
      for p in fragments:
        read(t, p, t)


def _version_bytes(
  run: Run, schedule: Schedule, p: int, version: int, follows: bool
) -> int:
  """To bring a version to who holds the one before, or to anybody else."""
  steps = run.syncer.step_bytes
  if follows and (version, p) in steps:
    return steps[version, p]
  total, every = run.fragment_bytes[p], run.config.codec.down_full_every
  if (version, p) in steps:
    full = last_full(version, p, schedule, every)
    while version > full:
      total += steps.get((version, p), 0)
      version = schedule.version_before(p, version)
  return total
