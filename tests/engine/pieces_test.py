"""Pieces of tensors on devices: sharded, exchanged, recovered, frozen."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Sharding

from ddiloco.algo.fragments import make_layout, take
from ddiloco.config import ConfigError
from ddiloco.engine.pieces import DevicePieces
from tests.engine.identity_test import assert_equal
from tests.engine.lockstep import Lockstep
from tests.engine.recovery_test import assert_one_history
from tests.engine.regression import Regression, free_config, make_config
from tests.engine.stacked import PATTERN, Stacked, values
from tests.lm.tiny import count_compilations


def layout_of(strategy, params):
  return make_layout(params, 3, strategy, layer_pattern=PATTERN)


@pytest.mark.parametrize("sharded", [False, True], ids=["one", "eight"])
@pytest.mark.parametrize("strategy", ["layer_strided", "balanced_sub_tensor"])
def test_take_and_put_on_devices_are_those_of_the_host(strategy, sharded):
  program = Stacked(0, sharded)
  leaves = jax.tree.leaves(program.params(program.init()))
  host, new = (jax.tree.leaves(values(seed)) for seed in (0, 1))
  layout = layout_of(strategy, values(0))
  pieces = DevicePieces(layout, leaves)
  shardings = [leaf.sharding for leaf in leaves]
  for p in range(layout.num_fragments):
    assert_equal(pieces.take(p, leaves), take(layout.pieces(p), host))
    copies = pieces.copy(p, leaves)
    placed = jax.device_put(
      list(take(layout.pieces(p), new)), list(pieces.shardings[p])
    )
    pieces.put(p, leaves, placed)
    assert_equal(copies, take(layout.pieces(p), host))
    assert_equal(pieces.take(p, leaves), take(layout.pieces(p), new))
  assert_equal(leaves, new)
  assert [leaf.sharding for leaf in leaves] == shardings


def test_a_sharding_that_pieces_cannot_have_is_refused():
  class Halves(Sharding):
    """Another kind of sharding, in two halves."""

    def shard_shape(self, global_shape):
      if global_shape[0] % 2:
        raise ValueError("uneven")
      return (global_shape[0] // 2,)

  leaf = collections.namedtuple("Leaf", "sharding")(Halves())
  layout = make_layout({"v": np.zeros(6, np.float32)}, 2, "balanced_sub_tensor")
  with pytest.raises(ConfigError, match="'v' along axis 0 from 0 to 3"):
    DevicePieces(layout, [leaf])


# --- Runs -------------------------------------------------------------------


def stacked_run(strategy, codec, sharded):
  """A learner dies; it comes back, and nothing is compiled for it."""
  config = free_config(
    2,
    3,
    4,
    2,
    sync={"fragmentation": strategy, "layer_pattern": PATTERN},
    codec={"up": codec},
    outer={"momentum": 0.5, "learning_rate": 0.7},
    stop={"rounds": 20},
  )
  world = Lockstep(config, [Stacked(m, sharded) for m in range(2)]).start()
  world.run_to_round(9)
  with count_compilations() as compiled:
    world.learners[1].kill()
    node = world.join(1)
    assert_equal(node.anchors, world.params_at(world.committed))
    world.run()
  assert compiled == []
  assert_one_history(world)
  return world


@pytest.mark.slow
@pytest.mark.parametrize(
  "strategy, codec", [("layer_strided", "int4"), ("balanced_sub_tensor", "f32")]
)
def test_sharded_islands_give_the_bits_of_unsharded_ones(strategy, codec):
  one, eight = (stacked_run(strategy, codec, x) for x in (False, True))
  assert one.layout == eight.layout
  for t in (0, 5, 12, 20):
    assert_equal(one.params_at(t), eight.params_at(t))
  before, after = one.params_at(0), one.params_at(20)
  ends = [jax.tree.leaves(values(100 + m)) for m in (0, 1)]
  goal = [(x + y) / 2 for x, y in zip(*ends, strict=True)]
  distance = [
    sum(float(np.sum((x - y) ** 2)) for x, y in zip(tensors, goal, strict=True))
    for tensors in (before, after)
  ]
  assert distance[1] < 0.3 * distance[0]


@pytest.mark.parametrize("policy", [{"blend": 0.5}, {"eager": True}], ids=str)
def test_policies_on_pieces(policy):
  """Compiled once for all; what is exchanged stays one history."""
  sync = {"fragmentation": "balanced_sub_tensor", **policy}
  config = make_config(2, 3, 3, 1, sync=sync, stop={"rounds": 9})
  world = Lockstep(config, [Regression(m) for m in range(2)]).start()
  world.run_to_round(6)
  with count_compilations() as compiled:
    world.run()
  assert compiled == []
  assert_one_history(world)


def test_one_learner_with_outer_rate_one_is_plain_training():
  """Whichever pieces are exchanged, all values are, once in H steps."""
  plain, cut = (
    Lockstep(
      make_config(
        1, 3, 3, 0, sync={"fragmentation": strategy}, stop={"rounds": 12}
      ),
      [Regression(0)],
    )
    .start()
    .run()
    for strategy in ("balanced_tensor", "balanced_sub_tensor")
  )
  for mine, other in zip(
    cut.learners[0].params, plain.learners[0].params, strict=True
  ):
    np.testing.assert_allclose(mine, other, atol=1e-5)


# --- Frozen parameters and other state --------------------------------------


class Frozen(Stacked):
  """Has a table of integers and a scale of its own among its parameters.

  It trains the scale, which nobody else gets to see.
  """

  def __init__(self, shard: int):
    super().__init__(shard)
    self._shard = shard

  def init(self):
    params, steps = super().init()
    own = {"scale": jnp.full(3, 1.0), "table": jnp.arange(5)}
    return params | {"own": own}, steps

  def step(self, state, batch, clock):
    params, steps = state
    own = params.pop("own")
    (params, steps), metrics = super().step((params, steps), batch, clock)
    own = own | {"scale": own["scale"] + self._shard}
    return (params | {"own": own}, steps), metrics


def test_frozen_parameters_and_other_state_stay_where_they_are():
  config = free_config(
    2, 4, 4, sync={"frozen": "^own/"}, stop={"rounds": 12}, codec={"up": "f32"}
  )
  world = Lockstep(config, [Frozen(m) for m in range(2)]).start().run()
  paths = [spec.path for spec in world.layout.tensors]
  frozen = [paths.index(name) for name in ("own/scale", "own/table")]
  assert [world.params_at(12)[i] for i in frozen] == [None, None]
  sizes = [ref.params_bytes for ref in world.commit(12).fragments]
  assert sum(sizes) == 4 * sum(np.size(x) for x in jax.tree.leaves(values(0)))
  for m, node in world.learners.items():
    scale, table = (node.params[i] for i in frozen)
    np.testing.assert_array_equal(table, np.arange(5))
    np.testing.assert_array_equal(scale, 1 + m * node.state.step)
    assert node.plane.arrays._state[1] == node.state.step
  assert_one_history(world)


def test_tensors_of_any_size_are_exchanged_whole():
  """One element, none of a layer's, and one a thousand times the rest."""

  class Sizes(Stacked):
    def init(self):
      params = {
        "dot": jnp.zeros(()),
        "one": jnp.zeros(1),
        "huge": jnp.zeros((64, 999)),
      }
      return params, jnp.zeros((), jnp.int32)

    def batch(self, first_sample, count):
      return {
        "dot": jnp.ones(()),
        "one": jnp.ones(1),
        "huge": jnp.ones((64, 999)),
      }

    def step(self, state, batch, clock):
      params, steps = state
      params = jax.tree.map(lambda x, y: x + 0.5 * (y - x), params, batch)
      return (params, steps + 1), {"loss": params["dot"]}

  config = free_config(1, 3, 3, stop={"rounds": 30})
  world = Lockstep(config, [Sizes(0)]).start().run()
  for tensor in world.params_at(30):
    np.testing.assert_allclose(tensor, 1, atol=0.01)
