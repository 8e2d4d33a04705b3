"""The largest batch of an island that its chips' memory has room for."""

from collections.abc import Callable
from typing import NamedTuple

_TRIES = 7
_PATIENCE = 3  # refusals
_BEYOND = 3.0  # times what a line through small batches says
_ABOVE = 1.1
_CLOSE = 0.02  # of the largest found: closer than this nobody need look


class Tried(NamedTuple):
  """What became of a batch."""

  fits: bool
  needed_bytes: float
  usable_bytes: float | None = None  # if that was told


class Found(NamedTuple):
  """What was tried."""

  batch: int  # the largest that fits; 0: none does
  refused: int | None  # the smallest found that does not


def largest_batch(
  attempt: Callable[[int], Tried],
  *,
  unit: int,
  batch: int,
  first: Tried,
  fixed_bytes: float,
  limit_bytes: float,
) -> Found:
  """Searches along the line that memory follows, and proves its ends.

  Args:
    attempt: tries a batch.
    unit: batches are multiples of it.
    batch: one that was tried.
    first: what became of it.
    fixed_bytes: what even an empty batch would need.
    limit_bytes: about what there is, until an attempt tells.
  """
  points = {0: fixed_bytes, batch // unit: first.needed_bytes}
  low, high = (batch // unit, None) if first.fits else (0, batch // unit)
  limit_bytes = first.usable_bytes or limit_bytes
  refusals = 0  # one after the other
  for _ in range(_TRIES):
    if high is not None and high - low <= max(1, _CLOSE * low):
      break
    guess = _guess(points, low, high, limit_bytes)
    if refusals > _PATIENCE:  # memory follows no line, and the end creeps
      guess = low + (high - low) // 2
    guess = max(guess, low + 1)
    if high is not None:
      guess = min(guess, high - 1)
    tried = attempt(guess * unit)
    points[guess] = tried.needed_bytes
    limit_bytes = tried.usable_bytes or limit_bytes
    low, high = (guess, high) if tried.fits else (low, guess)
    refusals = 0 if tried.fits else refusals + 1
  return Found(low * unit, None if high is None else high * unit)


def _guess(
  points: dict[int, float], low: int, high: int | None, limit_bytes: float
) -> int:
  """Where memory reaches the limit, by a line.

  A batch that does not fit is refused within seconds, one that does takes as
  long as a compilation: so the limit is approached from above.
  """
  if high is None:
    k0, k1 = sorted(points)[-2:]
    return int(_BEYOND * _reaches(points, k0, k1, limit_bytes))
  refused = sorted(k for k in points if k >= high)
  if len(refused) > 1:
    return int(_reaches(points, *refused[:2], limit_bytes))
  return int(_ABOVE * _reaches(points, low, high, limit_bytes))


def _reaches(
  points: dict[int, float], k0: int, k1: int, limit_bytes: float
) -> float:
  slope = max((points[k1] - points[k0]) / (k1 - k0), 1.0)
  return k0 + (limit_bytes - points[k0]) / slope
