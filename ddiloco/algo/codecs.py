"""Codecs: how outer gradients cross the exchange (paper Sec. 4.5, Table 10).

A codec is a triple of pure functions, (init, encode, decode). Error feedback
is explicit state: the residual holds what earlier payloads left out. Encoding
runs on the learner's devices, so only packed codes cross to the host.

Values every codec agrees on:
  * A tensor is cut into blocks of consecutive values of its flattened form.
    Blocks never cross tensors nor depend on sharding: same bits on any mesh.
  * f32 keeps every bit. The others read subnormal inputs as zero: whether
    they survive arithmetic depends on the processor, and the result must not.
  * A finite input decodes to finite values. A block that holds an infinity or
    a NaN decodes to non-finite values only where it stands (f32, bf16) or in
    that whole block (int8, int4), and never anywhere else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Shapes = tuple[tuple[int, ...], ...]  # Tensor shapes of one fragment.
Payload = tuple[Array, ...]  # What crosses, in the order of `payload_spec`.
Residual = tuple[Array, ...]  # f32, as the tensors; () without feedback.
Specs = tuple[jax.ShapeDtypeStruct, ...]

_F32_MAX = np.float32(np.finfo(np.float32).max)
_F32_TINY = np.float32(np.finfo(np.float32).tiny)  # Smallest normal value.
_BF16_MAX = np.float32(jnp.finfo(jnp.bfloat16).max)


class Codec(NamedTuple):
  """An encoding of the f32 tensors of one fragment.

  init(shapes) -> residual: all zero; () if there is no error feedback.
  encode(residual, tensors) -> (payload, next residual): jittable.
  decode(payload, shapes) -> f32 tensors: jittable, `shapes` is static.
  payload_spec(shapes) -> exact shapes and dtypes of the payload, so that a
    receiver bounds sizes before it allocates.
  """

  name: str
  init: Callable[[Shapes], Residual]
  encode: Callable[[Residual, Payload], tuple[Payload, Residual]]
  decode: Callable[[Payload, Shapes], tuple[jax.Array, ...]]
  payload_spec: Callable[[Shapes], Specs]


class _Coder(NamedTuple):
  """A codec of one tensor; its arrays are that tensor's part of a payload."""

  encode: Callable[[jax.Array], Payload]
  decode: Callable[[Payload, tuple[int, ...]], jax.Array]
  spec: Callable[[tuple[int, ...]], Specs]


def make_codec(
  name: str, *, block_size: int = 64, error_feedback: bool = False
) -> Codec:
  """Builds a codec.

  With s = (largest magnitude of a block) / (7 or 127), int4 and int8 are off
  by at most s/2 * (1 + 2^-7), or by less than 2^-119 where s is subnormal;
  bf16 by at most 2^-8 of the value.

  Args:
    name: "f32", "bf16", "int8" or "int4".
    block_size: Consecutive values that share a scale (int8, int4); a power of
      two, at least 8.
    error_feedback: Adds what a payload left out to the next one. Changes
      nothing for f32, which leaves nothing out.
  """
  if name not in _CODERS:
    raise ValueError(
      f"unknown codec {name!r}: choose one of {', '.join(_CODERS)}"
    )
  if block_size < 8 or block_size & (block_size - 1):
    raise ValueError(
      f"block_size {block_size} must be a power of two and at least 8, so "
      "that codes fill whole bytes and scales stay a small part of them"
    )
  coder = _CODERS[name](block_size)
  return _fragment_codec(name, coder, error_feedback and name != "f32")


def payload_bytes(codec: Codec, shapes: Shapes) -> int:
  """Bytes of a payload for tensors of these shapes."""
  return specs_bytes(codec.payload_spec(shapes))


def specs_bytes(specs: Specs) -> int:
  """Bytes of arrays of these shapes and dtypes."""
  return sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)


def to_bytes(payload: Sequence[Array]) -> bytes:
  """Concatenates arrays, little endian, in their order; waits for them."""
  return b"".join(_little_endian(np.asarray(a)).tobytes() for a in payload)


def from_bytes(codec: Codec, shapes: Shapes, data: bytes) -> Payload:
  """Reads a payload as read-only views of `data`.

  Raises ValueError if `data` has any other size than the payload must have.
  """
  return unpack(codec.payload_spec(shapes), data)


def unpack(specs: Specs, data: bytes) -> tuple[np.ndarray, ...]:
  """The inverse of `to_bytes`: read-only views of `data`."""
  if len(data) != specs_bytes(specs):
    raise ValueError(
      f"{len(data)} bytes were received, but these arrays have "
      f"{specs_bytes(specs)}: the object is torn or was written for another "
      "codec or layout"
    )
  arrays, offset = [], 0
  for spec in specs:
    little = np.dtype(f"<u{spec.dtype.itemsize}")
    flat = np.frombuffer(data, little, math.prod(spec.shape), offset)
    offset += flat.nbytes
    native = flat.astype(little.newbyteorder("="), copy=False)
    arrays.append(native.view(spec.dtype).reshape(spec.shape))
  return tuple(arrays)


