"""Every fragmentation: which pieces go where, and no value lost or twice."""

import collections
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.algo import fragments
from ddiloco.algo.fragments import STRATEGIES, Piece, make_layout

STACKED = r"^blocks/(\d*)"
LAYERS, WIDTH = 4, 3
SHAPES = {"attention": (WIDTH, 2, 5), "mlp": (WIDTH, 8), "norm": (WIDTH,)}
WHOLE = [name for name in STRATEGIES if name != "balanced_sub_tensor"]


def values(shapes, first=0):
  """Arrays of these shapes, no two values of which are equal."""
  sizes = [
    math.prod(shape) for shape in jax.tree.leaves(shapes, is_leaf=is_shape)
  ]
  numbers = iter(
    np.split(np.arange(first, first + sum(sizes)), np.cumsum(sizes))
  )
  return jax.tree.map(
    lambda shape: next(numbers).reshape(shape).astype(np.float32),
    shapes,
    is_leaf=is_shape,
  )


def is_shape(x):
  return isinstance(x, tuple)


def unrolled(layers=LAYERS):
  """Keys sort as text: layer 10 comes before layer 2."""
  blocks = {str(n): dict(SHAPES) for n in range(layers)}
  return values({"blocks": blocks, "embed": (16, WIDTH), "final": (WIDTH,)})


def scanned(layers=LAYERS):
  """The same values with all layers stacked."""
  params = unrolled(layers)
  blocks = [params["blocks"][str(n)] for n in range(layers)]
  return params | {"blocks": jax.tree.map(lambda *x: np.stack(x), *blocks)}


def contents(layout, params):
  """Of each fragment, the values that are in it."""
  leaves = jax.tree.leaves(params)
  return [
    sorted(
      np.concatenate(
        [x.ravel() for x in fragments.take(layout.pieces(p), leaves)]
      ).tolist()
    )
    for p in range(layout.num_fragments)
  ]


def assert_covers(layout, params):
  """Every value is in one fragment, and comes back from it to its place."""
  leaves = jax.tree.leaves(params)
  everything = sorted(itertools.chain(*contents(layout, params)))
  assert everything == sorted(np.concatenate([x.ravel() for x in leaves]))
  taken = []
  for p in range(layout.num_fragments):
    pieces = fragments.take(layout.pieces(p), leaves)
    assert tuple(x.shape for x in pieces) == layout.shapes(p)
    assert sum(x.nbytes for x in pieces) == layout.fragment_bytes(p) > 0
    taken.append(pieces)
  for whole, leaf in zip(fragments.join(layout, taken), leaves, strict=True):
    np.testing.assert_array_equal(whole, leaf)
  again = fragments.Layout.from_json(layout.to_json())
  assert again == layout and again.digest == layout.digest


# --- All strategies ---------------------------------------------------------


@pytest.mark.parametrize("params", [unrolled(), scanned()], ids=["un", "scan"])
@pytest.mark.parametrize("num_fragments", [1, 2, 5])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_covers(strategy, num_fragments, params):
  layout = make_layout(params, num_fragments, strategy, layer_pattern=STACKED)
  assert layout.strategy == strategy
  assert_covers(layout, params)


@pytest.mark.parametrize("layers", [4, 12])
@pytest.mark.parametrize("num_fragments", [2, 3, 5])
@pytest.mark.parametrize("strategy", WHOLE)
def test_a_scanned_model_has_the_fragments_of_the_unrolled_one(
  strategy, num_fragments, layers
):
  one, other = (
    contents(
      make_layout(params, num_fragments, strategy, layer_pattern=STACKED),
      params,
    )
    for params in (unrolled(layers), scanned(layers))
  )
  if strategy == "balanced_tensor":  # Tensors of one size are interchangeable.
    assert list(map(len, one)) == list(map(len, other))
  else:
    assert one == other


@st.composite
def trees(draw):
  """Tensors in and outside of layers, of 0 to 3 axes; some stacked."""
  shape = st.lists(st.integers(1, 5), max_size=3).map(tuple)
  names = st.sampled_from("abcd")
  tree = {
    "blocks": {
      str(n): draw(st.dictionaries(names, shape, min_size=1))
      for n in draw(st.sets(st.integers(0, 11), min_size=1, max_size=4))
    }
  }
  tree |= draw(st.dictionaries(st.sampled_from("xyz"), shape))
  if draw(st.booleans()):
    stacks = draw(st.dictionaries(names, shape, min_size=1))
    depth = draw(st.integers(1, 4))
    tree["stack"] = {name: (depth, *s) for name, s in stacks.items()}
  return values(tree)


