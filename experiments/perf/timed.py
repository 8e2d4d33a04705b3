"""The quickstart's program; now and then a block of its steps runs alone.

Blocks alternate: `BLOCK` steps as the run takes them, whatever else the run
does meanwhile included, then as many of the same steps one after the other.
So both meet the same machine.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp

from ddiloco.config import Config
from ddiloco.lm import program

BLOCK = 30  # steps, of all learners together
# Of every block: ns with the rest of the run, and alone.
blocks_ns: list[tuple[int, int]] = []
_begun_ns: list[int] = []  # every step of the block under way


class Timed:
  """A program of which a block of steps is timed alone, then one in a run."""

  def __init__(self, inner: program.LanguageModel):
    self._inner = inner

  def __getattr__(self, name: str) -> Any:
    return getattr(self._inner, name)

  def step(
    self, state: Any, batch: Any, clock: int
  ) -> tuple[Any, dict[str, Any]]:
    """One inner step; between two blocks, a block of steps alone first."""
    if len(_begun_ns) in (0, BLOCK):
      jax.block_until_ready(state)
      together_ns = time.monotonic_ns() - _begun_ns[0] if _begun_ns else 0
      alone_ns = self._alone_ns(state, clock)
      blocks_ns.append((together_ns, alone_ns))
      _begun_ns.clear()
    _begun_ns.append(time.monotonic_ns())
    return self._inner.step(state, batch, clock)

  def _alone_ns(self, state: Any, clock: int) -> int:
    size = self._inner.samples_per_step
    state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    batch = self._inner.batch(0, size)
    begun_ns = time.monotonic_ns()
    for i in range(BLOCK):
      state, metrics = self._inner.step(state, batch, clock)
      batch = self._inner.batch((i + 1) * size, size)
      jax.block_until_ready(metrics)
    return time.monotonic_ns() - begun_ns


def build(
  config: Config, learner: int | None, *, cache_dir: str | None = None
) -> Timed:
  """The language model, timed."""
  return Timed(program.build(config, learner, cache_dir=cache_dir))
