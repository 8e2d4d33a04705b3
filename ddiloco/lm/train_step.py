"""One inner step: the optimizer on the masked mean loss, jitted for a mesh."""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.algo.fragments import tensor_path
from ddiloco.config import InnerConfig, ModelConfig
from ddiloco.lm.data import Batch
from ddiloco.lm.frozen import Frozen
from ddiloco.lm.layers import (
  AxisRules,
  batch_axes,
  initial_value,
  is_variable,
)
from ddiloco.lm.loss import measure, objective
from ddiloco.lm.model import Decoder
from ddiloco.lm.optimizer import learning_rate, make_optimizer, owners


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
  measure: Callable[[Any, Batch], dict[str, jax.Array]]  # see `loss`
  logits: Callable[[Any, jax.Array], jax.Array]  # of tokens, int32 [B, L]
  abstract: State  # shapes and shardings of a state, no arrays
  owners: Any  # of each array of State.inner, its parameter's index or -1
  batch_sharding: Batch
  replicated: NamedSharding


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


def _abstract_params(variables: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
  """Shapes and shardings."""

  def abstract(variable):
    logical = variable.get_metadata()["logical"]
    where = AxisRules().sharding(mesh, logical, variable.shape)
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=where)

  return jax.tree.map(abstract, variables, is_leaf=is_variable)


def _axes(variables: dict[str, Any]) -> dict[str, str]:
  return jax.tree.map(
    lambda variable: " ".join(variable.get_metadata()["logical"]),
    variables,
    is_leaf=is_variable,
  )


def _abstract_state(
  params: dict[str, Any], moments: Any, mesh: Mesh
) -> tuple[State, Any]:
  """With shardings; and of each moment, its parameter.

  Moments lie where their parameters lie; counts are replicated.
  """
  shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
  shardings.append(NamedSharding(mesh, PartitionSpec()))  # of owner -1
  owner_of = owners(moments, params)
  inner = jax.tree.map(
    lambda x, i: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[i]),
    moments,
    owner_of,
  )
  return State(params, inner), owner_of


def _draw(name: str, variable: nnx.Variable, seed: int) -> np.ndarray:
  """A tensor's initial value, from the run's seed and its own path."""
  metadata, shape = variable.get_metadata(), variable.shape

  def draw(name, shape):
    drawn_from = (seed, zlib.crc32(name.encode()))
    return initial_value(shape, metadata["deviation"], drawn_from)

  if metadata["logical"][0] != "layer":
    return draw(name, shape)
  # Stacked or one by one, layers start with the same values.
  blocks, _, rest = name.split("/", 2)
  return np.stack(
    [draw(f"{blocks}/{layer}/{rest}", shape[1:]) for layer in range(shape[0])]
  )


def _initial_params(
  variables: dict[str, Any], abstract: Any, seed: int
) -> dict[str, Any]:
  def place(path, variable, struct):
    name = tensor_path(path)
    value = _draw(name, variable, seed)
    return jax.make_array_from_callback(
      value.shape, struct.sharding, lambda index: value[index]
    )

  return jax.tree_util.tree_map_with_path(
    place, variables, abstract, is_leaf=is_variable
  )


# Learners of one process (a simulation) that are built alike share programs.
@functools.lru_cache(maxsize=8)
def make_trainer(
  model: ModelConfig,
  inner: InnerConfig,
  vocab_size: int,
  mesh: Mesh,
  frozen: str = "",
) -> Trainer:
  """Builds the functions; `ConfigError` if the mesh does not fit the model."""
  graph, variables = abstract_decoder(model, vocab_size, mesh)
  params = _abstract_params(variables, mesh)
  partition = Frozen(params, frozen)
  optimizer = make_optimizer(inner, partition.trained(_axes(variables)))
  moments = jax.eval_shape(optimizer.init, partition.trained(params))
  abstract, owner_of = _abstract_state(params, moments, mesh)
  state_sharding = jax.tree.map(lambda x: x.sharding, abstract)
  replicated = NamedSharding(mesh, PartitionSpec())
  rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
  of_images = rows if model.image_size else None
  batch_sharding = Batch(rows, rows, images=of_images, targets=of_images)
  init_inner = jax.jit(optimizer.init, out_shardings=state_sharding.inner)

  def init(seed):
    params = _initial_params(variables, abstract.params, seed)
    return State(params, init_inner(partition.trained(params)))

  def minimised(trained, params, batch):
    decoder = nnx.merge(graph, partition.join(trained, params))
    return objective(model, decoder, batch)

  def step(state, batch, clock):
    trained = partition.trained(state.params)
    gradient = jax.grad(minimised, has_aux=True)
    grads, metrics = gradient(trained, state.params, batch)
    updates, inner_state = optimizer.update(grads, state.inner, trained)
    rate = learning_rate(inner, clock)
    trained = jax.tree.map(lambda p, u: p - rate * u, trained, updates)
    metrics |= {
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": rate,
    }
    return State(partition.join(trained, state.params), inner_state), metrics

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
    measure=jax.jit(
      lambda params, batch: measure(nnx.merge(graph, params), batch),
      in_shardings=(state_sharding.params, batch_sharding),
      out_shardings=replicated,
    ),
    logits=jax.jit(lambda params, x: nnx.merge(graph, params)(x)),
    abstract=abstract,
    owners=owner_of,
    batch_sharding=batch_sharding,
    replicated=replicated,
  )
