"""How much bandwidth between sites keeps their chips busy (Table 13, Fig. 13).

Of a step of T seconds the first third is the forward pass. What is to be sent
is cut into buckets that are ready one after the other over the backward pass;
one serial queue takes them to the other sites. A ring of D sites moves
2 (D - 1) / D times the bits. What a step has sent must be there before the
step `overlap` + 1 later begins; until then everybody waits. Compute
utilisation is the share of time that is not waited.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from ddiloco.protocol.schedule import Schedule

BUCKETS = 128  # of the whole model
STEPS = 1_000
GIGABIT = 1e9
_FORWARD = 1 / 3  # of a step
_LIMITS_GBPS = (0.0, 1e5)
_HALVINGS_MAX = 60


@dataclasses.dataclass(frozen=True)
class Link:
  """The slowest way between two sites."""

  latency_s: float = 0.0
  loss: float = 0.0  # of what is sent, and sent again

  def __post_init__(self):
    """Refuses what no link is; `ValueError`."""
    if not 0 <= self.latency_s < math.inf:
      raise ValueError(f"latency_s = {self.latency_s}: must not be negative")
    if not 0 <= self.loss < 1:
      raise ValueError(f"loss = {self.loss}: from 0 to below 1")


PERFECT = Link()


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What is sent when: fragment p's bits at the rounds it is due."""

  bits: tuple[float, ...]  # of each fragment, one way, before the ring
  schedule: Schedule
  sites: int = 2

  def __post_init__(self):
    """Refuses what is no traffic; `ValueError`."""
    if len(self.bits) != self.schedule.num_fragments:
      raise ValueError(
        f"{len(self.bits)} sizes for {self.schedule.num_fragments} fragments"
      )
    if self.sites < 2:
      raise ValueError(f"sites = {self.sites}: at least 2")
    if any(not 0 <= size < math.inf for size in self.bits):
      raise ValueError("a fragment's bits must not be negative")

  @property
  def ring(self) -> float:
    """What a ring all-reduce moves, over what is reduced."""
    return 2 * (self.sites - 1) / self.sites

  def sent(self, t: int) -> float:
    """Bits of step t, over the ring."""
    return self.ring * sum(self.bits[p] for p in self.schedule.fragments(t))


def slowest_gbps(links: Sequence[str]) -> float | None:
  """A ring is as fast as its slowest link; None without any. `ValueError`."""
  found = []
  for text in links:
    try:
      found.append(float(text))
    except ValueError:
      found.append(math.nan)
    if not 0 < found[-1] < math.inf:
      raise ValueError(f"wan_gbps = {text!r}: a positive number for each link")
  return min(found, default=None)


def data_parallel(bits: float, sites: int) -> Traffic:
  """All gradients at every step."""
  return Traffic((bits,), Schedule(1, 1, 0), sites)


def decoupled(
  sizes: Sequence[float], *, interval: int, overlap: int, sites: int
) -> Traffic:
  """Fragments of these bits, each once in `interval` steps."""
  schedule = Schedule(len(sizes), interval, overlap)
  return Traffic(tuple(sizes), schedule, sites)


def utilisation(
  traffic: Traffic,
  gbps: float,
  *,
  step_s: float,
  link: Link = PERFECT,
  steps: int = STEPS,
) -> float:
  """Compute utilisation at a bandwidth; `ValueError` for an absurd one."""
  if not 0 < step_s < math.inf:
    raise ValueError(f"step_s = {step_s}: must be positive")
  if not gbps > 0:
    return 0.0
  now_s, free_s, waited_s = 0.0, 0.0, 0.0
  due: collections.deque[tuple[int, float]] = collections.deque()
  rate = gbps * GIGABIT * (1 - link.loss)
  total = sum(traffic.bits) * traffic.ring
  for t in range(1, steps + 1):
    while due and due[0][0] <= t:
      there_s = due.popleft()[1]
      waited_s += max(there_s - now_s, 0.0)
      now_s = max(there_s, now_s)
    bits = traffic.sent(t)
    if bits:
      free_s = _last_bucket_s(bits / rate, bits / total, now_s, free_s, step_s)
      overlap = traffic.schedule.overlap
      due.append((t + overlap + 1, free_s + link.latency_s))
    now_s += step_s
  return steps * step_s / (steps * step_s + waited_s)


def _last_bucket_s(
  send_s: float, share: float, start_s: float, free_s: float, step_s: float
) -> float:
  """When a queue that was busy until `free_s` has sent all of a step.

  Buckets are alike and ready at even intervals, so the last one waits for all
  from the queue's freeing on, or from the first one's, or for none.
  """
  count = max(round(BUCKETS * share), 1)
  bucket_s = send_s / count
  backward_s = (1 - _FORWARD) * step_s
  first_s = start_s + _FORWARD * step_s + backward_s / count
  return max(free_s + send_s, first_s + send_s, start_s + step_s + bucket_s)


def needed_gbps(
  traffic: Traffic,
  target: float,
  *,
  step_s: float,
  link: Link = PERFECT,
  tolerance: float = 1e-4,
) -> float:
  """The bandwidth for a compute utilisation, by bisection.

  Args:
    traffic: what is sent.
    target: 0 to 1.
    step_s: of compute.
    link: between the sites.
    tolerance: of the utilisation. Of the paper's table it is 0.0075: its 99%
      column is where that ends, not what is needed.

  Raises `ValueError` where no bandwidth is enough.
  """
  if not 0 < target < 1:
    raise ValueError(f"utilisation = {target}: between 0 and 1")
  low, high = _LIMITS_GBPS
  found = high
  for _ in range(_HALVINGS_MAX):
    found = (low + high) / 2
    there = utilisation(traffic, found, step_s=step_s, link=link)
    if abs(there - target) <= tolerance:
      return found
    low, high = (found, high) if there < target else (low, found)
  best = utilisation(traffic, _LIMITS_GBPS[1], step_s=step_s, link=link)
  if best < target:
    raise ValueError(
      f"no bandwidth gives {target:.1%}: at {_LIMITS_GBPS[1]:g} Gbit/s it is "
      f"{best:.1%}, for what is sent in a step of {step_s:g} s takes "
      f"{link.latency_s:g} s to arrive and may take "
      f"{traffic.schedule.overlap} steps. Raise the overlap."
    )
  return found
