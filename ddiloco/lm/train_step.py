"""One inner step: AdamW on the masked mean loss, jitted once for a mesh.

The inner optimizer of a learner (paper, Sec. 3 and Appendix A). Its learning
rate is a function of a clock that the caller passes in, not of the optimizer's
own count: learners that start late or step slowly then share one schedule.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.config import InnerConfig, ModelConfig
from ddiloco.lm.data import Batch
from ddiloco.lm.model import BATCH_AXES, AxisRules, Decoder, initial_value


class State(NamedTuple):
  """Everything a learner trains: f32 master parameters, optimizer state."""

  params: Any
  inner: Any


class Trainer(NamedTuple):
  """The jitted functions of one model on one mesh, and their shardings."""

  init: Callable[[int], State]  # from a seed
  step: Callable[
    [State, Batch, jax.Array], tuple[State, dict[str, jax.Array]]
  ]  # donates the state
  nats: Callable[[Any, Batch], jax.Array]  # summed over the unmasked rows
  params_sharding: Any
  batch_sharding: Batch
  replicated: NamedSharding


def learning_rate(config: InnerConfig, clock: jax.Array) -> jax.Array:
  """The inner learning rate at `clock`, an f32 scalar.

  It rises linearly from final_fraction of the peak to the peak at `warmup`, and
  under 'cosine' falls back to it until `decay`. It starts above 0 because a
  clock stands still until the first commit, and steps at rate 0 would fill the
  first answers with zeros.
  """
  low = config.final_fraction
  rise = low + (1.0 - low) * clock / max(config.warmup, 1)
  top = jnp.ones_like(clock)
  if config.schedule == "cosine":
    span = max(config.decay - config.warmup, 1)
    done = jnp.clip((clock - config.warmup) / span, 0.0, 1.0)
    top = low + (1.0 - low) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
  return config.learning_rate * jnp.where(clock < config.warmup, rise, top)


def make_optimizer(config: InnerConfig) -> optax.GradientTransformation:
  """Clipped AdamW without its learning rate; decay on matrices only."""

  def matrices(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)

  clip = optax.clip_by_global_norm(config.clip_norm)
  return optax.chain(
    clip if config.clip_norm else optax.identity(),
    optax.scale_by_adam(config.b1, config.b2, config.eps),
    optax.add_decayed_weights(config.weight_decay, mask=matrices),
  )


def abstract_decoder(
  model: ModelConfig, vocab_size: int, mesh: Mesh
) -> tuple[nnx.GraphDef, dict[str, Any]]:
  """The decoder's structure, and its variables as nested dicts, no arrays.

  `nnx.merge(structure, params)` is the model with those parameters.
  """
  graph, state = nnx.split(
    nnx.eval_shape(lambda: Decoder(model, vocab_size, mesh))
  )
  return graph, nnx.to_pure_dict(state, extract_fn=lambda variable: variable)


def _is_variable(leaf: Any) -> bool:
  return isinstance(leaf, nnx.Variable)


def _state_sharding(
  variables: dict[str, Any],
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
) -> State:
  """Optimizer state lies where its parameters lie; counts are replicated."""
  params_sharding = jax.tree.map(
    lambda v: AxisRules().sharding(mesh, v.get_metadata()["logical"], v.shape),
    variables,
    is_leaf=_is_variable,
  )
  shapes = jax.tree.map(
    lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype),
    variables,
    is_leaf=_is_variable,
  )
  inner_sharding = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    jax.eval_shape(optimizer.init, shapes),
    params_sharding,
    transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
  )
  return State(params_sharding, inner_sharding)


def _initial_params(
  variables: dict[str, Any], shardings: Any, seed: int
) -> dict[str, Any]:
  """Draws every tensor from the run's seed and its own path."""

  def draw(path, variable, sharding):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    value = initial_value(
      variable.shape,
      variable.get_metadata()["deviation"],
      (seed, zlib.crc32(name.encode())),
    )
    return jax.make_array_from_callback(
      value.shape, sharding, lambda index: value[index]
    )

  return jax.tree_util.tree_map_with_path(
    draw, variables, shardings, is_leaf=_is_variable
  )


# Learners of one process (a simulation) that are built alike share programs.
@functools.lru_cache(maxsize=8)
def make_trainer(
  model: ModelConfig, inner: InnerConfig, vocab_size: int, mesh: Mesh
) -> Trainer:
  """Builds the functions; `ConfigError` if the mesh does not fit the model."""
  graph, variables = abstract_decoder(model, vocab_size, mesh)
  optimizer = make_optimizer(inner)
  state_sharding = _state_sharding(variables, optimizer, mesh)
  replicated = NamedSharding(mesh, PartitionSpec())
  rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
  batch_sharding = Batch(tokens=rows, mask=rows)
  init_inner = jax.jit(optimizer.init, out_shardings=state_sharding.inner)

  def init(seed):
    params = _initial_params(variables, state_sharding.params, seed)
    return State(params, init_inner(params))

  def nats(params, batch):
    logits = nnx.merge(graph, params)(batch.tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch.tokens[:, 1:]
    )
    return jnp.sum(losses * batch.mask[:, None])

  def mean_nats(params, batch):
    targets = jnp.sum(batch.mask) * (batch.tokens.shape[1] - 1)
    return nats(params, batch) / targets

  def step(state, batch, clock):
    loss, grads = jax.value_and_grad(mean_nats)(state.params, batch)
    updates, inner_state = optimizer.update(grads, state.inner, state.params)
    rate = learning_rate(inner, clock)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    metrics = {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": rate,
    }
    return State(params, inner_state), metrics

  # Shardings are named on both sides: left to the compiler, the first result
  # differs from the initial state in its sharding, and step compiles twice.
  return Trainer(
    init=init,
    step=jax.jit(
      step,
      in_shardings=(state_sharding, batch_sharding, replicated),
      out_shardings=(state_sharding, replicated),
      donate_argnums=0,
    ),
    nats=jax.jit(
      nats,
      in_shardings=(state_sharding.params, batch_sharding),
      out_shardings=replicated,
    ),
    params_sharding=state_sharding.params,
    batch_sharding=batch_sharding,
    replicated=replicated,
  )
