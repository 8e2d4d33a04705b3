"""A program small enough to train in every test: six tensors, plain JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddiloco.config import Config
from tests.configs import override
from tests.engine.lockstep import Lockstep

WORDS, WIDTH, HIDDEN, OUT = 12, 4, 6, 2
SAMPLES, WORDS_PER_SAMPLE = 512, 3


def make_config(
  learners: int = 2,
  fragments: int = 3,
  interval: int = 3,
  overlap: int = 1,
  **groups: dict,
) -> Config:
  """Exact, averaged, f32, plain outer steps; `groups` override keys."""
  values: dict[str, Any] = {
    "learners": {"count": learners},
    "sync": {
      "num_fragments": fragments,
      "interval_steps": interval,
      "overlap_steps": overlap,
      "quorum_min": learners,
      "wait": "exact",
    },
    "codec": {"up": "f32"},
    "merge": {"rule": "average"},
    "outer": {"learning_rate": 1.0, "momentum": 0.0},
    "stop": {"rounds": 30},
    "live": {"checkpoint_every_steps": 0},
  }
  return override(values, groups)


def free_config(learners: int = 2, *shape: int, **groups: dict) -> Config:
  """The default policy, where nobody ever waits, with a quorum of one."""
  sync = {"wait": "never", "quorum_min": 1, "grace": False}
  groups["sync"] = sync | groups.get("sync", {})
  return make_config(learners, *shape, **groups)


def make_world(config: Config, *programs: Any, **options: Any) -> Lockstep:
  """A started run, by default with one `Regression` a learner."""
  count = config.learners.count
  programs = programs or tuple(Regression(m) for m in range(count))
  return Lockstep(config, programs, **options).start()


class Regression:
  """A two-layer network that learns another one's outputs.

  Tells what it was given: `clocks` and `first_samples`, step by step. Batches
  that hold sample `nan_at` are not numbers.
  """

  def __init__(
    self,
    shard: int,
    batch_size: int = 4,
    optimizer: str = "adamw",
    nan_at: int | None = None,
  ):
    self.samples_per_step = batch_size
    self.clocks: list[int] = []
    self._optimizer, self._nan_at = optimizer, nan_at
    self._words, self._targets = _samples(shard)

  def init(self) -> Any:
    params = jax.tree.map(jnp.asarray, _params(0))
    return params, _optimizer(self._optimizer).init(params)

  def params(self, state: Any) -> Any:
    return state[0]

  def with_params(self, state: Any, params: Any) -> Any:
    return params, state[1]

  def batch(self, first_sample: int, count: int) -> Any:
    index = np.arange(first_sample, first_sample + count)
    targets = self._targets[index % SAMPLES]
    if self._nan_at is not None and self._nan_at in index:
      targets = np.full_like(targets, np.nan)
    return self._words[index % SAMPLES], targets

  def tokens(self, batch: Any) -> int:
    return batch[0].size

  def step(self, state: Any, batch: Any, clock: int) -> tuple[Any, dict]:
    self.clocks.append(clock)
    state, loss = _step(self._optimizer)(state, *batch)
    return state, {"loss": loss}

  def loss(self, leaves: list[Any]) -> float:
    """Over the whole shard."""
    treedef = jax.tree.structure(_params(0))
    params = jax.tree.unflatten(treedef, leaves)
    return float(_loss(params, self._words, self._targets))


def _loss(params: Any, words: jax.Array, targets: jax.Array) -> jax.Array:
  return jnp.mean(jnp.square(_predict(params, words) - targets))


def _predict(params: Any, words: jax.Array) -> jax.Array:
  x = params["embed"][words].mean(axis=1)
  x = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
  x = x @ params["out"]["kernel"] + params["out"]["bias"][None]
  return x * params["out"]["scale"][None]


def _params(seed: int) -> Any:
  draw = np.random.default_rng(seed)

  def normal(*shape: int) -> np.ndarray:
    return draw.normal(size=shape).astype(np.float32)

  return {
    "embed": normal(WORDS, WIDTH),
    "hidden": {"kernel": normal(WIDTH, HIDDEN), "bias": normal(HIDDEN)},
    "out": {
      "kernel": normal(HIDDEN, OUT),
      "bias": normal(OUT),
      "scale": normal(OUT),
    },
  }


@functools.cache
def _samples(shard: int) -> tuple[np.ndarray, np.ndarray]:
  draw = np.random.default_rng(100 + shard)
  words = draw.integers(WORDS, size=(SAMPLES, WORDS_PER_SAMPLE), dtype=np.int32)
  return words, np.asarray(_predict(_params(1), words))


@functools.cache
def _optimizer(name: str) -> optax.GradientTransformation:
  return {"adamw": optax.adamw(3e-3), "sgd": optax.sgd(0.02)}[name]


@functools.cache
def _step(optimizer: str) -> Any:
  tx = _optimizer(optimizer)

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state, words, targets):
    params, opt_state = state
    loss, grads = jax.value_and_grad(_loss)(params, words, targets)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return step
