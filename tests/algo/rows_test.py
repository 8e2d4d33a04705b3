"""Tensors split over devices, while a codec cuts them into blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ddiloco.algo import codecs
from ddiloco.algo.downlink import step_adder
from ddiloco.algo.rows import by_rows, row_sharding
from ddiloco.planning import hlo

MESH = jax.make_mesh(
  (4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
)
SHAPE = (64, 960)  # a quarter of a row is 240 values: blocks of 64 reach over


def on_mesh(*spec):
  return NamedSharding(MESH, PartitionSpec(*spec))


@pytest.mark.parametrize(
  "spec, shape, rows",
  [
    (("tensor", "fsdp"), (64, 960), (("tensor", "fsdp"), None)),
    ((None, "fsdp"), (64, 960), ("fsdp", None)),
    ((None, ("fsdp", "tensor")), (64, 960), (("fsdp", "tensor"), None)),
    # The first axis that can take it: 3 layers cannot.
    ((None, "tensor", "fsdp"), (3, 8, 960), (None, ("tensor", "fsdp"), None)),
  ],
)
def test_the_last_axis_becomes_whole(spec, shape, rows):
  found = row_sharding(on_mesh(*spec), shape)
  assert found.is_equivalent_to(on_mesh(*rows), len(shape))


@pytest.mark.parametrize(
  "spec, shape",
  [
    (("fsdp",), (64, 960)),  # whole already
    (("fsdp",), (64,)),  # there is no other axis
    ((None, "fsdp"), (3, 960)),  # no other axis can be cut
    ((), (64, 960)),
  ],
)
def test_others_stay(spec, shape):
  where = on_mesh(*spec)
  assert row_sharding(where, shape) is where


def test_without_a_mesh_nothing_happens():
  x = jnp.ones((2, 64))
  assert by_rows((x,), None)[0] is x
  alone = x.sharding
  assert row_sharding(alone, x.shape) is alone


def draw(seed):
  rng = np.random.default_rng(seed)
  return rng.normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize("name", ("int4", "int8", "sign1", "topk", "bf16"))
def test_a_split_tensor_is_encoded_to_the_same_bits(name):
  codec = codecs.make_codec(name, error_feedback=True)
  where = on_mesh("tensor", "fsdp")
  residual, x = draw(0) * 0.01, draw(1)

  def encode(shardings, residual, x):
    residual, x = by_rows((residual, x), shardings and shardings * 2)
    return codec.encode((residual,), (x,))

  alone = jax.jit(functools.partial(encode, None))(residual, x)
  placed = jax.device_put((residual, x), where)
  split = jax.jit(functools.partial(encode, (where,)))(*placed)
  for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(split), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def sent_bytes(function, *shapes):
  structs = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    for shape, dtype, where in shapes
  ]
  text = jax.jit(function).lower(*structs).compile().as_text()
  return hlo.traffic(text).sent_bytes


def test_what_chips_send_to_encode_is_their_own_part():
  """And not whole tensors to everybody, as without `by_rows`."""
  codec = codecs.make_codec("int4")
  where = on_mesh("tensor", "fsdp")
  part_bytes = 4 * SHAPE[0] * SHAPE[1] // 8

  def encode(x):
    return codec.encode((), by_rows((x,), (where,)))[0]

  assert sent_bytes(encode, (SHAPE, jnp.float32, where)) <= part_bytes


def test_steps_are_added_where_parameters_lie():
  codec = codecs.make_codec("int4")
  where = on_mesh("tensor", "fsdp")
  payload, _ = jax.jit(codec.encode)((), (draw(2),))
  alone = step_adder(codec)((draw(3),), payload)
  placed = (jax.device_put(draw(3), where),)
  split = step_adder(codec, (where,))(placed, payload)
  assert split[0].sharding == where
  np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(split[0]))
