"""The merge of a round's answers (paper Alg. 2 and its Weight and Merge).

Answers are folded one at a time in the order given, in f32. Refused and
absent answers are never touched (they may hold NaN), memory does not grow
with the number of answers M, and neither M nor who answered recompiles. An
average is fused with decoding; for RDA, which reads the values three times,
XLA on a CPU holds one decoded answer at a time.
"""

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.algo import codecs

AVERAGE = "average"
RDA = "rda"
RULES = (AVERAGE, RDA)

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
  tensor of values v_m becomes, by its rule,

    average  sum w_m v_m
    rda      (sum w_m ||v_m||) * phi(sum w_m phi(v_m))

  and where directions cancel (||sum w_m phi(v_m)|| < 1e-6) that sum itself
  takes the place of its phi.
  """

  def __init__(
    self, codec: codecs.Codec, shapes: codecs.Shapes, rules: Sequence[str]
  ):
    """Takes the shape and the rule of every tensor of the fragment."""
    _check_rules(rules)
    if len(rules) != len(shapes):
      raise ValueError(
        f"{len(rules)} rules for {len(shapes)} tensors: give one for each"
      )
    self._codec = codec
    self._shapes = shapes
    self._rules = tuple(rules)
    self._decode = jax.jit(lambda payload: codec.decode(payload, shapes))
    self._first = jax.jit(self._terms)
    self._fold = jax.jit(self._add, donate_argnums=0)
    self._finish = jax.jit(self._scale, donate_argnums=0)

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
    if len(weights) == 1:
      (payload,) = payloads
      return self._decode(payload)  # Either rule, without its rounding.
    pairs = zip(payloads, map(np.float32, weights), strict=True)
    sums, radii = self._first(*next(pairs))
    for payload, weight in pairs:
      sums, radii = self._fold(sums, radii, payload, weight)
    return self._finish(sums, radii)

  def _terms(
    self, payload: codecs.Payload, weight: jax.Array
  ) -> tuple[Arrays, Arrays]:
    """One answer's (vectors, radii); an averaged tensor has radius 0."""
    vectors, radii = [], []
    tensors = self._codec.decode(payload, self._shapes)
    for tensor, rule in zip(tensors, self._rules, strict=True):
      vector, radius = tensor, jnp.float32(0)
      if rule == RDA:
        vector, radius = codecs.polar(tensor)
      vectors.append(weight * vector)
      radii.append(weight * radius)
    return tuple(vectors), tuple(radii)

  def _add(
    self,
    sums: Arrays,
    radii: Arrays,
    payload: codecs.Payload,
    weight: jax.Array,
  ) -> tuple[Arrays, Arrays]:
    """Folds one more answer in; `sums` are overwritten."""
    return jax.tree.map(jnp.add, (sums, radii), self._terms(payload, weight))

  def _scale(self, sums: Arrays, radii: Arrays) -> Arrays:
    """Gives every RDA tensor its length; `sums` are overwritten."""
    merged = []
    for total, radius, rule in zip(sums, radii, self._rules, strict=True):
      if rule == RDA:
        unit, length = codecs.polar(total)
        total = radius * jnp.where(length < _CANCELLED, total, unit)
      merged.append(total)
    return tuple(merged)


def _check_rules(rules: Sequence[str]) -> None:
  for rule in rules:
    if rule not in RULES:
      raise ValueError(
        f"unknown merge rule {rule!r}: choose one of {', '.join(RULES)}"
      )
