"""Fragments: which tensors are exchanged together (paper Sec. 3.3).

A layout assigns every exchanged parameter tensor, or every piece of one that
is cut, to one of P fragments. Each side computes it from the parameters alone
and compares digests, so a learner and a syncer that disagree about the model
find out before they exchange arrays.

Arrays go through `take`, `put` and `join` alone: what is outside of this file
sees a fragment as a tuple of arrays, one for each piece.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ddiloco.algo import strategies
from ddiloco.algo.strategies import Cuts
from ddiloco.config.schema import LAYER_PATTERN

STRATEGIES = strategies.STRATEGIES
_F32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
  """One parameter tensor."""

  path: str
  shape: tuple[int, ...]
  dtype: str

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)


class Piece(NamedTuple):
  """A whole tensor, or its slice from `start` to `stop` along an axis."""

  tensor: int  # its index
  axis: int | None = None  # None: whole
  start: int = 0
  stop: int = 0

  def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
    """The piece's shape, of a tensor of this one."""
    if self.axis is None:
      return whole
    length = self.stop - self.start
    return (*whole[: self.axis], length, *whole[self.axis + 1 :])

  @property
  def index(self) -> tuple[slice, ...]:
    """Where it is in its tensor, as NumPy and JAX index."""
    if self.axis is None:
      return ()
    return (slice(None),) * self.axis + (slice(self.start, self.stop),)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
  """An exact cover of the exchanged tensors by non-empty fragments.

  `tensors` are in the order of `jax.tree_util.tree_flatten`; `assignment`
  holds the fragment of each: one for the whole tensor, one for each piece of
  a tensor that is cut, or None for a frozen tensor, which is in none.
  """

  tensors: tuple[TensorSpec, ...]
  assignment: tuple[int | Cuts | None, ...]
  num_fragments: int
  strategy: str

  def __post_init__(self):
    twice = [
      p for p, n in Counter(s.path for s in self.tensors).items() if n > 1
    ]
    if twice:
      raise ValueError(
        f"two tensors have the path {twice[0]!r}: rename one of them"
      )
    if len(self.assignment) != len(self.tensors):
      raise ValueError(
        f"{len(self.assignment)} tensors are assigned to fragments, but there "
        f"are {len(self.tensors)}: every tensor needs exactly one fragment"
      )
    used = set()
    for spec, entry in zip(self.tensors, self.assignment, strict=True):
      if entry is None:
        continue
      _check_exchanged(spec)
      if isinstance(entry, Cuts):
        _check_cover(spec, entry)
      used.update(entry.fragments if isinstance(entry, Cuts) else [entry])
    if used != set(range(self.num_fragments)):
      raise ValueError(
        f"fragments {sorted(used)} are in use, but they must be 0 to "
        f"{self.num_fragments - 1}, each with at least one tensor"
      )

  def pieces(self, p: int) -> tuple[Piece, ...]:
    """The pieces of fragment p, in the order of their tensors."""
    found = []
    for i, entry in enumerate(self.assignment):
      if isinstance(entry, Cuts):
        found += [q for n, q in _pieces_of(i, entry) if n == p]
      elif entry == p:
        found.append(Piece(i))
    return tuple(found)

  def fragment(self, p: int) -> tuple[int, ...]:
    """The tensor of each piece of fragment p, ascending."""
    return tuple(piece.tensor for piece in self.pieces(p))

  def shapes(self, p: int) -> tuple[tuple[int, ...], ...]:
    """The shape of each piece of fragment p."""
    return tuple(q.shape(self.tensors[q.tensor].shape) for q in self.pieces(p))

  def fragment_bytes(self, p: int) -> int:
    """Bytes of fragment p in float32."""
    return _F32_BYTES * sum(map(math.prod, self.shapes(p)))

  @property
  def digest(self) -> str:
    """The layout hash: SHA-256, in hex, of the canonical JSON form."""
    text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

  def to_json(self) -> dict[str, Any]:
    """A value for `json.dumps`; `from_json` reads it back."""
    return {
      "tensors": [
        {"path": s.path, "shape": list(s.shape), "dtype": s.dtype}
        for s in self.tensors
      ],
      "assignment": [
        {
          "axis": entry.axis,
          "stops": list(entry.stops),
          "fragments": list(entry.fragments),
        }
        if isinstance(entry, Cuts)
        else entry
        for entry in self.assignment
      ],
      "num_fragments": self.num_fragments,
      "strategy": self.strategy,
    }

  @classmethod
  def from_json(cls, d: Any) -> "Layout":
    """Reads what `to_json` wrote; ValueError on anything else."""
    _check_keys(d, "layout", [f.name for f in dataclasses.fields(cls)])
    for key in ("tensors", "assignment"):
      _check(isinstance(d[key], list), f"layout.{key}", d[key])
    return cls(
      tensors=tuple(_tensor_from_json(s) for s in d["tensors"]),
      assignment=tuple(_entry_from_json(e) for e in d["assignment"]),
      num_fragments=_integers([d["num_fragments"]], "layout.num_fragments")[0],
      strategy=_string(d["strategy"], "layout.strategy"),
    )


