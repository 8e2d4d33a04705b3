"""Compiles for TPU slices that are not there (ahead of time).

The `libtpu` wheel has the compiler; no TPU is needed, nor looked for.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from ddiloco.config import ConfigError
from ddiloco.planning import hlo
from ddiloco.planning.tpus import GIB, Slice

INSTALL = "pip install '.[tpu]'"
# Without these libtpu asks the cloud what machine it is on, and lets only one
# process at a time load it.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_WORKER_ID": "0",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_TOO_MUCH = "RESOURCE_EXHAUSTED"
_SIZES = re.compile(r"\b(\d[\d.]*)([KMGT])")  # as 81.08G
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": GIB, "T": GIB << 10}
# A third of the time, and memory within 2% (BUILD_NOTES.md).
_LESS_EFFORT = {"exec_time_optimization_effort": -1.0}


class DoesNotFit(Exception):
  """A program needs more memory than a chip has."""

  def __init__(self, needed_bytes: int | None, usable_bytes: int | None):
    """Takes what the compiler says; None if it does not."""
    super().__init__(f"{needed_bytes} of {usable_bytes} bytes")
    self.needed_bytes, self.usable_bytes = needed_bytes, usable_bytes


class Compiled(NamedTuple):
  """A program for a slice: bytes of each chip."""

  arguments_bytes: int
  temporaries_bytes: int  # reserved for intermediate results
  peak_bytes: int  # of everything that lives at a time
  code_bytes: int
  traffic: hlo.Traffic


def available() -> bool:
  """Whether the compiler is installed."""
  return importlib.util.find_spec("libtpu") is not None


def devices(of: Slice) -> Sequence[jax.Device]:
  """The chips of a slice, to compile for; `ConfigError` without a compiler."""
  if not available():
    raise ConfigError(
      "compiling for a TPU slice needs libtpu, which is not installed. "
      f"{INSTALL} brings it (0.7 GB); no TPU is needed."
    )
  for name, value in _ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  options = {}
  if of.chips == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  try:
    return topologies.get_topology_desc(
      platform="tpu", topology_name=str(of), **options
    ).devices
  except (RuntimeError, ValueError) as error:  # XLA's errors are the former
    raise ConfigError(
      f"libtpu cannot describe {of}: {str(error).splitlines()[0]}. It must fit "
      f"jax {jax.__version__}: {INSTALL} brings the one that does."
    ) from error


def compile_lowered(
  lowered: jax.stages.Lowered, *, quickly: bool = False
) -> Compiled:
  """Compiles; raises `DoesNotFit`. `quickly`: to see whether it fits."""
  options: dict[str, Any] = dict(_LESS_EFFORT) if quickly else {}
  try:
    made = lowered.compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    if _TOO_MUCH not in str(error) or "hbm" not in str(error).lower():
      raise
    raise DoesNotFit(*_sizes(str(error))) from error
  memory = made.memory_analysis()
  return Compiled(
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    memory.peak_memory_in_bytes,
    memory.generated_code_size_in_bytes,
    hlo.traffic(made.as_text()),
  )


def _sizes(message: str) -> tuple[int | None, int | None]:
  """What is needed, and what there is, in bytes."""
  found = [float(n) * _UNITS[unit] for n, unit in _SIZES.findall(message)]
  return (int(found[0]), int(found[1])) if len(found) >= 2 else (None, None)