@given(trees(), st.sampled_from(STRATEGIES), st.integers(1, 12))
def test_any_tree_is_covered_or_refused_with_the_largest_number(
  params, strategy, num_fragments
):
  pattern = r"^(?:blocks|stack)/(\d*)"
  try:
    layout = make_layout(params, num_fragments, strategy, layer_pattern=pattern)
  except ValueError as error:
    most = int(str(error).split("use 1 to ")[1].split()[0])
    assert 1 <= most < num_fragments
    layout = make_layout(params, most, strategy, layer_pattern=pattern)
  assert_covers(layout, params)


# --- One by one -------------------------------------------------------------


def names(layout, p):
  """Paths of the tensors of a fragment, with the layer of a slice."""
  return [
    layout.tensors[q.tensor].path + ("" if q.axis is None else f"[{q.start}]")
    for q in layout.pieces(p)
  ]


def test_tensor_strides_by_layer_and_index_after_what_is_in_no_layer():
  layout = make_layout(unrolled(12), 5, "tensor")
  assert names(layout, 0) == ["embed", "final"]
  order = [f"blocks/{n}/{name}" for n in range(12) for name in SHAPES]
  for p in range(1, 5):
    assert sorted(names(layout, p)) == sorted(order[p - 1 :: 4])


def test_layers_are_strided():
  layout = make_layout(unrolled(12), 6, "layer_strided")
  assert names(layout, 0) == ["embed", "final"]
  for p in range(1, 6):
    layers = {int(name.split("/")[1]) for name in names(layout, p)}
    assert layers == set(range(p - 1, 12, 5))


def test_layers_are_sequential():
  layout = make_layout(scanned(7), 4, "layer_sequential", layer_pattern=STACKED)
  assert names(layout, 0) == ["embed", "final"]
  groups = [[0, 1, 2], [3, 4], [5, 6]]
  for p, group in enumerate(groups, 1):
    assert names(layout, p) == [
      f"blocks/{name}[{n}]" for name in sorted(SHAPES) for n in group
    ]


def test_a_layer_of_a_stack_is_a_piece_of_its_own():
  """So that per-tensor rules see what they see of an unrolled model."""
  layout = make_layout(scanned(), 3, "layer_sequential", layer_pattern=STACKED)
  assert layout.pieces(1)[:2] == (Piece(0, 0, 0, 1), Piece(0, 0, 1, 2))
  assert layout.shapes(1)[0] == (1, *SHAPES["attention"])


def test_layers_alone_have_all_fragments():
  params = {"blocks": unrolled()["blocks"]}
  for strategy in ("layer_strided", "layer_sequential", "tensor"):
    layout = make_layout(params, 4, strategy)
    assert_covers(layout, params)
  assert names(make_layout(params, 4, "layer_strided"), 0) == [
    f"blocks/0/{name}" for name in SHAPES
  ]


@pytest.mark.parametrize(
  "path, layer",
  [
    ("blocks/3/k", 3),
    ("decoder/layers_12/mlp/k", 12),
    ("block/007", 7),
    ("layers/2", 2),
    ("blocks/k", None),
    ("my_layers/3/k", None),
    ("blocks/3x/k", None),
    ("embed", None),
  ],
)
def test_the_default_pattern_finds_layers(path, layer):
  params = {path: np.zeros(3, np.float32), "layer_99": np.zeros(2, np.float32)}
  layout = make_layout(params, 2, "layer_strided")
  index = [spec.path for spec in layout.tensors].index(path)
  if layer is None:
    assert layout.assignment[index] == 0
  else:  # No other tensor is in no layer: layer 99 comes second.
    assert layout.assignment[index] == 0 and layout.assignment[1 - index] == 1
    with pytest.raises(ValueError, match="3 fragments of 2 layers"):
      make_layout(params, 3, "layer_strided")


