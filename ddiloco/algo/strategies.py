"""How tensors become fragments (paper Sec. 3.3, Figs. 9-10, Table 7).

A tensor belongs to the layer whose number the layer pattern finds in its path.
Where the pattern matches without a number, the tensor holds all layers, stacked
on its first axis as `jax.lax.scan` wants them; its layers then count as tensors
of their own, and a scanned model gets the fragments of the unrolled one.

Quality does not differ between the strategies beyond noise (Table 7); the
largest transfer does.
"""

import functools
import heapq
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Unit(NamedTuple):
  """What is assigned as one: a tensor, or one layer of a stack of layers."""

  tensor: int  # its index
  path: str
  layer: int | None  # None: part of no layer
  size: int  # elements


class Cuts(NamedTuple):
  """A tensor cut along one axis; piece i ends at `stops[i]`."""

  axis: int
  stops: tuple[int, ...]
  fragments: tuple[int, ...]  # of each piece


Assignment = list[int]  # The fragment of each unit.


def split_layers(
  paths: Sequence[str], shapes: Sequence[tuple[int, ...]], layer_pattern: str
) -> list[list[Unit]]:
  """The units of every tensor: one, or one for each layer of a stack.

  Args:
    paths: Of the tensors.
    shapes: Of the tensors, as long as `paths`.
    layer_pattern: A regular expression with one group, the layer's number.
  """
  pattern = re.compile(layer_pattern)
  units = []
  for i, (path, shape) in enumerate(zip(paths, shapes, strict=True)):
    size, found = math.prod(shape), pattern.search(path)
    if found is None:
      units.append([Unit(i, path, None, size)])
    elif found[1]:
      if not found[1].isdecimal():
        raise ValueError(
          f"layer pattern {layer_pattern!r} finds the layer {found[1]!r} in "
          f"{path!r}: its group must match the layer's number, as in "
          r"'blocks/(\d+)'"
        )
      units.append([Unit(i, path, int(found[1]), size)])
    else:
      if not shape:
        raise ValueError(
          f"layer pattern {layer_pattern!r} says that {path!r} holds all "
          "layers on its first axis, but it is a scalar: narrow the pattern"
        )
      units.append(
        [Unit(i, path, n, size // shape[0]) for n in range(shape[0])]
      )
  return units


def whole(
  strategy: str, units: Sequence[Sequence[Unit]], num_fragments: int
) -> list[int | Cuts]:
  """The fragment of each tensor, or of each layer of a stack."""
  flat = list(itertools.chain.from_iterable(units))
  fragments = iter(_WHOLE[strategy](flat, num_fragments))
  entries: list[int | Cuts] = []
  for one in units:
    own = tuple(itertools.islice(fragments, len(one)))
    layers = Cuts(0, tuple(range(1, len(own) + 1)), own)
    entries.append(layers if len(own) > 1 else own[0])
  return entries


# --- Whole units ------------------------------------------------------------


def balanced(units: Sequence[Unit], num_fragments: int) -> Assignment:
  """Graham's longest-processing-time rule: the largest unit goes first.

  Every unit goes to the currently smallest fragment, so the largest fragment
  is at most 4/3 - 1/(3P) times as large as it has to be.
  """
  _enough(units, num_fragments, "tensors", 0)
  smallest = [(0, p) for p in range(num_fragments)]
  assignment = [0] * len(units)

  def largest_first(n: int) -> tuple[int, str, int]:
    unit = units[n]
    return -unit.size, unit.path, n

  for n in sorted(range(len(units)), key=largest_first):
    size, p = smallest[0]
    assignment[n] = p
    heapq.heapreplace(smallest, (size + units[n].size, p))
  return assignment


def by_tensor(units: Sequence[Unit], num_fragments: int) -> Assignment:
  """What is in no layer first, then the tensors of layers, one by one."""
  order = {
    n: rank
    for rank, n in enumerate(
      sorted(
        [n for n, unit in enumerate(units) if unit.layer is not None],
        key=lambda n: (units[n].layer, n),
      )
    )
  }
  first, rest = _outside_first(units, num_fragments, len(order), "tensors")
  return [
    first + order[n] % rest if n in order else 0 for n in range(len(units))
  ]


def by_layer(
  units: Sequence[Unit], num_fragments: int, *, sequential: bool
) -> Assignment:
  """The paper's "Layer": what is in no layer first, then whole layers.

  They are strided (layer n in fragment 1 + n mod (P - 1)), or neighbouring
  layers stay together.
  """
  layers = sorted({u.layer for u in units if u.layer is not None})
  first, rest = _outside_first(units, num_fragments, len(layers), "layers")
  place = {
    layer: first + (n * rest // len(layers) if sequential else n % rest)
    for n, layer in enumerate(layers)
  }
  return [0 if unit.layer is None else place[unit.layer] for unit in units]


def _outside_first(
  units: Sequence[Unit], num_fragments: int, count: int, what: str
) -> tuple[int, int]:
  """The first fragment of the layers, and how many fragments they have."""
  if not count:
    example = units[len(units) // 2].path
    raise ValueError(
      f"the layer pattern finds no layer in any path, such as {example!r}: "
      "set sync.layer_pattern to a regular expression whose group is the "
      r"layer's number, as in 'blocks/(\d+)', or empty where tensors hold "
      "all layers, as in 'blocks/()'"
    )
  outside = any(unit.layer is None for unit in units)
  if num_fragments == 1:
    return 0, 1
  _enough(range(count), num_fragments, what, int(outside))
  return int(outside), num_fragments - outside


def _enough(
  items: Sequence[object], num_fragments: int, what: str, outside: int
) -> None:
  most = len(items) + outside
  if not 1 <= num_fragments <= most:
    first = ", after a first one for what is in no layer" if outside else ""
    raise ValueError(
      f"{num_fragments} fragments of {len(items)} {what}: each fragment holds "
      f"at least one of them whole{first}, so use 1 to {most} fragments, or "
      "the strategy balanced_sub_tensor, which cuts tensors"
    )


# --- Parts of tensors -------------------------------------------------------


def cut_evenly(
  paths: Sequence[str], shapes: Sequence[tuple[int, ...]], num_fragments: int
) -> list[int | Cuts]:
  """McNaughton's wrap-around rule: one after another, cut where one is full.

  The largest tensor goes first. Tensors are cut along their output axis: the
  last one, or the longest if the last has fewer than P entries. A fragment is
  larger than the mean by at most the largest entry (all values with the same
  index on that axis). Returns the fragment, or the cuts, of each tensor.
  """
  axes = [_output_axis(shape, num_fragments) for shape in shapes]
  counts = [
    shape[axis] if shape else 1
    for shape, axis in zip(shapes, axes, strict=True)
  ]
  total_entries = sum(counts)
  if not 1 <= num_fragments <= total_entries:
    raise ValueError(
      f"{num_fragments} fragments of {len(shapes)} tensors with "
      f"{total_entries} entries on their output axes: use 1 to "
      f"{total_entries} fragments"
    )
  sizes = [math.prod(shape) for shape in shapes]
  order = sorted(range(len(shapes)), key=lambda i: (-sizes[i], paths[i]))
  bounds = _bounds(
    [(counts[i], sizes[i] // counts[i]) for i in order], num_fragments
  )
  result: list[int | Cuts] = [0] * len(shapes)
  end = 0
  for i in order:
    start, end = end, end + counts[i]
    # Fragment p is the entries bounds[p] to bounds[p + 1].
    p = next(p for p in range(num_fragments) if bounds[p + 1] > start)
    stops, fragments = [], []
    while not stops or stops[-1] < counts[i]:
      stops.append(min(bounds[p + 1], end) - start)
      fragments.append(p)
      p += 1
    cuts = Cuts(axes[i], tuple(stops), tuple(fragments))
    result[i] = cuts if len(stops) > 1 else fragments[0]
  return result


def _bounds(runs: Sequence[tuple[int, int]], num_fragments: int) -> list[int]:
  """Cuts a row of entries into P parts of nearly equal size.

  Args:
    runs: (count, size) of consecutive entries of equal size.
    num_fragments: P, at most the number of entries.

  Returns:
    The entry where each part starts, and the end of the last: P + 1 numbers.
  """
  ends = list(itertools.accumulate(count * size for count, size in runs))
  entries, total = sum(count for count, _ in runs), ends[-1]
  bounds, run, before = [0], 0, 0  # entries in the runs before `run`
  for p in range(1, num_fragments):
    # All in units of 1/P, so that nothing is rounded but the entry.
    goal = p * total
    while ends[run] * num_fragments < goal:
      before, run = before + runs[run][0], run + 1
    count, size = runs[run]
    into = goal - (ends[run] - count * size) * num_fragments
    step = size * num_fragments
    nearest = before + (2 * into + step) // (2 * step)
    latest = entries - (num_fragments - p)
    bounds.append(min(max(nearest, bounds[-1] + 1), latest))
  return [*bounds, entries]


def _output_axis(shape: tuple[int, ...], num_fragments: int) -> int:
  if not shape:
    return 0
  last = len(shape) - 1
  if shape[last] >= num_fragments:
    return last
  return max(range(len(shape)), key=lambda axis: (shape[axis], axis))


_WHOLE: dict[str, Callable[[Sequence[Unit], int], Assignment]] = {
  "balanced_tensor": balanced,
  "tensor": by_tensor,
  "layer_strided": functools.partial(by_layer, sequential=False),
  "layer_sequential": functools.partial(by_layer, sequential=True),
}
CUT = "balanced_sub_tensor"
STRATEGIES = (*_WHOLE, CUT)
