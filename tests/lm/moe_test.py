"""Experts against a loop over tokens in float64; balance; expert meshes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddiloco.config import ConfigError, ModelConfig
from ddiloco.lm import moe
from ddiloco.lm.layers import is_variable
from ddiloco.lm.program import build
from ddiloco.lm.train_step import abstract_decoder, make_trainer
from tests.lm.tiny import flat, preset, run, tiny_config, write_text

ROWS, LENGTH = 3, 10
MESH = jax.make_mesh(
  (1, 1, 1),
  ("data", "fsdp", "tensor"),
  axis_types=(jax.sharding.AxisType.Auto,) * 3,
  devices=jax.devices()[:1],
)


def layer_config(**keys) -> ModelConfig:
  return ModelConfig(**{"width": 8, "hidden": 12, "experts": 5, **keys})


def draw(variables):
  """Random values for abstract variables."""
  generator = np.random.default_rng(1)
  return jax.tree.map(
    lambda v: jnp.asarray(generator.normal(size=v.shape) / 3, jnp.float32),
    variables,
    is_leaf=is_variable,
  )


def make_layer(config: ModelConfig):
  """The layer's structure, and random parameters."""
  graph, state = nnx.split(nnx.eval_shape(lambda: moe.MoE(config, MESH)))
  return graph, draw(
    nnx.to_pure_dict(state, extract_fn=lambda variable: variable)
  )


def inputs() -> np.ndarray:
  generator = np.random.default_rng(2)
  return generator.normal(size=(ROWS, LENGTH, 8)).astype(np.float32)


def geglu(x, gate, up, down):
  inner = math.sqrt(2 / math.pi) * (x @ gate + 0.044715 * (x @ gate) ** 3)
  return (0.5 * (x @ gate) * (1 + np.tanh(inner)) * (x @ up)) @ down