@pytest.mark.parametrize(
  "strategy, num_fragments, pattern, words",
  [
    ("layer_strided", 6, STACKED, "6 fragments of 4 layers.*use 1 to 5"),
    ("layer_sequential", 9, STACKED, "9 fragments of 4 layers.*first one"),
    ("tensor", 15, STACKED, "15 fragments of 12 tensors.*use 1 to 13"),
    ("balanced_tensor", 15, STACKED, "15 fragments of 14 tensors"),
    ("balanced_sub_tensor", 0, STACKED, "0 fragments of 14 tensors"),
    ("balanced_sub_tensor", 999, STACKED, "999 fragments.*use 1 to"),
    ("tensor", 3, r"^h/(\d+)", "no layer in any path.*sync.layer_pattern"),
    ("layer_strided", 1, r"^h/(\d+)", "such as 'blocks/"),
    ("layer_strided", 2, "blocks/./(.*)", "'attention' in 'blocks/0/att"),
    ("balanced_tensor", 2, "fina(l)|emb()", "'l' in 'final'"),
    ("balanced_sub_tensor", -3, STACKED, "-3 fragments"),
  ],
)
def test_what_cannot_be_is_refused(strategy, num_fragments, pattern, words):
  with pytest.raises(ValueError, match=words):
    make_layout(unrolled(), num_fragments, strategy, layer_pattern=pattern)


def test_a_scalar_is_no_stack():
  params = {"blocks": {"scale": np.zeros((), np.float32)}}
  with pytest.raises(ValueError, match="'blocks/scale'.*scalar"):
    make_layout(params, 1, layer_pattern=STACKED)


def test_without_a_stack_the_pattern_changes_nothing_of_the_default():
  plain = make_layout(unrolled(), 5)
  assert make_layout(unrolled(), 5, layer_pattern=STACKED) == plain
  assert all(type(entry) is int for entry in plain.assignment)


# --- Balance ----------------------------------------------------------------


def sizes_of(layout):
  return [layout.fragment_bytes(p) // 4 for p in range(layout.num_fragments)]


@given(trees(), st.integers(1, 40))
def test_cut_fragments_exceed_the_mean_by_less_than_an_entry(params, most):
  shapes = [x.shape for x in jax.tree.leaves(params)]
  # The axis that each is cut along has as many entries as any may choose.
  entries = [
    math.prod(s) // (s[-1] if s[-1] >= most else max(s)) if s else 1
    for s in shapes
  ]
  counts = [math.prod(s) // n for s, n in zip(shapes, entries, strict=True)]
  num_fragments = min(most, sum(counts))
  layout = make_layout(params, num_fragments, "balanced_sub_tensor")
  assert_covers(layout, params)
  mean = sum(map(math.prod, shapes)) / num_fragments
  assert max(sizes_of(layout)) <= mean + max(entries)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 5))
def test_cut_vectors_are_as_even_as_can_be(lengths, num_fragments):
  """Entries of size one: nothing is better than ceil(total / P)."""
  num_fragments = min(num_fragments, sum(lengths))
  params = values({f"v{i}": (n,) for i, n in enumerate(lengths)})
  layout = make_layout(params, num_fragments, "balanced_sub_tensor")
  assert_covers(layout, params)
  assert max(sizes_of(layout)) == -(-sum(lengths) // num_fragments)
  assert max(sizes_of(layout)) - min(sizes_of(layout)) <= 1
  cut = sum(len(layout.pieces(p)) for p in range(num_fragments))
  assert cut <= len(lengths) + num_fragments - 1


@given(
  st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3
  ),
  st.integers(1, 4),
)
def test_cut_matrices_are_within_an_entry_of_the_best(shapes, num_fragments):
  """The best way to deal the columns out, found by trying all."""
  num_fragments = min(num_fragments, sum(columns for _, columns in shapes))
  params = values({f"m{i}": shape for i, shape in enumerate(shapes)})
  layout = make_layout(params, num_fragments, "balanced_sub_tensor")
  assert_covers(layout, params)
  columns = sorted(
    itertools.chain(*([rows] * n for rows, n in shapes)), reverse=True
  )
  largest_entry = max(
    shape[0] if shape[1] >= num_fragments else min(shape) for shape in shapes
  )
  assert max(sizes_of(layout)) <= best(columns, num_fragments) + max(
    columns[0], largest_entry
  )


def best(sizes, bins):
  """The smallest possible largest sum of sizes dealt into bins."""
  loads = {(0,) * bins}
  for size in sizes:
    loads = {
      tuple(sorted((*load[:i], load[i] + size, *load[i + 1 :])))
      for load in loads
      for i in range(bins)
    }
  return min(map(max, loads))


