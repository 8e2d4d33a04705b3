"""Outer optimizers (paper Alg. 2): SGD with Nesterov momentum, and others.

The merged outer gradient D is anchor minus learner parameters, so the outer
optimizer descends along it. With momentum mu and learning rate eta,

  b <- mu b + D,   theta <- theta - eta (D + mu b)     (Nesterov)

Any optax transformation will do. Each fragment has a state of its own, which
is stored as bytes next to its parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco.algo import codecs
from ddiloco.config import ConfigError, OuterConfig

Params = tuple[jax.Array, ...]


def make_outer(
  config: OuterConfig, own: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
  """Builds a checked config's outer optimizer.

  Its `update` takes the number of the round that is merged as `round`.

  Args:
    config: without momentum, restarts and schedule, SGD has no state.
    own: the transformation where `name` is somebody's own function.
  """
  tx = _named(config) if own is None else own
  if config.restart_every:
    tx = with_restarts(tx, config.restart_every)
  if config.schedule != "constant" or config.warmup:
    tx = optax.chain(tx, scale_by_schedule(config))
  return optax.with_extra_args_support(tx)


def _named(config: OuterConfig) -> optax.GradientTransformation:
  rate = config.learning_rate
  if config.name == "sgd":
    return optax.sgd(rate, config.momentum or None, config.nesterov)
  if config.name == "adam":
    return optax.adam(rate, config.b1, config.b2, config.eps)
  return optax.chain(
    scale_by_delayed_nesterov(
      config.momentum, config.momentum_delay, config.momentum_activation
    ),
    optax.scale_by_learning_rate(rate),
  )


class DelayedNesterovState(NamedTuple):
  """Merges so far, momentum, and outer gradients since its last refresh."""

  count: jax.Array  # i32[]
  momentum: Params
  buffer: Params


def scale_by_delayed_nesterov(
  momentum: float, delay: int, activation: float = 0.0
) -> optax.GradientTransformation:
  """Delayed Nesterov (Async Local-SGD, arXiv 2401.09135, Alg. 3).

  Every N = `delay` merges, with the outer gradients of those merges summed up
  in B and c = `activation`, in [0, 1/N]: m <- mu m + B / N. The update is

    D / N + c mu m,  but  D / N + (1 - c N + c) mu m  where m was refreshed.

  N = 1 is Nesterov's momentum.
  """

  def init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return DelayedNesterovState(jnp.zeros([], jnp.int32), zeros, zeros)

  def update(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)
    due = count % delay == 0
    last = 1.0 - activation * delay + activation
    share = momentum * jnp.where(due, last, activation)
    buffer = jax.tree.map(jnp.add, state.buffer, updates)
    kept = jax.tree.map(
      lambda m, b: jnp.where(due, momentum * m + b / delay, m),
      state.momentum,
      buffer,
    )
    buffer = jax.tree.map(lambda b: jnp.where(due, 0.0, b), buffer)
    updates = jax.tree.map(lambda d, m: d / delay + share * m, updates, kept)
    return updates, DelayedNesterovState(count, kept, buffer)

  return optax.GradientTransformation(init, update)


class RestartsState(NamedTuple):
  """Merges so far, and the state of what is restarted."""

  count: jax.Array  # i32[]
  inner: optax.OptState


def with_restarts(
  tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
  """Starts `tx` from its initial state again after each `every` merges."""
  tx = optax.with_extra_args_support(tx)

  def init(params):
    return RestartsState(jnp.zeros([], jnp.int32), tx.init(params))

  def update(updates, state, params=None, **extra):
    due = (state.count > 0) & (state.count % every == 0)
    inner = jax.tree.map(
      lambda fresh, old: jnp.where(due, fresh, old),
      tx.init(params),
      state.inner,
    )
    updates, inner = tx.update(updates, inner, params, **extra)
    return updates, RestartsState(optax.safe_increment(state.count), inner)

  return optax.GradientTransformationExtraArgs(init, update)


class ScheduleState(NamedTuple):
  """Merges so far."""

  count: jax.Array  # i32[]


def scale_by_schedule(
  config: OuterConfig,
) -> optax.GradientTransformationExtraArgs:
  """Scales updates by `rate_fraction` at the fragment's merge or the round."""
  by_merge = config.clock == "merges"

  def init(params):
    del params
    zero = jnp.zeros([], jnp.int32)
    return ScheduleState(zero) if by_merge else optax.EmptyState()

  def update(updates, state, params=None, *, round, **extra):
    del params, extra
    clock = round
    if by_merge:
      clock = optax.safe_increment(state.count)
      state = ScheduleState(clock)
    fraction = rate_fraction(config, clock)
    return jax.tree.map(lambda u: fraction * u, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def rate_fraction(config: OuterConfig, clock: jax.Array) -> jax.Array:
  """The outer learning rate at `clock` over its peak, an f32 scalar.

  The clock counts from 1. The rate rises as clock / warmup to the peak at
  `warmup`, and unless it is constant falls to final_fraction at `decay`.
  """
  clock = jnp.asarray(clock, jnp.float32)
  span = max(config.decay - config.warmup, 1)
  done = jnp.clip((clock - config.warmup) / span, 0.0, 1.0)
  top = {
    "constant": jnp.ones_like(clock),
    "linear": 1.0 - done,
    "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
  }[config.schedule]
  if config.schedule != "constant":
    top = config.final_fraction + (1.0 - config.final_fraction) * top
  return jnp.where(clock < config.warmup, clock / max(config.warmup, 1), top)


class OuterStep:
  """The outer step of one fragment.

  Nothing is donated: if another syncer wins the commit, this one goes on from
  the parameters and the state it had.
  """

  def __init__(self, tx: optax.GradientTransformation, shapes: codecs.Shapes):
    """Takes any optax transformation and the shapes of the tensors.

    `ConfigError` if it cannot step on these, or if its state could not be
    stored: a step must not change its shapes and dtypes.
    """
    self._init, self._apply = tx.init, _compiled(tx)
    params = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    # The shapes and dtypes of a state, for `state_from_bytes`.
    self.template: optax.OptState = _check_steps(tx, self._apply, params)

  def init(self, params: Params) -> optax.OptState:
    """The state before the first step."""
    return self._init(params)

  def apply(
    self, params: Params, state: optax.OptState, merged: Params, round: int
  ) -> tuple[Params, optax.OptState]:
    """One step: f32 parameters and outer gradient to the next parameters.

    Args:
      params: the fragment's.
      state: of the optimizer.
      merged: the outer gradient.
      round: the round that is merged, from 1.
    """
    return self._apply(params, state, merged, np.int32(round))


@functools.cache
def _compiled(
  tx: optax.GradientTransformation,
) -> Callable[..., tuple[Params, optax.OptState]]:
  tx = optax.with_extra_args_support(tx)

  @jax.jit
  def step(params, state, merged, round):
    updates, state = tx.update(merged, state, params, round=round)
    return optax.apply_updates(params, updates), state

  return step


def _check_steps(
  tx: optax.GradientTransformation, step: Callable[..., Any], params: Any
) -> optax.OptState:
  """The shapes and dtypes of its state."""
  try:
    before = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(step, params, before, params, np.int32(1))
  except Exception as error:  # it may be a user's, and raise anything
    raise ConfigError(
      f"the outer optimizer (outer.name) cannot step on tensors of shapes "
      f"{[x.shape for x in params]}: {type(error).__name__}: {error}."
    ) from error
  if _specs(before) != _specs(after):
    raise ConfigError(
      f"the outer optimizer (outer.name) turns a state {_specs(before)} into "
      f"{_specs(after)}. A step must keep structure, shapes and dtypes."
    )
  for leaf in jax.tree.leaves(before):
    if not jnp.issubdtype(leaf.dtype, np.number):
      raise ConfigError(
        f"the outer optimizer (outer.name) has a state of {leaf.dtype}, which "
        "cannot be stored. Use integers and floats."
      )
  return before


def _specs(tree: Any) -> tuple[list[Any], Any]:
  leaves, treedef = jax.tree.flatten(tree)
  return [(x.dtype, x.shape) for x in leaves], treedef


def state_to_bytes(state: optax.OptState) -> bytes:
  """The leaves of an optimizer state in tree order, little endian."""
  return codecs.to_bytes(jax.tree.leaves(state))


def state_from_bytes(template: optax.OptState, data: bytes) -> optax.OptState:
  """Reads what `state_to_bytes` wrote, as read-only views of `data`.

  Args:
    template: A state of the same shapes and dtypes, as `OuterStep.template`.
    data: ValueError if it has any other size than such a state.
  """
  leaves, treedef = jax.tree.flatten(template)
  specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  return jax.tree.unflatten(treedef, codecs.unpack(tuple(specs), data))
