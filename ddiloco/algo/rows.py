"""Where tensors lie while a codec works on them: split by whole rows.

Codecs cut tensors into blocks of consecutive values. Where a tensor is split
over chips along its last axis, chips would hold parts of rows, and blocks
could reach from one chip to the next: compilers then gather whole tensors, or
take minutes over it. Moving the split to another axis is one exchange among
the chips, and leaves every bit as it is.
"""

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def by_rows(
  tensors: Sequence[jax.Array], shardings: Sequence[Sharding] | None
) -> tuple[jax.Array, ...]:
  """The tensors, laid out so that no row is split if that can be; in a jit.

  Args:
    tensors: of a fragment.
    shardings: how they lie outside; None: on one device.
  """
  if shardings is None:
    return tuple(tensors)
  pairs = zip(tensors, shardings, strict=True)
  return tuple(
    jax.lax.with_sharding_constraint(x, row_sharding(where, x.shape))
    for x, where in pairs
  )


def row_sharding(where: Sharding, shape: tuple[int, ...]) -> Sharding:
  """The sharding with the last axis whole; as it is if no other can be cut."""
  if not isinstance(where, NamedSharding) or len(shape) < 2:
    return where
  axes = [_names(entry) for entry in where.spec]
  axes += [()] * (len(shape) - len(axes))
  *rows, last = axes
  if not last:
    return where
  for axis, names in enumerate(rows):
    ways = 1
    for name in (*names, *last):
      ways *= where.mesh.shape[name]
    if shape[axis] % ways == 0:
      rows[axis] = (*names, *last)
      spec = PartitionSpec(*rows, None)
      return NamedSharding(where.mesh, spec, memory_kind=where.memory_kind)
  return where


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)