def test_more_fragments_than_tensors():
  params = values({"embed": (50, 64), "kernel": (64, 10), "scale": ()})
  layout = make_layout(params, 24, "balanced_sub_tensor")
  assert_covers(layout, params)
  sizes = sizes_of(layout)
  assert max(sizes) < 1.5 * sum(sizes) / 24
  where = collections.Counter(layout.fragment(p) for p in range(24))
  assert where[(0,)] > 15  # The embedding has most fragments to itself.


def test_tensors_are_cut_along_their_output_axis_if_it_is_long_enough():
  params = values({"a": (40, 30), "b": (90, 2), "c": (3, 9)})
  layout = make_layout(params, 10, "balanced_sub_tensor")
  axes = [getattr(entry, "axis", None) for entry in layout.assignment]
  assert axes == [1, 0, None]


@given(st.integers(1, 30), st.integers(1, 6))
def test_layers_of_equal_size_differ_by_one_at_most(layers, groups):
  groups = min(groups, layers)
  params = values({"blocks": (layers, 2, 3), "embed": (7,)})
  for strategy in ("layer_strided", "layer_sequential"):
    layout = make_layout(
      params, groups + 1, strategy, layer_pattern="^blocks()"
    )
    sizes = sizes_of(layout)[1:]
    assert sum(sizes) == 6 * layers and max(sizes) - min(sizes) in (0, 6)


# --- Frozen -----------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_tensors_are_in_no_fragment(strategy):
  params = unrolled() | {"steps": np.arange(3)}
  layout = make_layout(params, 3, strategy, frozen="norm$|^steps|blocks/2/")
  frozen = [
    spec.path
    for spec, entry in zip(layout.tensors, layout.assignment, strict=True)
    if entry is None
  ]
  assert frozen == [
    "blocks/0/norm",
    "blocks/1/norm",
    "blocks/2/attention",
    "blocks/2/mlp",
    "blocks/2/norm",
    "blocks/3/norm",
    "steps",
  ]
  leaves = jax.tree.leaves(params)
  taken = [
    fragments.take(layout.pieces(p), leaves)
    for p in range(layout.num_fragments)
  ]
  whole = fragments.join(layout, taken)
  for spec, leaf, joined in zip(layout.tensors, leaves, whole, strict=True):
    assert (joined is None) == (spec.path in frozen)
    if joined is not None:
      np.testing.assert_array_equal(joined, leaf)
  again = fragments.Layout.from_json(layout.to_json())
  assert again == layout
  assert layout.digest != make_layout(unrolled(), 3, strategy).digest


def test_what_is_frozen_may_be_anything_and_counts_for_nothing():
  params = {
    "a": np.zeros(4, np.float32),
    "key": jax.random.key(0),
    "none": np.zeros((0, 3), np.float16),
  }
  layout = make_layout(params, 1, frozen="key|none")
  assert layout.shapes(0) == ((4,),)
  assert layout.fragment_bytes(0) == 16


@pytest.mark.parametrize(
  "frozen, words",
  [
    ("heads", "'heads' is found in no path.*correct it"),
    ("", "'steps' is int.*or freeze it"),
    (".", "'.' is found in every path.*nothing is left to train"),
  ],
)
def test_patterns_of_frozen_tensors_that_cannot_be_meant(frozen, words):
  params = {"a": np.zeros(4, np.float32), "steps": np.arange(3)}
  with pytest.raises(ValueError, match=words):
    make_layout(params, 1, frozen=frozen)


# --- Device arrays ----------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_put_is_the_reverse_of_take(strategy):
  params = scanned()
  layout = make_layout(params, 4, strategy, layer_pattern=STACKED)
  old = [jax.numpy.asarray(leaf) for leaf in jax.tree.leaves(params)]
  new = [jax.numpy.asarray(-leaf) for leaf in jax.tree.leaves(params)]
  leaves = list(old)
  for p in range(4):
    pieces = layout.pieces(p)
    fragments.put(pieces, leaves, fragments.take(pieces, new))
    for q, wanted in ((p, new), ((p + 1) % 4, old if p < 3 else new)):
      for x, y in zip(
        fragments.take(layout.pieces(q), leaves),
        fragments.take(layout.pieces(q), wanted),
        strict=True,
      ):
        np.testing.assert_array_equal(x, y)
