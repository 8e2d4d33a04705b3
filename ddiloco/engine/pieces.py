"""Fragments among a learner's own arrays, on its devices.

Whole tensors change hands without a copy. Pieces of a tensor that is cut are
sliced out of it and written into it on the devices, whatever its sharding.
"""

import functools
from collections.abc import Callable, MutableSequence, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ddiloco.algo.fragments import Layout, Piece, put, take
from ddiloco.config import ConfigError

Leaves = tuple[jax.Array, ...]


class DevicePieces:
  """Takes fragments from a program's parameters, and puts them there."""

  def __init__(self, layout: Layout, leaves: Sequence[jax.Array]):
    """Takes parameters that lie as they always will; `ConfigError`."""
    self._pieces = [layout.pieces(p) for p in range(layout.num_fragments)]
    # The sharding of every piece of every fragment.
    self.shardings: list[tuple[Sharding, ...]] = [
      tuple(
        _piece_sharding(leaves[q.tensor].sharding, q, layout) for q in pieces
      )
      for pieces in self._pieces
    ]
    self._cut = [_cut(pieces) for pieces in self._pieces]
    self._takers, self._putters = [], []
    for cut, pieces, where in zip(
      self._cut, self._pieces, self.shardings, strict=True
    ):
      parts = tuple(
        w for q, w in zip(pieces, where, strict=True) if q.axis is not None
      )
      wholes = tuple((i, leaves[i].sharding) for i in _tensors(cut))
      self._takers.append(cut and _taker(cut, parts))
      self._putters.append(cut and _putter(cut, wholes))

  def take(self, p: int, leaves: Sequence[jax.Array]) -> Leaves:
    """The pieces of fragment p; whole tensors are the leaves themselves."""
    cut = self._cut[p]
    if not cut:
      return take(self._pieces[p], leaves)
    parts = iter(self._takers[p]({i: leaves[i] for i in _tensors(cut)}))
    return tuple(
      leaves[q.tensor] if q.axis is None else next(parts)
      for q in self._pieces[p]
    )

  def copy(self, p: int, leaves: Sequence[jax.Array]) -> Leaves:
    """Copies of the pieces of fragment p."""
    pairs = zip(self._pieces[p], self.take(p, leaves), strict=True)
    return tuple(jnp.copy(x) if q.axis is None else x for q, x in pairs)

  def put(
    self,
    p: int,
    leaves: MutableSequence[jax.Array],
    values: Sequence[jax.Array],
  ) -> None:
    """Replaces fragment p in `leaves`; tensors that are cut are donated."""
    pairs = list(zip(self._pieces[p], values, strict=True))
    for q, value in pairs:
      if q.axis is None:
        leaves[q.tensor] = value
    if cut := self._cut[p]:
      parts = tuple(value for q, value in pairs if q.axis is not None)
      old = {i: leaves[i] for i in _tensors(cut)}
      for i, leaf in self._putters[p](old, parts).items():
        leaves[i] = leaf


def _cut(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
  return tuple(q for q in pieces if q.axis is not None)


def _tensors(pieces: Sequence[Piece]) -> list[int]:
  """The tensors that pieces are of, each once."""
  return sorted({q.tensor for q in pieces})


@functools.cache
def _taker(
  pieces: tuple[Piece, ...], shardings: tuple[Sharding, ...]
) -> Callable[[dict[int, jax.Array]], Leaves]:
  return jax.jit(functools.partial(take, pieces), out_shardings=shardings)


@functools.cache
def _putter(
  pieces: tuple[Piece, ...], shardings: tuple[tuple[int, Sharding], ...]
) -> Callable[[dict[int, jax.Array], Leaves], dict[int, jax.Array]]:
  """Writes in place: a fragment is a small part of a stack of all layers."""

  @functools.partial(jax.jit, out_shardings=dict(shardings), donate_argnums=0)
  def putter(leaves, values):
    leaves = dict(leaves)
    put(pieces, leaves, values)
    return leaves

  return putter


def _piece_sharding(
  sharding: Sharding, piece: Piece, layout: Layout
) -> Sharding:
  """That of the tensor, or replicated along an axis it does not divide."""
  spec = layout.tensors[piece.tensor]
  try:
    sharding.shard_shape(piece.shape(spec.shape))
    return sharding
  except ValueError as error:
    if isinstance(sharding, NamedSharding):
      axes = list(sharding.spec)
      axes[piece.axis] = None
      return NamedSharding(
        sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind
      )
    raise ConfigError(
      f"sync.fragmentation = {layout.strategy!r} cuts {spec.path!r} along axis "
      f"{piece.axis} from {piece.start} to {piece.stop}, which its sharding "
      f"{sharding} cannot divide. Shard it by a NamedSharding, or use a "
      "strategy that does not cut it."
    ) from error
