"""Which fragments are due when, and which rounds are open to whom.

Fragment p of P is due at every t with t mod H = t_p = floor(p H / P): exactly
once in H global steps for any P and H (paper, Sec. 3.1).
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
  """The rounds of a run. Global steps without a fragment are no rounds."""

  num_fragments: int  # P
  interval: int  # H, global steps
  overlap: int  # tau, steps

  def offset(self, fragment: int) -> int:
    """t_p, in global steps."""
    return fragment * self.interval // self.num_fragments

  def fragments(self, t: int) -> tuple[int, ...]:
    """F(t), ascending; empty if t is no round."""
    return (
      _fragments_by_offset(self).get(t % self.interval, ()) if t > 0 else ()
    )

  def is_round(self, t: int) -> bool:
    """Whether any fragment is due at t."""
    return bool(self.fragments(t))

  def next_round(self, t: int) -> int:
    """The smallest round after t."""
    t += 1
    while not self.is_round(t):
      t += 1
    return t

  def previous_round(self, t: int) -> int:
    """The largest round before t, or 0."""
    t -= 1
    while t > 0 and not self.is_round(t):
      t -= 1
    return max(t, 0)

  def gap(self, t: int) -> int:
    """g(t): t minus the round before it."""
    return t - self.previous_round(t)

  def version_before(self, fragment: int, t: int) -> int:
    """The newest version of a fragment that is older than t."""
    t -= 1
    behind = (t - self.offset(fragment)) % self.interval
    return max(t - behind, 0)

  def opens_after(self, t: int) -> int:
    """The commit a learner must have seen for round t to be open to it."""
    return self.previous_round(t - max(self.overlap, 1) + 1)

  def open_rounds(self, seen: int) -> tuple[int, ...]:
    """The rounds open to whoever has seen the commits up to `seen`."""
    first = self.next_round(seen)
    last = first + max(self.overlap, 1) - 1
    return tuple(t for t in range(first, last + 1) if self.is_round(t))


@functools.cache
def _fragments_by_offset(schedule: Schedule) -> dict[int, tuple[int, ...]]:
  due: dict[int, tuple[int, ...]] = {}
  for fragment in range(schedule.num_fragments):
    offset = schedule.offset(fragment)
    due[offset] = due.get(offset, ()) + (fragment,)
  return due
