"""The decoder: causality, masks, shapes, precision, sharding rules."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddiloco.config import ConfigError, ModelConfig
from ddiloco.lm import layers as layers_lib
from ddiloco.lm import model as model_lib
from ddiloco.lm.train_step import abstract_decoder, make_trainer
from tests.lm.tiny import flat, tiny_config

VOCAB = 257
LENGTH = 24


def mesh_of(*shape: int) -> jax.sharding.Mesh:
  return jax.make_mesh(
    shape,
    ("data", "fsdp", "tensor"),
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
    devices=jax.devices()[: int(np.prod(shape))],
  )


@pytest.fixture(name="config")
def config_fixture() -> ModelConfig:
  return tiny_config("unused").model


def init_params(config: ModelConfig, mesh=None):
  inner = tiny_config("unused").inner
  return (
    make_trainer(config, inner, VOCAB, mesh or mesh_of(1, 1, 1)).init(3).params
  )


def logits_fn(config: ModelConfig):
  graph, _ = abstract_decoder(config, VOCAB, mesh_of(1, 1, 1))
  return jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))


def some_tokens(rows: int = 2) -> np.ndarray:
  generator = np.random.default_rng(0)
  return generator.integers(0, VOCAB, (rows, LENGTH), dtype=np.int32)


def changed_positions(config: ModelConfig, position: int) -> list[int]:
  """Where logits change, bit for bit, if the token at `position` does."""
  apply, params, tokens = logits_fn(config), init_params(config), some_tokens()
  other = tokens.copy()
  other[:, position] = (other[:, position] + 1) % VOCAB
  differ = np.asarray(apply(params, tokens)) != np.asarray(apply(params, other))
  return sorted(np.unique(np.nonzero(differ)[1]).tolist())


@pytest.mark.parametrize("position", [0, 7, LENGTH - 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_changes_its_own_and_later_logits_only(config, position, dtype):
  config = dataclasses.replace(config, compute_dtype=dtype)
  assert changed_positions(config, position) == list(range(position, LENGTH))


@pytest.mark.parametrize("layers, reach", [(1, 4), (2, 7)])
def test_local_layers_see_window_tokens_each(config, layers, reach):
  config = dataclasses.replace(config, layers=layers, local_window=4)
  assert changed_positions(config, 5) == list(range(5, 5 + reach))


def test_a_global_layer_sees_everything_before(config):
  config = dataclasses.replace(
    config, layers=2, local_window=4, local_per_global=1
  )
  assert changed_positions(config, 5) == list(range(5, LENGTH))


@pytest.mark.parametrize(
  "window, per_global, expected",
  [(0, 5, (0,) * 6), (8, 2, (8, 8, 0, 8, 8, 0)), (8, 5, (8,) * 5 + (0,))],
)
def test_layer_windows(config, window, per_global, expected):
  config = dataclasses.replace(
    config, layers=6, local_window=window, local_per_global=per_global
  )
  assert model_lib.layer_windows(config) == expected


def test_parameter_tree(config):
  params = flat(init_params(config))
  assert params["blocks/0/attention/query"].shape == (32, 4, 8)
  assert params["blocks/1/attention/key"].shape == (32, 2, 8)
  assert params["blocks/1/attention/value"].shape == (32, 2, 8)
  assert params["blocks/0/mlp/gate"].shape == (32, 64)
  assert params["embedding"].shape == (288, 32)
  assert [path for path in params if re.search("embed", path)] == ["embedding"]
  assert {leaf.dtype for leaf in params.values()} == {np.dtype(np.float32)}


def test_grouped_queries_equal_repeated_key_value_heads(config):
  grouped = init_params(config)
  repeated = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      jnp.repeat(x, 2, axis=1)
      if path[-1].key in ("key", "value") and x.ndim == 3
      else x
    ),
    grouped,
  )
  full = dataclasses.replace(config, kv_heads=config.heads)
  np.testing.assert_allclose(
    logits_fn(config)(grouped, some_tokens()),
    logits_fn(full)(repeated, some_tokens()),
    rtol=1e-4,
    atol=1e-4,
  )


def test_soft_cap_bounds_logits(config):
  params = init_params(config)
  params["final_norm"]["scale"] = params["final_norm"]["scale"] + 20.0
  capped = dataclasses.replace(config, logit_soft_cap=5.0)
  free = np.asarray(logits_fn(config)(params, some_tokens()))
  bounded = np.asarray(logits_fn(capped)(params, some_tokens()))
  assert np.abs(free).max() > 20.0
  assert np.abs(bounded).max() <= 5.0
  np.testing.assert_allclose(bounded, 5.0 * np.tanh(free / 5.0), atol=1e-4)


def test_bfloat16_is_close_to_float32(config):
  params, tokens = init_params(config), some_tokens()
  half = dataclasses.replace(config, compute_dtype="bfloat16")
  exact = np.asarray(logits_fn(config)(params, tokens))
  rounded = logits_fn(half)(params, tokens)
  assert rounded.dtype == jnp.float32
  error = np.asarray(rounded) - exact
  assert 0 < np.sqrt(np.mean(error**2)) < 0.03 * np.std(exact)


def stack_blocks(params):
  """The parameters of an unrolled model, as a scanned one has them."""
  blocks = [params["blocks"][str(i)] for i in range(len(params["blocks"]))]
  stacked = jax.tree.map(lambda *layers: np.stack(layers), *blocks)
  return {**params, "blocks": {"stacked": stacked}}


def test_scanned_layers_equal_unrolled_ones(config):
  # Three layers: local, global, local; each recomputed in the backward pass.
  config = dataclasses.replace(
    config, layers=3, local_window=5, local_per_global=1
  )
  scanned = dataclasses.replace(config, scan_layers=True, remat=True)
  params, tokens = init_params(config), some_tokens()

  def loss_and_gradient(config, params):
    logits = logits_fn(config)
    loss = jax.value_and_grad(lambda p: jnp.mean(jnp.sin(logits(p, tokens))))
    return jax.jit(loss)(params)

  one, one_gradient = loss_and_gradient(config, params)
  other, other_gradient = loss_and_gradient(scanned, stack_blocks(params))
  np.testing.assert_allclose(other, one, rtol=1e-5)
  a, b = flat(stack_blocks(one_gradient)), flat(other_gradient)
  assert a.keys() == b.keys()
  for name in a:
    bound = 1e-4 * np.abs(a[name]).max()
    np.testing.assert_allclose(b[name], a[name], atol=bound, err_msg=name)


def test_scanned_layers_start_with_the_values_of_unrolled_ones(config):
  scanned = dataclasses.replace(config, scan_layers=True)
  a, b = flat(stack_blocks(init_params(config))), flat(init_params(scanned))
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_recomputed_only_if_told(config, scan, remat):
  model = dataclasses.replace(config, scan_layers=scan, remat=remat)
  logits, params = logits_fn(model), init_params(model)
  gradient = jax.grad(lambda p: jnp.mean(logits(p, some_tokens())))
  program = str(jax.make_jaxpr(gradient)(params))
  assert bool(re.search("checkpoint|remat", program)) == remat


def test_rotary_scores_depend_on_distance_only():
  generator = np.random.default_rng(0)
  row = generator.normal(size=(1, 1, 1, 8)).astype(np.float32)
  turned = np.asarray(layers_lib.rotate(jnp.tile(row, (1, 9, 1, 1)), 100.0))
  scores = turned[0, :, 0] @ turned[0, :, 0].T
  for distance in range(9):
    diagonal = np.diagonal(scores, distance)
    np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4)
  assert np.ptp(scores[0]) > 0.1


def test_initial_value_has_the_stated_moments():
  value = layers_lib.initial_value((400, 500), 0.25, (1, 2))
  assert value.dtype == np.float32
  assert abs(value.mean()) < 1e-3
  assert abs(value.std() - 0.25) < 1e-3
  assert not np.array_equal(
    value, layers_lib.initial_value((400, 500), 0.25, (1, 3))
  )


def test_every_matrix_is_split_over_fsdp_and_tensor(config):
  params = init_params(config, mesh_of(1, 2, 2))
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    parts = leaf.size // leaf.addressable_shards[0].data.size
    assert parts == (4 if leaf.ndim >= 2 else 1), path


@pytest.mark.parametrize(
  "shape, change, words",
  [
    ((1, 1, 4), {}, ["kv_heads", "size 2", "4 ways", "'tensor'"]),
    ((1, 2, 1), {"width": 33}, ["width", "size 33", "2 ways", "'fsdp'"]),
    ((1, 1, 2), {"hidden": 65}, ["hidden", "size 65", "2 ways"]),
  ],
)
def test_a_mesh_that_does_not_divide_is_refused(config, shape, change, words):
  config = dataclasses.replace(config, **change)
  inner = tiny_config("unused").inner
  with pytest.raises(ConfigError) as error:
    make_trainer(config, inner, VOCAB, mesh_of(*shape))
  for word in [*words, "learners.mesh"]:
    assert word in str(error.value)
