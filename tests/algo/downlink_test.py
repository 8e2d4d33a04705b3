"""Encoded outer steps: the same truth for all, and nothing lost on the way."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ddiloco.algo import codecs
from ddiloco.algo.downlink import step_adder, step_encoder

TINY = np.finfo(np.float32).tiny
SHAPES = ((4, 36), (5,))
WORDS = np.zeros(5, np.uint32)

every_codec = pytest.mark.parametrize("name", codecs.NAMES)


@functools.cache
def make(name, feedback=True):
  return codecs.make_codec(name, error_feedback=feedback)


def draw(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  return tuple((scale * rng.normal(size=s)).astype(np.float32) for s in SHAPES)


def bits(arrays):
  return [np.asarray(a).tobytes() for a in arrays]


@every_codec
def test_the_truth_follows_what_the_outer_optimizer_wanted(name):
  codec = make(name)
  truth, wanted = draw(0), draw(0)
  residual = codec.init(SHAPES)
  for seed in range(1, 30):
    step = draw(seed, 0.01)
    wanted = tuple(w + x for w, x in zip(wanted, step, strict=True))
    new = tuple(t + x for t, x in zip(truth, step, strict=True))
    payload, residual = step_encoder(codec)(residual, truth, new, WORDS)
    truth = tuple(map(np.asarray, step_adder(codec)(truth, payload)))
  # What is missing is what the residual holds, but for f32 rounding.
  left = residual or [np.float32(0)] * len(SHAPES)
  for t, w, r in zip(truth, wanted, left, strict=True):
    np.testing.assert_allclose(t + np.asarray(r), w, atol=3e-6)


@every_codec
def test_holders_on_any_mesh_add_the_same_bits(name):
  codec = make(name)
  old, new = (
    draw(0),
    tuple(x + y for x, y in zip(draw(0), draw(1), strict=True)),
  )
  payload, _ = step_encoder(codec)(codec.init(SHAPES), old, new, WORDS)
  stored = codecs.to_bytes(payload)
  payload = codecs.from_bytes(codec, SHAPES, stored)
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
  where = (
    NamedSharding(mesh, PartitionSpec("a", "b")),
    NamedSharding(mesh, PartitionSpec()),
  )
  sharded = tuple(map(jax.device_put, old, where))
  found = step_adder(codec, where)(sharded, payload)
  assert [x.sharding for x in found] == list(where)
  expected = step_adder(codec)(old, payload)
  assert bits(found) == bits(expected)
  # By hand: a decoded value is exact, so one addition is all the rounding.
  decoded = codec.decode(payload, SHAPES)
  by_hand = [x + np.asarray(y) for x, y in zip(old, decoded, strict=True)]
  assert bits(found) == bits(by_hand)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_subnormals_are_zero_on_every_processor(seed):
  rng = np.random.default_rng(seed)
  codec = make("f32")
  tiny = (rng.uniform(-4, 4, (2, 4, 36)) * TINY).astype(np.float32)
  old, step = (tiny[0], draw(0)[1]), (tiny[1], draw(1)[1])
  found = np.asarray(step_adder(codec)(old, step)[0], np.float64)
  assert not ((0 < abs(found)) & (abs(found) < TINY)).any()
  flushed = np.where(abs(tiny) < TINY, 0, tiny).astype(np.float64)
  total = (flushed[0] + flushed[1]).astype(np.float32)
  np.testing.assert_array_equal(found, np.where(abs(total) < TINY, 0, total))


def test_without_feedback_nothing_is_carried_over():
  codec = make("int4", feedback=False)
  payload, residual = step_encoder(codec)((), draw(0), draw(1), WORDS)
  assert residual == ()
  assert len(payload) == 2 * len(SHAPES)