# --- Arrays -----------------------------------------------------------------


def take(
  pieces: Sequence[Piece], leaves: Sequence[Any] | Mapping[int, Any]
) -> tuple[Any, ...]:
  """The values of pieces, of NumPy or JAX arrays in the layout's order.

  Whole tensors are the leaves themselves.
  """
  return tuple(
    leaves[q.tensor] if q.axis is None else leaves[q.tensor][q.index]
    for q in pieces
  )


def put(
  pieces: Sequence[Piece],
  leaves: MutableSequence[jax.Array] | MutableMapping[int, jax.Array],
  values: Sequence[jax.Array],
) -> None:
  """Replaces pieces in `leaves`, the reverse of `take`."""
  for q, value in zip(pieces, values, strict=True):
    if q.axis is None:
      leaves[q.tensor] = value
    else:
      leaves[q.tensor] = leaves[q.tensor].at[q.index].set(value)


def join(
  layout: Layout, fragments: Sequence[Sequence[np.ndarray]]
) -> list[np.ndarray | None]:
  """Whole tensors from the pieces of all fragments; None for frozen ones."""
  values = {
    piece: value
    for p, tensors in enumerate(fragments)
    for piece, value in zip(layout.pieces(p), tensors, strict=True)
  }
  leaves: list[np.ndarray | None] = []
  for i, entry in enumerate(layout.assignment):
    if isinstance(entry, Cuts):
      parts = [values[piece] for _, piece in _pieces_of(i, entry)]
      leaves.append(np.concatenate(parts, axis=entry.axis))
    else:
      leaves.append(None if entry is None else values[Piece(i)])
  return leaves


# --- Layouts of parameters --------------------------------------------------


def tensor_specs(params: Any) -> tuple[TensorSpec, ...]:
  """Specs of a pytree of arrays or ShapeDtypeStructs, in flatten order."""
  specs = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    name = tensor_path(path)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
      raise ValueError(
        f"parameter {name!r} is a {type(leaf).__name__}: make it an array"
      )
    specs.append(TensorSpec(name, tuple(leaf.shape), leaf.dtype.name))
  return tuple(specs)


