"""The paper's Algorithms 1 and 2 in lock step, straight from the equations.

K = M: every learner takes step t; then every fragment p with t mod H = t_p,
t_p = floor(p H / P), is merged over all learners, and all of them go on from
the result `delay` steps later. Nothing here is shared with what it checks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Tensors = list[np.ndarray]


class Recipe(NamedTuple):
  """What a run is told."""

  fragments: Sequence[Sequence[int]]  # tensor indices of each fragment
  interval: int  # H
  delay: int  # steps from a merge to its application; below H
  rules: Sequence[str]  # of each tensor: average | rda
  learning_rate: float = 1.0  # eta
  momentum: float = 0.0  # mu, Nesterov's


class History(NamedTuple):
  """What came of it."""

  rounds: list[int]
  params: list[Tensors]  # global, after each round
  momenta: list[Tensors]
  losses: list[float]  # of learner 0, step by step


def train(programs: Sequence[Any], recipe: Recipe, steps: int) -> History:
  """Trains for some inner steps of every learner."""
  learners = [_Learner(program, recipe) for program in programs]
  params = _host(programs[0].params(programs[0].init()))
  momenta = [np.zeros_like(tensor) for tensor in params]
  history = History([], [], [], [])
  merged_at: dict[int, Tensors] = {}
  for t in range(1, steps + 1):
    losses = [learner.step() for learner in learners]
    history.losses.append(losses[0])
    if recipe.delay:
      _deliver(learners, recipe, merged_at, t)
    due = _due(recipe, t)
    for p in due:
      weights = [learner.weight(p) for learner in learners]
      for i in recipe.fragments[p]:
        gradients = [learner.outer_gradient(i) for learner in learners]
        merged = merge(gradients, weights, recipe.rules[i])
        momentum = recipe.momentum * momenta[i].astype(np.float64) + merged
        update = merged + recipe.momentum * momentum
        momenta[i] = momentum.astype(np.float32)
        new = params[i].astype(np.float64) - recipe.learning_rate * update
        params[i] = new.astype(np.float32)
    if due:
      history.rounds.append(t)
      history.params.append(list(params))
      history.momenta.append(list(momenta))
      merged_at[t] = list(params)
    if not recipe.delay:
      _deliver(learners, recipe, merged_at, t)
  return history


class _Learner:
  """Algorithm 1: inner steps, counters, plain overwriting (alpha = 0)."""

  def __init__(self, program: Any, recipe: Recipe):
    self._program, self._recipe = program, recipe
    self._state = program.init()
    self._anchor = _host(program.params(self._state))
    self._steps = [0] * len(recipe.fragments)
    self._tokens = [0] * len(recipe.fragments)
    self._next_sample = 0

  def step(self) -> float:
    program = self._program
    batch = program.batch(self._next_sample, program.samples_per_step)
    self._next_sample += program.samples_per_step
    self._state, metrics = program.step(self._state, batch, 0)
    for p in range(len(self._steps)):
      self._steps[p] += 1
      self._tokens[p] += program.tokens(batch)
    return float(metrics["loss"])

  def weight(self, p: int) -> float:
    """Quantity times quality: c_tokens * (c_tokens / c_steps)."""
    return self._tokens[p] * (self._tokens[p] / self._steps[p])

  def outer_gradient(self, i: int) -> np.ndarray:
    params = _host(self._program.params(self._state))
    return self._anchor[i] - params[i]

  def overwrite(self, p: int, params: Tensors) -> None:
    mine = self._program.params(self._state)
    leaves, treedef = jax.tree.flatten(mine)
    for i in self._recipe.fragments[p]:
      self._anchor[i] = params[i]
      leaves[i] = jax.device_put(params[i], may_alias=False)
    self._steps[p] = self._tokens[p] = 0
    self._state = self._program.with_params(
      self._state, jax.tree.unflatten(treedef, leaves)
    )


def _due(recipe: Recipe, t: int) -> list[int]:
  count, h = len(recipe.fragments), recipe.interval
  return [p for p in range(count) if t % h == p * h // count]


def _deliver(
  learners: list[_Learner],
  recipe: Recipe,
  merged_at: dict[int, Tensors],
  now: int,
) -> None:
  t = now - recipe.delay
  if t not in merged_at:
    return
  for p in _due(recipe, t):
    for learner in learners:
      learner.overwrite(p, merged_at[t])


def merge(
  gradients: list[np.ndarray], weights: list[float], rule: str
) -> np.ndarray:
  """The paper's Merge of one tensor's outer gradients, in float64."""
  shares = [w / sum(weights) for w in weights]
  vectors = [gradient.astype(np.float64) for gradient in gradients]
  if rule == "average":
    return sum(w * v for w, v in zip(shares, vectors, strict=True))
  norms = [np.linalg.norm(v) for v in vectors]
  pairs = zip(shares, vectors, norms, strict=True)
  direction = sum(w * v / norm for w, v, norm in pairs)
  radius = sum(w * norm for w, norm in zip(shares, norms, strict=True))
  return radius * direction / np.linalg.norm(direction)


def _host(params: Any) -> Tensors:
  """Copies: the arrays may be donated."""
  return [np.array(leaf) for leaf in jax.tree.leaves(params)]
