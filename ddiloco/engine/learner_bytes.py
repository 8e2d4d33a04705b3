"""All arrays of a learner as bytes, for the snapshot of a run."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout
from ddiloco.engine.state_bytes import StateBytes
from ddiloco.protocol import wire
from ddiloco.protocol.messages import Contribution
from ddiloco.protocol.snapshots import Attempt


class Encoded(NamedTuple):
  """Dispatched encodings of a round's fragments."""

  contributions: tuple[Contribution, ...]
  payloads: dict[int, codecs.Payload]
  norms: list[Any]  # f32[tensors of the fragment], by contribution
  residuals: dict[int, codecs.Residual]  # those that hold if it is counted


class Captured(NamedTuple):
  """A learner's arrays at a step boundary."""

  state: Any  # the program's, whole
  anchors: tuple[Any, ...]  # by fragment
  residuals: tuple[codecs.Residual, ...]  # by fragment
  encoded: dict[tuple[int, int], Encoded]  # open ones, by (round, attempt)

  @property
  def attempts(self) -> tuple[Attempt, ...]:
    """What `LearnerBytes.unpack` has to know of them."""
    return tuple(
      Attempt(*key, self.encoded[key].contributions)
      for key in sorted(self.encoded)
    )


def part_of(encoded: Encoded) -> bytes:
  """The bytes of computed encodings, as an answer has them."""
  payloads = encoded.payloads
  return b"".join(codecs.to_bytes(payloads[p]) for p in sorted(payloads))


class LearnerBytes:
  """How a learner's arrays are laid out, one after the other."""

  def __init__(
    self, program: Any, state: Any, layout: Layout, codec: codecs.Codec
  ):
    """Takes the shapes of a program's state, and how it is exchanged."""
    self._state = StateBytes(program, state)
    self._layout, self._codec = layout, codec
    self.num_fragments = layout.num_fragments
    shapes = [self._state.digest, layout.digest, codec.name]
    self.digest = wire.sha256(wire.canonical_json(shapes))

  def num_bytes(self, attempts: Sequence[Attempt]) -> int:
    """Of a learner with these open answers."""
    return self._state.num_bytes + codecs.specs_bytes(self._specs(attempts))

  def pack(self, captured: Captured) -> bytes:
    """The bytes; waits for the arrays."""
    arrays = [*captured.anchors, *captured.residuals]
    for key in sorted(captured.encoded):
      item = captured.encoded[key]
      for part, norms in zip(item.contributions, item.norms, strict=True):
        p = part.fragment
        arrays += [item.payloads[p], (norms,), item.residuals[p]]
    flat = list(itertools.chain.from_iterable(arrays))
    return self._state.pack(captured.state) + codecs.to_bytes(flat)

  def unpack(
    self, like: Any, attempts: Sequence[Attempt], data: bytes
  ) -> Captured:
    """The arrays, on the host but for the state, which lies as `like` does.

    `ValueError` if these are not the bytes of such a learner.
    """
    size = self.num_bytes(attempts)
    if len(data) != size:
      raise ValueError(f"{len(data)} bytes of a learner's arrays, not {size}")
    view = memoryview(data)
    state = self._state.unpack(like, view[: self._state.num_bytes])
    rest = view[self._state.num_bytes :]
    arrays = iter(codecs.unpack(self._specs(attempts), rest))
    fragments = range(self._layout.num_fragments)

    def take(specs: Sequence[Any]) -> tuple[np.ndarray, ...]:
      return tuple(itertools.islice(arrays, len(specs)))

    anchors = tuple(take(self._layout.shapes(p)) for p in fragments)
    residuals = tuple(take(self._residual(p)) for p in fragments)
    encoded = {}
    for item in attempts:
      new = Encoded(item.contributions, {}, [], {})
      for part in item.contributions:
        p = part.fragment
        new.payloads[p] = take(self._payload(p))
        new.norms.extend(take((None,)))
        new.residuals[p] = take(self._residual(p))
      encoded[item.round, item.attempt] = new
    return Captured(state, anchors, residuals, encoded)

  def _specs(self, attempts: Sequence[Attempt]) -> list[Any]:
    """Of all but the program's state."""
    fragments = range(self._layout.num_fragments)
    specs = [spec for p in fragments for spec in _f32(self._layout.shapes(p))]
    specs += [spec for p in fragments for spec in self._residual(p)]
    for item in attempts:
      for part in item.contributions:
        p = part.fragment
        tensors = len(self._layout.shapes(p))
        specs += [*self._payload(p), *_f32(((tensors,),)), *self._residual(p)]
    return specs

  def _residual(self, p: int) -> list[Any]:
    shapes = self._layout.shapes(p)
    return _f32(shapes) if self._codec.init(((1,),)) else []

  def _payload(self, p: int) -> Sequence[Any]:
    return self._codec.payload_spec(self._layout.shapes(p))


def _f32(shapes: Sequence[tuple[int, ...]]) -> list[Any]:
  return [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
