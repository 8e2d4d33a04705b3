"""Reads a run's key from a file that nobody else may read."""

import os
import pathlib
import stat

from ddiloco.config import ConfigError
from ddiloco.engine.sealing import KEY_BYTES_MAX, KEY_BYTES_MIN, RunKey


def read(path: str) -> RunKey:
  """The key in a file; `ConfigError` unless it is one, and a secret."""
  where = pathlib.Path(path).absolute()
  make = f"Make one: head -c 32 /dev/urandom > {path}; chmod 600 {path}"
  try:
    # A pipe without a writer would keep whoever opens it waiting.
    descriptor = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
  except OSError as error:
    raise ConfigError(
      f"--run_key_file={path} cannot be read: {error.strerror}. {make}."
    ) from error
  try:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
      raise ConfigError(f"--run_key_file={path} is not a file. {make}.")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
      raise ConfigError(
        f"--run_key_file={path} is open to others (mode "
        f"{stat.S_IMODE(mode):o}). Make it yours alone: chmod 600 {path}; and "
        "if somebody may have read it, make another key."
      )
    secret = os.read(descriptor, KEY_BYTES_MAX + 1)
  finally:
    os.close(descriptor)
  if not KEY_BYTES_MIN <= len(secret) <= KEY_BYTES_MAX:
    more = " or more" if len(secret) > KEY_BYTES_MAX else ""
    raise ConfigError(
      f"--run_key_file={path} holds {len(secret)} bytes{more}; a key has "
      f"{KEY_BYTES_MIN} to {KEY_BYTES_MAX}. {make}."
    )
  return RunKey(secret, str(where))
