"""The exchange of a live run: a TensorStore key-value store.

Everything actors tell each other is an object here. The drivers differ in how
they fail; this module makes them alike: every operation ends before its
deadline, transient failures are retried with back-off, the others are reported
at once, and a write that succeeded but was reported as failed is recognised.
"""

import contextlib
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from ddiloco.engine.ports import ExchangeError, Item

KEY_LENGTH_MAX = 512
SEGMENT_LENGTH_MAX = 200  # File names end at 255, less a lock file's suffix.

_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 2.0

# The generation TensorStore gives to an absent key. The empty generation means
# "unspecified": as a condition it would overwrite anything, as a result it
# says that the condition did not hold.
_ABSENT = b"\x02"

# A writer killed half-way leaves its lock file, and the file driver writes the
# next value into it without truncating: a shorter value would get the tail of
# the old one. So every object begins with the length of its value.
_HEADER_BYTES = 8

_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+")
_FORMS = (
  "a directory, file:///directory, gs://bucket/prefix, s3://bucket/prefix or"
  " memory://name (one process only)"
)

# The exchange alone retries: a driver that repeats a conditional write whose
# reply was lost would report our own success as somebody else's.
_NO_RETRIES = {"max_retries": 0}
_CONTEXT = ts.Context(
  {"gcs_request_retries": _NO_RETRIES, "s3_request_retries": _NO_RETRIES}
)

# TensorStore has no error classes: the status code opens the message, and an
# INVALID_ARGUMENT has none.
_CODE = re.compile(r"([A-Z_]+): ")
_ERRNO = re.compile(r"os_error_code='(\d+)'")
_STORE_ERRORS = (ValueError, OSError, RuntimeError, LookupError)
_TRANSIENT_CODES = frozenset(
  {
    "ABORTED",  # What gs and s3 say when a server or the network failed.
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",  # A full disk, too many requests.
    "UNAUTHENTICATED",  # A token that expired; the next try fetches another.
    "UNAVAILABLE",
    "UNKNOWN",  # EIO among others.
  }
)
# Failures of a directory that another process cleans or unmounts meanwhile.
_TRANSIENT_ERRNOS = frozenset({"2", "16", "39"})  # ENOENT, EBUSY, ENOTEMPTY


