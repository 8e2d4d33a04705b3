"""Outer states across the syncer's lives; moments that a commit overwrites."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco.algo.outer import OuterStep
from ddiloco.config import ConfigError, from_dict
from ddiloco.engine import loading
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.lm.optimizer import overwrite_scale, owners, scale_moments
from ddiloco.protocol import faults as fault_script
from ddiloco.protocol import keys
from ddiloco.sim import history, islands
from ddiloco.sim.train import simulate
from ddiloco.types import Exit
from tests.engine.identity_test import assert_equal, distance
from tests.engine.regression import make_config, make_world
from tests.sim import small
from tests.sim.program import Evaluated

HERE = "tests.engine.optimizers_test"
ROUNDS = 16
DELAYED = {"name": "delayed_nesterov", "momentum": 0.5, "momentum_delay": 2}
OUTER = {
  "adam": {"name": "adam", "learning_rate": 0.1},
  "delayed": DELAYED | {"restart_every": 4},
  "schedule": {"momentum": 0.5, "schedule": "cosine", "decay": 4, "warmup": 2},
  "rounds": {"schedule": "linear", "decay": 20, "clock": "round"},
  "own": {"name": HERE + ":own_outer", "momentum": 0.3, "restart_every": 3},
}


def own_outer(config):
  """Somebody's own: a step that shrinks with the round, and counts in i32."""

  def init(params):
    return {"n": jnp.int32(0), "sum": jax.tree.map(jnp.zeros_like, params)}

  def update(updates, state, params=None, *, round, **extra):
    del params, extra
    total = jax.tree.map(
      lambda s, u: config.momentum * s + u, state["sum"], updates
    )
    scale = -config.learning_rate / (1 + 0.1 * round)
    steps = jax.tree.map(lambda s: scale * s, total)
    return steps, {"n": state["n"] + 1, "sum": total}

  return optax.GradientTransformationExtraArgs(init, update)


def no_optimizer(config):
  del config
  return 0.7


def exact_world(outer):
  config = make_config(
    2,
    4,
    4,
    2,
    sync={"apply": "at_overlap"},
    outer={"learning_rate": 0.5} | outer,
    stop={"rounds": ROUNDS},
  )
  return make_world(config)


@pytest.mark.parametrize("name", OUTER)
def test_outer_states_survive_the_syncer(name):
  """A life that goes on from the stored bytes makes the same commits."""
  undisturbed = exact_world(OUTER[name]).run()
  world = exact_world(OUTER[name])
  for t in (5, 10):
    world.run_to_round(t)
    world.syncers[-1].kill()
    world.start_syncer()
  world.run()
  plain = exact_world({}).run()
  for t in range(1, ROUNDS + 1):
    assert_equal(world.params_at(t), undisturbed.params_at(t))
    assert world.outer_at(t) == undisturbed.outer_at(t)
  assert distance(world.params_at(ROUNDS), plain.params_at(ROUNDS)) > 1e-4


@pytest.mark.parametrize(
  "name, words",
  [
    (HERE + ":missing", "missing.*module:function"),
    ("no_such_module:f", "no_such_module.*module:function"),
    (HERE + ":no_optimizer", "returns float.*optax.GradientTransformation"),
    ("optax:sgd", "optax:sgd.*TypeError.*the outer group of the config"),
    ("os:getcwd", "os:getcwd.*TypeError.*optax.GradientTransformation"),
  ],
)
def test_own_outer_optimizers_that_are_none_are_refused(name, words):
  config = make_config(outer={"name": name})
  with pytest.raises(ConfigError, match=words):
    loading.make_outer(config)


def divides_by_zero(config):
  return optax.stateless(lambda updates, params: 1 / 0)


def test_own_outer_optimizers_that_cannot_step_are_refused():
  config = make_config(outer={"name": HERE + ":divides_by_zero"})
  with pytest.raises(ConfigError, match="cannot step.*ZeroDivisionError"):
    OuterStep(loading.make_outer(config), [(3,)])


def test_state_of_another_optimizer_is_refused():
  world = exact_world(OUTER["adam"])
  world.run_to_round(4)
  other = SyncerArrays.from_config(
    make_config(2, 4, 4, outer={"momentum": 0.9}), world.layout, world.codec
  )
  ref = world.commit(4).fragments[0]
  params = world.exchange.history[keys.params(ref.version, 0, ref.epoch)]
  with pytest.raises(ValueError, match="bytes were received"):
    other.load(0, ref, params, world.outer_at(4)[0])


# --- Moments ----------------------------------------------------------------


class Forgetful(Evaluated):
  """Follows `inner.on_overwrite`, and tells what it was told."""

  def __init__(self, config, learner):
    super().__init__(config, learner)
    self.scale, self.told = overwrite_scale(config.inner), []

  def overwritten(self, state, pieces):
    self.told.append((pieces, jax.tree.map(np.array, state[0])))
    params, moments = state
    of = owners(moments, params)
    return params, scale_moments(moments, of, pieces, self.scale)


def build(config, learner, *, cache_dir):
  del cache_dir
  return Forgetful(config, learner)


def test_a_program_is_told_what_commits_overwrite():
  config = make_config(
    2, 3, 3, inner={"on_overwrite": "zero"}, stop={"rounds": 6}
  )
  programs = [Forgetful(config, m) for m in range(2)]
  world = make_world(config, *programs)
  whole = [world.layout.pieces(p) for p in range(3)]
  told = programs[0].told
  # A life starts with the parameters of commits.
  assert [p for p, _ in told] == [[q for pieces in whole for q in pieces]]
  world.run()
  rounds = range(1, len(told))
  assert [tuple(p) for p, _ in told[1:]] == [whole[t % 3] for t in rounds]
  assert rounds.stop >= 6  # nothing is applied after the end
  for t, (pieces, params) in zip(rounds, told[1:], strict=True):
    leaves, now = jax.tree.leaves(params), world.params_at(t)
    for piece in pieces:
      np.testing.assert_array_equal(leaves[piece.tensor], now[piece.tensor])


def simulated(workdir, option):
  workdir.mkdir()
  values = small.get_config().to_dict()
  values["program"] = HERE + ":build"
  values["inner"]["on_overwrite"] = option
  values["stop"]["rounds"] = 30
  store = small.MemoryStore()
  code = simulate(
    from_dict(values),
    workdir=workdir,
    store=store,
    seed=3,
    faults=fault_script.parse("at round 12 kill learner 1 for 1s"),
  )
  assert code is Exit.OK
  return store


def test_moments_are_forgotten_alike_in_a_simulation_and_its_replay(tmp_path):
  stores = {
    option: simulated(tmp_path / option, option)
    for option in ("keep", "zero", "scale")
  }
  last = {option: s.objects[keys.commit(30)] for option, s in stores.items()}
  assert len(set(last.values())) == 3
  for option in ("zero", "scale"):
    result = islands.replay(
      history.load(stores[option]),
      cache_dir="",
      decisions_only=False,
      say=lambda line: None,
    )
    assert result["matched"] == result["commits"] == 30


def test_a_program_without_the_hook_is_refused(tmp_path):
  for option in ("zero", "scale"):
    config = small.make_config(inner={"on_overwrite": option})
    with pytest.raises(ConfigError, match="no method overwritten.*or use keep"):
      loading.load_program(config, 0, str(tmp_path))
  loading.load_program(small.make_config(), 0, str(tmp_path))