def reference(config, params, x_BxLxD, counted_BxL):
  """The layer, one token and one choice at a time, in float64."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x_BxLxD = np.asarray(x_BxLxD, np.float64)
  e, k = config.experts, config.experts_per_token
  places = min(LENGTH, math.ceil(LENGTH * k / e * config.capacity_factor))
  out = np.zeros_like(x_BxLxD)
  load, mean_probability, z, dropped, tokens = np.zeros(e), np.zeros(e), 0, 0, 0
  for b in range(ROWS):
    taken = np.zeros(e, int)
    for t in range(LENGTH):
      x = x_BxLxD[b, t]
      logits = x @ params["router"]
      probability = np.exp(logits) / np.exp(logits).sum()
      best = np.argsort(-probability)[:k]
      weights = probability[best]
      if k > 1:
        weights = weights / weights.sum()
      lost = 0
      for expert, weight in zip(best, weights, strict=True):
        if taken[expert] < places:
          taken[expert] += 1
          experts = (params[n][expert] for n in ("gate", "up", "down"))
          out[b, t] += weight * geglu(x, *experts)
        else:
          lost += 1
      if config.shared_hidden:
        shared = (params["shared"][n] for n in ("gate", "up", "down"))
        out[b, t] += geglu(x, *shared)
      if counted_BxL[b, t]:
        tokens += 1
        load[best] += 1
        mean_probability += probability
        z += np.log(np.exp(logits).sum()) ** 2
        dropped += lost
  load /= tokens * k
  balance = e * (load * mean_probability / tokens).sum()
  return out, moe.Routing(load, balance, z / tokens, dropped / (tokens * k))


@pytest.mark.parametrize(
  "keys",
  [
    {"experts_per_token": 1, "capacity_factor": 0.6},
    {"experts_per_token": 2},
    {"experts_per_token": 2, "capacity_factor": 0.5, "shared_hidden": 6},
    {"experts_per_token": 3, "capacity_factor": 5 / 3},
    {"experts_per_token": 5, "capacity_factor": 1.0},
  ],
)
def test_equals_a_loop_over_tokens(keys):
  config, x = layer_config(**keys), inputs()
  graph, params = make_layer(config)
  counted = np.ones((ROWS, LENGTH), np.float32)
  counted[1, 4:] = 0
  out, routing = jax.jit(lambda p, x: nnx.merge(graph, p)(x, counted))(
    params, x
  )
  expected, stated = reference(config, params, x, counted)
  np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
  for name, value in routing._asdict().items():
    np.testing.assert_allclose(
      value, getattr(stated, name), rtol=1e-4, atol=1e-6, err_msg=name
    )
  even = config.experts / config.experts_per_token
  if config.capacity_factor >= even:
    assert routing.dropped == 0.0
  elif config.capacity_factor < 0.9:
    assert routing.dropped > 0.1


def test_gradients_equal_differences_of_the_loop():
  config, x = layer_config(capacity_factor=0.8, shared_hidden=6), inputs()
  graph, params = make_layer(config)
  generator = np.random.default_rng(3)
  counted = np.ones((ROWS, LENGTH), np.float32)
  probe = generator.normal(size=x.shape)

  @jax.jit
  @jax.grad
  def gradient(params):
    out, routing = nnx.merge(graph, params)(x, counted)
    return jnp.sum(out * probe.astype(np.float32)) + routing.balance + routing.z

  def value(params):
    out, routing = reference(config, params, x, counted)
    return (out * probe).sum() + routing.balance + routing.z

  gradients, eps = gradient(params), 1e-5
  for name in ("router", "gate", "up", "down"):
    direction = generator.normal(size=params[name].shape)
    moved = [
      {**params, name: np.float64(params[name]) + sign * eps * direction}
      for sign in (1.0, -1.0)
    ]
    slope = (value(moved[0]) - value(moved[1])) / (2 * eps)
    found = np.sum(np.asarray(gradients[name], np.float64) * direction)
    assert found == pytest.approx(slope, rel=2e-3, abs=2e-3), name


def test_a_full_expert_keeps_the_earlier_tokens():
  experts = jnp.array([[0, 1], [0, 2], [0, 1], [2, 0]])
  places = moe.assign(experts, 3, 2)
  # Expert 0 takes the choices 0 and 2, expert 1 takes 1 and 5, expert 2 both.
  np.testing.assert_array_equal(places.choice, [0, 2, 1, 5, 3, 6])
  np.testing.assert_array_equal(places.of_choice, [0, 2, 1, 4, 6, 3, 5, 6])


@pytest.mark.parametrize("position", [0, 6])
def test_no_token_sees_a_later_one(position):
  # So few places that a token's choice often pushes out those that follow.
  config = tiny_config(
    "unused", model={"experts": 4, "capacity_factor": 0.5}
  ).model
  graph, variables = abstract_decoder(config, 257, MESH)
  params = draw(variables)
  apply = jax.jit(lambda tokens: nnx.merge(graph, params)(tokens))
  tokens = np.random.default_rng(4).integers(0, 257, (2, LENGTH), np.int32)
  other = tokens.copy()
  other[:, position] = (other[:, position] + 1) % 257
  gap = np.abs(np.asarray(apply(tokens)) - np.asarray(apply(other)))
  changed = np.unique(np.nonzero(gap > 1e-5)[1])
  assert changed.min() == position and len(changed) > 1


@pytest.mark.parametrize(
  "load, expected",
  [
    ([0.125] * 8, 1.0),
    ([1.0] + [0.0] * 7, 0.0),
    ([0.5, 0.5] + [0.0] * 6, 1 / 3),
    ([0.0, 0.25] * 4, 2 / 3),
  ],
)
def test_load_entropy(load, expected):
  found = moe.load_entropy(jnp.array(load, jnp.float32))
  assert float(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("collapsed", [False, True])
def test_routing_of_even_and_collapsed_routers(collapsed):
  config = layer_config(experts=4, experts_per_token=1)
  graph, params = make_layer(config)
  # Inputs name their expert; a collapsed router sends all to the first one.
  x = np.zeros((1, 8, 8), np.float32)
  x[0, np.arange(8), np.arange(8) % 4] = 1.0
  params["router"] = np.zeros((8, 4), np.float32)
  if collapsed:
    params["router"][:, 0] = 20.0
  else:
    params["router"][:4] = 20.0 * np.eye(4)
  counted = np.ones((1, 8), np.float32)
  _, routing = jax.jit(lambda p: nnx.merge(graph, p)(x, counted))(params)
  assert float(routing.balance) == pytest.approx(4.0 if collapsed else 1.0)
  entropy = moe.load_entropy(routing.load)
  assert float(entropy) == pytest.approx(0.0 if collapsed else 1.0)
  # A quarter of 8 tokens, times 1.25, is 3 places: 5 of 8 are dropped.
  assert float(routing.dropped) == (5 / 8 if collapsed else 0.0)


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory) -> str:
  return write_text(tmp_path_factory.mktemp("moe") / "text")


def small(path: str, mesh: tuple[int, ...] = (1, 1, 1), **model):
  devices = math.prod(mesh)
  return tiny_config(
    path,
    learners={"devices": (devices,), "mesh": mesh, "batch_size": (8,)},
    model={"experts": 4, "shared_hidden": 16, "router_z_loss": 1e-3, **model},
  )


def test_expert_parallel_training_equals_one_device(path):
  mesh = (1, 2, 2, 2)
  one, one_state, one_metrics = run(small(path))
  many, many_state, many_metrics = run(small(path, mesh))
  assert many.mesh.size == 8
  gate = many_state.params["blocks"]["0"]["moe"]["gate"]
  assert gate.addressable_shards[0].data.shape[0] == 4 // mesh[3]
  for a, b in zip(one_metrics, many_metrics, strict=True):
    assert a == pytest.approx(b, rel=1e-3)
  rate = sum(m["learning_rate"] for m in one_metrics)
  a, b = flat(one_state.params), flat(many_state.params)
  for name in a:
    assert np.mean(np.abs(a[name] - b[name])) < 2e-2 * rate, name


def test_training_reports_routing_and_learns(path):
  config = tiny_config(path, model=preset("moe_tiny"))
  program, state, metrics = run(config, steps=30)
  assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
  for step in metrics:
    assert 0.0 <= step["dropped_share"] < 0.5
    assert 0.5 < step["load_entropy"] <= 1.0
    assert step["balance_loss"] > 0.99
  heldout = program.evaluate(program.params(state))
  assert 0.5 < heldout["load_entropy"] <= 1.0


def test_the_balance_loss_evens_the_loads():
  config, x = layer_config(experts_per_token=1), inputs() + 1.0
  graph, params = make_layer(config)
  params["router"] = params["router"].at[:, 0].add(1.0)
  counted = np.ones((ROWS, LENGTH), np.float32)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def balance(router):
    _, routing = nnx.merge(graph, {**params, "router": router})(x, counted)
    return routing.balance, moe.load_entropy(routing.load)

  router, entropies = params["router"], []
  for _ in range(100):
    (_, entropy), gradient = balance(router)
    router -= 0.3 * gradient
    entropies.append(float(entropy))
  assert entropies[0] < 0.2
  assert entropies[-1] > 0.9


def test_masked_rows_are_not_routed_for(path):
  config = small(path)
  program, state, _ = run(config, steps=1)
  batch = program.batch(0, 3)
  other = batch._replace(
    tokens=np.where(batch.mask[:, None] > 0, batch.tokens, 77)
  )
  copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]
  _, a = program.step(copies[0], batch, 1)
  _, b = program.step(copies[1], other, 1)
  assert {k: float(v) for k, v in a.items()} == {
    k: float(v) for k, v in b.items()
  }


def test_scanned_experts_equal_unrolled_ones(path):
  tokens = np.arange(2 * LENGTH, dtype=np.int32).reshape(2, LENGTH)
  outputs = []
  for scan in (False, True):
    config = small(path, scan_layers=scan)
    params = build(config, None).init().params
    graph, _ = abstract_decoder(config.model, 257, MESH)

    @jax.jit
    def decode(params, graph=graph):
      counted = jnp.ones(tokens.shape, jnp.float32)
      return nnx.merge(graph, params).decode(tokens, counted)

    outputs.append(decode(params))
  a, b = map(flat, outputs)
  assert a.keys() == b.keys() and a["routing/load"].shape == (2, 4)
  for name in a:
    np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "groups, words",
  [
    ({"model": {"experts": 1}}, ["model.experts", "1", "at least 2"]),
    (
      {"model": {"experts": 2, "experts_per_token": 3}},
      ["model.experts_per_token", "3", "2"],
    ),
    (
      {"model": {"experts": 8, "capacity_factor": 0.0}},
      ["model.capacity_factor", "0.0", "4 never drops"],
    ),
    ({"model": {"shared_hidden": 8}}, ["model.shared_hidden", "experts = 0"]),
    ({"model": {"balance_loss": 0.5}}, ["model.balance_loss", "experts = 0"]),
    (
      {"learners": {"devices": (2,), "mesh": (1, 1, 1, 2)}},
      ["learners.mesh", "experts = 0", "fourth"],
    ),
    (
      {
        "model": {"experts": 4},
        "learners": {"devices": (4,), "mesh": (1, 2, 1, 2), "batch_size": (6,)},
      },
      ["learners.batch_size", "6", "4 ways"],
    ),
  ],
)
def test_what_cannot_work_is_refused(groups, words):
  with pytest.raises(ConfigError) as error:
    tiny_config("unused", **groups)
  for word in words:
    assert word in str(error.value), str(error.value)


def test_experts_that_the_mesh_does_not_divide_are_refused():
  config = dataclasses.replace(layer_config(experts=3), layers=1)
  mesh = jax.make_mesh(
    (1, 1, 1, 2),
    ("data", "fsdp", "tensor", "expert"),
    axis_types=(jax.sharding.AxisType.Auto,) * 4,
    devices=jax.devices()[:2],
  )
  inner = tiny_config("unused").inner
  with pytest.raises(ConfigError, match="expert axis has size 3.*2 ways"):
    make_trainer(config, inner, 257, mesh)
