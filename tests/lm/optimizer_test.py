"""Inner optimizers: schedule, updates, where their moments are, forgetting."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from ddiloco.algo.fragments import Piece
from ddiloco.live.checkpoint import Checkpoints
from ddiloco.lm import optimizer
from ddiloco.lm.program import build
from tests.lm.tiny import flat, run, tiny_config, write_text

NAMES = ("adamw", "muon", "sgd", "lion")
# Learning rates at which the tiny model learns in a few steps.
OPTIONS = {
  "adamw": {},
  "muon": {},
  "sgd": {"learning_rate": 0.2, "momentum": 0.9},
  "lion": {"learning_rate": 3e-3, "b2": 0.99},
}
AXES = {
  "embedding": "vocab width",
  "query": "width heads head_width",
  "out": "heads head_width width",
  "up": "layer expert width hidden",
  "router": "layer width choice",
  "scale": "layer scale",
  "final": "scale",
}
SHAPES = {
  "embedding": (10, 6),
  "query": (6, 2, 4),
  "out": (2, 4, 6),
  "up": (2, 3, 6, 5),
  "router": (2, 6, 3),
  "scale": (2, 6),
  "final": (6,),
}
MATRICES = ("embedding", "query", "out", "up", "router")


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory) -> str:
  return write_text(tmp_path_factory.mktemp("lm") / "text")


def inner(**options):
  return tiny_config("x", inner=options).inner


def draw(seed):
  rng = np.random.default_rng(seed)
  return {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in SHAPES.items()
  }


# --- Schedule ---------------------------------------------------------------


@pytest.mark.parametrize(
  "schedule, clock, fraction",
  [
    ("cosine", 0, 0.1),
    ("cosine", 5, 0.55),
    ("cosine", 10, 1.0),
    ("cosine", 505, 0.55),
    ("cosine", 1000, 0.1),
    ("cosine", 2**40, 0.1),
    ("constant", 0, 0.1),
    ("constant", 10, 1.0),
    ("constant", 2**40, 1.0),
  ],
)
def test_learning_rate(schedule, clock, fraction):
  config = inner(schedule=schedule)
  rate = optimizer.learning_rate(config, jnp.float32(clock))
  assert float(rate) == pytest.approx(config.learning_rate * fraction, rel=1e-5)


def test_no_warm_up_starts_at_the_peak():
  config = inner(warmup=0)
  rate = optimizer.learning_rate(config, jnp.float32(0))
  assert float(rate) == pytest.approx(config.learning_rate, rel=1e-6)


# --- Updates ----------------------------------------------------------------


class Reference:
  """The directions of one tensor in float64."""

  def __init__(self, config, name, params):
    self.config, self.name, self.params, self.steps = config, name, params, 0
    self.m, self.v = np.zeros_like(params), np.zeros_like(params)

  def update(self, grad):
    c, self.steps = self.config, self.steps + 1
    kind = c.name
    if kind == "muon" and self.name in (
      "embedding",
      "router",
      "scale",
      "final",
    ):
      kind = "adamw"
    direction = getattr(self, kind)(grad)
    decays = self.name in MATRICES
    return direction + c.weight_decay * self.params * decays

  def adamw(self, g):
    c, n = self.config, self.steps
    self.m = c.b1 * self.m + (1 - c.b1) * g
    self.v = c.b2 * self.v + (1 - c.b2) * g * g
    mean = self.m / (1 - c.b1**n)
    return mean / (np.sqrt(self.v / (1 - c.b2**n)) + c.eps)

  def sgd(self, g):
    self.m = self.config.momentum * self.m + g
    return self.m

  def lion(self, g):
    c = self.config
    direction = np.sign(c.b1 * self.m + (1 - c.b1) * g)
    self.m = c.b2 * self.m + (1 - c.b2) * g
    return direction

  def muon(self, g):
    mu, n = self.config.momentum, self.steps
    self.m = mu * self.m + (1 - mu) * g
    ahead = mu * self.m / (1 - mu ** (n + 1)) + (1 - mu) * g / (1 - mu**n)
    two = {"query": (6, 8), "out": (8, 6), "up": (6, 5)}[self.name]
    matrices = ahead.reshape(-1, *two)
    turned = np.stack([newton_schulz(x) for x in matrices])
    return (0.2 * np.sqrt(max(two)) * turned).reshape(g.shape)


def newton_schulz(x):
  """Five steps of the quintic iteration towards U V^T."""
  wide = x if x.shape[0] <= x.shape[1] else x.T
  y = wide / (np.linalg.norm(wide) + 1e-8)
  for _ in range(5):
    a = y @ y.T
    y = 3.4445 * y + (-4.775 * a + 2.0315 * a @ a) @ y
  return y if x.shape[0] <= x.shape[1] else y.T


@pytest.mark.parametrize("name", NAMES)
def test_updates_follow_the_equations(name):
  config = inner(name=name, weight_decay=0.3, clip_norm=0.0, **OPTIONS[name])
  ours = optimizer.make_optimizer(config, AXES)
  params = draw(0)
  state, step = ours.init(params), jax.jit(ours.update)
  references = {
    key: Reference(config, key, np.asarray(x, np.float64))
    for key, x in params.items()
  }
  for seed in range(1, 4):
    grads = draw(seed)
    updates, state = step(grads, state, params)
    for key, update in updates.items():
      expected = references[key].update(np.asarray(grads[key], np.float64))
      np.testing.assert_allclose(
        update, expected, rtol=2e-4, atol=2e-4, err_msg=key
      )


def test_gradients_are_clipped_by_their_global_norm():
  config = inner(name="sgd", momentum=0.0, clip_norm=0.5)
  ours, grads = optimizer.make_optimizer(config, AXES), draw(1)
  updates, _ = jax.jit(ours.update)(grads, ours.init(draw(0)), draw(0))
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))
  for key in SHAPES:
    np.testing.assert_allclose(updates[key], 0.5 * grads[key] / norm, rtol=1e-5)


def test_adamw_is_the_one_of_optax():
  config = inner(weight_decay=0.3)
  ours = optimizer.make_optimizer(config, AXES)
  theirs = optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      -1.0,
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=0.3,
      mask={name: name in MATRICES for name in AXES},
    ),
  )
  params = draw(0)
  state, other = ours.init(params), theirs.init(params)
  for seed in range(1, 4):
    a, state = jax.jit(ours.update)(draw(seed), state, params)
    b, other = jax.jit(theirs.update)(draw(seed), other, params)
    for key in SHAPES:
      assert np.array_equal(a[key], b[key])


@pytest.mark.parametrize(
  "axes, dimensions",
  [
    ("width hidden", ((0,), (1,))),
    ("hidden width", ((0,), (1,))),
    ("width heads head_width", ((0,), (1, 2))),
    ("heads head_width width", ((0, 1), (2,))),
    ("layer width kv_heads head_width", ((1,), (2, 3))),
    ("layer expert hidden width", ((2,), (3,))),
    ("pixel width", ((0,), (1,))),
    ("patch width", None),
    ("vocab width", None),
    ("hidden heads", None),
    ("layer width choice", None),
    ("layer scale", None),
    ("scale", None),
  ],
)
def test_muon_sees_operators(axes, dimensions):
  expected = dimensions and MuonDimensionNumbers(*dimensions)
  assert optimizer.muon_dimensions(axes) == expected


# --- The tiny model ---------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_its_checkpoint_goes_on(name, path, tmp_path):
  options = {"name": name, "decay": 10**6} | OPTIONS[name]
  config = tiny_config(path, inner=options, model={"layers": 1})
  program, state, metrics = run(config, steps=20)
  assert metrics[-1]["loss"] < metrics[0]["loss"] - 1.5
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(state, {"next_sample": 160})
  restored = checkpoints.restore(program.init()).state
  checkpoints.close()
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  for _ in range(2):
    a, b = flat(state), flat(restored)
    for key in a:
      assert a[key].tobytes() == b[key].tobytes(), key
    state, _ = program.step(state, program.batch(160, 8), 9)
    restored, _ = program.step(restored, program.batch(160, 8), 9)


def island(path, **groups):
  learners = {"devices": (8,), "mesh": (2, 2, 2), "batch_size": (8,)}
  return tiny_config(path, learners=learners, **groups)


@pytest.mark.parametrize("name", NAMES)
def test_moments_lie_where_their_parameters_lie(name, path):
  config = island(path, inner={"name": name} | OPTIONS[name])
  state = build(config, 0).init()
  params, split = flat(state.params), 0
  leaves, _ = jax.tree_util.tree_flatten_with_path(state)
  where = {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding
    for path, leaf in leaves
  }
  moments = [key for key in where if key.startswith("inner")]
  for key in moments:
    owner = next((p for p in params if key.endswith("/" + p)), None)
    if owner is None:
      assert where[key].is_fully_replicated, key
    else:
      assert where[key] == where["params/" + owner], key
      split += not where[key].is_fully_replicated
  assert split >= sum(x.ndim > 1 for x in params.values())


def test_muon_on_an_island_is_muon_alone():
  mesh = jax.make_mesh(
    (2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  axes = {"query": AXES["query"], "down": "hidden width"}
  rng = np.random.default_rng(0)
  grads = {
    "query": rng.normal(size=(8, 4, 4)).astype(np.float32),
    "down": rng.normal(size=(12, 8)).astype(np.float32),
  }
  where = {
    "query": NamedSharding(mesh, PartitionSpec("fsdp", "tensor", None)),
    "down": NamedSharding(mesh, PartitionSpec("tensor", "fsdp")),
  }
  ours = optimizer.make_optimizer(inner(name="muon"), axes)
  update = jax.jit(ours.update)
  alone, _ = update(grads, ours.init(grads), grads)
  split = jax.device_put(grads, where)
  updates, state = update(split, ours.init(split), split)
  owners = jax.tree.leaves(optimizer.owners(state, grads))
  assert sorted(owners) == [-1] * owners.count(-1) + [0, 1]
  for key in grads:
    np.testing.assert_allclose(updates[key], alone[key], rtol=0, atol=1e-5)


# --- Overwritten parameters -------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_owners_are_found_by_path_and_shape(name):
  config = inner(name=name, **OPTIONS[name])
  state = optimizer.make_optimizer(config, AXES).init(draw(0))
  found = [
    (i, leaf)
    for i, leaf in zip(
      jax.tree.leaves(optimizer.owners(state, draw(0))),
      jax.tree.leaves(state),
      strict=True,
    )
    if i >= 0
  ]
  per_tensor = {"adamw": 2, "sgd": 1, "lion": 1}
  counts = [
    1 if name == "muon" and key in ("query", "out", "up") else 2
    for key in sorted(SHAPES)
  ]
  if name in per_tensor:
    counts = [per_tensor[name]] * len(SHAPES)
  assert [sum(i == j for j, _ in found) for i in range(len(SHAPES))] == counts
  for i, leaf in found:
    assert leaf.shape == SHAPES[sorted(SHAPES)[i]]


def test_a_tail_of_a_path_is_no_owner():
  params = {
    "a": {"scale": jnp.zeros(3)},
    "scale": jnp.zeros(3),
    "x": jnp.zeros(2),
  }
  state = {"mu": params, "count": jnp.int32(0), "row": {"x": jnp.zeros(5)}}
  assert optimizer.owners(state, params) == {
    "mu": {"a": {"scale": 0}, "scale": 1, "x": 2},
    "count": -1,
    "row": {"x": -1},
  }


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(
  "option, scale", [("keep", 1.0), ("zero", 0.0), ("scale", 0.25)]
)
def test_moments_of_overwritten_parameters(option, scale, devices, path):
  options = {"name": "muon", "on_overwrite": option}
  if option == "scale":
    options["overwrite_scale"] = scale
  make = island if devices > 1 else tiny_config
  program = build(make(path, inner=options), 0)
  names = list(flat(program.init().params))
  whole, cut = names.index("embedding"), names.index("blocks/0/mlp/up")
  state = jax.tree.map(lambda x: x + 1, program.init())
  before = flat(state.inner)
  pieces = [Piece(whole), Piece(cut, axis=0, start=8, stop=20)]
  after = program.overwritten(state, pieces)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
    assert a.sharding == b.sharding
  changed = 0
  for key, old in before.items():
    expected = old.copy()
    if key.endswith("/embedding"):
      expected *= scale
    if key.endswith("/blocks/0/mlp/up"):
      expected[8:20] *= scale
    np.testing.assert_array_equal(flat(after.inner)[key], expected, key)
    changed += not np.array_equal(old, expected)
  assert changed == (0 if option == "keep" else 3)  # Adam's two and Muon's


def test_zero_forgets_what_is_no_number():
  state = {"mu": {"w": jnp.full(4, jnp.nan)}}
  owners = {"mu": {"w": 0}}
  after = optimizer.scale_moments(state, owners, [Piece(0)], 0.0)
  np.testing.assert_array_equal(after["mu"]["w"], np.zeros(4))
