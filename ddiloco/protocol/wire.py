"""How records become bytes: framed JSON with a length and a checksum.

Nothing is trusted on the way back: the frame's kind, format, length and
checksum are verified, then every field against its declared type.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from ddiloco.types import WIRE_FORMAT, Refusal

MAGIC = b"ddiloco"
MAX_RECORD_BYTES = 64 * 1024 * 1024
# Of the records that many write and anybody may have to read: a wrong one must
# not cost what a commit or a tape may.
_MAX_BYTES = {
  "answer": 1024 * 1024,
  "member": 64 * 1024,
  "lease": 64 * 1024,
  "learner-snapshot": 1024 * 1024,
}
_ENCODER = json.JSONEncoder(
  sort_keys=True,
  separators=(",", ":"),
  allow_nan=False,
  check_circular=False,
)


class WireError(ValueError):
  """Bytes that are not the record they should be."""

  def __init__(self, reason: Refusal, message: str):
    super().__init__(message)
    self.reason = reason


class Unauthentic(bytes):
  """In place of an object that its run's key does not vouch for: no bytes.

  Whoever does not look for it finds an empty object, which is no valid one.
  """

  why: str  # and what to do about it

  def __new__(cls, why: str) -> "Unauthentic":
    """Takes what is wrong."""
    self = super().__new__(cls)
    self.why = why
    return self


def sha256(data: bytes | memoryview) -> str:
  """The hexadecimal digest of some bytes."""
  return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
  """The one JSON text of a plain value."""
  return _ENCODER.encode(value).encode()


def frame(kind: str, value: Any) -> bytes:
  """One line `ddiloco <format> <kind> <bytes> <sha256>`, then the JSON."""
  body = canonical_json(value)
  head = f" {WIRE_FORMAT} {kind} {len(body)} {sha256(body)}\n".encode()
  return MAGIC + head + body


def unframe(kind: str, data: bytes) -> Any:
  """The JSON value of a framed record; `WireError` if anything is off."""
  if isinstance(data, Unauthentic):
    raise WireError(Refusal.UNAUTHENTIC, data.why)
  limit = _MAX_BYTES.get(kind, MAX_RECORD_BYTES)
  if len(data) > limit:
    raise WireError(Refusal.SIZE, f"{kind}: {len(data)} bytes, over {limit}")
  head, newline, body = data.partition(b"\n")
  fields = head.split(b" ")
  if not newline or len(fields) != 5 or fields[0] != MAGIC:
    raise WireError(Refusal.MALFORMED, f"{kind}: not a ddiloco record")
  _, version, found, length, digest = (
    field.decode("latin-1") for field in fields
  )
  if version != str(WIRE_FORMAT):
    raise WireError(
      Refusal.MALFORMED,
      f"{kind}: wire format {version}, this code reads {WIRE_FORMAT}; run "
      "both sides from the same release",
    )
  if found != kind:
    raise WireError(Refusal.MALFORMED, f"expected a {kind}, found a {found}")
  if length != str(len(body)):
    raise WireError(
      Refusal.SIZE, f"{kind}: {len(body)} bytes where {length} were announced"
    )
  if sha256(body) != digest:
    raise WireError(Refusal.CHECKSUM, f"{kind}: checksum differs")
  try:
    return json.loads(body)
  except (ValueError, RecursionError) as error:
    raise WireError(Refusal.MALFORMED, f"{kind}: {error}") from error


def to_plain(value: Any) -> dict[str, Any]:
  """A dataclass as a dict, tuples as lists; the inverse of `from_plain`."""
  shape = _shape(type(value))
  return dict(zip(shape.names, _write_fields(shape, value), strict=True))


def from_plain(hint: Any, value: Any) -> Any:
  """Builds `hint` from a plain value; `WireError` on any other shape."""
  return _reader(hint)(value)


def pack(value: Any) -> list[Any]:
  """A dataclass as `[class name, field, …]`: the compact form of tapes."""
  cls = type(value)
  return [cls.__name__, *_write_fields(_shape(cls), value)]


def unpack(classes: dict[str, type], value: Any) -> Any:
  """The inverse of `pack`, for any of `classes` by name."""
  name = value[0] if isinstance(value, list) and value else None
  if not isinstance(name, str) or name not in classes:
    raise WireError(Refusal.MALFORMED, f"unknown record {_shown(name)}")
  cls = classes[name]
  if len(value) != len(_shape(cls).names) + 1:
    raise _mismatch(cls, value)
  return _read_fields(cls, value[1:])


# --- A class or hint is looked at once, not for every value -----------------

_Writer = Callable[[Any], Any]
_Reader = Callable[[Any], Any]
_EXACT = (int, str, bool)  # JSON has them: only the type is verified


class _Shape(NamedTuple):
  """The fields of a dataclass, by position, and what is done to them."""

  names: tuple[str, ...]
  values: Callable[[Any], tuple]
  writers: tuple[tuple[int, _Writer], ...]  # of those JSON lacks
  readers: tuple[tuple[int, _Reader], ...]  # of those that are not exact
  exact: tuple[tuple[int, type], ...]


@functools.cache
def _shape(cls: type) -> _Shape:
  hints = typing.get_type_hints(cls)
  names = tuple(field.name for field in dataclasses.fields(cls))
  fields = [(i, hints[name]) for i, name in enumerate(names)]
  return _Shape(
    names=names,
    values=_getter(names),
    writers=tuple((i, write) for i, x in fields if (write := _writer(x))),
    readers=tuple((i, _reader(x)) for i, x in fields if x not in _EXACT),
    exact=tuple((i, x) for i, x in fields if x in _EXACT),
  )


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple]:
  """All fields of a value; `attrgetter` gives a tuple for two or more."""
  if len(names) > 1:
    return operator.attrgetter(*names)
  return lambda value: tuple(getattr(value, name) for name in names)


# --- Writers ----------------------------------------------------------------


@functools.cache
def _writer(hint: Any) -> _Writer | None:
  """None: JSON has values of this type as they are."""
  if dataclasses.is_dataclass(hint):
    return to_plain
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is tuple:
    items = [_writer(arg) for arg in args if arg is not Ellipsis]
    if not any(items):
      return list
    if len(items) < len(args):
      return functools.partial(_write_sequence, items[0])
    return functools.partial(_write_tuple, items)
  if origin in (typing.Union, types.UnionType):
    write = _writer(args[0])
    return write and (lambda value: None if value is None else write(value))
  return None


def _write_fields(shape: _Shape, value: Any) -> list[Any]:
  fields = list(shape.values(value))
  for i, write in shape.writers:
    fields[i] = write(fields[i])
  return fields


def _write_sequence(write: _Writer, value: tuple) -> list[Any]:
  return [write(item) for item in value]


def _write_tuple(items: list[_Writer | None], value: tuple) -> list[Any]:
  pairs = zip(items, value, strict=True)
  return [write(item) if write else item for write, item in pairs]


# --- Readers ----------------------------------------------------------------


@functools.cache
def _reader(hint: Any) -> _Reader:
  if dataclasses.is_dataclass(hint):
    return functools.partial(_read_dataclass, hint)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
    return functools.partial(_read_sequence, hint, _reader(args[0]))
  if origin is tuple:
    return functools.partial(_read_tuple, hint, tuple(map(_reader, args)))
  if origin in (typing.Union, types.UnionType):
    read = _reader(args[0])
    return lambda value: None if value is None else read(value)
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    return functools.partial(_read_enum, hint)
  if hint is float:
    return _read_float
  return functools.partial(_read_exactly, hint)


def _read_dataclass(cls: type, value: Any) -> Any:
  names = _shape(cls).names
  if not isinstance(value, dict) or len(value) != len(names):
    raise _mismatch(cls, value)
  try:
    fields = [value[name] for name in names]
  except KeyError as error:
    raise _mismatch(cls, value) from error
  return _read_fields(cls, fields)


def _read_fields(cls: type, fields: list[Any]) -> Any:
  shape = _shape(cls)
  for i, hint in shape.exact:
    if type(fields[i]) is not hint:
      raise _mismatch(hint, fields[i])
  for i, read in shape.readers:
    fields[i] = read(fields[i])
  return cls(*fields)


def _read_sequence(hint: Any, read: _Reader, value: Any) -> tuple:
  if not isinstance(value, list):
    raise _mismatch(hint, value)
  return tuple(map(read, value))


def _read_tuple(hint: Any, readers: tuple[_Reader, ...], value: Any) -> tuple:
  if not isinstance(value, list) or len(value) != len(readers):
    raise _mismatch(hint, value)
  return tuple(read(item) for read, item in zip(readers, value, strict=True))


def _read_enum(hint: type, value: Any) -> Any:
  try:
    return hint(value)
  except ValueError as error:
    raise _mismatch(hint, value) from error


def _read_exactly(hint: type, value: Any) -> Any:
  if type(value) is not hint:
    raise _mismatch(hint, value)
  return value


def _read_float(value: Any) -> float:
  # Python reads NaN and 1e999, and integers of any size; no tape could be
  # written with what comes of them.
  if type(value) in (int, float):
    try:
      if math.isfinite(value):
        return float(value)
    except OverflowError:
      pass
  raise _mismatch(float, value)


def _mismatch(hint: Any, value: Any) -> WireError:
  name = getattr(hint, "__name__", str(hint))
  return WireError(Refusal.MALFORMED, f"expected {name}, found {_shown(value)}")


def _shown(value: Any) -> str:
  # A container may be nested too deeply, or be too large, to be written out.
  if isinstance(value, list | dict):
    return f"a {type(value).__name__} of {len(value)}"
  return repr(str(value)[:80])