class TensorStoreExchange:
  """The port `Exchange` over TensorStore. Thread-safe.

  Opening touches nothing; an unreachable store shows at the first operation.
  Stores named `memory://` with the same URL are one store within a process.
  """

  def __init__(
    self,
    url: str,
    *,
    deadline_s: float = 30.0,
    interrupt: threading.Event | None = None,
  ):
    """Opens the store.

    Args:
      url: A directory, `file://`, `gs://`, `s3://` or `memory://` URL.
      deadline_s: Within which every operation returns or raises.
      interrupt: Once set, operations are still tried, but not again.

    Raises:
      ValueError: The URL names no store, or the deadline is not positive.
    """
    if not deadline_s > 0:
      raise ValueError(f"deadline_s is {deadline_s}; it must be positive")
    self.url = url
    self._deadline_s = deadline_s
    self._interrupt = interrupt or threading.Event()
    self._jitter = random.Random()
    self._directory = _directory(url)
    self._stores = _open(url, self._directory)

  def put(self, key: str, value: bytes, *, durable: bool = False) -> None:
    """Writes an object; `durable` survives a crash of the machine."""
    _check_key(key)
    _Operation(self, "put", key).write(value, durable=durable)

  def put_if_absent(
    self, key: str, value: bytes, *, durable: bool = False
  ) -> bool:
    """Creates an object. True if the stored object is the caller's.

    An object with the same bytes counts as the caller's, since a create may
    succeed and yet be reported as failed: values must carry a nonce.
    """
    _check_key(key)
    operation = _Operation(self, "put_if_absent", key)
    if operation.write(value, if_equal=_ABSENT, durable=durable):
      return True
    item = operation.read()
    return item is not None and item.value == value

  def compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None
  ) -> bytes | None:
    """Replaces an object of that generation (None: absent).

    Returns the new generation, or None if somebody else was faster. After a
    failed try, an object with the same bytes counts as the caller's: values
    must carry a nonce. For keys that change rarely: where file times are
    coarse (Linux before 6.13), writes within a few milliseconds may share a
    generation.
    """
    _check_key(key)
    assert generation != b"", "the empty generation would overwrite anything"
    operation = _Operation(self, "compare_and_swap", key)
    written = operation.write(value, if_equal=generation or _ABSENT)
    if written or operation.tries == 1:
      return written or None
    item = operation.read()
    return item.generation if item and item.value == value else None

  def get(self, key: str) -> Item | None:
    """Reads an object; None if there is none."""
    _check_key(key)
    return _Operation(self, "get", key).read()

  def list(self, prefix: str) -> list[str]:
    """The keys that start with `prefix`, sorted.

    Names that cannot be keys (other programs' files) are left out.
    """
    _check_prefix(prefix)
    keys = _Operation(self, "list", prefix).run(
      lambda store: store.list(_range(prefix))
    )
    names = (key.decode(errors="replace") for key in keys)
    return sorted(name for name in names if not _fault_of(name))

  def delete(self, key: str) -> None:
    """Deletes an object; an absent one is no error."""
    _check_key(key)
    _Operation(self, "delete", key).run(lambda store: store.write(key, None))

  def delete_prefix(self, prefix: str) -> None:
    """Deletes every object whose key starts with `prefix`.

    Also removes what killed writers left there, and the directories if the
    prefix ends in a slash.

    Raises:
      ValueError: The prefix is empty or malformed.
    """
    if not prefix:
      raise ValueError("delete_prefix('') would delete the whole exchange")
    _check_prefix(prefix)
    _Operation(self, "delete_prefix", prefix).run(
      lambda store: store.delete_range(_range(prefix))
    )
    if self._directory and prefix.endswith("/"):
      # The file driver removes the directories below this one only. One that a
      # new object is in stays; a writer that it vanishes under tries again.
      with contextlib.suppress(OSError):
        os.rmdir(os.path.join(self._directory, prefix))

  def close(self) -> None:
    """Refuses further operations; those under way end as they would."""
    self._stores = None


class _Operation:
  """One operation on one key: its deadline, its tries, its error message."""

  def __init__(self, exchange: TensorStoreExchange, name: str, key: str):
    self.tries = 0
    self._exchange = exchange
    self._name = name
    self._key = key
    self._start_s = time.monotonic()
    self._deadline_s = self._start_s + exchange._deadline_s
    if exchange._stores is None:
      raise self._error("the exchange is closed")
    self._fast, self._durable = exchange._stores

  def write(
    self,
    value: bytes,
    *,
    if_equal: bytes | None = None,
    durable: bool = False,
  ) -> bytes:
    """Returns the new generation; empty if the condition did not hold."""
    assert if_equal != b"", "the empty generation would overwrite anything"
    framed = len(value).to_bytes(_HEADER_BYTES, "little") + value
    stamp = self.run(
      lambda store: store.write(self._key, framed, if_equal=if_equal), durable
    )
    return stamp.generation

  def read(self) -> Item | None:
    """Returns the object, or None if there is none."""
    result = self.run(lambda store: store.read(self._key))
    if result.state == "value":
      framed = result.value
      end = _HEADER_BYTES + int.from_bytes(framed[:_HEADER_BYTES], "little")
      return Item(framed[_HEADER_BYTES:end], result.stamp.generation)
    # The file driver finds nothing, rather than an error, below a file.
    directory = self._exchange._directory
    if directory and not os.path.isdir(directory):
      if os.path.lexists(directory):
        raise self._error(f"{directory} is not a directory")
    return None

  def run(
    self, start: Callable[[ts.KvStore], ts.Future], durable: bool = False
  ) -> Any:
    """Returns the future's result, retrying until the deadline."""
    store = self._durable if durable else self._fast
    while True:
      self.tries += 1
      left_s = max(0.0, self._deadline_s - time.monotonic())
      try:
        # Giving up drops the future, which cancels what has not begun.
        return start(store).result(timeout=left_s)
      except TimeoutError as error:
        raise self._error("no reply") from error
      except _STORE_ERRORS as error:
        if not _is_transient(str(error)):
          raise self._error(f"{error} (retrying cannot help)") from error
        self._back_off(error)

  def _back_off(self, error: Exception) -> None:
    """Waits before the next try; raises if there must be none."""
    ceiling_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2.0 ** min(self.tries, 9))
    # Jitter, or the actors that failed together would return together.
    delay_s = ceiling_s * self._exchange._jitter.uniform(0.5, 1.0)
    if time.monotonic() + delay_s >= self._deadline_s:
      raise self._error(str(error)) from error
    if self._exchange._interrupt.wait(delay_s):
      raise self._error(f"{error} (interrupted)") from error

  def _error(self, cause: str) -> ExchangeError:
    elapsed_s = time.monotonic() - self._start_s
    return ExchangeError(
      f"{self._name} of {self._key!r} in {self._exchange.url} failed after"
      f" {self.tries} tries in {elapsed_s:.1f} s: {cause}"
    )


