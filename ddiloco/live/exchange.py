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
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from ddiloco.engine.ports import ExchangeError, ExchangeRefused, Item
from ddiloco.live import store_errors, stores
from ddiloco.live.store_errors import Remedy
from ddiloco.live.stores import Locks, Place

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
_NONCE_BYTES = 8

_SEGMENT = re.compile(r"[A-Za-z0-9._=-]+")


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
    file_locking: str = "os",
    file_sync: str = "durable",
  ):
    """Opens the store.

    Args:
      url: A directory, `file://`, `gs://`, `s3://` or `memory://` URL.
      deadline_s: Within which every operation returns or raises.
      interrupt: Once set, operations are still tried, but not again.
      file_locking: How files are locked: os | lockfile.
      file_sync: Which writes of files are forced to disk: durable | all | none.

    Raises:
      ValueError: The URL names no store, or an option is out of bounds.
    """
    if not deadline_s > 0:
      raise ValueError(f"deadline_s is {deadline_s}; it must be positive")
    self.url = url
    self._deadline_s = deadline_s
    self._interrupt = interrupt or threading.Event()
    self._jitter = random.Random()
    self._address = stores.parse(url, file_locking, file_sync)
    directory = self._address.directory
    self._place = Place(directory) if directory else None
    self._locks = Locks(directory) if file_locking == "lockfile" else None
    self._stores = self._address.open()

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
    item = operation.read_back()
    return item is not None and item.value == value

  def compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None
  ) -> bytes | None:
    """Replaces an object of that generation (None: absent).

    Returns the new generation, or None if somebody else was faster. An object
    with the same bytes counts as the caller's, since a write may succeed and
    yet be reported as failed: values must carry a nonce. For keys that change
    rarely: where file times are coarse (Linux before 6.13), writes within a
    few milliseconds may share a generation.
    """
    _check_key(key)
    assert generation != b"", "the empty generation would overwrite anything"
    operation = _Operation(self, "compare_and_swap", key)
    written = operation.write(value, if_equal=generation or _ABSENT)
    if written:
      return written
    # After one try, too: on a connection that breaks, libcurl sends a request
    # again by itself, and the second one finds what the first has written.
    item = operation.read_back()
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
    return _Operation(self, "list", prefix).names()

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
    operation = _Operation(self, "delete_prefix", prefix)
    if self._address.is_remote:
      # As the driver does, but only what we have seen to have the prefix: some
      # servers list everything.
      names = operation.names()
      operation.run(lambda store: _All([store.write(n, None) for n in names]))
      return
    operation.run(lambda store: store.delete_range(_range(prefix)))
    directory = self._address.directory
    if directory and prefix.endswith("/"):
      # The file driver removes the directories below this one only. One that a
      # new object is in stays; a writer that it vanishes under tries again.
      with contextlib.suppress(OSError):
        os.rmdir(os.path.join(directory, prefix))

  def close(self) -> None:
    """Refuses further operations; those under way end as they would."""
    self._stores = None

  def _renew(self) -> None:
    """Opens the store anew, with whatever credentials there are now."""
    if self._stores is not None:
      self._stores = self._address.open()


