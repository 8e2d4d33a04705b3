"""The way down: new parameters as encoded outer steps.

The syncer encodes what an outer step changes, plus what earlier encodings
left out, and takes the decoded value as its own truth. Whoever holds the
version before adds the same value to the same parameters: all copies stay
identical in every bit, on any mesh. Products of codes and scales are exact
(see `coders`), so a compiler may fuse them with the addition; subnormals,
which some processors flush, are 0.
"""

import functools
from collections.abc import Callable

import jax

from ddiloco.algo.codecs import Codec, Residual
from ddiloco.algo.coders import Array, Payload, flushed
from ddiloco.algo.rows import by_rows
from ddiloco.config.codecs import blocked

Params = tuple[Array, ...]  # f32 tensors of one fragment.


@functools.cache
def step_encoder(
  codec: Codec,
) -> Callable[[Residual, Params, Params, Array], tuple[Payload, Residual]]:
  """Jitted: (residual, old, new, words) -> (payload, next residual)."""

  @jax.jit
  def encode(residual, old, new, words):
    step = tuple(y - x for x, y in zip(old, new, strict=True))
    return codec.encode(residual, step, words)

  return encode


@functools.cache
def step_adder(
  codec: Codec, shardings: tuple[jax.sharding.Sharding, ...] | None = None
) -> Callable[[Params, Payload], tuple[jax.Array, ...]]:
  """Jitted: (parameters, payload) -> the parameters after that step."""

  @functools.partial(jax.jit, out_shardings=shardings)
  def add(params, payload):
    shapes = tuple(x.shape for x in params)
    steps = codec.decode(payload, shapes)
    if blocked(codec.name):
      steps = by_rows(steps, shardings)
    pairs = zip(params, steps, strict=True)
    return tuple(flushed(flushed(x) + flushed(y)) for x, y in pairs)

  return add
