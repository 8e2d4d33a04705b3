"""Which fragments are due when, and which rounds are open to whom.

Fragment p of P is due at every t with t mod H = t_p = floor(p H / P): exactly
once in H global steps for any P and H (paper, Sec. 3.1).
"""

import dataclasses
import itertools
from typing import NamedTuple

from ddiloco.config import SyncConfig


class _Residue(NamedTuple):
  """What all global steps t with the same t mod H have in common."""

  due: tuple[int, ...]  # the fragments, ascending
  turn: int  # how many global steps of an interval before it have a round
  ahead: int  # global steps to the next round
  behind: int  # global steps since the round before


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
  """The rounds of a run. Global steps without a fragment are no rounds."""

  num_fragments: int  # P
  interval: int  # H, global steps
  overlap: int  # tau, steps
  # Looked up at every transition, so worked out once.
  _residues: tuple[_Residue, ...] = dataclasses.field(
    init=False, repr=False, compare=False
  )

  def __post_init__(self):
    object.__setattr__(self, "_residues", _residues(self))

  def offset(self, fragment: int) -> int:
    """t_p, in global steps."""
    return fragment * self.interval // self.num_fragments

  def fragments(self, t: int) -> tuple[int, ...]:
    """F(t), ascending; empty if t is no round."""
    return self._residues[t % self.interval].due if t > 0 else ()

  def is_round(self, t: int) -> bool:
    """Whether any fragment is due at t."""
    return bool(self.fragments(t))

  def next_round(self, t: int) -> int:
    """The smallest round after t >= 0."""
    return t + self._residues[t % self.interval].ahead

  def previous_round(self, t: int) -> int:
    """The largest round before t, or 0."""
    return max(t - self._residues[t % self.interval].behind, 0)

  def gap(self, t: int) -> int:
    """g(t): t minus the round before it."""
    return t - self.previous_round(t)

  def shard(self, t: int, shards: int) -> int:
    """Which of the syncer's shards owns round t: offsets are dealt in turn."""
    return self._residues[t % self.interval].turn % shards

  def previous_owned(self, t: int, shards: int) -> int:
    """The largest round before t that has t's owner, or 0."""
    before = self.previous_round(t)
    while before and self.shard(before, shards) != self.shard(t, shards):
      before = self.previous_round(before)
    return before

  def version_before(self, fragment: int, t: int) -> int:
    """The newest version of a fragment that is older than t."""
    t -= 1
    behind = (t - self.offset(fragment)) % self.interval
    return max(t - behind, 0)

  def version_after(self, fragment: int, version: int) -> int:
    """The version that follows one of a fragment's versions."""
    if version:
      return version + self.interval
    return self.offset(fragment) or self.interval

  def ordinal(self, fragment: int, version: int) -> int:
    """How many versions of a fragment come before one of them."""
    if not version:
      return 0
    first = self.version_after(fragment, 0)
    return (version - first) // self.interval + 1

  def opens_after(self, t: int) -> int:
    """The commit a learner must have seen for round t to be open to it."""
    return self.previous_round(t - max(self.overlap, 1) + 1)

  def open_rounds(self, seen: int) -> tuple[int, ...]:
    """The rounds open to whoever has seen the commits up to `seen` >= 0."""
    t = self.next_round(seen)
    last = t + max(self.overlap, 1) - 1
    rounds = []
    while t <= last:
      rounds.append(t)
      t = self.next_round(t)
    return tuple(rounds)


def make_schedule(sync: SyncConfig) -> Schedule:
  """That of a config's `sync` group."""
  return Schedule(sync.num_fragments, sync.interval_steps, sync.overlap_steps)


def _residues(schedule: Schedule) -> tuple[_Residue, ...]:
  interval = schedule.interval
  due: list[list[int]] = [[] for _ in range(interval)]
  for fragment in range(schedule.num_fragments):
    due[schedule.offset(fragment)].append(fragment)

  # Rounds repeat every H; twice around, every step has both neighbours.
  ahead, behind = [0] * interval, [0] * interval
  for t in range(2 * interval):
    before = (t - 1) % interval
    behind[t % interval] = 1 if due[before] else behind[before] + 1
    after = -t % interval
    ahead[(after - 1) % interval] = 1 if due[after] else ahead[after] + 1
  turns = itertools.accumulate((bool(p) for p in due[:-1]), initial=0)
  return tuple(map(_Residue, map(tuple, due), turns, ahead, behind))
