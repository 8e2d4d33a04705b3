"""The outer optimizer (paper Alg. 2): SGD with Nesterov momentum.

The merged outer gradient D is anchor minus learner parameters, so the outer
optimizer descends along it. With momentum mu and learning rate eta,

  b <- mu b + D,   theta <- theta - eta (D + mu b)     (Nesterov)
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from ddiloco.algo import codecs

Params = tuple[jax.Array, ...]


@functools.cache  # equal optimizers share their compiled steps
def make_outer(
  *,
  name: str = "sgd",
  learning_rate: float,
  momentum: float,
  nesterov: bool,
) -> optax.GradientTransformation:
  """Builds an outer optimizer; without momentum it has no state.

  Args:
    name: "sgd".
    learning_rate: eta > 0.
    momentum: mu in [0, 1).
    nesterov: Whether to look ahead; no difference if mu is 0.
  """
  if name != "sgd":
    raise ValueError(f"unknown outer optimizer {name!r}: choose sgd")
  if not 0 < learning_rate < math.inf:
    raise ValueError(
      f"outer learning rate {learning_rate} must be positive and finite"
    )
  if not 0 <= momentum < 1:
    raise ValueError(f"outer momentum {momentum} must be in [0, 1)")
  return optax.sgd(learning_rate, momentum or None, nesterov)


class OuterStep:
  """The outer step of one fragment.

  Nothing is donated: if another syncer wins the commit, this one goes on from
  the parameters and the state it had.
  """

  def __init__(self, tx: optax.GradientTransformation, shapes: codecs.Shapes):
    """Takes any optax transformation and the shapes of the tensors."""
    self._tx = tx
    self._shapes = shapes
    self._apply = _compiled(tx)

  def init(self) -> optax.OptState:
    """The state before the first step."""
    return self._tx.init(tuple(jnp.zeros(s, jnp.float32) for s in self._shapes))

  def apply(
    self, params: Params, state: optax.OptState, merged: Params
  ) -> tuple[Params, optax.OptState]:
    """One step: f32 parameters and outer gradient to the next parameters."""
    return self._apply(params, state, merged)


@functools.cache
def _compiled(
  tx: optax.GradientTransformation,
) -> Callable[..., tuple[Params, optax.OptState]]:
  @jax.jit
  def step(params, state, merged):
    updates, state = tx.update(merged, state, params)
    return optax.apply_updates(params, updates), state

  return step


def state_to_bytes(state: optax.OptState) -> bytes:
  """The leaves of an optimizer state in tree order, little endian."""
  return codecs.to_bytes(jax.tree.leaves(state))


def state_from_bytes(template: optax.OptState, data: bytes) -> optax.OptState:
  """Reads what `state_to_bytes` wrote, as read-only views of `data`.

  Args:
    template: A state of the same shapes and dtypes, such as `init()`.
    data: ValueError if it has any other size than such a state.
  """
  leaves, treedef = jax.tree.flatten(template)
  specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  return jax.tree.unflatten(treedef, codecs.unpack(tuple(specs), data))
