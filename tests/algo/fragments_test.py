"""Layouts: exact cover, balance, digests, and garbage refused."""

import copy
import dataclasses
import hashlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.algo import fragments


def _struct(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _params(sizes):
  return {f"t{i:03}": _struct((size,)) for i, size in enumerate(sizes)}


_PARAMS = {
  "embed": _struct((16, 4)),
  "blocks": {0: {"k": _struct((4, 4))}, 1: {"k": _struct((4, 4))}},
  "scale": _struct(()),
}


@st.composite
def _problems(draw, max_tensors, max_fragments):
  sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=max_tensors))
  top = min(len(sizes), max_fragments)
  return sizes, draw(st.integers(1, top))


@given(_problems(max_tensors=40, max_fragments=40))
def test_fragments_cover_all_tensors_exactly(problem):
  sizes, num_fragments = problem
  layout = fragments.make_layout(_params(sizes), num_fragments)
  parts = [layout.fragment(p) for p in range(num_fragments)]
  assert all(part and list(part) == sorted(part) for part in parts)
  assert all(
    x.axis is None for p in range(num_fragments) for x in layout.pieces(p)
  )
  assert sorted(itertools.chain(*parts)) == list(range(len(sizes)))
  nbytes = [layout.fragment_bytes(p) for p in range(num_fragments)]
  assert sum(nbytes) == 4 * sum(sizes)


@given(_problems(max_tensors=7, max_fragments=3))
def test_largest_fragment_meets_grahams_bound(problem):
  sizes, num_fragments = problem
  layout = fragments.make_layout(_params(sizes), num_fragments)
  largest = max(layout.fragment_bytes(p) for p in range(num_fragments))
  best = min(
    max(
      sum(s for s, q in zip(sizes, bins, strict=True) if q == p)
      for p in range(num_fragments)
    )
    for bins in itertools.product(range(num_fragments), repeat=len(sizes))
  )
  # largest <= (4/3 - 1/(3P)) best, in integers.
  assert 3 * num_fragments * largest <= (4 * num_fragments - 1) * 4 * best


def test_balanced_assignment_is_by_size_then_path_to_the_smallest():
  layout = fragments.make_layout(_params([5, 9, 5, 7, 1]), 3)
  # 9 -> 0, 7 -> 1, first 5 -> 2, second 5 -> 2 (5 < 7 < 9), 1 -> 1 (7).
  assert layout.assignment == (2, 0, 2, 1, 1)


def test_specs_follow_the_order_of_flatten():
  specs = fragments.tensor_specs(_PARAMS)
  assert [s.path for s in specs] == [
    "blocks/0/k",
    "blocks/1/k",
    "embed",
    "scale",
  ]
  leaves = jax.tree_util.tree_leaves(_PARAMS)
  assert [s.shape for s in specs] == [x.shape for x in leaves]
  assert [s.size for s in specs] == [16, 16, 64, 1]
  arrays = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), _PARAMS)
  assert fragments.tensor_specs(arrays) == specs


def test_json_round_trip_keeps_layout_and_digest():
  layout = fragments.make_layout(_PARAMS, 3)
  again = fragments.Layout.from_json(json.loads(json.dumps(layout.to_json())))
  assert again == layout
  assert again.digest == layout.digest
  assert len(bytes.fromhex(layout.digest)) == 32


def test_digest_changes_with_any_change():
  base = fragments.Layout(
    fragments.tensor_specs(_params([4, 4, 4])), (0, 1, 0), 2, "balanced_tensor"
  )
  first, second, third = base.tensors
  renamed = dataclasses.replace(first, path="other")
  reshaped = dataclasses.replace(first, shape=(2, 2))
  changed = [
    dataclasses.replace(base, tensors=(renamed, second, third)),
    dataclasses.replace(base, tensors=(reshaped, second, third)),
    dataclasses.replace(base, tensors=(second, first, third)),
    dataclasses.replace(base, assignment=(1, 0, 0)),
    dataclasses.replace(base, assignment=(0, 1, 2), num_fragments=3),
    dataclasses.replace(base, strategy="tensor"),
  ]
  digests = [layout.digest for layout in [base, *changed]]
  assert len(set(digests)) == len(digests)


def test_digest_is_that_of_the_canonical_json():
  # Learners and syncers of different versions compare this hash.
  text = (
    '{"assignment":[0,1],"num_fragments":2,"strategy":"balanced_tensor",'
    '"tensors":[{"dtype":"float32","path":"t000","shape":[4]},'
    '{"dtype":"float32","path":"t001","shape":[3]}]}'
  )
  digest = fragments.make_layout(_params([4, 3]), 2).digest
  assert digest == hashlib.sha256(text.encode()).hexdigest()


