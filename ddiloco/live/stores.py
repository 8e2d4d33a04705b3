"""Which store a URL names, and how TensorStore opens it.

  a directory, or file:///directory
  gs://bucket/prefix
  s3://bucket/prefix[?endpoint=https://host:port][&region=NAME]
  memory://name

Endpoint and region are for servers other than Amazon's, and for what Amazon
does not tell by itself. Credentials are in no URL, as those stand in process
lists and logs: TensorStore finds them as Google's and Amazon's own tools do.
"""

import contextlib
import dataclasses
import os
import re
import threading
import time
import urllib.parse
import uuid
import weakref
from typing import Any

import tensorstore as ts

from ddiloco.config.schema import did_you_mean

FORMS = (
  "a directory, file:///directory, gs://bucket/prefix, s3://bucket/prefix or"
  " memory://name (one process only)"
)
LOCKINGS = ("os", "lockfile")
SYNCS = ("durable", "all", "none")
LOCK_TIMEOUT_S = 2.0  # then a lock of `lockfile` is looked at ...
LOCK_STALE_S = 10.0  # ... and broken, if nothing has changed for so long
_LOCK = ".__lock"

_OPTIONS = ("endpoint", "region")
_REGION = "us-east-1"  # what servers of other makers take, unless told

# The exchange alone retries: a driver that repeats a conditional write whose
# reply was lost would report our own success as somebody else's.
_NO_RETRIES = {"max_retries": 0}
_SETTINGS = {
  "gcs_request_retries": _NO_RETRIES,
  "s3_request_retries": _NO_RETRIES,
}
_CONTEXT = ts.Context(_SETTINGS)

# A connection on which nothing moves for so long is given up and tried anew.
_STALLED = {
  "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
  "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "10",
}


@dataclasses.dataclass(frozen=True)
class Address:
  """A store, and how TensorStore is to open it."""

  url: str
  directory: str | None  # absolute; None: not of this file system
  fast: dict[str, Any] | str
  durable: dict[str, Any] | str  # every write is on disk when it returns

  @property
  def is_remote(self) -> bool:
    """Whether it is a server, which asks for credentials."""
    return not self.url.startswith("memory:") and self.directory is None

  def open(self) -> tuple[ts.KvStore, ts.KvStore]:
    """The store, and the same one with durable writes. Touches nothing.

    Every call looks for credentials anew.
    """
    for name, value in _STALLED.items():
      os.environ.setdefault(name, value)
    # One of its own, or TensorStore would hand out the driver that is open,
    # with the credentials it has.
    context = ts.Context(_SETTINGS) if self.is_remote else _CONTEXT
    try:
      fast = ts.KvStore.open(self.fast, context=context).result()
      if self.durable == self.fast:
        return fast, fast
      return fast, ts.KvStore.open(self.durable, context=context).result()
    except ValueError as error:
      reason = str(error).partition(" [")[0]
      raise ValueError(
        f"{self.url!r} names no exchange ({reason}); use {FORMS}"
      ) from error


def parse(url: str, locking: str = "os", sync: str = "durable") -> Address:
  """What a URL names; `ValueError` with the remedy if it is none.

  Args:
    url: see above.
    locking: of files, one of `LOCKINGS`.
    sync: which writes of files are forced to disk, one of `SYNCS`.
  """
  for name, value, known in (
    ("file_locking", locking, LOCKINGS),
    ("file_sync", sync, SYNCS),
  ):
    if value not in known:
      raise ValueError(f"{name} is {value!r}; it must be of {known}")
  directory = _directory(url)
  if directory is not None:
    fast, durable = (
      _file(directory, locking, forced)
      for forced in (sync == "all", sync != "none")
    )
    return Address(url, directory, fast, durable)
  scheme, _, rest = url.partition("://")
  path = rest.rstrip("/")
  spec: Any = f"{scheme}://{path}/" if path else f"{scheme}://"
  if scheme == "s3":
    spec = _s3(url)
  return Address(url, None, spec, spec)


def _directory(url: str) -> str | None:
  """The absolute directory that the URL names, if it names one."""
  scheme, separator, path = url.partition("://")
  if separator and scheme in ("gs", "s3", "memory"):
    return None
  if separator and scheme == "file":
    if not path.startswith("/") or "?" in path or "#" in path:
      raise ValueError(
        f"{url!r} names no local directory; write file:///directory"
      )
    path = urllib.parse.unquote(path)
  elif separator or not url or re.match(r"(file|gs|s3|memory):", url):
    raise ValueError(f"{url!r} names no exchange; use {FORMS}")
  else:
    path = url
  return os.path.abspath(path)


