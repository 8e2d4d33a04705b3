"""The inner optimizer of a learner and its schedule (paper, Sec. 3, App. A).

The learning rate is a function of a clock that the caller passes in, not of
the optimizer's own count: learners that start late or step slowly then share
one schedule.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from ddiloco.algo.fragments import Piece
from ddiloco.config import InnerConfig

# Like the parameters: the names of a tensor's axes, as in "layer width hidden".
Axes = Any

# Tensors along these axes are many matrices, one for each index.
_STACKED = ("layer", "expert")
# Tables and routers choose rows; as operators between activations they have
# no meaningful spectrum.
_CHOOSING = ("vocab", "patch", "choice")
# Muon's updates get the root mean square that Adam's usually have, so that one
# learning rate serves both.
_ADAM_RMS = 0.2


def learning_rate(config: InnerConfig, clock: jax.Array) -> jax.Array:
  """The inner learning rate at `clock`, an f32 scalar.

  It rises linearly from final_fraction of the peak to the peak at `warmup`, and
  under 'cosine' falls back to it until `decay`. It starts above 0 because a
  clock stands still until the first commit, and steps at rate 0 would fill the
  first answers with zeros.
  """
  low = config.final_fraction
  # Floats, as tokens of a large run are more than an int32 holds.
  warmup, decay = float(config.warmup), float(config.decay)
  rise = low + (1.0 - low) * clock / max(warmup, 1.0)
  top = jnp.ones_like(clock)
  if config.schedule == "cosine":
    span = max(decay - warmup, 1.0)
    done = jnp.clip((clock - warmup) / span, 0.0, 1.0)
    top = low + (1.0 - low) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))
  return config.learning_rate * jnp.where(clock < warmup, rise, top)


def make_optimizer(
  config: InnerConfig, axes: Axes
) -> optax.GradientTransformation:
  """The inner optimizer without its learning rate.

  Gradients are clipped by their global norm first; weights of matrices decay.
  """
  clip = optax.clip_by_global_norm(config.clip_norm)
  return optax.chain(
    clip if config.clip_norm else optax.identity(),
    _direction(config, axes),
    optax.add_decayed_weights(
      config.weight_decay, mask=jax.tree.map(_is_matrix, axes)
    ),
  )


def _direction(config: InnerConfig, axes: Axes) -> optax.GradientTransformation:
  if config.name == "muon":
    return _muon(config, axes)
  if config.name == "sgd":
    return optax.trace(config.momentum) if config.momentum else optax.identity()
  if config.name == "lion":
    return optax.scale_by_lion(config.b1, config.b2)
  return optax.scale_by_adam(config.b1, config.b2, config.eps)


def _muon(config: InnerConfig, axes: Axes) -> optax.GradientTransformation:
  """Muon (arXiv 2502.16982) on operators between activations, Adam on others.

  Not `optax.contrib.muon`, whose other half is NAdam, with a rate of its own.
  """
  operators = jax.tree.map(
    lambda names: muon_dimensions(names) or optax.MaskedNode(), axes
  )
  scale = functools.partial(jax.tree.map, _scale_muon, is_leaf=_is_dimensions)
  matrices = optax.chain(
    optax.contrib.scale_by_muon(
      beta=config.momentum,
      eps=config.eps,
      weight_dimension_numbers=operators,
    ),
    optax.stateless(lambda updates, _: scale(operators, updates)),
  )
  return optax.partition(
    {
      "operator": matrices,
      "other": optax.scale_by_adam(config.b1, config.b2, config.eps),
    },
    jax.tree.map(
      lambda names: "operator" if muon_dimensions(names) else "other", axes
    ),
  )


def _is_dimensions(x: Any) -> bool:
  return isinstance(x, MuonDimensionNumbers)


def _scale_muon(
  dimensions: MuonDimensionNumbers, update: jax.Array
) -> jax.Array:
  fans = [math.prod(update.shape[i] for i in axes) for axes in dimensions]
  return update * (_ADAM_RMS * max(fans) ** 0.5)


def muon_dimensions(axes: str) -> MuonDimensionNumbers | None:
  """The axes that an operator reads and those it writes; None if it is none.

  One of the two is the width of the activations, the other one all the other
  axes together, such as heads times head width.
  """
  names = axes.split()
  matrix = [i for i, name in enumerate(names) if name not in _STACKED]
  if len(matrix) < 2 or any(name in _CHOOSING for name in names):
    return None
  if names[matrix[0]] == "width":
    return MuonDimensionNumbers(tuple(matrix[:1]), tuple(matrix[1:]))
  if names[matrix[-1]] == "width":
    return MuonDimensionNumbers(tuple(matrix[:-1]), tuple(matrix[-1:]))
  return None


def _is_matrix(axes: str) -> bool:
  return sum(name != "layer" for name in axes.split()) >= 2


# --- Moments ----------------------------------------------------------------


def owners(inner: Any, params: Any) -> Any:
  """Of each array of an optimizer state, which parameter it is a moment of.

  The parameter's index in tree order; -1 for counts and other constants. A
  moment has its parameter's shape, and its path ends in its parameter's.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  known = {path: (i, leaf.shape) for i, (path, leaf) in enumerate(leaves)}

  def owner(path, leaf):
    ends = (path[start:] for start in range(len(path)))
    found, shape = next((known[end] for end in ends if end in known), (-1, ()))
    return found if leaf.shape == shape else -1

  return jax.tree_util.tree_map_with_path(owner, inner)


def overwrite_scale(config: InnerConfig) -> float:
  """What the moments of overwritten parameters are multiplied by."""
  scales = {"keep": 1.0, "zero": 0.0, "scale": config.overwrite_scale}
  return scales[config.on_overwrite]


def scale_moments(
  inner: Any, owner_of: Any, pieces: Sequence[Piece], scale: float
) -> Any:
  """An optimizer state with the moments of some parameters scaled.

  History counts less then; the optimizer's counts stay, so that Adam does not
  take the history for shorter than it is and its updates for larger.
  """
  leaves, treedef = jax.tree.flatten(inner)
  of = jax.tree.leaves(owner_of)
  for piece in pieces:
    for i in (i for i, tensor in enumerate(of) if tensor == piece.tensor):
      where = leaves[i].sharding
      leaves[i] = _scaler(piece._replace(tensor=0), scale, where)(leaves[i])
  return jax.tree.unflatten(treedef, leaves)


@functools.cache
def _scaler(
  piece: Piece, scale: float, where: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
  @functools.partial(jax.jit, out_shardings=where)
  def scaled(moment):
    old = moment[piece.index]
    # Zero forgets also what is not a number.
    new = scale * old if scale else jnp.zeros_like(old)
    return moment.at[piece.index].set(new)

  return scaled
