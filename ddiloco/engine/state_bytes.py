"""A program's state as bytes, for another life that goes on from it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.algo import codecs
from ddiloco.protocol import wire


class StateBytes:
  """How a state travels: all of it, or all but the exchanged parameters.

  Arrays that `program.params(state)` hands out as they are in the state are
  the exchanged ones; those that it makes anew travel with the rest.
  """

  def __init__(self, program: Any, state: Any, *, whole: bool = True):
    """Takes the shapes, and where arrays are placed, from `state`."""
    leaves = jax.tree.leaves(state)
    exchanged = set()
    if not whole:
      exchanged = {id(leaf) for leaf in jax.tree.leaves(program.params(state))}
    self._chosen = [id(leaf) not in exchanged for leaf in leaves]
    chosen = self._of(leaves)
    self._specs = [jax.eval_shape(_raw, leaf) for leaf in chosen]
    shapes = [[list(x.shape), str(x.dtype)] for x in self._specs]
    self.digest = wire.sha256(wire.canonical_json(shapes))
    self.num_bytes = codecs.specs_bytes(self._specs)

  def _of(self, leaves: list[Any]) -> list[Any]:
    pairs = zip(leaves, self._chosen, strict=True)
    return [leaf for leaf, chosen in pairs if chosen]

  def pack(self, state: Any) -> bytes:
    """The bytes of a state; waits for its arrays."""
    return codecs.to_bytes([_raw(x) for x in self._of(jax.tree.leaves(state))])

  def unpack(self, state: Any, data: bytes) -> Any:
    """`state` with what travelled in place of its own, placed as that was.

    Raises `ValueError` if these are not the bytes of such a state, or hold a
    number that is not finite.
    """
    leaves, treedef = jax.tree.flatten(state)
    arrived = iter(codecs.unpack(self._specs, data))
    for i, leaf in enumerate(leaves):
      if not self._chosen[i]:
        continue
      value = next(arrived)
      if jnp.issubdtype(value.dtype, jnp.inexact):
        if not np.isfinite(value).all():
          raise ValueError(f"array {i} of the state is not finite")
      if _is_key(leaf):
        value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
      leaves[i] = jax.device_put(value, leaf.sharding, may_alias=False)
    return jax.tree.unflatten(treedef, leaves)


def _raw(leaf: jax.Array) -> jax.Array:
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: jax.Array) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
