"""The least time that work takes on a chip, at its published peaks."""

from typing import NamedTuple

from ddiloco.planning.tpus import Generation


class Roofline(NamedTuple):
  """Of work that a chip's units do side by side, in s."""

  compute_s: float
  memory_s: float
  network_s: float  # between the slice's chips

  @property
  def step_s(self) -> float:
    """No shorter than this."""
    return max(self)

  @property
  def bound(self) -> str:
    """What keeps it from being shorter."""
    names = ("compute", "memory", "network")
    return names[self.index(self.step_s)]


def roofline(
  generation: Generation,
  *,
  flops: float,
  memory_bytes: float,
  sent_bytes: float,
) -> Roofline:
  """Of one chip's share of the work."""
  return Roofline(
    flops / generation.flops,
    memory_bytes / generation.hbm_bytes_per_s,
    sent_bytes / generation.ici_bytes_per_s,
  )
