"""Bytes of any size as objects of bounded ones, verified on the way back."""

from collections.abc import Callable, Iterator, Sequence

from ddiloco.engine.ports import Call, Job
from ddiloco.protocol import wire
from ddiloco.protocol.messages import PartRef

_PART_BYTES = 64 * 1024 * 1024
Name = Callable[[int], str]  # the key of a part by its number


def part_sizes(num_bytes: int) -> Iterator[int]:
  """The sizes of the parts of so many bytes, in order."""
  for start in range(0, num_bytes, _PART_BYTES):
    yield min(num_bytes - start, _PART_BYTES)


def write_parts(name: Name, data: bytes, *, durable: bool = False) -> Job:
  """Writes them; returns their records."""
  refs, view = [], memoryview(data)
  for number, size in enumerate(part_sizes(len(data))):
    part, view = bytes(view[:size]), view[size:]
    yield Call("put", (name(number), part), durable=durable)
    refs.append(PartRef(len(part), wire.sha256(part)))
  return tuple(refs)


def read_parts(name: Name, refs: Sequence[PartRef]) -> Job:
  """Puts them together; `ValueError` if one is gone, torn or damaged."""
  parts = []
  for number, ref in enumerate(refs):
    item = yield Call("get", (name(number),))
    what = f"bytes of part {number} of its state"
    check_object(item and item.value, ref.bytes, ref.sha256, what)
    parts.append(item.value)
  return b"".join(parts)


def check_sizes(refs: Sequence[PartRef], num_bytes: int) -> None:
  """`ValueError` unless these are the parts of so many bytes."""
  sizes = [ref.bytes for ref in refs]
  if sizes != list(part_sizes(num_bytes)):
    raise ValueError(f"its parts have {sum(sizes)} bytes, not {num_bytes}")


def check_object(
  data: bytes | None, size_bytes: int, sha256: str, what: str
) -> None:
  """`ValueError` unless these are the bytes that a record names."""
  if data is None:
    raise ValueError(f"the {what} are gone")
  if isinstance(data, wire.Unauthentic):
    raise ValueError(f"the {what} are refused: {data.why}")
  found = wire.sha256(data)
  if (len(data), found) != (size_bytes, sha256):
    raise ValueError(
      f"the {what} are damaged: {len(data)} bytes with SHA-256 {found[:12]}, "
      f"where the record names {size_bytes} bytes with {sha256[:12]}"
    )
