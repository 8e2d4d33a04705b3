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
import types
import typing
from collections.abc import Callable
from typing import Any

from ddiloco.types import WIRE_FORMAT, Refusal

MAGIC = b"ddiloco"
MAX_RECORD_BYTES = 64 * 1024 * 1024


class WireError(ValueError):
  """Bytes that are not the record they should be."""

  def __init__(self, reason: Refusal, message: str):
    super().__init__(message)
    self.reason = reason


def sha256(data: bytes | memoryview) -> str:
  """The hexadecimal digest of some bytes."""
  return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
  """The one JSON text of a plain value."""
  return json.dumps(
    value, sort_keys=True, separators=(",", ":"), allow_nan=False
  ).encode()


def frame(kind: str, value: Any) -> bytes:
  """One line `ddiloco <format> <kind> <bytes> <sha256>`, then the JSON."""
  body = canonical_json(value)
  head = f" {WIRE_FORMAT} {kind} {len(body)} {sha256(body)}\n".encode()
  return MAGIC + head + body


def unframe(kind: str, data: bytes) -> Any:
  """The JSON value of a framed record; `WireError` if anything is off."""
  if len(data) > MAX_RECORD_BYTES:
    raise WireError(
      Refusal.SIZE, f"{kind}: {len(data)} bytes, over {MAX_RECORD_BYTES}"
    )
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


def to_plain(value: Any) -> Any:
  """A dataclass as a dict, tuples as lists; the inverse of `from_plain`."""
  cls = type(value)
  if cls is tuple:
    return [to_plain(item) for item in value]
  if dataclasses.is_dataclass(cls):
    return {name: to_plain(getattr(value, name)) for name in field_types(cls)}
  return value


def from_plain(hint: Any, value: Any) -> Any:
  """Builds `hint` from a plain value; `WireError` on any other shape."""
  return _reader(hint)(value)


def pack(value: Any) -> list[Any]:
  """A dataclass as `[class name, field, …]`: the compact form of tapes."""
  cls = type(value)
  fields = [to_plain(getattr(value, name)) for name in field_types(cls)]
  return [cls.__name__, *fields]


def unpack(classes: dict[str, type], value: Any) -> Any:
  """The inverse of `pack`, for any of `classes` by name."""
  name = value[0] if isinstance(value, list) and value else None
  if not isinstance(name, str) or name not in classes:
    raise WireError(Refusal.MALFORMED, f"unknown record {_shown(name)}")
  cls = classes[name]
  readers = _field_readers(cls)
  if len(value) != len(readers) + 1:
    raise _mismatch(cls, value)
  fields = zip(readers.values(), value[1:], strict=True)
  return cls(*(read(field) for read, field in fields))


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
  """The resolved type of each field of a dataclass, in order."""
  hints = typing.get_type_hints(cls)
  return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


# --- Readers: a hint is looked at once, not for every value -----------------

_Reader = Callable[[Any], Any]


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


@functools.cache
def _field_readers(cls: type) -> dict[str, _Reader]:
  return {name: _reader(hint) for name, hint in field_types(cls).items()}


def _read_dataclass(cls: type, value: Any) -> Any:
  readers = _field_readers(cls)
  if not isinstance(value, dict) or value.keys() != readers.keys():
    raise _mismatch(cls, value)
  return cls(*(read(value[name]) for name, read in readers.items()))


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
