"""What codecs make of single blocks: exact tables, and rounding by chance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.algo import codecs

INF, NAN = np.inf, np.nan
MAX = float(np.finfo(np.float32).max)
BF16_MAX = 255 * 2.0**120
DENORMAL = float(np.float32(1e-40))

# Blocks of 8 values; what each codec makes of them, to the last bit. "all" is
# for the codecs that are not named. A scale of bf16 has 8 bits, so 3/7 is
# 219/512 and 3/127 is 97/4096.
TABLE = {
  "zeros": ([0.0] * 9, {"all": [0.0] * 9}),
  "minus zero": ([-0.0], {"f32": [-0.0], "all": [0.0]}),
  "no value": ([], {"all": []}),
  "denormals": (
    [DENORMAL, -DENORMAL],
    {"f32": [DENORMAL, -DENORMAL], "all": [0.0, 0.0]},
  ),
  "denormals beside others": (
    [8.0, DENORMAL, -DENORMAL],
    {
      "f32": [8.0, DENORMAL, -DENORMAL],
      "int8": [127 * 129 / 2048, 0.0, 0.0],
      "int4": [7 * 146 / 128, 0.0, 0.0],
      "int2": [3 * 171 / 64, -171 / 64, -171 / 64],
      "sign1": [171 / 64] * 3,
      "all": [8.0, 0.0, 0.0],
    },
  ),
  "one value": (
    [-3.0],
    {
      "int8": [-127 * 97 / 4096],
      "int4": [-7 * 219 / 512],
      "all": [-3.0],
    },
  ),
  "a short block": (
    [3.0, -1.0, 0.5, 0.0, -3.0],
    {
      "int8": [c * 97 / 4096 for c in (127, -42, 21, 0, -127)],
      "int4": [c * 219 / 512 for c in (7, -2, 1, 0, -7)],
      "e3m0": [3.0, -0.75, 0.375, 0.0, -3.0],
      "int2": [3.0, -1.0, 1.0, -1.0, -3.0],
      "sign1": [1.5, -1.5, 1.5, 1.5, -1.5],
      "topk": [3.0, 0.0, 0.0, 0.0, 0.0],
      "all": [3.0, -1.0, 0.5, 0.0, -3.0],
    },
  ),
  "a last block of one": (
    [2.0] * 8 + [-3.0],
    {
      "int8": [127 * 129 / 8192] * 8 + [-127 * 97 / 4096],
      "int4": [7 * 146 / 512] * 8 + [-7 * 219 / 512],
      "int2": [3 * 171 / 256] * 8 + [-3.0],
      "topk": [2.0] + [0.0] * 7 + [-3.0],
      "all": [2.0] * 8 + [-3.0],
    },
  ),
  "infinity": (
    [1.0] * 8 + [1.0, -INF, 2.0],
    {
      "f32": [1.0] * 9 + [-INF, 2.0],
      "bf16": [1.0] * 9 + [-INF, 2.0],
      "int8": [127 * 129 / 16384] * 8 + [NAN] * 3,
      "int4": [7 * 146 / 1024] * 8 + [NAN] * 3,
      "int2": [3 * 171 / 512] * 8 + [NAN] * 3,
      "topk": [1.0] + [0.0] * 8 + [-INF, 0.0],
      "all": [1.0] * 8 + [NAN] * 3,
    },
  ),
  "not a number": (
    [NAN, 1.0, INF, 2.0],
    {
      "f32": [NAN, 1.0, INF, 2.0],
      "bf16": [NAN, 1.0, INF, 2.0],
      "topk": [NAN, 0.0, 0.0, 0.0],
      "all": [NAN] * 4,
    },
  ),
  "the largest": (
    [MAX, -MAX, 1.0],
    {
      "f32": [MAX, -MAX, 1.0],
      "bf16": [BF16_MAX, -BF16_MAX, 1.0],
      "int8": [127 * 129 * 2.0**114, -127 * 129 * 2.0**114, 0.0],
      "int4": [7 * 146 * 2.0**118, -7 * 146 * 2.0**118, 0.0],
      "e3m0": [BF16_MAX, -BF16_MAX, 0.0],
      "int2": [510 * 2.0**119, -510 * 2.0**119, -170 * 2.0**119],
      "sign1": [171 * 2.0**120, -171 * 2.0**120, 171 * 2.0**120],
      "topk": [BF16_MAX, 0.0, 0.0],
    },
  ),
  "ties of int8": (
    [127.0, 0.5, 1.5, 2.5, -0.5, -1.5],
    {"int8": [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]},
  ),
  "ties of int4": (
    [7.0, 0.5, 1.5, 2.5, -0.5, -1.5],
    {"int4": [7.0, 0.0, 2.0, 2.0, 0.0, -2.0]},
  ),
  "ties of e3m0": (
    [-64.0, 48.0, 24.0, -12.0, 6.0, 3.0, 1.5, 0.5],
    {"e3m0": [-64.0, 32.0, 16.0, -8.0, 4.0, 2.0, 1.0, 0.0]},
  ),
  "beside ties of e3m0": (
    [64.0, 48.5, 24.5, -12.5, 6.5, 3.5, 1.75, -0.75],
    {"e3m0": [64.0, 64.0, 32.0, -16.0, 8.0, 4.0, 2.0, -1.0]},
  ),
  "ties of int2": (
    [3.0, 2.0, 0.0, -2.0, 2.5, 0.5, -0.5, -2.5],
    {"int2": [3.0, 1.0, -1.0, -3.0, 3.0, 1.0, -1.0, -3.0]},
  ),
  "ties of topk": (
    [1.0, -2.0, 2.0, -2.0, 1.0, 0.0, 2.0, 0.5],
    {"topk": [0.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]},
  ),
}
CASES = [
  (edge, name)
  for edge, (_, expected) in TABLE.items()
  for name in codecs.NAMES
  if name in expected or "all" in expected
]

stochastic = pytest.mark.parametrize(
  "name", ["bf16", "int8", "int4", "e3m0", "int2"]
)


@functools.cache
def make(name, **options):
  codec = codecs.make_codec(name, **options)
  return codec._replace(
    encode=jax.jit(codec.encode),
    decode=jax.jit(codec.decode, static_argnums=1),
  )


def decoded(codec, x, *words):
  payload, _ = codec.encode(codec.init((x.shape,)), (x,), *words)
  return np.asarray(codec.decode(payload, (x.shape,))[0])


@functools.cache
def table_of(name):
  """Every edge as this codec decodes it; compiled as one fragment."""
  blocks = tuple(np.asarray(x, np.float32) for x, _ in TABLE.values())
  codec = make(name, block_size=8)
  payload, _ = codec.encode((), blocks)
  found = codec.decode(payload, tuple(x.shape for x in blocks))
  return dict(zip(TABLE, map(np.asarray, found), strict=True))


@pytest.mark.parametrize("edge, name", CASES)
def test_table_of_edge_values(edge, name):
  _, expected = TABLE[edge]
  expected = np.asarray(expected.get(name, expected.get("all")), np.float32)
  found = table_of(name)[edge]
  np.testing.assert_array_equal(found, expected)
  zero = expected == 0
  assert (np.signbit(found) == np.signbit(expected))[zero].all()


@pytest.mark.parametrize(
  "name, value, expected",
  [
    # 17 bits of a scale: 3/7 is 112347/2^18, 3/127 is 99078/2^22.
    ("int8", 3.0, 127 * 99078 / 2**22),
    ("int4", 3.0, 7 * 112347 / 2**18),
    ("e3m0", 1 / 3, 87381 / 2**18),
    ("sign1", 1 / 3, 87381 / 2**18),
    ("topk", 1 / 3, float(np.float32(1 / 3))),
  ],
)
def test_scales_of_f32_have_17_bits_and_values_all(name, value, expected):
  codec = make(name, block_size=8, scale="f32")
  assert codec.payload_spec(((1,),))[1].dtype == jnp.float32
  assert decoded(codec, np.float32([value]))[0] == expected


def test_topk_keeps_the_fraction_of_each_block():
  codec = make("topk", block_size=8, topk_fraction=0.25)
  x = np.arange(20, dtype=np.float32) * (-1) ** np.arange(20)
  places, values = codec.encode((), (x,))[0]
  assert np.asarray(places).tolist() == [[6, 7], [6, 7], [2, 3]]
  assert np.asarray(values, np.float32).tolist() == [
    [6, -7],
    [14, -15],
    [18, -19],
  ]
  found = decoded(codec, x)
  assert np.flatnonzero(found).tolist() == [6, 7, 14, 15, 18, 19]


@pytest.mark.parametrize("size, dtype", [(256, "uint8"), (257, "uint16")])
def test_places_take_as_few_bytes_as_the_block_allows(size, dtype):
  codec = make("topk", block_size=512)
  assert codec.payload_spec(((size,),))[0].dtype == dtype
  x = np.zeros(size, np.float32)
  x[-1] = 2.0
  np.testing.assert_array_equal(decoded(codec, x), x)


def test_places_out_of_their_block_are_dropped():
  codec = make("topk", block_size=8)
  payload = np.uint8([[8]]), np.float32([[1.0]]).astype(jnp.bfloat16)
  assert not np.asarray(codec.decode(payload, ((8,),))[0]).any()


# --- Stochastic rounding ----------------------------------------------------


def words(*numbers):
  return np.array(numbers, np.uint32)


@stochastic
def test_same_words_give_the_same_bits_and_others_do_not(name):
  codec = make(name, rounding="stochastic", error_feedback=True)
  x = np.random.default_rng(0).normal(size=300).astype(np.float32)
  init = codec.init((x.shape,) * 2)
  first, residual = codec.encode(init, (x, x), words(7, 1, 2))
  again, _ = codec.encode(init, (x, x), words(7, 1, 2))
  other, _ = codec.encode(init, (x, x), words(7, 2, 1))
  bits = [codecs.to_bytes(p) for p in (first, again, other)]
  assert bits[0] == bits[1] != bits[2]
  # Equal tensors do not share their luck.
  one, two = codecs.by_tensor(codec, first)
  assert codecs.to_bytes(one) != codecs.to_bytes(two)
  sent = codec.decode(first, (x.shape,) * 2)
  for left_out, y in zip(residual, sent, strict=True):
    np.testing.assert_array_equal(np.asarray(left_out), x - np.asarray(y))


@stochastic
def test_stochastic_rounding_is_right_on_average(name):
  codec = codecs.make_codec(name, block_size=8, rounding="stochastic")
  x = np.float32([3.0, 0.1, -0.6, 1.4, -2.2, 2.9, 0.0, -1.0])
  draws = 4000

  def draw(i):
    return codec.decode(codec.encode((), (x,), i[None])[0], (x.shape,))[0]

  found = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(draws, dtype="uint32")))
  found = found.astype(np.float64)
  deviation = found.std(axis=0) / draws**0.5
  # Where the scale was rounded down the largest level is out of reach.
  assert (abs(found.mean(axis=0) - x) <= 4 * deviation + abs(x) * 2**-8).all()
  for column in found.T:
    assert len(np.unique(column)) <= 2


@stochastic
@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.floats(-36, 36))
def test_stochastic_rounding_takes_one_of_the_two_neighbours(
  name, seed, exponent
):
  rng = np.random.default_rng(seed)
  x = (rng.uniform(-1, 1, 24) * 10.0**exponent).astype(np.float32)
  nearest = decoded(make(name, block_size=8), x)
  found = decoded(
    make(name, block_size=8, rounding="stochastic"), x, words(seed)
  )
  assert np.isfinite(found).all()
  step = np.repeat(np.abs(x).reshape(3, 8).max(axis=1), 8).astype(np.float64)
  gap = {
    "bf16": np.abs(x) * 2**-7,
    "int8": step / 127,
    "int4": step / 7,
    "e3m0": np.maximum(np.abs(x), step / 64),
    "int2": 2 * step / 3,
  }[name]
  assert (np.abs(found - x.astype(np.float64)) <= gap * (1 + 2**-7)).all()
  # What is on a level stays there.
  kept = decoded(
    make(name, block_size=8, rounding="stochastic"), nearest, words(seed)
  )
  if name in ("bf16", "e3m0"):  # whose scale is not rounded anew
    np.testing.assert_array_equal(kept, nearest)


# --- Bad options ------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "sign1", "topk"])
def test_codecs_without_two_levels_do_not_round_by_chance(name):
  with pytest.raises(ValueError, match=f"codec '{name}'.*bf16, int8"):
    codecs.make_codec(name, rounding="stochastic")


def test_stochastic_rounding_asks_for_words():
  with pytest.raises(ValueError, match="give encode some"):
    make("int4", rounding="stochastic").encode((), (np.zeros(3, np.float32),))


@pytest.mark.parametrize(
  "options, words",
  [
    ({"scale": "f16"}, "unknown scale 'f16'"),
    ({"rounding": "up"}, "unknown rounding 'up'"),
    ({"topk_fraction": 0.0}, "topk_fraction 0.0"),
    ({"topk_fraction": 1.5}, "topk_fraction 1.5"),
  ],
)
def test_bad_options_are_refused(options, words):
  with pytest.raises(ValueError, match=words):
    codecs.make_codec("topk", **options)
