"""One battery over all codecs, and what is particular to some."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ddiloco.algo import codecs

_TINY = float(np.finfo(np.float32).tiny)
_MAX = float(np.finfo(np.float32).max)
_NAMES = codecs.NAMES
_LOSSY = _NAMES[1:]
_TOPS = {"int8": 127, "int4": 7, "e3m0": 64, "int2": 3, "sign1": 1}
_SHAPES = ((), (5,), (3, 67), (0,))

every_codec = pytest.mark.parametrize("name", _NAMES)
every_lossy_codec = pytest.mark.parametrize("name", _LOSSY)
every_scaled_codec = pytest.mark.parametrize("name", _TOPS)


def _random(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(rng.normal(size=s).astype(np.float32) for s in shapes)


def _bits(arrays):
  return [np.asarray(a).tobytes() for a in arrays]


def _blocks(x, block_size):
  """The blocks of one tensor as (start, stop) of its flat form."""
  width = max(2, min(block_size, x.size + x.size % 2))
  starts = range(0, x.size, width)
  return [(a, min(a + width, x.size)) for a in starts]


def _bound(name, x, block_size):
  """The promised bound of the error of each value of a finite tensor."""
  flat = np.abs(x.reshape(-1).astype(np.float64))
  if name == "f32":
    return np.zeros(x.shape)
  if name == "bf16":
    return (flat * 2**-8 + _TINY).reshape(x.shape)
  bound = np.empty(x.size)
  for a, b in _blocks(x, block_size):
    bound[a:b] = _bound_of_block(name, flat[a:b], min(block_size, x.size))
  bound += np.where(flat < _TINY, flat, 0)  # read as 0
  return bound.reshape(x.shape)


def _bound_of_block(name, size, width):
  if name == "topk":
    kept = max(1, round(width / 32))
    least = np.sort(size)[::-1][:kept][-1]
    return np.where(size > least, size * 2**-8, size) + _TINY
  step = (size.mean() if name == "sign1" else size.max()) / _TOPS[name]
  if step <= 1.01 * _TINY:
    return np.full(size.shape, 2.0**-119)
  return (1 + 2**-7) * {
    "int8": np.full(size.shape, step / 2),
    "int4": np.full(size.shape, step / 2),
    "e3m0": np.maximum(size / 3, step / 2),
    "int2": np.full(size.shape, step),
    "sign1": abs(size - step) + step * 2**-8,
  }[name]


@functools.cache
def _jitted(name, block_size=64, feedback=False):
  """A codec whose functions are compiled once for all tests."""
  codec = codecs.make_codec(
    name, block_size=block_size, error_feedback=feedback
  )
  return codec._replace(
    encode=jax.jit(codec.encode),
    decode=jax.jit(codec.decode, static_argnums=1),
  )


_inspect = functools.cache(codecs.inspect)


def _finite(norms):
  return bool(np.isfinite(norms).all())


def _roundtrip(codec, x):
  payload, _ = codec.encode(codec.init((x.shape,)), (x,))
  return np.asarray(codec.decode(payload, (x.shape,))[0])


def _is_bounded(name, x, decoded, block_size):
  assert decoded.dtype == np.float32 and decoded.shape == x.shape
  assert np.isfinite(decoded).all()
  error = np.abs(x.astype(np.float64) - decoded)
  return (error <= _bound(name, x, block_size)).all()


_EDGES = {
  "zeros": np.zeros(70),
  "minus zero": np.full(70, -0.0),
  "1e-30": np.linspace(-1e-30, 1e-30, 70),
  "denormals": np.linspace(-1e-40, 1e-40, 70),
  "smallest denormal": np.full(3, 1e-45),
  "denormals among small": np.array([1e-40, 3e-38, -2e-38, 1.2e-38]),
  "scale at the edge": np.array([7.01 * _TINY, 3 * _TINY, 127.5 * _TINY]),
  "below the edge": np.array([6.99 * _TINY, 3 * _TINY]),
  "1e38": np.linspace(-1e38, 1e38, 70),
  "largest": np.array([_MAX, -_MAX, 1.0, _MAX * 0.99999, _MAX * 0.5]),
  "one hot": np.eye(1, 70, 33),
  "huge and tiny": np.tile([1e38, 1e-38], 40),
  "one": np.array([-3.7]),
  "scalar": np.array(2.5),
}


@every_codec
def test_edge_values_keep_the_bound(name):
  # Two blocks an edge, in one tensor: there is one program to compile.
  x = np.zeros((len(_EDGES), 128), np.float32)
  for row, values in zip(x, _EDGES.values(), strict=True):
    row[: values.size] = values.reshape(-1)
  found = _roundtrip(_jitted(name), x)
  for edge, values, decoded in zip(_EDGES, x, found, strict=True):
    assert _is_bounded(name, values, decoded, 64), edge


@every_codec
@settings(max_examples=25)
@given(
  # Few shapes, so that few programs are compiled.
  st.sampled_from([(1,), (6,), (3, 5), (8, 9)]),
  st.integers(0, 2**32 - 1),
  st.floats(-44, 37),
  st.floats(0, 20),
)
def test_error_is_bounded(name, shape, seed, exponent, spread):
  rng = np.random.default_rng(seed)
  scale = 10.0 ** (exponent - spread * rng.uniform(size=shape))
  x = (rng.uniform(-1, 1, shape) * scale).astype(np.float32)
  assert _is_bounded(name, x, _roundtrip(_jitted(name, 8), x), 8)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_largest_values_are_off_by_half_a_step_at_most(name):
  # Every mantissa of the largest value, so every rounding of the scale.
  largest = np.linspace(1, 2, 4001, dtype=np.float32)
  x = np.stack([largest] + [largest * k / 16 for k in range(7)], 1)
  x = np.asarray(x, np.float32)
  assert _is_bounded(name, x, _roundtrip(_jitted(name, 8), x), 8)


@every_codec
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 63, 64, 129])
def test_non_finite_values_show_and_stay_in_their_block(name, bad, where):
  shapes = ((130,), (3,))
  codec = _jitted(name, feedback=True)
  clean = _random(shapes)
  dirty = (clean[0].copy(), clean[1])
  dirty[0][where] = bad
  init = codec.init(shapes)
  payload, residual = codec.encode(init, dirty)
  decoded = np.asarray(codec.decode(payload, shapes)[0])
  expected = np.asarray(codec.decode(codec.encode(init, clean)[0], shapes)[0])
  assert not np.isfinite(decoded[where])
  same = np.ones(130, bool)
  if name in _TOPS or name == "topk":
    same[where // 64 * 64 : where // 64 * 64 + 64] = False
  if name in _TOPS:
    assert not np.isfinite(decoded[~same]).any()
  else:
    same[where] = False
    assert np.isfinite(np.delete(decoded, where)).all()
  np.testing.assert_array_equal(decoded[same], expected[same])
  assert not _finite(_inspect(codec, shapes)(payload))
  assert all(np.isfinite(r).all() for r in residual)
  # The next payload is healthy again.
  payload, _ = codec.encode(residual, clean)
  assert _finite(_inspect(codec, shapes)(payload))


def test_f32_keeps_every_bit():
  x = np.array([0.0, -0.0, 1e-45, -1e-40, _MAX, np.inf, np.nan], np.float32)
  assert _bits([_roundtrip(_jitted("f32"), x)]) == _bits([x])


def test_bf16_rounds_as_numpy_does():
  bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
  x = bits.view(np.float32)
  x = x[(np.abs(x) >= _TINY) & (np.abs(x) < 3.389e38)]
  payload, _ = _jitted("bf16").encode((), (x,))
  assert _bits(payload) == _bits([x.astype(jnp.bfloat16)])


@every_lossy_codec
def test_subnormal_values_decode_to_zero(name):
  x = np.array([1e-40, -1e-39, 1e-45, 0.0], np.float32)
  decoded = _roundtrip(_jitted(name), x)
  assert not decoded.any()


@every_scaled_codec
@pytest.mark.parametrize("top", [0.0, 1e-45, 0.99])
def test_blocks_without_a_usable_scale_are_all_zero_bits(name, top):
  if top == 0.99:  # of the smallest normal scale
    top *= _TOPS[name] * _TINY
  x = np.linspace(-top, top, 9, dtype=np.float32)
  payload, _ = _jitted(name).encode((), (x,))
  assert not any(codecs.to_bytes(payload))


def test_int4_codes_of_a_block_pair_its_halves():
  x = np.array([7, -7, 1, 2, -1, 3, 0, 5], np.float32)
  codec = _jitted("int4", 8)
  codes, scales = codec.encode((), (x,))[0]
  # The low half holds value i, the high half value i + 4.
  assert np.asarray(codes).tolist() == [[0xF7, 0x39, 0x01, 0x52]]
  assert np.asarray(scales).tolist() == [1.0]
  np.testing.assert_array_equal(_roundtrip(codec, x), x)


@pytest.mark.parametrize(
  "name, block_size", [*((name, 64) for name in _NAMES), ("int4", 8)]
)
def test_payload_spec_and_bytes_are_exact(name, block_size):
  codec = _jitted(name, block_size)
  payload, _ = codec.encode((), _random(_SHAPES))
  specs = codec.payload_spec(_SHAPES)
  assert [(a.shape, a.dtype) for a in payload] == [
    (s.shape, s.dtype) for s in specs
  ]
  data = codecs.to_bytes(payload)
  assert len(data) == codecs.payload_bytes(codec, _SHAPES)
  again = codecs.from_bytes(codec, _SHAPES, data)
  assert _bits(again) == _bits(payload)
  assert all(isinstance(a, np.ndarray) for a in again)
  expected = codec.decode(payload, _SHAPES)
  assert _bits(codec.decode(again, _SHAPES)) == _bits(expected)


def test_bits_per_value():
  shapes = ((1024, 64), (640,))
  values = sum(map(math.prod, shapes))
  bits = {
    name: 8 * codecs.payload_bytes(_jitted(name), shapes) / values
    for name in _NAMES
  }
  assert bits == {
    "f32": 32,
    "bf16": 16,
    "int8": 8.25,
    "int4": 4.25,
    "e3m0": 4.25,
    "int2": 2.25,
    "sign1": 1.25,
    "topk": 0.75,  # 2 of 64 values, of 16 bits, and 8 for each one's place
  }


def test_bytes_are_little_endian():
  arrays = (np.array([1], np.float32), np.array(2, np.uint16))
  assert codecs.to_bytes(arrays) == b"\x00\x00\x80\x3f\x02\x00"


@every_codec
@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_size_are_refused(name, change):
  codec = _jitted(name)
  right = codecs.payload_bytes(codec, _SHAPES)
  words = f"^{right + change} bytes .* {right}:"
  with pytest.raises(ValueError, match=words):
    codecs.from_bytes(codec, _SHAPES, bytes(right + change))


@every_codec
def test_error_feedback_telescopes(name):
  shapes = ((3, 67), (5,))
  codec = _jitted(name, feedback=True)
  residual = codec.init(shapes)
  totals = [[np.zeros(s), np.zeros(s)] for s in shapes]
  for seed in range(20):
    tensors = _random(shapes, seed)
    carried = residual or [np.float32(0)] * len(shapes)
    last = [np.asarray(r) + x for r, x in zip(carried, tensors, strict=True)]
    payload, residual = codec.encode(residual, tensors)
    decoded = codec.decode(payload, shapes)
    for (sent, offered), y, x in zip(totals, decoded, tensors, strict=True):
      sent += np.asarray(y, np.float64)
      offered += x
  for (sent, offered), x in zip(totals, last, strict=True):
    error = np.abs(sent - offered)
    # One quantisation step of the last payload, and f32 rounding.
    assert (error <= _bound(name, x, 64) + 1e-5).all()


@every_lossy_codec
def test_residual_is_what_the_payload_left_out_bit_for_bit(name):
  # Under jit XLA may skip roundings; the residual must know all of them.
  shapes = ((3, 67), (5,))
  codec = _jitted(name, feedback=True)
  tensors = _random(shapes)
  payload, residual = codec.encode(codec.init(shapes), tensors)
  decoded = codec.decode(payload, shapes)
  left = [x - np.asarray(y) for x, y in zip(tensors, decoded, strict=True)]
  assert any(r.any() for r in left)
  assert _bits(residual) == _bits(left)


@every_codec
def test_without_feedback_there_is_no_residual(name):
  codec = codecs.make_codec(name)
  assert codec.init(_SHAPES) == ()
  assert jax.eval_shape(codec.encode, (), _random(_SHAPES))[1] == ()
  assert codecs.make_codec("f32", error_feedback=True).init(_SHAPES) == ()


@every_codec
def test_same_bits_on_any_mesh(name):
  # Shards of 60 values in pieces of 15, so blocks of 64 straddle devices.
  shapes = ((8, 2, 30),)
  codec = _jitted(name, feedback=True)
  tensors = _random(shapes)
  tensors[0][3, 1, 7] = np.nan
  tensors[0][5, 0, 0] = np.inf
  mesh = jax.make_mesh(
    (2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3
  )
  where = NamedSharding(mesh, PartitionSpec("a", "b", "c"))
  sharded = jax.device_put(tensors, where)
  assert len(sharded[0].sharding.device_set) == 8
  init = codec.init(shapes)
  single = tuple(jax.device_put(x, jax.devices()[0]) for x in tensors)
  expected = codec.encode(init, single)
  actual = codec.encode(init, sharded)
  assert _bits(itertools.chain(*actual)) == _bits(itertools.chain(*expected))


@pytest.mark.parametrize("name", ["f32", "int4", "topk"])
def test_repeated_calls_compile_once(name):
  codec = codecs.make_codec(name, error_feedback=True)
  traces = []

  def traced(residual, tensors):
    traces.append(1)
    return codec.encode(residual, tensors)

  encode = jax.jit(traced)
  residual = codec.init(_SHAPES)
  for seed in range(3):
    _, residual = encode(residual, _random(_SHAPES, seed))
  assert len(traces) == 1


@every_codec
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-25, 1.0, 1e25, 1e36])
def test_inspect_reports_the_norms_of_the_decoded_value(name, scale):
  codec = _jitted(name)
  tensors = tuple(np.float32(scale) * x for x in _random(_SHAPES))
  payload, _ = codec.encode((), tensors)
  stored = codecs.from_bytes(codec, _SHAPES, codecs.to_bytes(payload))
  norms = _inspect(codec, _SHAPES)(stored)
  assert _finite(norms)
  assert norms.dtype == np.float32 and norms.shape == (len(_SHAPES),)
  expected = [
    np.linalg.norm(np.asarray(x, np.float64).reshape(-1))
    for x in codec.decode(payload, _SHAPES)
  ]
  np.testing.assert_allclose(norms, expected, rtol=1e-6)


def test_inspect_refuses_a_norm_beyond_f32():
  codec = _jitted("f32")
  payload = (np.full(4, 3e38, np.float32),)
  norms = _inspect(codec, ((4,),))(payload)
  assert not _finite(norms) and np.isinf(norms[0])


@pytest.mark.parametrize("name", ["sign1", "topk"])
def test_error_feedback_makes_up_for_the_coarsest(name):
  # Alone, either would lose most of a steady outer gradient for ever.
  shapes, rounds = ((200,),), 150
  codec = _jitted(name, feedback=True)
  (x,) = _random(shapes)
  residual, sent = codec.init(shapes), np.zeros(200)
  for _ in range(rounds):
    payload, residual = codec.encode(residual, (x,))
    sent += np.asarray(codec.decode(payload, shapes)[0], np.float64)
  assert np.linalg.norm(sent / rounds - x) < 0.15 * np.linalg.norm(x)


def test_corrupt_scales_are_found():
  codec = _jitted("int4")
  codes, scales = codec.encode((), _random(((130,),)))[0]
  check = _inspect(codec, ((130,),))
  assert _finite(check((codes, scales)))
  for bad in (np.nan, np.inf, 3e38):
    assert not _finite(check((codes, scales.at[2].set(bad))))


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match="float32, not bfloat16"):
    codecs.make_codec("int4").encode((), (jnp.ones(3, jnp.bfloat16),))


@pytest.mark.parametrize("block_size", [0, 1, 4, 63, 96, -64])
def test_block_sizes_are_validated(block_size):
  with pytest.raises(ValueError, match=f"block_size {block_size} "):
    codecs.make_codec("int4", block_size=block_size)


def test_unknown_codecs_are_refused():
  with pytest.raises(ValueError, match="'fp8': choose one of f32, bf16"):
    codecs.make_codec("fp8")
