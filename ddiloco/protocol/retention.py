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
  + M * A * attempts + 2 H C + 5 bytes for every older round.

A reader that finds an object gone takes the one of the newest commit.
"""

from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.syncer_types import Sweep

SWEPT = b"swept"  # what is left of an old commit


def sweep(t: int, schedule: Schedule) -> Sweep:
  """What goes once round t is committed."""
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
