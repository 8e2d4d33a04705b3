"""A program that sleeps instead of computing: isolates the exchange.

Its parameters (0.5 M by default) drift a little each step, so that answers
are encoded, checked and merged for real; only the gradient is missing.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddiloco.config import Config, learner_value

_TENSORS = 16


class _Moment:
  """Ready at an instant, as a device array is when it is computed."""

  def __init__(self, ready_s: float):
    self._ready_s = ready_s

  def block_until_ready(self) -> "_Moment":
    """Sleeps until then."""
    time.sleep(max(self._ready_s - time.monotonic(), 0.0))
    return self

  def __float__(self) -> float:
    return 0.0


class _State(NamedTuple):
  params: dict[str, jax.Array]


class Sleeper:
  """A `Program` whose step takes `options.step_s` seconds of sleep."""

  def __init__(self, config: Config, learner: int | None):
    self._step_s = float(config.options.get("step_s", 0.1))
    self._size = int(config.options.get("params", 500_000)) // _TENSORS
    self.samples_per_step = (
      0
      if learner is None
      else learner_value(config.learners.batch_size, learner)
    )
    self._drift = jax.jit(
      lambda params: jax.tree.map(lambda x: x * 0.999, params),
      donate_argnums=0,
    )

  def init(self) -> _State:
    """The same parameters everywhere."""
    names = [f"tensor_{i:02d}" for i in range(_TENSORS)]
    values = jnp.linspace(-1.0, 1.0, self._size, dtype=jnp.float32)
    return _State({name: values + 0 for name in names})

  def params(self, state: _State) -> dict[str, jax.Array]:
    """The exchanged parameters."""
    return state.params

  def with_params(self, state: _State, params: dict[str, Any]) -> _State:
    """The state with other parameters."""
    return state._replace(params=params)

  def batch(self, first_sample: int, count: int) -> int:
    """Nothing to read: the number of samples."""
    del first_sample
    return count

  def tokens(self, batch: int) -> int:
    """One token a sample."""
    return batch

  def step(
    self, state: _State, batch: int, clock: int
  ) -> tuple[_State, dict[str, Any]]:
    """Drifts the parameters; ready after the sleep."""
    del batch, clock
    moment = _Moment(time.monotonic() + self._step_s)
    return _State(self._drift(state.params)), {"loss": moment}


def build(
  config: Config, learner: int | None, *, cache_dir: str | None = None
) -> Sleeper:
  """The program of `options.step_s` and `options.params`."""
  del cache_dir
  return Sleeper(config, learner)