def by_tensor(codec: Codec, payload: Payload) -> list[Payload]:
  """A fragment's payload as one payload of each of its tensors."""
  size = len(codec.payload_spec(((1,),)))
  return [tuple(payload[i : i + size]) for i in range(0, len(payload), size)]


def inspect(
  codec: Codec, shapes: Shapes
) -> Callable[[Payload], tuple[bool, np.ndarray]]:
  """Builds a check, payload -> (finite, norms f32[tensors]).

  `finite` says that all decoded values and all their L2 norms are finite: a
  value whose norm overflows f32 could not be merged either. No decoded copy
  outlives the call.
  """
  measures = [_norm(codec, shape) for shape in shapes]

  def check(payload: Payload) -> tuple[bool, np.ndarray]:
    parts = by_tensor(codec, payload)
    norms = [f(part) for f, part in zip(measures, parts, strict=True)]
    norms = np.array([float(norm) for norm in norms], np.float32)
    return bool(np.isfinite(norms).all()), norms

  return check


@functools.cache
def _norm(
  codec: Codec, shape: tuple[int, ...]
) -> Callable[[Payload], jax.Array]:
  """Compiled once for all tensors of a shape, whatever their fragment."""

  @jax.jit
  def norm(part: Payload) -> jax.Array:
    (tensor,) = codec.decode(part, (shape,))
    return polar(tensor)[1]

  return norm