def tensor_path(path: Sequence[Any]) -> str:
  """A leaf's path, from `tree_flatten_with_path`, as layouts write it."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def make_layout(
  params: Any,
  num_fragments: int,
  strategy: str = "balanced_tensor",
  *,
  layer_pattern: str = LAYER_PATTERN,
  frozen: str = "",
) -> Layout:
  """Assigns the tensors of `params` to fragments, the same way every time.

  Args:
    params: Pytree of float32 arrays or ShapeDtypeStructs; frozen ones may have
      any dtype.
    num_fragments: P, at least 1 and, unless tensors are cut, at most their
      number.
    strategy: One of `STRATEGIES`.
    layer_pattern: Finds a tensor's layer in its path; see `strategies`.
    frozen: A regular expression of the paths of tensors that are not
      exchanged; "" for none.
  """
  if strategy not in STRATEGIES:
    raise ValueError(
      f"unknown fragment strategy {strategy!r}: choose one of "
      f"{', '.join(STRATEGIES)}"
    )
  tensors = tensor_specs(params)
  left_out = frozen_paths([spec.path for spec in tensors], frozen)
  kept = [i for i, spec in enumerate(tensors) if spec.path not in left_out]
  paths = [tensors[i].path for i in kept]
  shapes = [tensors[i].shape for i in kept]
  for i in kept:
    _check_exchanged(tensors[i])
  entries: list[int | Cuts]
  if strategy == strategies.CUT:
    entries = strategies.cut_evenly(paths, shapes, num_fragments)
  else:
    units = strategies.split_layers(paths, shapes, layer_pattern)
    entries = strategies.whole(strategy, units, num_fragments)
  assignment: list[int | Cuts | None] = [None] * len(tensors)
  for i, entry in zip(kept, entries, strict=True):
    assignment[i] = entry
  return Layout(tuple(tensors), tuple(assignment), num_fragments, strategy)


def frozen_paths(paths: Sequence[str], frozen: str) -> frozenset[str]:
  """The paths that the pattern `frozen` is found in; "" is found in none."""
  if not frozen:
    return frozenset()
  found = frozenset([path for path in paths if re.search(frozen, path)])
  if not found or len(found) == len(paths):
    raise ValueError(
      f"the pattern of frozen parameters {frozen!r} is found in "
      f"{'every path' if found else 'no path'}, such as {paths[0]!r}: "
      + ("nothing is left to train" if found else "correct it, or leave it out")
    )
  return found


# --- Checks -----------------------------------------------------------------


def _check_exchanged(spec: TensorSpec) -> None:
  if spec.dtype != "float32":
    raise ValueError(
      f"tensor {spec.path!r} is {spec.dtype}, but exchanged parameters are "
      "float32 master copies: store it as float32 and cast inside the model, "
      "or freeze it"
    )
  if not spec.size:
    raise ValueError(
      f"tensor {spec.path!r} of shape {spec.shape} has no elements: remove it "
      "from the exchanged parameters"
    )


def _check_cover(spec: TensorSpec, cuts: Cuts) -> None:
  """Every element in exactly one piece, and no piece empty."""
  starts = (0, *cuts.stops[:-1])
  covered = (
    cuts.axis < len(spec.shape)
    and len(cuts.stops) == len(cuts.fragments) > 0
    and all(a < b for a, b in zip(starts, cuts.stops, strict=True))
    and cuts.stops[-1] == spec.shape[cuts.axis]
  )
  if not covered:
    raise ValueError(
      f"tensor {spec.path!r} of shape {spec.shape} is cut along axis "
      f"{cuts.axis} at {cuts.stops} for fragments {cuts.fragments}: pieces "
      "must not be empty, and together are the whole axis"
    )


def _pieces_of(tensor: int, cuts: Cuts) -> list[tuple[int, Piece]]:
  """The fragment of each piece, and the piece."""
  starts = (0, *cuts.stops[:-1])
  return [
    (p, Piece(tensor, cuts.axis, start, stop))
    for p, start, stop in zip(cuts.fragments, starts, cuts.stops, strict=True)
  ]


def _entry_from_json(d: Any) -> int | Cuts | None:
  if not isinstance(d, dict):
    return None if d is None else _integers([d], "layout.assignment")[0]
  _check_keys(d, "cut tensor", Cuts._fields)
  return Cuts(
    axis=_integers([d["axis"]], "axis of a cut tensor")[0],
    stops=_integers(d["stops"], "stops of a cut tensor"),
    fragments=_integers(d["fragments"], "fragments of a cut tensor"),
  )


def _tensor_from_json(d: Any) -> TensorSpec:
  _check_keys(d, "tensor", [f.name for f in dataclasses.fields(TensorSpec)])
  path = _string(d["path"], "tensor.path")
  shape = _integers(d["shape"], f"shape of {path!r}")
  return TensorSpec(path, shape, _string(d["dtype"], f"dtype of {path!r}"))


def _check(ok: bool, what: str, value: Any) -> None:
  if not ok:
    raise ValueError(f"{what} is not valid: {value!r:.200}")


def _check_keys(d: Any, what: str, keys: Sequence[str]) -> None:
  _check(isinstance(d, dict), what, d)
  if set(d) != set(keys):
    raise ValueError(
      f"a {what} has the keys {sorted(keys)}, but this one has "
      f"{sorted(map(str, d))}"
    )


def _string(value: Any, what: str) -> str:
  _check(isinstance(value, str), what, value)
  return value


def _integers(values: Any, what: str) -> tuple[int, ...]:
  """A list of non-negative integers; `True` is not one of them."""
  _check(isinstance(values, list), what, values)
  _check(all(type(v) is int and v >= 0 for v in values), what, values)
  return tuple(values)
