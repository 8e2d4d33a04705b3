"""What Google publishes of its TPUs, and the slices that can be had of them.

Numbers of a chip, as of 2026-11, from docs.cloud.google.com/tpu/docs/v5e, /v5p
and /v6e: "Peak compute per chip (bf16)", "HBM bandwidth per chip",
"Bidirectional inter-chip interconnect (ICI) bandwidth (per chip)", and the
tables of supported topologies.
"""

import dataclasses
import math
import re

from ddiloco.config.schema import did_you_mean

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Generation:
  """A chip of one generation, at its published peak."""

  name: str
  flops: float  # a second, in bf16
  usable_bytes: int  # of its memory (HBM), by a program, says libtpu 0.0.42
  hbm_bytes_per_s: float
  ici_bytes_per_s: float  # sent, over all its links: half of both ways
  dimensions: int  # of the torus
  topologies: tuple[tuple[int, ...], ...]  # those that follow no rule
  cube: int = 0  # larger ones are made of cubes of so many chips a side
  most: tuple[int, ...] = ()  # of those


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
GENERATIONS = {
  "v5e": Generation(
    "v5e",
    197e12,
    int(15.75 * GIB),
    819e9,
    200e9,
    dimensions=2,
    topologies=_FLAT,
  ),
  "v5p": Generation(
    "v5p",
    459e12,
    int(95.74 * GIB),
    2765e9,
    600e9,
    dimensions=3,
    topologies=((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
    cube=4,
    most=(16, 16, 24),
  ),
  "v6e": Generation(
    "v6e",
    918e12,
    int(31.25 * GIB),
    1600e9,
    400e9,
    dimensions=2,
    topologies=_FLAT,
  ),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """A slice of TPU chips, such as v5p:4x4x4."""

  generation: Generation
  shape: tuple[int, ...]

  @property
  def chips(self) -> int:
    """How many there are."""
    return math.prod(self.shape)

  def __str__(self):
    """The form that `parse_slice` reads."""
    return f"{self.generation.name}:{'x'.join(map(str, self.shape))}"


def parse_slice(text: str) -> Slice:
  """A slice from its name, v5p:4x4x4; `ValueError` if there is none such."""
  name, _, shape = text.strip().partition(":")
  if name not in GENERATIONS:
    raise ValueError(
      f"topology {text!r}: generation {name!r} is none of "
      f"{', '.join(GENERATIONS)}. Write a generation, a colon and the slice's "
      f"shape, as v5p:4x4x4. {did_you_mean(name, GENERATIONS)}".rstrip()
    )
  generation = GENERATIONS[name]
  if not re.fullmatch(r"\d{1,4}(x\d{1,4})*", shape):
    raise ValueError(
      f"topology {text!r}: {shape!r} is no shape. Write chips a side, as "
      f"{_example(generation)}."
    )
  sides = tuple(map(int, shape.split("x")))
  if len(sides) != generation.dimensions:
    raise ValueError(
      f"topology {text!r} has {len(sides)} dimensions, but slices of {name} "
      f"have {generation.dimensions}, as {_example(generation)}."
    )
  if not _exists(generation, sides):
    raise ValueError(
      f"topology {text!r}: there is no such slice of {name}. There are "
      f"{_listed(generation)}."
    )
  return Slice(generation, sides)


def parse_islands(text: str) -> list[Slice]:
  """Islands from a list as 2*v5p:4x4x4,2*v6e:8x8; `ValueError`."""
  islands = []
  for part in text.split(","):
    count, star, name = part.strip().rpartition("*")
    if star and not re.fullmatch(r"[1-9]\d{0,3}", count.strip()):
      raise ValueError(
        f"islands {text!r}: {count.strip()!r} is no number of islands. Write "
        f"as 2*v5p:4x4x4,2*v6e:8x8."
      )
    islands += [parse_slice(name)] * int(count or 1)
  return islands


def _exists(generation: Generation, sides: tuple[int, ...]) -> bool:
  if sides in generation.topologies:
    return True
  if not generation.cube:
    return False
  cubes = all(side and side % generation.cube == 0 for side in sides)
  fits = all(a <= b for a, b in zip(sides, generation.most, strict=True))
  return cubes and fits and list(sides) == sorted(sides)


def _example(generation: Generation) -> str:
  return str(Slice(generation, (4,) * generation.dimensions))


def _listed(generation: Generation) -> str:
  names = ", ".join("x".join(map(str, t)) for t in generation.topologies)
  if not generation.cube:
    return names
  most = "x".join(map(str, generation.most))
  return (
    f"{names}, and ascending multiples of {generation.cube} up to {most}, as "
    "4x4x8"
  )
