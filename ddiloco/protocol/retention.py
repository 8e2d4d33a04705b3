"""What the exchange keeps, and what a commit makes deletable.

Kept: each fragment's newest two versions (so that whoever reads all of them
has H global steps to do so), the answers of uncommitted rounds, the commits
of the last 2 H global steps and commit 0. Of older commits the content goes,
but not the key: a syncer that has slept through its round could create it
again, and the round would have two commits. With F bytes of f32 parameters, S
bytes of outer-optimizer state, A encoded bytes of one answer for every
fragment, M learners and C bytes a commit, the exchange without its tapes
stays below

  2 (F + S) + (largest fragment and its outer state) * max(tau, 1)
  + M * A * attempts + 2 H C + 5 bytes for every older round,

and one transfer for each learner that recovers.

Where versions are encoded steps, of E bytes for every fragment, and every
R-th lies there in full as well, a version is kept with all that it takes to
put it together: the newest full one up to it and the steps since. S then has
the F bytes of the downlink residual in it, and R E is added to the bound.

A reader that finds an object gone takes the one of the newest commit.
"""

from typing import NamedTuple

from ddiloco.protocol.rules import Rules
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.syncer_types import Sweep

SWEPT = b"swept"  # what is left of an old commit
PARAMS = "params"
OUTER = "outer"
STEP = "step"


def sweep(t: int, schedule: Schedule) -> Sweep:
  """What goes once round t is committed.

  `states` are the versions that are no longer one of the newest two; see
  `outlived` for their objects.
  """
  before = {p: schedule.version_before(p, t) for p in schedule.fragments(t)}
  states = tuple(
    (schedule.version_before(p, version), p)
    for p, version in before.items()
    if version  # version 0 has none before it
  )
  old = schedule.previous_round(t - 2 * schedule.interval + 1)
  # Answers that came after their round's own sweep go one interval later.
  late = schedule.previous_round(t - schedule.interval + 1)
  return Sweep(
    commits=(old,) if old else (),
    states=states,
    answers=tuple(u for u in (late, t) if u),
  )


class Outlived(NamedTuple):
  """Versions of a fragment, and the kinds of their objects; (): all."""

  versions: tuple[int, ...]
  kinds: tuple[str, ...] = ()


def outlived(
  version: int, p: int, schedule: Schedule, full_every: int
) -> Outlived:
  """What goes with a version that is no longer one of the newest two.

  Its outer state at once, and the step to a full one. The rest once the
  version after it is put together without it, and with it all of that chain.
  """
  if not full_every:
    return Outlived((version,))
  after = schedule.version_after(p, version)
  oldest = last_full(version, p, schedule, full_every)
  if last_full(after, p, schedule, full_every) < after:
    led_to = (STEP,) if version == oldest else ()
    return Outlived((version,), (OUTER, *led_to))
  chain = [version]
  while chain[-1] > oldest:
    chain.append(schedule.version_before(p, chain[-1]))
  return Outlived(tuple(chain))


def keeps(kind: str, version: int, newest: int, p: int, rules: Rules) -> bool:
  """Whether an object of a version is needed beside the newest one.

  One that is newer may be another syncer's, who is about to commit it.

  Args:
    kind: `PARAMS`, `OUTER` or `STEP`.
    version: of the object.
    newest: the fragment's newest version.
    p: the fragment.
    rules: the run's.
  """
  schedule, full_every = rules.schedule, rules.full_every
  before = schedule.version_before(p, newest)
  if kind == OUTER or not full_every or version >= before:
    return version >= before
  full = last_full(before, p, schedule, full_every)
  return version > full or (kind == PARAMS and version == full)


def is_full(version: int, p: int, rules: Rules) -> bool:
  """Whether a version's parameters are stored, and not its step alone."""
  if not rules.full_every:
    return True
  return last_full(version, p, rules.schedule, rules.full_every) == version


def last_full(version: int, p: int, schedule: Schedule, every: int) -> int:
  """The newest full version up to this one: each `every`-th, from 0 on."""
  beyond = schedule.ordinal(p, version) % every
  for _ in range(beyond):
    version = schedule.version_before(p, version)
  return version
