"""The merge of a round's answers (paper Alg. 2 and its Weight and Merge).

Answers are folded one at a time in the order given, in f32. Refused and
absent answers are never touched (they may hold NaN), memory does not grow
with the number of answers M, and neither M nor who answered recompiles. An
average is fused with decoding; for RDA, which reads the values three times,
XLA on a CPU holds one decoded tensor at a time.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.algo import codecs

AVERAGE = "average"
RDA = "rda"
RULES = (AVERAGE, RDA)

TENSOR = "tensor"
ROW = "row"
FRAGMENT = "fragment"
SCOPES = (TENSOR, ROW, FRAGMENT)

Arrays = tuple[jax.Array, ...]

# A mean of unit vectors this short is what rounding left of directions that
# cancel. Stretched to length 1 it would be noise of full size.
_CANCELLED = 1e-6


def token_weights(counters: Sequence[tuple[int, int]]) -> tuple[float, ...]:
  """Weights w = c_tokens^2 / c_steps, normalised: quantity times quality.

  Exact rationals, rounded once at the end, so equal counters weigh equally
  and the result does not depend on the order of the answers.

  Args:
    counters: (c_tokens, c_steps) of every counted answer.
  """
  if not counters:
    raise ValueError("no answers to weigh: a round counts at least one")
  for tokens, steps in counters:
    if tokens <= 0 or steps <= 0:
      raise ValueError(
        f"an answer of {tokens} tokens in {steps} steps has no weight: leave "
        "it out of the round"
      )
  raw = [Fraction(tokens * tokens, steps) for tokens, steps in counters]
  total = sum(raw)
  return tuple(float(w / total) for w in raw)


def merge_rules(
  paths: Sequence[str],
  default: str,
  embedding_rule: str,
  embedding_pattern: str,
) -> tuple[str, ...]:
  """The rule of each tensor: its own where the pattern is found in its path.

  The paper averages embeddings and merges all else by RDA.
  """
  _check_rules((default, embedding_rule))
  try:
    pattern = re.compile(embedding_pattern)
  except re.error as error:
    raise ValueError(
      f"embedding pattern {embedding_pattern!r} is not a regular expression: "
      f"{error}"
    ) from error
  return tuple(
    embedding_rule if pattern.search(path) else default for path in paths
  )


class Merger:
  """Merges the answers for one fragment.

  With weights w_m that sum to 1 and phi(x) = x / ||x||_2, phi(0) = 0, a
  vector of values v_m becomes, by its rule,

    average  sum w_m v_m
    rda      (sum w_m ||v_m||) * phi(sum w_m phi(v_m))

  and where directions cancel (||sum w_m phi(v_m)|| < 1e-6) that sum itself
  takes the place of its phi. The scope says what is one vector to RDA:

    tensor    all values of a tensor
    row       the values along the last axis, at each index of the others; a
              tensor of one axis or none is one vector
    fragment  all values of all RDA tensors of the fragment together

  The order of the answers matters to f32 rounding alone; who needs the same
  bits gives them in the same order.
  """

  def __init__(
    self,
    codec: codecs.Codec,
    shapes: codecs.Shapes,
    rules: Sequence[str],
    scope: str = TENSOR,
  ):
    """Takes the shape and the rule of every tensor of the fragment."""
    _check_rules(rules)
    if scope not in SCOPES:
      raise ValueError(
        f"unknown RDA scope {scope!r}: choose one of {', '.join(SCOPES)}"
      )
    if len(rules) != len(shapes):
      raise ValueError(
        f"{len(rules)} rules for {len(shapes)} tensors: give one for each"
      )
    self._codec = codec
    self._kernels = [
      _kernels(codec, shape, scope if rule == RDA else AVERAGE)
      for shape, rule in zip(shapes, rules, strict=True)
    ]
    self._shapes = shapes
    # The tensors that make up one vector together.
    self._joint = [
      i for i, rule in enumerate(rules) if rule == RDA and scope == FRAGMENT
    ]

  def merge(
    self, payloads: Iterable[codecs.Payload], weights: Sequence[float]
  ) -> Arrays:
    """Merges payloads, in order, to f32 tensors.

    Args:
      payloads: The counted answers; may be produced lazily.
      weights: One of each payload, summing to 1.
    """
    if not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-6):
      raise ValueError(
        f"the weights sum to {math.fsum(weights)}: normalise them to 1"
      )
    if len(weights) == 1:  # Any rule, without its rounding.
      (payload,) = payloads
      parts = codecs.by_tensor(self._codec, payload)
      pairs = zip(self._kernels, parts, strict=True)
      return tuple(kernel.decode(part) for kernel, part in pairs)
    sums = [
      (np.zeros(shape, np.float32), np.zeros(kernel.radii, np.float32))
      for kernel, shape in zip(self._kernels, self._shapes, strict=True)
    ]
    for payload, weight in zip(payloads, weights, strict=True):
      parts = codecs.by_tensor(self._codec, payload)
      joint = _joint_norm(
        [self._kernels[i].norm(parts[i]) for i in self._joint]
      )
      for i, (kernel, part) in enumerate(
        zip(self._kernels, parts, strict=True)
      ):
        sums[i] = kernel.fold(*sums[i], part, np.float32(weight), joint)
    joint = _joint_norm(
      [self._kernels[i].length(sums[i][0]) for i in self._joint]
    )
    return tuple(
      kernel.finish(*pair, joint)
      for kernel, pair in zip(self._kernels, sums, strict=True)
    )


class _Kernels(NamedTuple):
  """The jitted functions of one tensor, and the shape of its vectors' norms.

  `joint` is the norm of the vector of scope "fragment" that the tensor is a
  part of; nobody else reads it.
  """

  radii: tuple[int, ...]
  decode: Callable[..., jax.Array]
  norm: Callable[..., jax.Array]
  length: Callable[..., jax.Array]
  fold: Callable[..., tuple[jax.Array, jax.Array]]
  finish: Callable[..., jax.Array]


@functools.cache
def _kernels(
  codec: codecs.Codec, shape: tuple[int, ...], scope: str
) -> _Kernels:
  """Compiled once for all tensors of a shape and scope, in any fragment.

  `scope` is one of RDA, or AVERAGE.
  """
  radii = shape[:-1] + (1,) if shape and scope == ROW else ()

  def decode(part):
    (tensor,) = codec.decode(part, (shape,))
    return tensor

  def split(x, joint):
    """Directions and norms of x's vectors."""
    if scope == ROW and shape:
      unit, norm = jax.vmap(codecs.polar)(x.reshape(-1, shape[-1]))
      return unit.reshape(shape), norm.reshape(radii)
    unit, norm = codecs.polar(x)
    if scope == FRAGMENT:
      return unit * jnp.where(joint == 0, 0.0, norm / joint), joint
    return unit, norm

  def fold(total, radius, part, weight, joint):
    vector, norm = decode(part), jnp.float32(0)
    if scope != AVERAGE:
      vector, norm = split(vector, joint)
    return total + weight * vector, radius + weight * norm

  def finish(total, radius, joint):
    if scope == AVERAGE:
      return total
    unit, length = split(total, joint)
    return radius * jnp.where(length < _CANCELLED, total, unit)

  return _Kernels(
    radii,
    jax.jit(decode),
    jax.jit(lambda part: codecs.polar(decode(part))[1]),
    jax.jit(lambda x: codecs.polar(x)[1]),
    jax.jit(fold, donate_argnums=(0, 1)),
    jax.jit(finish, donate_argnums=0),
  )


def _joint_norm(norms: Sequence[jax.Array]) -> jax.Array | np.float32:
  """The norm of a vector of parts of these norms; 0 for none."""
  return _norm(tuple(norms)) if norms else np.float32(0)


@jax.jit
def _norm(values: Arrays) -> jax.Array:
  return codecs.polar(jnp.stack(values))[1]


def _check_rules(rules: Sequence[str]) -> None:
  for rule in rules:
    if rule not in RULES:
      raise ValueError(
        f"unknown merge rule {rule!r}: choose one of {', '.join(RULES)}"
      )
