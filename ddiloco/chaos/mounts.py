"""A directory that can be made read-only for this process and its children.

Not by permissions, which mean nothing to root and are a refusal to others,
but as a file system goes read-only after an error: writes fail with EROFS.
It is a bind mount in a mount namespace of our own: nobody else sees it, and
it is gone with the last of our processes, however that ends. Linux only.
"""

import ctypes
import errno
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

_NEWNS = 0x00020000  # of unshare(2)
_RDONLY, _REMOUNT, _BIND = 1, 32, 4096  # of mount(2)
_REC, _PRIVATE = 16384, 1 << 18
_BUSY_S = 2.0  # for files that are open for writing just now
_AGAIN = "DDILOCO_CHAOS_AGAIN"
_ROOT_OF_ITS_OWN = ("unshare", "--map-root-user", "--mount")


class Unavailable(OSError):
  """This system does not let us."""


def start_again_as_root(module: str) -> None:
  """Where users may be root of a namespace, runs this command as that.

  Returns if that is neither possible nor needed.
  """
  tried = os.environ.pop(_AGAIN, None)
  if tried or os.geteuid() == 0 or shutil.which("unshare") is None:
    return
  trial = [*_ROOT_OF_ITS_OWN, "true"]
  if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
    os.environ[_AGAIN] = "1"
    command = [*_ROOT_OF_ITS_OWN, sys.executable, "-m", module, *sys.argv[1:]]
    os.execvp(command[0], command)


def enter() -> None:
  """Gives the calling thread, and what it starts, mounts of its own.

  Raises `Unavailable`.
  """
  try:
    _call("unshare", _NEWNS)
    _mount(None, "/", _REC | _PRIVATE)
  except OSError as error:
    raise Unavailable(
      error.errno, f"mounts of its own take root ({error.strerror})"
    ) from error


class ReadOnly:
  """A directory of which writes can be forbidden for a while."""

  def __init__(self, directory: pathlib.Path):
    """Mounts the directory on itself; `Unavailable` if that is refused."""
    self._path = str(directory)
    try:
      _mount(self._path, self._path, _BIND)
      # A user may not take away what the mount below forbids (nosuid, ...).
      self._flags = os.statvfs(self._path).f_flag & 0b1110
      self.set(False)
    except OSError as error:
      raise Unavailable(error.errno, f"no bind mount: {error}") from error

  def set(self, value: bool) -> None:
    """Forbids writes, or allows them again; `OSError` if it cannot."""
    flags = _REMOUNT | _BIND | self._flags | (_RDONLY if value else 0)
    end_s = time.monotonic() + _BUSY_S
    while True:
      try:
        return _mount(None, self._path, flags)
      except OSError as error:
        if error.errno != errno.EBUSY or time.monotonic() > end_s:
          raise
      time.sleep(0.001)

  def refuses(self) -> bool:
    """Whether the kernel says so to a write of our own."""
    probe = os.path.join(self._path, f".probe-{os.getpid()}")
    try:
      os.close(os.open(probe, os.O_CREAT | os.O_WRONLY))
      os.unlink(probe)
    except OSError as error:
      return error.errno == errno.EROFS
    return False


def _mount(source: str | None, target: str, flags: int) -> None:
  from_ = None if source is None else source.encode()
  _call("mount", from_, target.encode(), None, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: Any) -> None:
  """Calls a function of the C library; `OSError` if it fails."""
  libc = ctypes.CDLL(None, use_errno=True)
  if not hasattr(libc, name):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
  if getattr(libc, name)(*arguments):
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
