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
  scope: str = "tensor"  # of rda: tensor | row | fragment
  blend: float = 0.0  # alpha: what learners keep of their own parameters
  eager: bool = False  # they go on from the outer step of their own gradient


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
      tensors = recipe.fragments[p]
      merged = merge(
        [[learner.outer_gradient(i) for i in tensors] for learner in learners],
        [learner.weight(p) for learner in learners],
        [recipe.rules[i] for i in tensors],
        recipe.scope,
      )
      for i, gradient in zip(tensors, merged, strict=True):
        momentum = recipe.momentum * momenta[i].astype(np.float64) + gradient
        update = gradient + recipe.momentum * momentum
        momenta[i] = momentum.astype(np.float32)
        new = params[i].astype(np.float64) - recipe.learning_rate * update
        params[i] = new.astype(np.float32)
    if recipe.eager:
      for learner in learners:
        learner.step_eagerly(due)
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

  def step_eagerly(self, due: Sequence[int]) -> None:
    """Nesterov's first step, with what this learner alone has learnt."""
    rate = self._recipe.learning_rate * (1 + self._recipe.momentum)
    leaves, treedef = jax.tree.flatten(self._program.params(self._state))
    for p in due:
      for i in self._recipe.fragments[p]:
        new = self._anchor[i] - rate * self.outer_gradient(i)
        leaves[i] = jax.device_put(new.astype(np.float32), may_alias=False)
    self._state = self._program.with_params(
      self._state, jax.tree.unflatten(treedef, leaves)
    )

  def overwrite(self, p: int, params: Tensors) -> None:
    mine = self._program.params(self._state)
    leaves, treedef = jax.tree.flatten(mine)
    keep = self._recipe.blend
    for i in self._recipe.fragments[p]:
      self._anchor[i] = params[i]
      new = keep * np.array(leaves[i], np.float64) + (1 - keep) * params[i]
      leaves[i] = jax.device_put(new.astype(np.float32), may_alias=False)
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
  answers: Sequence[Tensors],
  weights: Sequence[float],
  rules: Sequence[str],
  scope: str = "tensor",
) -> Tensors:
  """The paper's Merge of a fragment's outer gradients, in float64.

  Of several answers with the same tensors; `scope` says what is one vector of
  radial-directional averaging: a tensor, a row (last axis) or the fragment.
  """
  shares = [w / sum(weights) for w in weights]
  answers = [
    [np.asarray(x, np.float64) for x in tensors] for tensors in answers
  ]
  merged = [
    sum(w * x for w, x in zip(shares, tensors, strict=True))
    for tensors in zip(*answers, strict=True)
  ]
  chosen = [i for i, rule in enumerate(rules) if rule == "rda"]
  if scope == "fragment" and chosen:
    rows = [
      np.concatenate([tensors[i].reshape(-1) for i in chosen])
      for tensors in answers
    ]
    ends = np.cumsum([answers[0][i].size for i in chosen])[:-1]
    for i, piece in zip(
      chosen, np.split(_rda(rows, shares), ends), strict=True
    ):
      merged[i] = piece.reshape(answers[0][i].shape)
  elif scope != "fragment":
    for i in chosen:
      shape = answers[0][i].shape
      rows = [t[i].reshape(-1) for t in answers]
      if scope == "row" and shape:
        rows = [row.reshape(-1, shape[-1]) for row in rows]
      merged[i] = _rda(rows, shares).reshape(shape)
  return merged


def _rda(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
  """Of vectors along the last axis: mean norm times direction of the mean."""
  norms = [np.linalg.norm(v, axis=-1, keepdims=True) for v in vectors]
  pairs = list(zip(shares, vectors, norms, strict=True))
  direction = sum(w * _unit(v) for w, v, _ in pairs)
  return sum(w * norm for w, _, norm in pairs) * _unit(direction)


def _unit(v: np.ndarray) -> np.ndarray:
  norm = np.linalg.norm(v, axis=-1, keepdims=True)
  return np.divide(v, norm, out=np.zeros_like(v), where=norm > 0)


def _host(params: Any) -> Tensors:
  """Copies: the arrays may be donated."""
  return [np.array(leaf) for leaf in jax.tree.leaves(params)]
