"""Virtual time: one heap of what happens next, and clocks that drift."""

import heapq
import random
from collections.abc import Callable

from ddiloco.types import SECOND_NS

EPOCH_NS = 946_684_800 * SECOND_NS  # the world begins on 2000-01-01, UTC

Action = Callable[[], None]


class Heap:
  """Runs actions in the order of (time, sequence), so none is up to chance."""

  def __init__(self):
    self.now_ns = 0
    self.count = 0
    self._sequence = 0
    self._actions: list[tuple[int, int, Action]] = []

  def at(self, time_ns: int, action: Action) -> None:
    """Schedules an action; one in the past runs next."""
    self._sequence += 1
    entry = (max(time_ns, self.now_ns), self._sequence, action)
    heapq.heappush(self._actions, entry)

  def after(self, delay_ns: int, action: Action) -> None:
    """Schedules an action from now."""
    self.at(self.now_ns + delay_ns, action)

  def step(self) -> bool:
    """Runs the next action; False if there is none."""
    if not self._actions:
      return False
    self.now_ns, _, action = heapq.heappop(self._actions)
    self.count += 1
    action()
    return True


class Clock:
  """One machine's monotonic clock: an offset, a drift, and sudden jumps."""

  def __init__(self, heap: Heap, offset_ns: int, drift_ppm: int):
    self._heap = heap
    self._offset_ns = offset_ns
    self._drift_ppm = drift_ppm

  def now_ns(self) -> int:
    """What this machine believes; never less than before."""
    true_ns = self._heap.now_ns
    return self._offset_ns + true_ns + true_ns * self._drift_ppm // 1_000_000

  def true_ns(self, local_ns: int) -> int:
    """The world's time of an instant on this clock, rounded up."""
    scale = 1_000_000 + self._drift_ppm
    return -((self._offset_ns - local_ns) * 1_000_000 // scale)

  def jump(self, forward_ns: int) -> None:
    """Moves the clock forward; a monotonic clock has no other jump."""
    assert forward_ns >= 0, forward_ns
    self._offset_ns += forward_ns


def stream(seed: int, name: str) -> random.Random:
  """A stream of randomness of its own for every purpose.

  What one part draws does not shift what another one gets.
  """
  return random.Random(f"{seed}/{name}")


def spread(rng: random.Random, mean_ns: int, fraction: float) -> int:
  """A duration within +- `fraction` of its mean, at least 1 ns."""
  return max(round(mean_ns * (1 + fraction * (2 * rng.random() - 1))), 1)


def seconds(value: float) -> int:
  """Seconds as integer nanoseconds."""
  return round(value * SECOND_NS)
