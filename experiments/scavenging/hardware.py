"""Slices of Cloud TPUs, as far as an emulated island needs to know them.

An emulated island is as fast as its peak says (`ddiloco.planning.tpus`): step
time goes with samples over chips times peak. Measured speeds of a real model
belong into a config instead.
"""

from collections.abc import Sequence
from typing import Any

from ddiloco.planning.tpus import GENERATIONS


def islands(
  slices: Sequence[tuple[str, int, int]], *, chips_per_device: int = 8
) -> dict[str, Any]:
  """Keys of `learners` for islands of (generation, chips, samples per step).

  An emulated device stands for `chips_per_device` chips. Raises `ValueError`
  for a generation it does not know, or chips that fill no whole device.
  """
  seconds = []
  for generation, chips, samples in slices:
    if generation not in GENERATIONS:
      raise ValueError(
        f"generation {generation!r}: known are {', '.join(GENERATIONS)}"
      )
    if chips % chips_per_device:
      raise ValueError(
        f"{chips} chips are no multiple of {chips_per_device}, which is what "
        "an emulated device stands for"
      )
    seconds.append(samples / (chips * GENERATIONS[generation].flops))
  return {
    "count": len(slices),
    "devices": tuple(chips // chips_per_device for _, chips, _ in slices),
    "batch_size": tuple(samples for _, _, samples in slices),
    "slowdown": tuple(round(s / min(seconds), 3) for s in seconds),
  }
