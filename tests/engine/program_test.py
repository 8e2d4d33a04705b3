"""Programs: how little one has to be, the language model, compilations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.lm.program import build
from tests.engine.identity_test import assert_equal
from tests.engine.lockstep import Lockstep
from tests.engine.recovery_test import assert_one_history
from tests.engine.regression import free_config, make_config, make_world
from tests.lm.tiny import count_compilations, tiny_config, write_text


class Tiny:
  """A program in ten lines: the mean of what it is shown, by SGD."""

  samples_per_step = 4

  def init(self):
    return {"mean": jnp.zeros(3), "scale": jnp.ones(())}

  def params(self, state):
    return state

  def with_params(self, state, params):
    return params

  def batch(self, first_sample, count):
    return np.random.default_rng(first_sample).normal(5, 1, (count, 3))

  def tokens(self, batch):
    return batch.size

  def step(self, state, batch, clock):
    gap = state["mean"] - batch.mean(0)
    return {**state, "mean": state["mean"] - 0.1 * gap}, {"loss": gap @ gap}


def test_a_program_of_ten_lines_trains():
  config = free_config(2, 2, 4, stop={"rounds": 60}, codec={"up": "int8"})
  world = Lockstep(config, [Tiny(), Tiny()]).start().run()
  mean, scale = world.params_at(60)
  assert np.all(np.abs(mean - 5) < 1)
  assert scale == 1  # nothing trains it: all its outer gradients are zero


def test_the_programs_of_a_run_may_differ_in_speed_and_batch():
  slow = itertools.cycle([0, 0, 0, 1])
  world = Lockstep(
    free_config(2, 2, 4, stop={"rounds": 40}), [Tiny(), Tiny()], script=slow
  )
  world.start().run()
  counted = [c.learner for x in world.commits for c in x.counted]
  assert counted.count(0) > counted.count(1) > 2
  assert_one_history(world)


# --- Compilations -----------------------------------------------------------


@pytest.mark.parametrize("codec", ["f32", "int4"])
@pytest.mark.parametrize("config", [make_config, free_config])
def test_nothing_compiles_after_the_first_rounds(config, codec):
  """Not for other learners, answers, rounds, or a learner that comes back."""
  config = config(
    3,
    6,
    6,
    2,
    stop={"rounds": 26},
    codec={"up": codec},
    merge={"rule": "rda"},
    outer={"momentum": 0.9},
  )
  world = make_world(config)
  world.run_to_round(2 * config.sync.interval_steps)
  with count_compilations() as compiled:
    world.run_to_round(20)
    world.learners[2].kill()
    world.join(2)
    world.run()
  assert compiled == []


def test_nothing_compiles_once_warm():
  """All that a run needs is compiled before its first step ends."""
  world = make_world(free_config(2, 2, 5, stop={"rounds": 20}))
  with count_compilations() as compiled:
    world.run()
  # The program's own step, unless another test has compiled it already.
  assert len(compiled) <= 1


# --- The language model -----------------------------------------------------


@pytest.fixture(scope="module")
def model_run(tmp_path_factory):
  folder = write_text(tmp_path_factory.mktemp("lm") / "text")
  config = tiny_config(
    folder,
    learners={"count": 2, "batch_size": (4,), "devices": (2,)},
    model={"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32},
    sync={"num_fragments": 2, "interval_steps": 4, "overlap_steps": 2},
    inner={"learning_rate": 1e-2, "schedule": "constant", "warmup": 1},
    stop={"rounds": 32},
  )
  return Lockstep(config, [build(config, m) for m in range(2)]).start()


def test_the_language_model_learns_on_islands_of_two_devices(model_run):
  """int4 and RDA; a learner dies and comes back."""
  world = model_run
  world.run_to_round(12)
  world.learners[1].beat()
  world.learners[1].kill()
  node = world.join(1)
  assert_equal(node.anchors, world.params_at(world.committed))
  with count_compilations() as compiled:
    world.run()
  assert compiled == []
  assert_one_history(world)
  judge = build(world.config, None)
  treedef = jax.tree.structure(judge.params(judge.init()))
  losses = []
  for t in (0, 32):
    params = jax.tree.map(jnp.asarray, treedef.unflatten(world.params_at(t)))
    params = judge.params(judge.with_params(judge.init(), params))
    losses.append(judge.evaluate(params)["loss"])
  assert losses[1] < 0.8 * losses[0]
