"""What fails next, and when it is back: by chance, or as a log tells.

Lanes are the learners of all seeds side by side; arrays are `[lanes asked]`.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ddiloco.planning.failure_log import Outage
from ddiloco.planning.returns import Returns

_EXTRA_MAX = 64  # further failures in one step


class Failures(Protocol):
  """Of slices that step; a chip that fails takes its slice with it."""

  def next_s(
    self,
    lanes: np.ndarray,
    now_s: np.ndarray,
    live: np.ndarray,
    draws: np.ndarray,
  ) -> np.ndarray:
    """Stepping time up to the next one."""

  def more(
    self,
    lanes: np.ndarray,
    end_s: np.ndarray,
    left_s: np.ndarray,
    live: np.ndarray,
    draws: np.ndarray,
  ) -> np.ndarray:
    """How many follow in what is left of the step, which ends at `end_s`."""

  def back_s(
    self, lanes: np.ndarray, now_s: np.ndarray, draws: np.ndarray
  ) -> np.ndarray:
    """When what fails now is to be had again."""


class Drawn:
  """Failures by chance: of every live chip, while it steps."""

  def __init__(self, rate_per_s: float, slices: int, returns: Returns):
    """Takes the rate of a whole learner, and its number of slices."""
    self._slice_rate, self._returns = rate_per_s / slices, returns

  def next_s(self, lanes: Any, now_s: Any, live: Any, draws: Any) -> np.ndarray:
    """See `Failures`."""
    del lanes, now_s
    return -np.log1p(-draws) / (self._slice_rate * live)

  def more(
    self, lanes: Any, end_s: Any, left_s: Any, live: Any, draws: Any
  ) -> np.ndarray:
    """See `Failures`; Poisson, by inversion."""
    del lanes, end_s
    mean = self._slice_rate * live * left_s
    term = np.exp(-mean)
    total, found = term.copy(), np.zeros(mean.shape, int)
    for k in range(1, _EXTRA_MAX):
      beyond = draws > total
      if not beyond.any():
        break
      found += beyond
      term = term * mean / k
      total += term
    return found

  def back_s(self, lanes: Any, now_s: Any, draws: Any) -> np.ndarray:
    """See `Failures`."""
    del lanes
    return now_s + self._returns.quantile_s(draws)


class Logged:
  """Failures as a log tells them, one entry for every slice that was lost."""

  def __init__(
    self,
    log: Sequence[Outage],
    seeds: Sequence[int],
    *,
    learners: int,
    slice_chips: float,
  ):
    """Deals outages that name no learner by the seed; `ValueError`."""
    queues: list[list[tuple[float, float]]] = []
    for seed in seeds:
      rng = np.random.default_rng([seed, 2])
      queues += _deal(log, learners, slice_chips, rng)
    times = np.full((len(queues), max(map(len, queues)) + 1, 2), np.inf)
    for lane, queue in enumerate(queues):
      if queue:
        times[lane, : len(queue)] = sorted(queue)
    self._starts, self._ends = times[..., 0], times[..., 1]
    self._next = np.zeros(len(queues), int)

  def next_s(
    self, lanes: np.ndarray, now_s: np.ndarray, live: Any, draws: Any
  ) -> np.ndarray:
    """See `Failures`; what was over before anybody stepped is left out."""
    del live, draws
    while (over := self._ends[lanes, self._next[lanes]] <= now_s).any():
      self._next[lanes[over]] += 1
    return np.maximum(self._starts[lanes, self._next[lanes]] - now_s, 0)

  def more(
    self,
    lanes: np.ndarray,
    end_s: np.ndarray,
    left_s: Any,
    live: Any,
    draws: Any,
  ) -> np.ndarray:
    """See `Failures`."""
    del left_s, live, draws
    begun = (self._starts[lanes] < end_s[:, None]).sum(axis=1)
    return np.maximum(begun - self._next[lanes] - 1, 0)

  def back_s(self, lanes: np.ndarray, now_s: Any, draws: Any) -> np.ndarray:
    """See `Failures`."""
    del now_s, draws
    found = self._ends[lanes, self._next[lanes]]
    self._next[lanes] += 1
    return found


def _deal(
  log: Sequence[Outage],
  learners: int,
  slice_chips: float,
  rng: np.random.Generator,
) -> list[list[tuple[float, float]]]:
  """Every learner's lost slices: (start, end)."""
  found: list[list[tuple[float, float]]] = [[] for _ in range(learners)]
  for outage in log:
    learner = outage.learner
    if learner is None:
      learner = int(rng.integers(learners))
    if learner >= learners:
      raise ValueError(
        f"line {outage.line} of the log names learner {learner}, but there are "
        f"{learners}, from 0 on"
      )
    lost = math.ceil(outage.chips / slice_chips)
    found[learner] += [(outage.start_s, outage.end_s)] * lost
  return found