def _is_transient(message: str) -> bool:
  errno = _ERRNO.search(message)
  if errno and errno[1] in _TRANSIENT_ERRNOS:
    return True
  code = _CODE.match(message)
  return code is not None and code[1] in _TRANSIENT_CODES


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
    raise ValueError(f"{url!r} names no exchange; use {_FORMS}")
  else:
    path = url
  return os.path.abspath(path)


def _open(url: str, directory: str | None) -> tuple[ts.KvStore, ts.KvStore]:
  """The store, and the same one with writes forced to disk."""
  if directory:
    path = directory.rstrip("/") + "/"
    specs = [
      {"driver": "file", "path": path, "file_io_sync": sync}
      for sync in (False, True)
    ]
    fast, durable = (
      ts.KvStore.open(spec, context=_CONTEXT).result() for spec in specs
    )
    return fast, durable
  scheme, _, rest = url.partition("://")
  path = rest.rstrip("/")
  try:
    store = ts.KvStore.open(
      f"{scheme}://{path}/" if path else f"{scheme}://", context=_CONTEXT
    ).result()
  except ValueError as error:
    raise ValueError(
      f"{url!r} names no exchange ({error}); use {_FORMS}"
    ) from error
  return store, store


def _fault_of(key: str) -> str:
  """What is wrong with a key; empty if nothing is."""
  if len(key) > KEY_LENGTH_MAX:
    return f"it has {len(key)} characters, at most {KEY_LENGTH_MAX} are allowed"
  for segment in key.split("/"):
    if not segment:
      return "it has an empty segment"
    if not _SEGMENT.fullmatch(segment):
      return f"segment {segment!r} has characters outside A-Z a-z 0-9 . _ = -"
    if segment in (".", "..") or segment.endswith(".__lock"):
      return f"segment {segment!r} is reserved"
    if len(segment) > SEGMENT_LENGTH_MAX:
      return (
        f"a segment has {len(segment)} characters, at most"
        f" {SEGMENT_LENGTH_MAX} are allowed"
      )
  return ""


def _check_key(key: str) -> None:
  fault = _fault_of(key)
  if fault:
    raise ValueError(f"invalid key {key!r}: {fault}")


def _check_prefix(prefix: str) -> None:
  """A prefix is empty, or the beginning of a key."""
  fault = prefix and _fault_of(prefix + "x")
  if fault:
    raise ValueError(f"invalid prefix {prefix!r}: {fault}")


def _range(prefix: str) -> ts.KvStore.KeyRange:
  if not prefix:
    return ts.KvStore.KeyRange()
  return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