def _file(directory: str, locking: str, forced: bool) -> dict[str, Any]:
  lock = {"mode": locking}
  if locking == "lockfile":
    lock["acquire_timeout"] = f"{LOCK_TIMEOUT_S}s"
  return {
    "driver": "file",
    "path": directory.rstrip("/") + "/",
    "file_io_sync": forced,
    "file_io_locking": lock,
  }


def _s3(url: str) -> dict[str, Any]:
  parts = urllib.parse.urlsplit(url)
  options = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
  for name, value in options.items():
    if name not in _OPTIONS:
      hint = (
        did_you_mean(name, _OPTIONS) or f"It takes {' and '.join(_OPTIONS)}."
      )
      raise ValueError(
        f"{_shown(url)!r} has an unknown option {name!r}. {hint} Credentials "
        "are never in a URL: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or AWS_PROFILE."
      )
    if not value:
      raise ValueError(f"{url!r}: {name} is empty; leave it out or set it")
  if parts.fragment or "@" in parts.netloc or ":" in parts.netloc:
    raise ValueError(f"{_shown(url)!r} names no bucket; use {FORMS}")
  path = urllib.parse.unquote(parts.path).strip("/")
  spec = {
    "driver": "s3",
    "bucket": parts.netloc,
    "path": f"{path}/" if path else "",
    # Else every conditional write would cost a second request, which is no
    # safer. A server that ignores conditions fails the check at the start.
    "use_conditional_write": True,
    # Left to itself, TensorStore 0.1.86 reads no credentials file.
    "aws_credentials": {
      "type": "default",
      "profile": os.environ.get("AWS_PROFILE", "default"),
    },
  }
  endpoint = options.get("endpoint")
  if endpoint is not None:
    server = urllib.parse.urlsplit(endpoint)
    if server.scheme not in ("http", "https") or not server.hostname:
      raise ValueError(f"{_shown(url)!r}: endpoint is no http(s)://host[:port]")
    if "@" in server.netloc:
      raise ValueError(
        f"{_shown(url)!r}: endpoint holds a user name. Credentials are never "
        "in a URL: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        "AWS_PROFILE."
      )
    spec["endpoint"] = endpoint.rstrip("/")
  region = options.get("region", _REGION if endpoint else None)
  if region:
    spec["aws_region"] = region
  return spec


def _shown(url: str) -> str:
  """A URL that may hold secrets by mistake, for a message."""
  return url.partition("?")[0] + ("?..." if "?" in url else "")


class Place:
  """A store's directory, held open so that its end is noticed.

  A directory that was removed, or whose file system is gone, would be made
  anew by the next write, somewhere else.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self._lock = threading.Lock()
    self._file: int | None = None  # None: it has not been there yet

  def fault(self) -> str:
    """What has become of it; empty if it is there, or was not there yet."""
    try:
      if not self.hold():
        return ""
      now = os.stat(self._directory)
      same = os.path.samestat(now, os.fstat(self._file))
    except NotADirectoryError:
      return f"{self._directory} is not a directory"
    except FileNotFoundError:
      return f"{self._directory} is gone: was it deleted, or unmounted?"
    except OSError:
      return ""  # the store is away, as its operations will find
    return "" if same else f"{self._directory} is not the directory it was"

  def hold(self) -> bool:
    """Whether it has been there; from its first moment on it is held."""
    if self._file is not None:
      return True
    with self._lock:
      if self._file is None:
        try:
          file = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, PermissionError):
          return False  # the driver says more about it
        # An open file keeps the number of the directory from being reused.
        weakref.finalize(self, os.close, file)
        self._file = file
    return True


class Locks:
  """Breaks locks of `lockfile` whose owners have died in mid-write.

  An owner that was only asleep finds its lock gone, and tries again.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self._seen: dict[str, tuple[tuple[int, ...], float]] = {}

  def break_if_stale(self, key: str) -> None:
    """Removes a lock that has not changed for long, by our own clock."""
    path = os.path.join(self._directory, key) + _LOCK
    try:
      found = os.stat(path)
    except OSError:
      self._seen.pop(path, None)
      return
    state = (found.st_ino, found.st_mtime_ns, found.st_size)
    known, since_s = self._seen.get(path, (None, 0.0))
    if state != known:
      self._seen[path] = (state, time.monotonic())
    elif time.monotonic() - since_s >= LOCK_STALE_S:
      del self._seen[path]
      # Set aside first: of several that break it, one succeeds.
      aside = f"{path}.{uuid.uuid4().hex}{_LOCK}"
      with contextlib.suppress(OSError):
        os.rename(path, aside)
        os.unlink(aside)
