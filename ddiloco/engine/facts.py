"""What this process is, as far as the bits of its arrays depend on it."""

import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any

import jax

_LIBRARIES = (
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "tensorstore",
  "grain",
  "numpy",
)


def facts() -> dict[str, Any]:
  """The fields of a tape's header that tell of processes and libraries."""
  return {
    "backend": jax.default_backend(),
    "devices": jax.device_count(),
    "processes": jax.process_count(),
    "threads": int(os.environ.get("PJRT_NPROC", 0)),
    "cpu_features": _cpu_features(),
    "libraries": tuple((name, _version(name)) for name in _LIBRARIES),
  }


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "absent"


def _cpu_features() -> str:
  """The machine type and the vector extensions that XLA chooses from."""
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text()
  except OSError:
    return platform.machine()
  flags = re.search(r"^flags\s*:(.*)$", text, re.M)
  known = set(flags[1].split()) if flags else set()
  vector = sorted(
    f for f in known if re.fullmatch(r"avx\w*|fma|sse4_2|amx\w*", f)
  )
  return " ".join([platform.machine(), *vector])
