"""Coders: how one tensor becomes its part of a payload (see `codecs`).

Most of them cut the tensor into blocks of consecutive values and send small
codes and a scale for each: a value is its code's level times the scale. Two
rules make the bits the same on every processor and for every sharding:

  * No product is ever added to anything unless it is exact. A compiler is free
    to fuse the two into one rounding, or not to. So scales are kept to 8 bits
    (bf16) or 17 (f32), which leaves room for any level in a product.
  * No sum depends on the order that a compiler chooses.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
Payload = tuple[Array, ...]
Shape = tuple[int, ...]
Specs = tuple[jax.ShapeDtypeStruct, ...]

F32_MAX = np.float32(np.finfo(np.float32).max)
F32_TINY = np.float32(np.finfo(np.float32).tiny)  # Smallest normal value.
_BF16_MAX = np.float32(jnp.finfo(jnp.bfloat16).max)
_MANTISSA_BITS = {"bf16": 7, "f32": 16}  # Of a scale, without the implied one.
_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}


class Options(NamedTuple):
  """What a coder is told; see `codecs.make_codec`."""

  block_size: int
  scale: str
  topk_fraction: float


class Coder(NamedTuple):
  """A codec of one tensor; its arrays are that tensor's part of a payload.

  encode(x, key) rounds stochastically if there is a key.
  """

  encode: Callable[[jax.Array, jax.Array | None], Payload]
  decode: Callable[[Payload, Shape], jax.Array]
  spec: Callable[[Shape], Specs]


# --- Whole values -----------------------------------------------------------


def f32(_: Options) -> Coder:
  """Every bit."""
  return Coder(
    encode=lambda x, key: (x,),
    decode=lambda part, shape: part[0].reshape(shape),
    spec=lambda shape: (jax.ShapeDtypeStruct(shape, jnp.float32),),
  )


def bf16(_: Options) -> Coder:
  """The upper half of every value."""
  return Coder(
    encode=lambda x, key: (_to_bf16(x, key),),
    decode=lambda part, shape: part[0].astype(jnp.float32).reshape(shape),
    spec=lambda shape: (jax.ShapeDtypeStruct(shape, jnp.bfloat16),),
  )


def _to_bf16(x: jax.Array, key: jax.Array | None = None) -> jax.Array:
  """Rounds to nearest even, or up or down by chance; subnormals become 0."""
  # The largest finite values would round to infinity.
  finite = jnp.clip(x, -_BF16_MAX, _BF16_MAX)
  x = flushed(jnp.where(jnp.isfinite(x), finite, x))
  if key is not None:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = (bits + noise) & np.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(bits, jnp.float32)
    x = jnp.where(jnp.isfinite(x), rounded, x)
  # `reduce_precision` because XLA may skip the rounding of a conversion that
  # is converted back, and error feedback would then miss it.
  return jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)


# --- Codes and scales -------------------------------------------------------


class _Grid(NamedTuple):
  """The levels that a block's values are rounded to, in units of its scale.

  Code 0 is a level >= 0, so that the zeros of an empty block have no sign.
  """

  bits: int  # of a code
  top: int  # the largest level
  to_codes: Callable[[jax.Array, jax.Array | None], jax.Array]
  to_levels: Callable[[jax.Array], jax.Array]


def _integers(bits: int) -> _Grid:
  """The integers of 8 or 4 bits, without the lowest."""
  top = 2 ** (bits - 1) - 1

  def to_codes(y: jax.Array, u: jax.Array | None) -> jax.Array:
    if u is None:
      return jnp.clip(jnp.round(y), -top, top)
    low = jnp.floor(y)
    return jnp.clip(jnp.where(y > low + u, low + 1, low), -top, top)

  return _Grid(bits, top, to_codes, lambda codes: codes)


def _powers(bits: int) -> _Grid:
  """Sign and exponent: 0 and the powers of two from 1 to 64."""
  signs = 1 << (bits - 1)
  top = 1 << (signs - 2)

  def magnitude(code: jax.Array) -> jax.Array:
    return jnp.where(code > 0, 1 << jnp.maximum(code - 1, 0), 0)

  def to_codes(y: jax.Array, u: jax.Array | None) -> jax.Array:
    size = jnp.abs(y)
    low = sum((size >= 1 << k).astype(jnp.int32) for k in range(signs - 1))
    level = magnitude(low).astype(jnp.float32)
    gap = jnp.maximum(level, 1.0)
    up = size > level + gap * (0.5 if u is None else u)
    code = jnp.minimum(low + up, signs - 1)
    return jnp.where((y < 0) & (code > 0), code + signs, code)

  def to_levels(codes: jax.Array) -> jax.Array:
    codes = codes.astype(jnp.int32)
    level = magnitude(codes & (signs - 1))
    return jnp.where((codes & signs) > 0, -level, level)

  return _Grid(bits, top, to_codes, to_levels)


def _odd_integers() -> _Grid:
  """-3, -1, 1 and 3: two bits have no level to spare for 0."""

  def to_codes(y: jax.Array, u: jax.Array | None) -> jax.Array:
    low = jnp.where(y >= -1, -1.0, -3.0)
    low = jnp.where(y >= 1, 1.0, low)
    up = y > low + 2 * (0.5 if u is None else u)
    return jnp.where(up, low + 2, low) // 2

  return _Grid(2, 3, to_codes, lambda codes: 2 * codes + 1)


def _signs() -> _Grid:
  """1 and -1."""
  return _Grid(1, 1, lambda y, u: y < 0, lambda codes: 1 + 2 * codes)


def integer(bits: int) -> Callable[[Options], Coder]:
  """Symmetric integers of 8 or 4 bits."""
  return lambda options: _scaled(_integers(bits), options)


def e3m0(options: Options) -> Coder:
  """A 4-bit float of sign and exponent, the largest value a power of two."""
  return _scaled(_powers(4), options)


def int2(options: Options) -> Coder:
  """Four levels, at thirds of the largest magnitude."""
  return _scaled(_odd_integers(), options)


def sign1(options: Options) -> Coder:
  """The sign; the scale is the mean magnitude, which is off the least."""
  return _scaled(_signs(), options, mean=True)


def _scaled(grid: _Grid, options: Options, *, mean: bool = False) -> Coder:
  """Packed codes and one scale a block.

  The part of a tensor is (codes [blocks, bytes of a block], scales [blocks]).
  With n codes to a byte, value i of a block stands in its lowest bits, value
  i + width/n in the next ones: all pieces stay contiguous for the vector
  units. The last block is padded with zeros.
  """
  bits = grid.bits
  per_byte = 8 // bits
  align = max(per_byte, 2)  # Tensors shorter than a block are a narrower one.
  # Beyond this scale a level would be infinite.
  mantissa = _MANTISSA_BITS[options.scale]
  cap = _truncated(F32_MAX / np.float32(grid.top), mantissa)

  def blocks_of(shape: Shape) -> tuple[int, int]:
    size = math.prod(shape)
    width = max(align, min(options.block_size, size + -size % align))
    return -(-size // width), width

  def encode(x: jax.Array, key: jax.Array | None) -> Payload:
    size, (blocks, width) = x.size, blocks_of(x.shape)
    x = _in_blocks(x, blocks, width)
    largest = _largest_magnitude(x)
    scale = largest * np.float32(1 / grid.top)
    if mean:
      scale = _mean_magnitude(x, largest, size - (blocks - 1) * width)
    usable = (scale >= F32_TINY) & (largest <= F32_MAX)
    # To nearest, not up: with clipped codes the top value is off by no more
    # than half a step either way, and the steps are finer.
    scale = jax.lax.reduce_precision(scale, 8, mantissa)
    scale = jnp.minimum(scale, cap)
    # A subnormal value is 0 here whether or not the processor flushes it.
    normal = (jnp.abs(x) >= F32_TINY) & (jnp.abs(x) <= F32_MAX)
    x = jnp.where(normal, x, 0.0)
    if not mean:  # signs have no unit
      # Nor may the reciprocal of a scale be subnormal.
      unit = jnp.where(scale > 1, np.float32(2**-8), 1.0)
      inverse = jnp.where(usable, 1 / (scale * unit), 0.0)
      x = flushed((x * unit) * inverse)
    scale = jnp.where(usable, scale, 0.0)
    scale = jnp.where(largest <= F32_MAX, scale, jnp.nan)
    codes = grid.to_codes(x, None if key is None else _uniform(key, x.shape))
    codes = jnp.where(usable, codes, 0).astype(jnp.int8)
    scale = scale.astype(_DTYPES[options.scale])
    codes = _pack(codes, bits).reshape(blocks, width // per_byte)
    return codes, scale.reshape(blocks)

  def decode(part: Payload, shape: Shape) -> jax.Array:
    blocks, width = blocks_of(shape)
    where = _block_shape(shape, blocks, width)
    codes = part[0].reshape(*where, width // per_byte)
    codes = _unpack(codes, bits).reshape(*where, width)
    scales = part[1].reshape(*where, 1).astype(jnp.float32)
    x = grid.to_levels(codes).astype(jnp.float32) * scales
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)

  def spec(shape: Shape) -> Specs:
    blocks, width = blocks_of(shape)
    dtype = jnp.int8 if bits == 8 else jnp.uint8
    return (
      jax.ShapeDtypeStruct((blocks, width // per_byte), dtype),
      jax.ShapeDtypeStruct((blocks,), _DTYPES[options.scale]),
    )

  return Coder(encode, decode, spec)


def _block_shape(shape: Shape, blocks: int, width: int) -> Shape:
  """The blocks of a tensor, in their order, as an array of this shape.

  Where blocks do not reach from one row into the next, they stay in the rows:
  then a tensor split over chips is cut into blocks where it lies, and only
  codes travel.
  """
  if blocks > 1 and shape[-1] % width == 0:
    return (*shape[:-1], shape[-1] // width)
  return (blocks,)


def _in_blocks(x: jax.Array, blocks: int, width: int) -> jax.Array:
  """A tensor's blocks along the last axis, the last one padded with zeros."""
  where = _block_shape(x.shape, blocks, width)
  if len(where) == 1:
    x = jnp.pad(x.reshape(-1), (0, blocks * width - x.size))
  return x.reshape(*where, width)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
  """int8[..., width] -> [..., width * bits / 8]; codes keep their low bits."""
  if bits == 8:
    return codes
  piece = codes.shape[-1] * bits // 8
  packed = 0
  for k in range(8 // bits):
    code = codes[..., k * piece : (k + 1) * piece] & (2**bits - 1)
    packed = packed | (code << (k * bits))
  return packed.astype(jnp.uint8)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
  """The inverse of `_pack`, as [..., codes in a byte, bytes]; signed."""
  if bits == 8:
    return packed
  signed, per_byte = packed.astype(jnp.int8), 8 // bits
  pieces = [signed << (8 - (k + 1) * bits) for k in range(per_byte)]
  return jnp.stack(pieces, axis=-2) >> (8 - bits)


# --- The largest values -----------------------------------------------------


def topk(options: Options) -> Coder:
  """The largest values of each block, with their places.

  The part of a tensor is (places [blocks, k] ascending, values [blocks, k]);
  of equal magnitudes the one with the lowest place goes first.
  """

  def sizes(shape: Shape) -> tuple[int, int, int]:
    size = math.prod(shape)
    width = max(1, min(options.block_size, size))
    kept = max(1, round(options.topk_fraction * width))
    return -(-size // width), width, kept

  def encode(x: jax.Array, key: jax.Array | None) -> Payload:
    del key
    blocks, width, kept = sizes(x.shape)
    x = flushed(jnp.pad(x.reshape(-1), (0, blocks * width - x.size)))
    x = x.reshape(blocks, width)
    size = jnp.abs(x)
    size = jnp.where(size <= F32_MAX, size, jnp.inf)
    _, place = jax.lax.top_k(size, kept)  # lowest place first among equals
    place = jnp.sort(place, axis=1)
    values = jnp.take_along_axis(x, place, axis=1)
    if options.scale == "bf16":
      values = _to_bf16(values)
    return place.astype(_place_dtype(width)), values

  def decode(part: Payload, shape: Shape) -> jax.Array:
    place, values = part
    blocks, width, _ = sizes(shape)
    row = jnp.arange(blocks)[:, None]
    x = jnp.zeros((blocks, width), jnp.float32)
    x = x.at[row, place].set(values.astype(jnp.float32), mode="drop")
    return x.reshape(-1)[: math.prod(shape)].reshape(shape)

  def spec(shape: Shape) -> Specs:
    blocks, width, kept = sizes(shape)
    return (
      jax.ShapeDtypeStruct((blocks, kept), _place_dtype(width)),
      jax.ShapeDtypeStruct((blocks, kept), _DTYPES[options.scale]),
    )

  return Coder(encode, decode, spec)


def _place_dtype(width: int) -> np.dtype:
  return np.min_scalar_type(width - 1)


# --- Parts ------------------------------------------------------------------


def _largest_magnitude(x: jax.Array) -> jax.Array:
  """Of each block [..., width] -> [..., 1]; infinity for a NaN.

  As an infinity, a NaN survives any maximum, also one between devices. Rows
  are halved first because XLA would write all magnitudes to memory to reduce
  long rows on a CPU.
  """
  x = jnp.abs(x)
  x = jnp.where(x <= F32_MAX, x, jnp.inf)
  while x.shape[-1] > 8 and x.shape[-1] % 2 == 0:
    half = x.shape[-1] // 2
    x = jnp.maximum(x[..., :half], x[..., half:])
  return jnp.max(x, axis=-1, keepdims=True)


def _mean_magnitude(x: jax.Array, largest: jax.Array, last: int) -> jax.Array:
  """Of each block [..., width] -> [..., 1]; the last one has `last` values.

  Summed by halves, so in one order whatever the sharding, and in units of the
  power of two below the largest, so that neither end leaves the range of f32.
  """
  width = x.shape[-1]
  bits = jax.lax.bitcast_convert_type(largest, jnp.uint32)
  exponent = bits & np.uint32(255 << 23)
  inverse = jnp.maximum(np.uint32(254 << 23) - exponent, np.uint32(1 << 23))
  inverse = jax.lax.bitcast_convert_type(inverse, jnp.float32)
  total = jnp.abs(flushed(x)) * inverse
  while total.shape[-1] > 1:
    odd = total.shape[-1] % 2
    total = jnp.pad(total, ((0, 0),) * (total.ndim - 1) + ((0, odd),))
    half = total.shape[-1] // 2
    total = total[..., :half] + total[..., half:]
  if last == width:
    return total / width / inverse
  row = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
  return total / jnp.where(row == total.shape[0] - 1, last, width) / inverse


def flushed(x: jax.Array) -> jax.Array:
  """Subnormals as 0, as some processors read them."""
  return jnp.where(jnp.abs(x) < F32_TINY, 0.0, x)


def _uniform(key: jax.Array, shape: Shape) -> jax.Array:
  """Between 0 and 1, both excluded: odd multiples of 2^-24."""
  bits = jax.random.bits(key, shape, jnp.uint32) >> 9
  return (bits.astype(jnp.float32) + 0.5) * np.float32(2**-23)


def _truncated(x: np.float32, mantissa_bits: int) -> np.float32:
  """x, rounded towards 0 to this many bits after the first."""
  mask = np.uint32(0xFFFFFFFF << (23 - mantissa_bits) & 0xFFFFFFFF)
  return (np.float32(x).view(np.uint32) & mask).view(np.float32)