def polar(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Splits x into its direction x / ||x||_2 (0 for 0) and its L2 norm.

  Squares of values beyond 1e19 or below 1e-19 leave the range of f32, so x is
  first scaled by (about) the reciprocal of its largest magnitude. Not finite
  if x is not.
  """
  largest = jnp.max(jnp.abs(x), initial=0.0)
  # The clip keeps the reciprocal a normal number: 1/3e38 would not be one.
  scale = jnp.clip(1 / largest, _F32_TINY, 1 / _F32_TINY)
  scaled = x * scale
  norm = jnp.sqrt(jnp.sum(jnp.square(scaled)))
  inverse = jnp.where(norm == 0, 0.0, 1 / norm)
  return scaled * inverse, norm / scale


def _fragment_codec(name: str, coder: _Coder, feedback: bool) -> Codec:
  """Applies a coder to every tensor of a fragment, with error feedback."""

  def payload_spec(shapes: Shapes) -> Specs:
    return tuple(itertools.chain.from_iterable(map(coder.spec, shapes)))

  def init(shapes: Shapes) -> Residual:
    return tuple(jnp.zeros(s, jnp.float32) for s in shapes) if feedback else ()

  def encode(residual: Residual, tensors: Payload) -> tuple[Payload, Residual]:
    tensors = tuple(map(_require_f32, tensors))
    if feedback:
      pairs = zip(residual, tensors, strict=True)
      tensors = tuple(jnp.asarray(r) + x for r, x in pairs)
    parts = [coder.encode(x) for x in tensors]
    payload = tuple(itertools.chain.from_iterable(parts))
    if not feedback:
      return payload, ()
    decoded = (
      coder.decode(p, x.shape) for p, x in zip(parts, tensors, strict=True)
    )
    return payload, tuple(map(_left_out, tensors, decoded))

  def decode(payload: Payload, shapes: Shapes) -> tuple[jax.Array, ...]:
    arrays = map(jnp.asarray, payload)
    tensors = []
    for shape in shapes:
      part = tuple(itertools.islice(arrays, len(coder.spec(shape))))
      tensors.append(coder.decode(part, shape))
    return tuple(tensors)

  return Codec(name, init, encode, decode, payload_spec)


def _left_out(x: jax.Array, decoded: jax.Array) -> jax.Array:
  """The next residual: 0 where x was not finite, or it would stay so."""
  error = x - decoded
  return jnp.where(jnp.isfinite(error), error, 0.0)


def _require_f32(x: Array) -> jax.Array:
  x = jnp.asarray(x)
  if x.dtype != jnp.float32:
    raise ValueError(f"outer gradients are float32, not {x.dtype}: cast first")
  return x


def _f32(_: int) -> _Coder:
  return _Coder(
    encode=lambda x: (x,),
    decode=lambda part, shape: part[0].reshape(shape),
    spec=lambda shape: (jax.ShapeDtypeStruct(shape, jnp.float32),),
  )


def _bf16(_: int) -> _Coder:
  def encode(x: jax.Array) -> Payload:
    # The largest finite values would round to infinity.
    finite = jnp.clip(x, -_BF16_MAX, _BF16_MAX)
    return (_round_bf16(jnp.where(jnp.isfinite(x), finite, x)),)

  return _Coder(
    encode=encode,
    decode=lambda part, shape: part[0].astype(jnp.float32).reshape(shape),
    spec=lambda shape: (jax.ShapeDtypeStruct(shape, jnp.bfloat16),),
  )


def _integer(bits: int, block_size: int) -> _Coder:
  """Symmetric integers of 8 or 4 bits and one bf16 scale a block.

  The part of a tensor is (codes [blocks, bytes of a block], scales [blocks]).
  Two 4-bit codes share a byte: value i of a block the low half and value
  i + width/2 the high one, which keeps both halves contiguous for the vector
  units. The last block is padded with zeros.
  """
  largest_code = 2 ** (bits - 1) - 1
  packed = bits == 4

  def blocks_of(shape: tuple[int, ...]) -> tuple[int, int]:
    size = math.prod(shape)
    # Tensors shorter than a block are one narrower block, of even width.
    width = max(2, min(block_size, size + size % 2))
    return -(-size // width), width

  def quantise(x: jax.Array, inverse: jax.Array) -> jax.Array:
    # A subnormal value is 0 here whether or not the processor flushes it.
    normal = (jnp.abs(x) >= _F32_TINY) & (jnp.abs(x) <= _F32_MAX)
    codes = jnp.round(jnp.where(normal, x, 0.0) * inverse)
    return jnp.clip(codes, -largest_code, largest_code).astype(jnp.int8)

  def encode(x: jax.Array) -> Payload:
    blocks, width = blocks_of(x.shape)
    x = jnp.pad(x.reshape(-1), (0, blocks * width - x.size))
    x = x.reshape(blocks, width)
    largest = _largest_magnitude(x)
    scale = largest * np.float32(1 / largest_code)
    usable = (scale >= _F32_TINY) & (largest <= _F32_MAX)
    # To nearest, not up: with clipped codes the top value is off by no more
    # than half a step either way, and the steps are finer. The largest scale
    # of all, f32 max / 7 or / 127, rounds down, so decoding cannot overflow.
    scale = jax.lax.reduce_precision(scale, 8, 7)
    inverse = jnp.where(usable, 1 / scale, 0.0)
    scale = jnp.where(usable, scale, 0.0)
    scale = jnp.where(largest <= _F32_MAX, scale, jnp.nan)
    if packed:
      low = quantise(x[:, : width // 2], inverse)
      high = quantise(x[:, width // 2 :], inverse)
      codes = ((low & 15) | (high << 4)).astype(jnp.uint8)
    else:
      codes = quantise(x, inverse)
    return codes, scale[:, 0].astype(jnp.bfloat16)

  def decode(part: Payload, shape: tuple[int, ...]) -> jax.Array:
    codes, scales = part
    blocks, width = blocks_of(shape)
    if packed:
      codes = codes.astype(jnp.int8)
      codes = jnp.stack([(codes << 4) >> 4, codes >> 4], axis=1)
    codes = codes.reshape(blocks, width).astype(jnp.float32)
    # Exact: at most 7 bits of code times 8 bits of scale.
    x = codes * scales.astype(jnp.float32)[:, None]
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)

  def spec(shape: tuple[int, ...]) -> Specs:
    blocks, width = blocks_of(shape)
    codes = jax.ShapeDtypeStruct((blocks, width), jnp.int8)
    if packed:
      codes = jax.ShapeDtypeStruct((blocks, width // 2), jnp.uint8)
    return codes, jax.ShapeDtypeStruct((blocks,), jnp.bfloat16)

  return _Coder(encode, decode, spec)


_CODERS: dict[str, Callable[[int], _Coder]] = {
  "f32": _f32,
  "bf16": _bf16,
  "int8": lambda block_size: _integer(8, block_size),
  "int4": lambda block_size: _integer(4, block_size),
}


def _largest_magnitude(x: jax.Array) -> jax.Array:
  """Of each row [n, width] -> [n, 1]; infinity for a NaN.

  As an infinity, a NaN survives any maximum, also one between devices. Rows
  are halved first because XLA would write all magnitudes to memory to reduce
  long rows on a CPU.
  """
  x = jnp.abs(x)
  x = jnp.where(x <= _F32_MAX, x, jnp.inf)
  while x.shape[1] > 8 and x.shape[1] % 2 == 0:
    half = x.shape[1] // 2
    x = jnp.maximum(x[:, :half], x[:, half:])
  return jnp.max(x, axis=1, keepdims=True)


def _round_bf16(x: jax.Array) -> jax.Array:
  """Rounds to nearest even; subnormals become 0.

  `reduce_precision` first: XLA may skip the rounding of a conversion to bf16
  that is converted back, and error feedback would then miss it.
  """
  x = jnp.where(jnp.abs(x) < _F32_TINY, 0.0, x)
  return jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)


def _little_endian(a: np.ndarray) -> np.ndarray:
  native = a.view(np.dtype(f"u{a.dtype.itemsize}"))
  return native.astype(native.dtype.newbyteorder("<"), copy=False)
