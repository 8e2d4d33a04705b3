"""Fragments: which tensors are exchanged together (paper Sec. 3.3).

A layout assigns every parameter tensor to one of P fragments. Each side
computes it from the parameters alone and compares digests, so a learner and a
syncer that disagree about the model find out before they exchange arrays.
"""

import dataclasses
import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
  """One exchanged parameter tensor; `dtype` is that of its master copy."""

  path: str
  shape: tuple[int, ...]
  dtype: str

  def __post_init__(self):
    if self.dtype != "float32":
      raise ValueError(
        f"tensor {self.path!r} is {self.dtype}, but exchanged parameters are "
        "float32 master copies: store it as float32 and cast inside the model"
      )
    if not self.size:
      raise ValueError(
        f"tensor {self.path!r} of shape {self.shape} has no elements: remove "
        "it from the exchanged parameters"
      )

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def nbytes(self) -> int:
    """Bytes of the master copy."""
    return self.size * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
  """An exact cover of the tensors by non-empty fragments.

  `tensors` are in the order of `jax.tree_util.tree_flatten`; `assignment`
  holds the fragment of each.
  """

  tensors: tuple[TensorSpec, ...]
  assignment: tuple[int, ...]
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
    if set(self.assignment) != set(range(self.num_fragments)):
      raise ValueError(
        f"fragments {sorted(set(self.assignment))} are in use, but they must "
        f"be 0 to {self.num_fragments - 1}, each with at least one tensor"
      )

  def fragment(self, p: int) -> tuple[int, ...]:
    """Indices of the tensors of fragment p, ascending."""
    return tuple(i for i, q in enumerate(self.assignment) if q == p)

  def fragment_bytes(self, p: int) -> int:
    """Bytes of fragment p in float32."""
    return sum(self.tensors[i].nbytes for i in self.fragment(p))

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
      "assignment": list(self.assignment),
      "num_fragments": self.num_fragments,
      "strategy": self.strategy,
    }

  @classmethod
  def from_json(cls, d: Any) -> "Layout":
    """Reads what `to_json` wrote; ValueError on anything else."""
    _check_keys(d, "layout", [f.name for f in dataclasses.fields(cls)])
    _check(isinstance(d["tensors"], list), "layout.tensors", d["tensors"])
    return cls(
      tensors=tuple(_tensor_from_json(s) for s in d["tensors"]),
      assignment=_integers(d["assignment"], "layout.assignment"),
      num_fragments=_integers([d["num_fragments"]], "layout.num_fragments")[0],
      strategy=_string(d["strategy"], "layout.strategy"),
    )


def tensor_specs(params: Any) -> tuple[TensorSpec, ...]:
  """Specs of a pytree of arrays or ShapeDtypeStructs, in flatten order.

  Raises ValueError, naming the tensor, for a leaf that is not float32.
  """
  specs = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
      raise ValueError(
        f"parameter {name!r} is a {type(leaf).__name__}: make it an array"
      )
    specs.append(TensorSpec(name, tuple(leaf.shape), np.dtype(leaf.dtype).name))
  return tuple(specs)


def make_layout(
  params: Any, num_fragments: int, strategy: str = "balanced_tensor"
) -> Layout:
  """Assigns the tensors of `params` to fragments, the same way every time.

  Args:
    params: Pytree of float32 arrays or ShapeDtypeStructs.
    num_fragments: P, at least 1 and at most the number of tensors.
    strategy: "balanced_tensor".
  """
  if strategy not in _STRATEGIES:
    raise ValueError(
      f"unknown fragment strategy {strategy!r}: choose one of "
      f"{', '.join(sorted(_STRATEGIES))}"
    )
  tensors = tensor_specs(params)
  if not 1 <= num_fragments <= len(tensors):
    raise ValueError(
      f"{num_fragments} fragments of {len(tensors)} tensors: each fragment "
      "holds at least one whole tensor (tensors cannot be split yet), so use "
      f"1 to {len(tensors)} fragments"
    )
  assignment = _STRATEGIES[strategy](tensors, num_fragments)
  return Layout(tensors, assignment, num_fragments, strategy)


def _balanced_tensor(
  tensors: Sequence[TensorSpec], num_fragments: int
) -> tuple[int, ...]:
  """Graham's longest-processing-time rule: the largest tensor goes first.

  Every tensor goes to the currently smallest fragment, so the largest
  fragment is at most 4/3 - 1/(3P) times as large as it has to be.
  """
  smallest = [(0, p) for p in range(num_fragments)]
  assignment = [0] * len(tensors)
  order = range(len(tensors))
  for i in sorted(order, key=lambda i: (-tensors[i].nbytes, tensors[i].path)):
    nbytes, p = smallest[0]
    assignment[i] = p
    heapq.heapreplace(smallest, (nbytes + tensors[i].nbytes, p))
  return tuple(assignment)


_STRATEGIES = {"balanced_tensor": _balanced_tensor}


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
