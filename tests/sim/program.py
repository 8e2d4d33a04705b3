"""A program of six tensors for simulated and live runs; see `Regression`."""

import signal
from typing import Any

import jax

from ddiloco.config import Config
from tests.engine.regression import Regression

TARGETS_SCALE = 1.0  # changed by a test: another program, other bits


class Evaluated(Regression):
  """Can be evaluated; may ask its process to stop at a step.

  Learner 1 may meet a sample that is not a number, or one that moves its
  parameters far away.
  """

  def __init__(self, config: Config, learner: int | None):
    options = config.options if learner == 1 else {}
    super().__init__(learner or 0, nan_at=options.get("nan_at"))
    self._spike_at = options.get("spike_at", -1)
    self._interrupt_at = config.options.get("interrupt_at", 0)
    self._steps = 0

  def batch(self, first_sample: int, count: int) -> Any:
    words, targets = super().batch(first_sample, count)
    return words, TARGETS_SCALE * targets

  def step(self, state: Any, batch: Any, clock: int) -> tuple[Any, dict]:
    self._steps += 1
    if self._steps == self._interrupt_at:
      signal.raise_signal(signal.SIGINT)
    state, metrics = super().step(state, batch, clock)
    if self._steps == self._spike_at:
      params = jax.tree.map(lambda x: x + 1000.0, self.params(state))
      state = self.with_params(state, params)
    return state, metrics

  def evaluate(self, params: Any) -> dict[str, float]:
    loss = self.loss(jax.tree.leaves(params))
    return {"loss": loss, "bits_per_byte": loss}


def build(config: Config, learner: int | None, *, cache_dir: str) -> Evaluated:
  del cache_dir
  return Evaluated(config, learner)
