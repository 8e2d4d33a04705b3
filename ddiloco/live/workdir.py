"""The workdir: who uses it, and what run it belongs to."""

import fcntl
import json
import pathlib
from typing import IO, Any

from ddiloco import config as config_lib
from ddiloco.config import Config, ConfigError, LiveConfig
from ddiloco.engine.ports import ExchangeError
from ddiloco.engine.sealing import RunKey, SealedExchange
from ddiloco.live import store_check, store_errors
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys, messages, wire

RESOLVED = "config.json"
_LOCK = "lock"


def exchange_url(workdir: pathlib.Path, url: str) -> str:
  """Where the exchange is: in the workdir unless told otherwise."""
  return url or str(workdir.absolute() / "exchange")


def open_exchange(
  url: str, key: RunKey | None = None, **options: Any
) -> SealedExchange:
  """Opens an exchange, as a run with that key; `ConfigError` if it is none."""
  if url.startswith("memory:"):
    raise ConfigError(
      f"--exchange={url} exists inside one process only, and a run has "
      "several: use a directory, file://, gs:// or s3://."
    )
  try:
    store = TensorStoreExchange(url, **options)
  except ValueError as error:
    raise ConfigError(f"--exchange: {error}") from error
  return SealedExchange(store, key, url)


def store_options(live: LiveConfig) -> dict[str, Any]:
  """How a process that takes part in a run opens the exchange."""
  return {
    "deadline_s": live.store_deadline_s,
    "file_locking": live.file_locking,
    "file_sync": live.file_sync,
  }


def check_exchange(exchange: SealedExchange, live: LiveConfig) -> None:
  """Refuses a store that a run would not be safe in, before there is one.

  Raises `ConfigError` with what it did wrong and what to try.
  """
  if exchange.get(keys.commit(0)) is not None:
    return
  url = exchange.url
  one, other = (
    TensorStoreExchange(url, **store_options(live)) for _ in range(2)
  )
  try:
    fault = store_check.fault_of(one, other)
  except ExchangeError as error:
    if store_errors.cannot_lock(str(error)):
      fault = f"files there cannot be locked ({error})"
    else:
      raise ConfigError(f"--exchange cannot be used: {error}") from error
  finally:
    one.close()
    other.close()
  if not fault:
    return
  if "://" in url and not url.startswith("file:"):
    remedy = (
      "Its server does not keep conditional writes, without which two syncers "
      "could commit the same round. Use a store that does"
    )
  elif live.file_locking == "os":
    remedy = (
      "Locks do not work on this file system, and without them two syncers "
      "could commit the same round. Try --config.live.file_locking=lockfile, "
      "or a directory on another file system"
    )
  else:
    remedy = (
      "Lock files do not work on this file system either: use a directory on "
      "another one, or a bucket"
    )
  raise ConfigError(f"--exchange={url} is not safe: {fault}. {remedy}.")


def lock(workdir: pathlib.Path) -> IO[str]:
  """Takes the workdir for this process; released when it ends, however."""
  file = open(workdir / _LOCK, "a+")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    file.close()
    raise ConfigError(
      f"{workdir} is in use by another launch.local. Stop that one, or choose "
      "another --workdir."
    ) from error
  return file


def has_run(exchange: SealedExchange) -> bool:
  """Whether a run was started here.

  Raises `ConfigError` if one cannot even look, or nobody can go on with it.
  """
  try:
    item = exchange.get(keys.commit(0))
  except ExchangeError as error:
    raise ConfigError(f"--exchange cannot be read: {error}") from error
  if item is None:
    return False
  try:
    genesis = messages.decode(messages.Commit, item.value).genesis
  except wire.WireError:
    return True  # whoever starts names the damage
  if genesis is not None and not genesis.has_arrays:
    raise ConfigError(
      "the run in this exchange was simulated without arrays (--compute=none), "
      "so nobody can go on with it. Train along it (launch.simulate "
      "--history), or choose another --workdir."
    )
  return True


def settle_config(
  workdir: pathlib.Path, config: Config, *, started: bool
) -> dict[str, tuple[Any, Any]]:
  """Writes the resolved config; returns what a resumed run changes.

  A run that never `started` binds nobody: its config had an error, perhaps.
  Raises `ConfigError` if the workdir holds a run that this config does not
  continue; nothing is written then.
  """
  path = workdir / RESOLVED
  changes = {}
  if started and path.exists():
    try:
      old = config_lib.from_dict(json.loads(path.read_text())["config"])
    except (ValueError, KeyError, TypeError) as error:
      raise ConfigError(
        f"{path} is damaged ({error}). Restore it, or use a new --workdir."
      ) from error
    changes = config_lib.check_resumable(old, config)
  text = json.dumps(
    {"config": config.to_dict(), "sha256": config.digest}, indent=2
  )
  temporary = path.with_suffix(".tmp")
  temporary.write_text(text + "\n")
  temporary.replace(path)
  return changes


def read_config(workdir: pathlib.Path) -> Config:
  """The resolved config of the run in a workdir; `ConfigError` if none."""
  path = workdir / RESOLVED
  try:
    return config_lib.from_dict(json.loads(path.read_text())["config"])
  except FileNotFoundError as error:
    raise ConfigError(
      f"{workdir} holds no run ({RESOLVED} is missing): name a run's workdir, "
      "or give --config."
    ) from error
  except (ValueError, KeyError, TypeError) as error:
    raise ConfigError(f"{path} is damaged: {error}") from error
