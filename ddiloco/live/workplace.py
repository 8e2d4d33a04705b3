"""What the live roles share: where things are, who we are, what we run on."""

import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import time
from typing import Any

import jax

import ddiloco
from ddiloco.config import Config, ConfigError
from ddiloco.protocol import tape, wire

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


def host() -> str:
  """This machine's name."""
  return socket.gethostname()


def code_version() -> str:
  """The release and a digest of the package's own source files."""
  root = pathlib.Path(ddiloco.__file__).parent
  digest = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    digest.update(path.relative_to(root).as_posix().encode())
    digest.update(path.read_bytes())
  return f"{ddiloco.__version__}+{digest.hexdigest()[:12]}"


def load_program(config: Config, learner: int | None, cache_dir: str) -> Any:
  """Builds `config.program`; raises `ConfigError` if there is none such."""
  module, _, function = config.program.partition(":")
  try:
    build = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(
      f"program = {config.program!r} cannot be loaded ({error}). Write "
      "'module:function', importable from here."
    ) from error
  return build(config, learner, cache_dir=cache_dir)


def tape_header(
  config: Config, run_id: str, actor: str, incarnation: int
) -> tape.Header:
  """What this process is, as far as bits depend on it."""
  return tape.Header(
    run_id=run_id,
    actor=actor,
    incarnation=incarnation,
    seed=config.seed,
    config=wire.canonical_json(config.to_dict()).decode(),
    config_sha256=config.digest,
    code_version=code_version(),
    backend=jax.default_backend(),
    devices=jax.device_count(),
    processes=jax.process_count(),
    threads=int(os.environ.get("PJRT_NPROC", 0)),
    cpu_features=_cpu_features(),
    libraries=tuple((name, _version(name)) for name in _LIBRARIES),
    started_unix_ns=time.time_ns(),
    started_ns=time.monotonic_ns(),
  )


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
