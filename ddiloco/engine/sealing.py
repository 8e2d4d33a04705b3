"""A run key: with it, write access to the exchange alone injects nothing.

Every object of a run that has a key begins with one line,

  ddiloco-sealed 1 <fingerprint of the key> <run> <MAC> <name>

whose MAC, HMAC-SHA256, covers the other fields and all the bytes that follow.
`name` is where the object belongs, so none can be moved; `run` is a number
that the line of commit 0 draws for its run, so none can be brought from a
run with the same key. (The lease is there before commit 0, and is anybody's.)

What does not open is read as `Unauthentic`: a record that cannot be decoded,
bytes that have no such digest. So all readers treat it as they treat garbage.
"""

import hashlib
import hmac
import secrets

from ddiloco.config import ConfigError
from ddiloco.engine.ports import Exchange, Item
from ddiloco.protocol import keys
from ddiloco.protocol.wire import Unauthentic

KEY_BYTES_MIN = 32
KEY_BYTES_MAX = 4096

_MAGIC = b"ddiloco-sealed "
_FORMAT = b"1"
_LINE_BYTES_MAX = 1024  # a name has at most 512
_NO_RUN = "0" * 32
_FIRST = keys.commit(0)
_RESTORE = (
  "Restore it from a copy of the exchange, and look who may write there"
)


class RunKey:
  """The secret that the actors of a run share; it never shows itself."""

  def __init__(self, secret: bytes, source: str):
    """Takes at least `KEY_BYTES_MIN` bytes, and where they come from."""
    assert KEY_BYTES_MIN <= len(secret) <= KEY_BYTES_MAX
    self.source = source
    self._secret = secret
    self.fingerprint = self.mac(b"ddiloco run key", b"")[:16]

  def __repr__(self) -> str:
    return f"RunKey({self.source})"

  def mac(self, line: bytes, value: bytes | memoryview) -> str:
    """HMAC-SHA256 of a line and what follows it, in hexadecimal."""
    found = hmac.new(self._secret, line + b"\n", hashlib.sha256)
    found.update(value)
    return found.hexdigest()


class SealedExchange:
  """The port `Exchange` over another one, as a run with or without a key.

  Every operation raises `ConfigError` once there is a run that has another
  key, has none, or has one although this side has none.
  """

  def __init__(self, exchange: Exchange, key: RunKey | None, url: str):
    """Takes the store itself, the key if there is one, and a name for it."""
    self.url = url
    self._exchange, self._key = exchange, key
    self._run: str | None = None  # until commit 0 was read or written
    self._own = secrets.token_hex(16)  # the run's, if it is started from here

  def put(self, key: str, value: bytes, *, durable: bool = False) -> None:
    """See `Exchange`."""
    self._exchange.put(key, self._seal(key, value), durable=durable)

  def put_if_absent(
    self, key: str, value: bytes, *, durable: bool = False
  ) -> bool:
    """See `Exchange`."""
    sealed = self._seal(key, value)
    return self._exchange.put_if_absent(key, sealed, durable=durable)

  def compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None
  ) -> bytes | None:
    """See `Exchange`."""
    sealed = self._seal(key, value)
    return self._exchange.compare_and_swap(key, sealed, generation)

  def get(self, key: str) -> Item | None:
    """See `Exchange`; the value of what does not open is `Unauthentic`."""
    item = self._exchange.get(key)
    if self._run is None:
      self._enter(item if key == _FIRST else self._exchange.get(_FIRST))
    if item is None:
      return None
    try:
      return Item(self._open(key, item.value), item.generation)
    except _Closed as why:
      value = Unauthentic(f"{key} is not authentic: {why}. {_RESTORE}")
      return Item(value, item.generation)

  def list(self, prefix: str) -> list[str]:
    """See `Exchange`. Anybody may have put an object there."""
    return self._exchange.list(prefix)

  def delete(self, key: str) -> None:
    """See `Exchange`."""
    self._exchange.delete(key)

  def delete_prefix(self, prefix: str) -> None:
    """See `Exchange`."""
    self._exchange.delete_prefix(prefix)

  def close(self) -> None:
    """Closes the store itself."""
    self._exchange.close()

  def _enter(self, first: Item | None) -> None:
    """Learns from commit 0 which run this is; `ConfigError` at the door."""
    if first is None:
      return
    try:
      value = self._open(_FIRST, first.value)
    except _Closed as why:
      raise ConfigError(
        f"the run in {self.url} cannot be entered: {_FIRST} is not authentic, "
        f"for {why}. {why.remedy}."
      ) from None
    line = first.value[: len(first.value) - len(value)]
    self._run = line.split(b" ")[3].decode() if line else _NO_RUN

  def _run_of(self, name: str) -> str:
    if name.startswith(keys.LEASES):
      return _NO_RUN
    return self._run or self._own

  def _seal(self, name: str, value: bytes) -> bytes:
    if self._key is None:
      return value
    fields = (self._key.fingerprint, self._run_of(name))
    mac = self._key.mac(_line(*fields, name), value)
    return b"".join((_line(*fields, mac, name), b"\n", value))

  def _open(self, name: str, data: bytes) -> bytes:
    """The bytes that were sealed; `_Closed` says why they do not open."""
    end = data.find(b"\n", 0, _LINE_BYTES_MAX)
    sealed = end >= 0 and data.startswith(_MAGIC)
    if self._key is None:
      if sealed:
        raise _Closed("it is sealed by a run key", "Give --run_key_file")
      return data
    path = self._key.source
    if not sealed:
      raise _Closed(
        "it is not sealed by a run key",
        f"If the run was started without one, leave out --run_key_file={path}",
      )
    fields = data[:end].decode("latin-1").split(" ")
    if len(fields) != 6 or fields[1] != _FORMAT.decode():
      raise _Closed(f"its seal is not of format {_FORMAT.decode()}", _RESTORE)
    fingerprint, run, mac, where = fields[2:]
    if fingerprint != self._key.fingerprint:
      raise _Closed(
        f"it is sealed by another run key than {path}",
        "Give the key that the run was started with",
      )
    covered = memoryview(data)[end + 1 :]
    found = self._key.mac(_line(fingerprint, run, where), covered)
    if not hmac.compare_digest(found.encode(), mac.encode()):
      raise _Closed("it was altered after it was sealed", _RESTORE)
    if where != name:
      raise _Closed(f"it was moved here from {where}", _RESTORE)
    if run != self._run_of(name) and (name != _FIRST or self._run is not None):
      raise _Closed("it is of another run with the same key", _RESTORE)
    return data[end + 1 :]


class _Closed(Exception):
  """Why an object does not open, and what to do if it is the first one."""

  def __init__(self, why: str, remedy: str):
    super().__init__(why)
    self.remedy = remedy


def _line(*fields: str) -> bytes:
  """The line of an object, or what of it the MAC covers."""
  return b" ".join((_MAGIC + _FORMAT, *(field.encode() for field in fields)))
