"""The worked examples of programs of one's own train, in a few rounds."""

import importlib
import itertools
import json

import jax
import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.sim.train import simulate
from ddiloco.types import Exit
from tests.sim.small import MemoryStore


@pytest.fixture(name="example", params=["byo_jax", "byo_flax"], scope="module")
def example_fixture(request):
  """The config of an example, made short, and its program's builder."""
  folder = f"experiments.{request.param}"
  values = importlib.import_module(f"{folder}.config").get_config().to_dict()
  values["learners"]["count"] = 2
  values["sync"] |= {"num_fragments": 1, "interval_steps": 4}
  values["codec"]["up"] = "f32"  # quick to compile
  values["merge"] |= {"rule": "average", "embedding_rule": "average"}
  values["data"]["sequence_length"] = 16
  values["stop"]["rounds"] = 24
  config = from_dict(values)
  build = importlib.import_module(f"{folder}.model").build
  assert config.program == f"{folder}.model:build"
  return config, build


@pytest.mark.slow
def test_it_learns(example, tmp_path):
  config, _ = example
  code = simulate(config, workdir=tmp_path, store=MemoryStore(), seed=0)
  assert code is Exit.OK
  lines = (tmp_path / "eval.jsonl").read_text().splitlines()
  losses = [json.loads(line)["loss"] for line in lines]
  assert losses[0] > 5.4  # no better than log 257 would be, or a little
  assert losses[-1] < 0.9 * losses[0]


def test_everybody_starts_from_the_same_bits(example):
  config, build = example
  one, other = (
    jax.tree.leaves(program.params(program.init()))
    for program in (build(config, None), build(config, 1))
  )
  assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
  assert all(x.dtype == np.float32 for x in one)


def test_batches_are_pure_and_learners_read_different_ones(example):
  config, build = example
  programs = [build(config, learner) for learner in range(2)]
  size = programs[0].samples_per_step
  again = build(config, 0)
  again.batch(3, 2)
  first = programs[0].batch(5, size)
  np.testing.assert_array_equal(first, again.batch(5, size))
  np.testing.assert_array_equal(first[2:], programs[0].batch(7, size - 2))
  rows = [
    {row.tobytes() for row in program.batch(0, size)} for program in programs
  ]
  assert rows[0] != rows[1]
  assert programs[0].tokens(first) in (size, size * (first.shape[1] - 1))


def test_parameters_replace_nothing_else(example):
  config, build = example
  program = build(config, 0)
  state = program.init()
  params = jax.tree.map(lambda x: x + 1, program.params(state))
  changed = program.with_params(state, params)
  assert program.params(changed) is params
  ours, theirs = (
    set(map(id, jax.tree.leaves(s)))
    - set(map(id, jax.tree.leaves(program.params(s))))
    for s in (state, changed)
  )
  assert ours == theirs and list(itertools.chain(ours))
