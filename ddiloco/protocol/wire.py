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
  if dataclasses.is_dataclass(value):
    return {
      field.name: to_plain(getattr(value, field.name))
      for field in dataclasses.fields(value)
    }
  if isinstance(value, tuple):
    return [to_plain(item) for item in value]
  return value


def from_plain(hint: Any, value: Any) -> Any:
  """Builds `hint` from a plain value; `WireError` on any other shape."""
  if dataclasses.is_dataclass(hint):
    fields = field_types(hint)
    if not isinstance(value, dict) or value.keys() != fields.keys():
      raise _mismatch(hint, value)
    return hint(**{key: from_plain(fields[key], value[key]) for key in fields})
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is tuple:
    return _tuple_from_plain(hint, args, value)
  if origin in (typing.Union, types.UnionType):
    if value is None:
      return None
    return from_plain(args[0], value)
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    try:
      return hint(value)
    except ValueError as error:
      raise _mismatch(hint, value) from error
  if hint is float:
    return _float_from_plain(value)
  if type(value) is not hint:
    raise _mismatch(hint, value)
  return value


def pack(value: Any) -> list[Any]:
  """A dataclass as `[class name, field, …]`: the compact form of tapes."""
  return [
    type(value).__name__,
    *(
      to_plain(getattr(value, field.name))
      for field in dataclasses.fields(value)
    ),
  ]


def unpack(classes: dict[str, type], value: Any) -> Any:
  """The inverse of `pack`, for any of `classes` by name."""
  name = value[0] if isinstance(value, list) and value else None
  if not isinstance(name, str) or name not in classes:
    raise WireError(Refusal.MALFORMED, f"unknown record {_shown(name)}")
  cls = classes[name]
  fields = field_types(cls)
  if len(value) != len(fields) + 1:
    raise _mismatch(cls, value)
  return cls(
    *(
      from_plain(hint, v)
      for hint, v in zip(fields.values(), value[1:], strict=True)
    )
  )


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
  """The resolved type of each field of a dataclass, in order."""
  hints = typing.get_type_hints(cls)
  return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _tuple_from_plain(hint: Any, args: tuple, value: Any) -> tuple:
  if not isinstance(value, list):
    raise _mismatch(hint, value)
  if len(args) == 2 and args[1] is Ellipsis:
    return tuple(from_plain(args[0], item) for item in value)
  if len(args) != len(value):
    raise _mismatch(hint, value)
  return tuple(
    from_plain(arg, item) for arg, item in zip(args, value, strict=True)
  )


def _float_from_plain(value: Any) -> float:
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