class _Operation:
  """One operation on one key: its deadline, its tries, its error message."""

  def __init__(self, exchange: TensorStoreExchange, name: str, key: str):
    self.tries = 0
    self._cause = ""  # why the try before has failed
    self._exchange = exchange
    self._name = name
    self._key = key
    self._start_s = time.monotonic()
    self._deadline_s = self._start_s + exchange._deadline_s
    self._renewed = False

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
    if self._exchange._address.is_remote:
      # To S3 a generation is a digest: a value that comes back would be taken
      # for one that never went away.
      framed += os.urandom(_NONCE_BYTES)
    stamp = self.run(
      lambda store: store.write(self._key, framed, if_equal=if_equal), durable
    )
    if self._exchange._place:
      self._exchange._place.hold()  # the first write has made it
    return stamp.generation

  def read(self) -> Item | None:
    """Returns the object, or None if there is none."""
    result = self.run(lambda store: store.read(self._key))
    if result.state != "value":
      return None
    framed = result.value
    end = _HEADER_BYTES + int.from_bytes(framed[:_HEADER_BYTES], "little")
    return Item(framed[_HEADER_BYTES:end], result.stamp.generation)

  def read_back(self) -> Item | None:
    """What is there instead, after a write whose condition did not hold."""
    item = self.read()
    if item is None:
      # Of a bucket that is gone, S3 says so to a listing only.
      self.run(lambda store: store.list(_range(self._key)))
    return item

  def names(self) -> list[str]:
    """Returns the keys that start with the operation's, sorted."""
    found = self.run(lambda store: store.list(_range(self._key)))
    names = (key.decode(errors="replace") for key in found)
    return sorted(
      name
      for name in names
      if name.startswith(self._key) and not _fault_of(name)
    )

  def run(
    self, start: Callable[[ts.KvStore], Any], durable: bool = False
  ) -> Any:
    """Returns the started future's result, retrying until the deadline."""
    while True:
      pair = self._exchange._stores
      if pair is None:
        raise self._error("the exchange is closed")
      self.tries += 1
      place = self._exchange._place
      if place and (fault := place.fault()):
        raise self._refusal(fault)
      left_s = max(0.0, self._deadline_s - time.monotonic())
      try:
        # Giving up drops the future, which cancels what has not begun.
        return start(pair[durable]).result(timeout=left_s)
      except TimeoutError as error:
        before = f"; before that: {self._cause}" if self._cause else ""
        raise self._error(f"no reply{before}") from error
      except store_errors.STORE_ERRORS as error:
        self._heal(str(error))

  def _heal(self, message: str) -> None:
    """Does what may help before the next try; raises if nothing does."""
    exchange, remedy = self._exchange, store_errors.remedy(message)
    if remedy is Remedy.RENEW_ONCE:
      again = exchange._address.is_remote and not self._renewed
      remedy, self._renewed = Remedy.RENEW if again else Remedy.NONE, True
    text = store_errors.readable(message)
    if remedy is Remedy.NONE:
      raise self._refusal(f"{text} (retrying cannot help)")
    if remedy is Remedy.RENEW:
      exchange._renew()
    if exchange._locks and store_errors.is_held_lock(message):
      exchange._locks.break_if_stale(self._key)
    self._back_off(text)

  def _back_off(self, cause: str) -> None:
    """Waits before the next try; raises if there must be none."""
    self._cause = cause
    ceiling_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2.0 ** min(self.tries, 9))
    # Jitter, or the actors that failed together would return together.
    delay_s = ceiling_s * self._exchange._jitter.uniform(0.5, 1.0)
    if time.monotonic() + delay_s >= self._deadline_s:
      raise self._error(cause)
    if self._exchange._interrupt.wait(delay_s):
      raise self._error(f"{cause} (interrupted)")

  def _error(self, cause: str) -> ExchangeError:
    return ExchangeError(self._message(cause))

  def _refusal(self, cause: str) -> ExchangeRefused:
    return ExchangeRefused(self._message(cause))

  def _message(self, cause: str) -> str:
    elapsed_s = time.monotonic() - self._start_s
    return (
      f"{self._name} of {self._key!r} in {self._exchange.url} failed after"
      f" {self.tries} tries in {elapsed_s:.1f} s: {cause}"
    )


class _All:
  """Several futures as one."""

  def __init__(self, futures: list[ts.Future]):
    self._futures = futures

  def result(self, timeout: float) -> None:
    """Waits for all of them; raises what one of them raises."""
    end_s = time.monotonic() + timeout
    for future in self._futures:
      future.result(timeout=max(0.0, end_s - time.monotonic()))


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
