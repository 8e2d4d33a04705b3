"""How much of a cluster's time is training, when its chips keep failing.

The paper's model (2604.21428, Sec. 4.1 and Table 1): a chip that fails takes
its slice with it; a learner scales down in a fixed time, steps on with fewer
slices, and scales up in a fixed time when slices are back. Learners do not
wait for each other, so each of them is a lane of its own here, and every
lane of every seed takes its next event (a failure, a return, the end of a
pause) in the same NumPy call.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np

from ddiloco.planning.failure_log import Outage
from ddiloco.planning.failures import Drawn, Failures, Logged
from ddiloco.planning.returns import Returns, with_mean

YEAR_S = 365.0 * 24 * 3600
_GOLDEN = 0.6180339887498949
_ROWS = 256  # of random numbers made at once


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Chips, what befalls them, and how a run on them reacts. Times in s."""

  chips: int
  learners: int = 1
  elastic: bool = True  # False: a learner stops until its slices are back
  mtbi_s: float = YEAR_S  # mean time between interruptions of one chip
  slices: int = 128  # of the whole cluster
  step_s: float = 1.0
  down_s: float = 10.0
  up_s: float = 12.0
  returns: Returns = dataclasses.field(
    default_factory=lambda: with_mean(2.0, 1.5, 80.0)
  )
  restart_s: float = 0.0  # not elastic: from the last return to the next step
  checkpoint_s: float = 0.0  # not elastic: useful time between them; 0: no loss
  speed_std: float = 0.0  # of a chip's step time, over the mean

  def __post_init__(self):
    """Refuses what no cluster is; `ValueError`."""
    for name in ("chips", "learners", "slices"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}: at least 1")
    for name in ("mtbi_s", "step_s"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
    for name in ("down_s", "up_s", "restart_s", "checkpoint_s", "speed_std"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f"{name} = {getattr(self, name)}: must not be negative"
        )
    if self.slices < self.learners:
      raise ValueError(
        f"{self.slices} slices for {self.learners} learners: each needs one"
      )
    if self.chips < self.slices:
      raise ValueError(
        f"{self.chips} chips in {self.slices} slices: at least one"
      )

  @property
  def mtbf_s(self) -> float:
    """Mean time between failures anywhere in the cluster."""
    return self.mtbi_s / self.chips

  @property
  def learner_slices(self) -> int:
    """Of each learner; what cannot be dealt out evenly is left out."""
    return self.slices // self.learners


@dataclasses.dataclass(frozen=True)
class Spans:
  """Unbroken rows of inner steps, one entry each."""

  seed: np.ndarray  # position of the seed
  learner: np.ndarray
  start_s: np.ndarray
  end_s: np.ndarray
  live: np.ndarray  # slices that stepped


@dataclasses.dataclass(frozen=True)
class Outages:
  """Every slice that was lost: when, and when it was to be had again."""

  seed: np.ndarray
  learner: np.ndarray
  start_s: np.ndarray
  end_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a cluster came to, for each seed."""

  cluster: Cluster
  horizon_s: float
  goodput: np.ndarray  # share of allocated slice time in useful steps
  uptime: np.ndarray  # share of time in which any learner stepped
  spans: Spans
  outages: Outages


def simulate(
  cluster: Cluster,
  *,
  hours: float,
  seeds: Sequence[int],
  log: Sequence[Outage] | None = None,
) -> Outcome:
  """Runs a cluster once for each seed; what one gives depends on no other.

  With a `log` its outages are what fails, and when it is back: each of as many
  slices as its chips take, of the learner it names, or one drawn by the seed.
  Raises `ValueError`.
  """
  if not 0 < hours < math.inf:
    raise ValueError(f"hours = {hours}: must be positive")
  if not seeds:
    raise ValueError("no seed: at least one is needed")
  learners, failures = cluster.learners, None
  if log is None:
    rate = 1 / (cluster.mtbf_s * learners)
    failures = Drawn(rate, cluster.learner_slices, cluster.returns)
  else:
    slice_chips = cluster.chips / cluster.slices
    failures = Logged(log, seeds, learners=learners, slice_chips=slice_chips)
  lanes = _Lanes(cluster, 3600.0 * hours, seeds, failures)
  for draws in _draws(seeds, cluster.learners):
    if not lanes.advance(draws):
      break
  return lanes.outcome(len(seeds))


def _draws(seeds: Sequence[int], learners: int) -> Iterator[np.ndarray]:
  """Three uniform numbers for every lane, again and again."""
  generators = [np.random.Generator(np.random.PCG64(seed)) for seed in seeds]
  while True:
    blocks = [g.random((_ROWS, learners, 3)) for g in generators]
    yield from np.concatenate(blocks, axis=1)


class _Lanes:
  """Learners of all seeds side by side; arrays are `[lanes]`."""

  def __init__(
    self,
    cluster: Cluster,
    horizon_s: float,
    seeds: Sequence[int],
    failures: Failures,
  ):
    self._cluster, self._horizon_s = cluster, horizon_s
    count, self._slices = len(seeds) * cluster.learners, cluster.learner_slices
    self._failures = failures
    self._step_s = _step_s(cluster, seeds)
    self._clock = np.zeros(count)
    self._live = np.full(count, self._slices)
    self._back_s = np.full((count, self._slices), np.inf)  # of what is missing
    self._pending = np.zeros(count, int)  # failures of the step under way
    self._unsaved_s, self._lost_s = np.zeros(count), np.zeros(count)
    self._spans: list[tuple[np.ndarray, ...]] = []
    self._outages: list[tuple[np.ndarray, ...]] = []

  def advance(self, draws: np.ndarray) -> bool:
    """The next event of every lane; False once all are at the end."""
    active = self._clock < self._horizon_s
    if not active.any():
      return False
    first_s = self._back_s.min(axis=1)
    back = active & (first_s <= self._clock)
    if back.any():
      self._scale_up(back)
    none = active & ~back & (self._live == 0)
    self._clock[none] = first_s[none]
    self._step(np.flatnonzero(active & ~back & ~none), first_s, draws)
    while (failing := np.flatnonzero(self._pending)).size:
      self._lose(failing, draws[failing, 2])
      # For the few steps in which several fail: far from the one before.
      draws = (draws + _GOLDEN) % 1
    return True

  def _scale_up(self, back: np.ndarray) -> None:
    """All that have come back by now do so at once."""
    here = back[:, None] & (self._back_s <= self._clock[:, None])
    self._live += here.sum(axis=1)
    self._back_s[here] = np.inf
    self._clock[back] += self._cluster.up_s

  def _step(
    self, lanes: np.ndarray, first_s: np.ndarray, draws: np.ndarray
  ) -> None:
    """Whole steps, up to a failure, a return, or the end."""
    clock, live = self._clock[lanes], self._live[lanes]
    step_s, failures = self._step_s[lanes], self._failures
    fails_s = failures.next_s(lanes, clock, live, draws[lanes, 0])
    until_s = np.minimum(first_s[lanes], self._horizon_s) - clock
    done, whole = np.floor(fails_s / step_s), np.ceil(until_s / step_s)
    fails = done < whole
    steps = np.where(fails, done, whole)
    end_s = clock + steps * step_s
    some = steps > 0
    self._spans.append((lanes[some], clock[some], end_s[some], live[some]))
    self._clock[lanes] = end_s
    self._unsaved_s[lanes] += steps * step_s
    hit, over_s = lanes[fails], end_s[fails] + step_s[fails]
    left_s = over_s - (clock + fails_s)[fails]
    extra = failures.more(hit, over_s, left_s, live[fails], draws[hit, 1])
    self._pending[hit] = 1 + extra

  def _lose(self, lanes: np.ndarray, draws: np.ndarray) -> None:
    """One slice of each of these; the last one of a step begins the pause."""
    cluster = self._cluster
    slot = np.argmax(np.isinf(self._back_s[lanes]), axis=1)
    now_s = self._clock[lanes]
    end_s = self._failures.back_s(lanes, now_s, draws)
    self._back_s[lanes, slot] = end_s
    self._outages.append((lanes, now_s, end_s))
    self._live[lanes] -= 1
    self._pending[lanes] -= 1
    self._pending[lanes[self._live[lanes] == 0]] = 0
    paused = lanes[self._pending[lanes] == 0]
    if cluster.elastic:
      self._clock[paused] += cluster.down_s
    else:
      self._restart(paused)

  def _restart(self, lanes: np.ndarray) -> None:
    """From the newest checkpoint, once everybody is back."""
    missing = np.where(
      np.isinf(self._back_s[lanes]), -np.inf, self._back_s[lanes]
    )
    self._clock[lanes] = missing.max(axis=1) + self._cluster.restart_s
    self._back_s[lanes], self._live[lanes] = np.inf, self._slices
    every_s = self._cluster.checkpoint_s
    if every_s:
      self._lost_s[lanes] += self._unsaved_s[lanes] % every_s
    self._unsaved_s[lanes] = 0

  def outcome(self, seeds: int) -> Outcome:
    """What came of it."""
    cluster, horizon_s = self._cluster, self._horizon_s
    lanes, start_s, end_s, live = map(
      np.concatenate, zip(*self._spans, strict=True)
    )
    end_s = np.minimum(end_s, horizon_s)
    seed, learner = np.divmod(lanes, cluster.learners)
    useful = np.bincount(seed, (end_s - start_s) * live, seeds)
    lost_s = self._lost_s.reshape(seeds, -1).sum(axis=1) * self._slices
    allocated_s = horizon_s * cluster.learners * self._slices
    spans = Spans(seed, learner, start_s, end_s, live)
    none = (np.zeros(0, int), np.zeros(0), np.zeros(0))
    lanes, start_s, end_s = map(
      np.concatenate, zip(none, *self._outages, strict=True)
    )
    return Outcome(
      cluster,
      horizon_s,
      (useful - lost_s) / allocated_s,
      _union_s(spans, seeds, horizon_s) / horizon_s,
      spans,
      Outages(*np.divmod(lanes, cluster.learners), start_s, end_s),
    )


def _step_s(cluster: Cluster, seeds: Sequence[int]) -> np.ndarray:
  """A learner's step takes as long as that of the slowest of its chips."""
  step_s = []
  for seed in seeds:
    stream = np.random.SeedSequence(seed, spawn_key=(1,))
    u = np.random.Generator(np.random.PCG64(stream)).random(cluster.learners)
    slowest = _normal_quantile(u ** (cluster.learners / cluster.chips))
    step_s.append(cluster.step_s * (1 + cluster.speed_std * slowest))
  return np.concatenate(step_s)


def _normal_quantile(u: np.ndarray) -> np.ndarray:
  inverse = NormalDist().inv_cdf
  return np.array([inverse(min(max(x, 1e-300), 1 - 1e-16)) for x in u])


def _union_s(spans: Spans, seeds: int, horizon_s: float) -> np.ndarray:
  """How long any learner of a seed was stepping."""
  order = np.lexsort((spans.start_s, spans.seed))
  seed = spans.seed[order]
  apart = 2 * horizon_s * seed  # so that no seed's reach into the next one's
  start_s, end_s = spans.start_s[order] + apart, spans.end_s[order] + apart
  reached = np.maximum.accumulate(end_s)
  before = np.concatenate(([-np.inf], reached[:-1]))
  added = np.maximum(end_s - np.maximum(start_s, before), 0)
  return np.bincount(seed, added, seeds)
