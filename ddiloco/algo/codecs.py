"""Codecs: how outer gradients cross the exchange (paper Sec. 4.5, Table 10).

A codec is a triple of pure functions, (init, encode, decode). Error feedback
is explicit state: the residual holds what earlier payloads left out. Encoding
runs on the learner's devices, so only packed codes cross to the host.

With B values to a block and S = 2 bytes of a scale (bf16; f32: 4), a value
takes, on average,

  f32    4 bytes
  bf16   2
  int8   1 + S/B       -127 to 127, in units of the scale
  int4   1/2 + S/B     -7 to 7
  e3m0   1/2 + S/B     0 and the powers of two from 1 to 64, with a sign
  int2   1/4 + S/B     -3, -1, 1, 3
  sign1  1/8 + S/B     -1, 1; the scale is the block's mean magnitude
  topk   F (S + I)     the fraction F of largest magnitude in a block, of S
                       bytes; I = 1, 2 or 4 tell the place in the block

Values every codec agrees on:
  * A tensor is cut into blocks of consecutive values of its flattened form.
    Blocks never cross tensors nor depend on sharding: same bits on any mesh.
  * f32 keeps every bit. The others read subnormal inputs as zero: whether
    they survive arithmetic depends on the processor, and the result must not.
  * A finite input decodes to finite values. A block that holds an infinity or
    a NaN decodes to non-finite values only where it stands (f32, bf16, topk)
    or in that whole block (all others), and never anywhere else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.algo import coders
from ddiloco.algo.coders import Array, Coder, Payload, Specs
from ddiloco.config.codecs import NAMES, USERS

Shapes = tuple[tuple[int, ...], ...]  # Tensor shapes of one fragment.
Residual = tuple[Array, ...]  # f32, as the tensors; () without feedback.


class Codec(NamedTuple):
  """An encoding of the f32 tensors of one fragment.

  init(shapes) -> residual: all zero; () if there is no error feedback.
  encode(residual, tensors, words) -> (payload, next residual): jittable.
    Stochastic rounding draws from `words` alone, uint32[n] of any length: the
    same words give the same bits. Nobody else reads them.
  decode(payload, shapes) -> f32 tensors: jittable, `shapes` is static.
  payload_spec(shapes) -> exact shapes and dtypes of the payload, so that a
    receiver bounds sizes before it allocates.
  """

  name: str
  init: Callable[[Shapes], Residual]
  encode: Callable[..., tuple[Payload, Residual]]
  decode: Callable[[Payload, Shapes], tuple[jax.Array, ...]]
  payload_spec: Callable[[Shapes], Specs]


def make_codec(
  name: str,
  *,
  block_size: int = 64,
  scale: str = "bf16",
  rounding: str = "nearest",
  topk_fraction: float = 1 / 32,
  error_feedback: bool = False,
) -> Codec:
  """Builds a codec.

  With a block's largest magnitude m and s = m / 127, 7, 64 or 3 (int8, int4,
  e3m0, int2), a finite value x is off by at most

    bf16        2^-8 |x|
    int8, int4  s/2 (1 + 2^-7)
    e3m0        max(|x|/3, s/2) (1 + 2^-7)
    int2        s (1 + 2^-7)
    sign1       the difference of |x| and the scale, which is at most m
    topk        |x| of what is left out, 2^-8 |x| (bf16) of the others

  or by less than 2^-119 where s is subnormal (sign1: the scale). Stochastic
  rounding is off by up to twice as much and right on average, but for values
  beyond the largest level where the scale was rounded down (2^-8; f32: 2^-17).

  Args:
    name: One of `NAMES`.
    block_size: Consecutive values that share a scale, or of which top-k keeps
      the largest; a power of two, at least 8.
    scale: "bf16" or "f32" (to 17 bits): the dtype of scales and top-k values.
    rounding: "nearest" or "stochastic"; the latter not with f32, sign1, topk.
    topk_fraction: of a block's values that top-k keeps, at least one.
    error_feedback: Adds what a payload left out to the next one. Changes
      nothing for f32, which leaves nothing out.
  """
  if name not in NAMES:
    raise ValueError(
      f"unknown codec {name!r}: choose one of {', '.join(NAMES)}"
    )
  if block_size < 8 or block_size & (block_size - 1):
    raise ValueError(
      f"block_size {block_size} must be a power of two and at least 8, so "
      "that codes fill whole bytes and scales stay a small part of them"
    )
  if scale not in ("bf16", "f32"):
    raise ValueError(f"unknown scale {scale!r}: choose bf16 or f32")
  if rounding not in ("nearest", "stochastic"):
    raise ValueError(
      f"unknown rounding {rounding!r}: choose nearest or stochastic"
    )
  if rounding == "stochastic" and name not in USERS["rounding"]:
    raise ValueError(
      f"rounding 'stochastic' with codec {name!r}, which has no two levels to "
      f"choose from: use one of {', '.join(USERS['rounding'])}"
    )
  if not 0 < topk_fraction <= 1:
    raise ValueError(
      f"topk_fraction {topk_fraction} must be above 0 and at most 1"
    )
  coder = _CODERS[name](coders.Options(block_size, scale, topk_fraction))
  feedback = error_feedback and name != "f32"
  return _fragment_codec(name, coder, feedback, rounding == "stochastic")


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


def inspect(codec: Codec, shapes: Shapes) -> Callable[[Payload], np.ndarray]:
  """Builds a check, payload -> norms f32[tensors] of the decoded values.

  One that is not finite tells of values that are not, or whose norm overflows
  f32: they could not be merged either. No decoded copy outlives the call.
  """
  measures = [_norm(codec, shape) for shape in shapes]

  def check(payload: Payload) -> np.ndarray:
    parts = by_tensor(codec, payload)
    norms = [f(part) for f, part in zip(measures, parts, strict=True)]
    return np.array([float(norm) for norm in norms], np.float32)

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
  scale = jnp.clip(1 / largest, coders.F32_TINY, 1 / coders.F32_TINY)
  scaled = x * scale
  norm = jnp.sqrt(jnp.sum(jnp.square(scaled)))
  inverse = jnp.where(norm == 0, 0.0, 1 / norm)
  return scaled * inverse, norm / scale


def _fragment_codec(
  name: str, coder: Coder, feedback: bool, stochastic: bool
) -> Codec:
  """Applies a coder to every tensor of a fragment, with error feedback."""

  def payload_spec(shapes: Shapes) -> Specs:
    return tuple(itertools.chain.from_iterable(map(coder.spec, shapes)))

  def init(shapes: Shapes) -> Residual:
    return tuple(jnp.zeros(s, jnp.float32) for s in shapes) if feedback else ()

  def encode(
    residual: Residual, tensors: Payload, words: Array | None = None
  ) -> tuple[Payload, Residual]:
    tensors = tuple(map(_require_f32, tensors))
    if feedback:
      pairs = zip(residual, tensors, strict=True)
      tensors = tuple(jnp.asarray(r) + x for r, x in pairs)
    noise = _keys(words, len(tensors)) if stochastic else [None] * len(tensors)
    parts = list(map(coder.encode, tensors, noise))
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


def _keys(words: Array | None, count: int) -> list[jax.Array]:
  """A key for each tensor of a fragment."""
  if words is None:
    raise ValueError("stochastic rounding draws from words: give encode some")
  key = jax.random.key(0, impl="threefry2x32")
  for i in range(words.shape[0]):
    key = jax.random.fold_in(key, words[i])
  return [jax.random.fold_in(key, i) for i in range(count)]


def _left_out(x: jax.Array, decoded: jax.Array) -> jax.Array:
  """The next residual: 0 where x was not finite, or it would stay so."""
  error = x - decoded
  return jnp.where(jnp.isfinite(error), error, 0.0)


def _require_f32(x: Array) -> jax.Array:
  x = jnp.asarray(x)
  if x.dtype != jnp.float32:
    raise ValueError(f"outer gradients are float32, not {x.dtype}: cast first")
  return x


_CODERS: dict[str, Callable[[coders.Options], Coder]] = {
  "f32": coders.f32,
  "bf16": coders.bf16,
  "int8": coders.integer(8),
  "int4": coders.integer(4),
  "e3m0": coders.e3m0,
  "int2": coders.int2,
  "sign1": coders.sign1,
  "topk": coders.topk,
}


def _little_endian(a: np.ndarray) -> np.ndarray:
  native = a.view(np.dtype(f"u{a.dtype.itemsize}"))
  return native.astype(native.dtype.newbyteorder("<"), copy=False)
