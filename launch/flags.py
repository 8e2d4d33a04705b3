"""The flags that all commands share, checked."""

import os
import pathlib
from typing import Any

from absl import flags
from ml_collections import config_flags

from ddiloco import config as config_lib
from ddiloco.config import ConfigError
from ddiloco.engine.sealing import RunKey, SealedExchange
from ddiloco.live import run_key as run_key_lib
from ddiloco.live import workdir as workdir_lib
from ddiloco.lm import weights

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "The run's configuration file; default: the one the workdir's run has.",
  lock_config=True,
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run leaves things.")
EXCHANGE = flags.DEFINE_string(
  "exchange",
  "",
  "URL of the exchange (file://, gs://, s3://); default: in the workdir.",
)
RUN_KEY_FILE = flags.DEFINE_string(
  "run_key_file",
  None,
  "A file of 32 bytes or more (head -c 32 /dev/urandom > FILE; chmod 600 FILE) "
  "that all who take part in a run have, and only they. What anybody else puts "
  "into the exchange is refused. A run keeps the key it was started with.",
)


def run_key() -> RunKey | None:
  """The run's key, if it has one; `ConfigError` if that is no secret."""
  path = RUN_KEY_FILE.value
  return None if path is None else run_key_lib.read(path)


def whereabouts(exchange: SealedExchange) -> list[str]:
  """The flags that bring another process to this exchange, with its key."""
  found = [f"--exchange={exchange.url}"]
  if RUN_KEY_FILE.value is not None:
    path = pathlib.Path(RUN_KEY_FILE.value).absolute()
    found.append(f"--run_key_file={path}")
  return found


def open_exchange(workdir: pathlib.Path, **options: Any) -> SealedExchange:
  """The exchange of a workdir's run, or the one that --exchange names."""
  url = workdir_lib.exchange_url(workdir, EXCHANGE.value)
  return open_exchange_at(url, **options)


def open_exchange_at(url: str, **options: Any) -> SealedExchange:
  """The exchange of that URL, with the key that was given."""
  return workdir_lib.open_exchange(url, run_key(), **options)


def workdir() -> pathlib.Path:
  """The run's directory, created if need be."""
  if not WORKDIR.value:
    raise ConfigError("--workdir is missing: name a directory for the run.")
  path = pathlib.Path(WORKDIR.value).absolute()
  if CONFIG.value is None and not path.is_dir():
    workdir_lib.read_config(path)  # says that there is none
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f".probe-{os.getpid()}"
    try:
      probe.write_bytes(b"x" * 4096)
    finally:
      probe.unlink(missing_ok=True)
  except OSError as error:
    raise ConfigError(
      f"--workdir={WORKDIR.value} cannot be written: {error.strerror}. Free "
      "space there, fix its permissions, or choose another."
    ) from error
  return path


def config(workdir: pathlib.Path) -> config_lib.Config:
  """The validated configuration: the flags', else that of the workdir."""
  if CONFIG.value is None:
    return workdir_lib.read_config(workdir)
  try:
    given = CONFIG.value.to_dict()
  except AttributeError as error:
    raise ConfigError(
      f"--config: get_config() returned {CONFIG.value!r}; it must return an "
      "ml_collections.ConfigDict."
    ) from error
  except OSError as error:  # ml_collections reports a missing file on use
    reason = str(error.__cause__ or error).splitlines()[-1].strip()
    raise ConfigError(f"--config cannot be read: {reason}") from error
  return weights.pinned(config_lib.from_dict(given))