def _cut(d, **changes):
  """With the first tensor, of four entries, cut."""
  cuts = {"axis": 0, "stops": [2, 4], "fragments": [0, 1]} | changes
  return d | {"assignment": [cuts, *d["assignment"][1:]]}


_GARBAGE = {
  "not a dict": lambda d: [],
  "missing key": lambda d: d.pop("strategy") and d,
  "unknown key": lambda d: d | {"extra": 1},
  "tensors no list": lambda d: d | {"tensors": "abc"},
  "tensor no dict": lambda d: d | {"tensors": [1]},
  "tensor key": lambda d: d["tensors"][0].pop("path") and d,
  "path no string": lambda d: d["tensors"][0].update(path=3) or d,
  "shape no list": lambda d: d["tensors"][0].update(shape=4) or d,
  "negative dim": lambda d: d["tensors"][0].update(shape=[-4]) or d,
  "bool dim": lambda d: d["tensors"][0].update(shape=[True]) or d,
  "float dim": lambda d: d["tensors"][0].update(shape=[4.0]) or d,
  "no elements": lambda d: d["tensors"][0].update(shape=[4, 0]) or d,
  "dtype": lambda d: d["tensors"][0].update(dtype="int32") or d,
  "same path": lambda d: d["tensors"][0].update(path="t001") or d,
  "assignment no list": lambda d: d | {"assignment": "001"},
  "too short": lambda d: d["assignment"].pop() + 1 and d,
  "too long": lambda d: d["assignment"].append(0) or d,
  "out of range": lambda d: d | {"assignment": [0, 1, 2]},
  "negative": lambda d: d | {"assignment": [0, 1, -1]},
  "empty fragment": lambda d: d | {"assignment": [0, 0, 0]},
  "no string": lambda d: d | {"strategy": None},
  "no integer": lambda d: d | {"num_fragments": "2"},
  "no fragments": lambda d: d | {"num_fragments": 0},
  "all frozen": lambda d: d | {"assignment": [None] * 3},
  "cut: another axis": lambda d: _cut(d, axis=1),
  "cut: negative axis": lambda d: _cut(d, axis=-1),
  "cut: nothing": lambda d: _cut(d, stops=[], fragments=[]),
  "cut: empty piece": lambda d: _cut(d, stops=[2, 2, 4], fragments=[0, 1, 0]),
  "cut: backwards": lambda d: _cut(d, stops=[3, 2, 4], fragments=[0, 1, 0]),
  "cut: not the end": lambda d: _cut(d, stops=[2, 3]),
  "cut: beyond the end": lambda d: _cut(d, stops=[2, 5]),
  "cut: fragments": lambda d: _cut(d, fragments=[0]),
  "cut: no list": lambda d: _cut(d, stops=4),
  "cut: a key": lambda d: _cut(d, step=1),
}


@pytest.mark.parametrize("change", _GARBAGE.values(), ids=_GARBAGE.keys())
def test_garbage_json_is_refused(change):
  good = fragments.make_layout(_params([4, 3, 2]), 2).to_json()
  for legal in (good, _cut(good)):
    legal = fragments.Layout.from_json(copy.deepcopy(legal))
    assert legal.num_fragments == 2
  with pytest.raises(ValueError):
    fragments.Layout.from_json(change(copy.deepcopy(good)))


@pytest.mark.parametrize(
  "leaf, words",
  [
    (_struct((2,), jnp.bfloat16), "'a/w' is bfloat16"),
    (_struct((2,), jnp.int32), "'a/w' is int32"),
    (_struct((2, 0)), "'a/w' of shape"),
    (1.0, "'a/w' is a float"),
  ],
)
def test_other_leaves_are_refused_by_name(leaf, words):
  with pytest.raises(ValueError, match=words):
    fragments.make_layout({"a": {"w": leaf}}, 1)


def test_paths_that_coincide_are_refused():
  params = {"a": {"b": _struct((1,))}, "a/b": _struct((1,))}
  with pytest.raises(ValueError, match="'a/b'"):
    fragments.make_layout(params, 1)


@pytest.mark.parametrize("num_fragments", [0, -1, 5])
def test_impossible_numbers_of_fragments_are_refused(num_fragments):
  words = f"{num_fragments} fragments of 4 tensors.*use 1 to 4.*sub_tensor"
  with pytest.raises(ValueError, match=words):
    fragments.make_layout(_PARAMS, num_fragments)


def test_unknown_strategies_are_refused():
  with pytest.raises(ValueError, match="'layers'.*balanced_tensor"):
    fragments.make_layout(_PARAMS, 2, "layers")
