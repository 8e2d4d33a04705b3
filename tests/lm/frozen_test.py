"""Frozen parameters are not trained; learners share their bits unexchanged."""

import jax
import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.lm.program import build
from tests.engine.lockstep import Lockstep
from tests.lm.tiny import flat, run, tiny_config, write_text


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  return write_text(tmp_path_factory.mktemp("frozen") / "text")


def config_of(path, frozen, **groups):
  model = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 32}
  inner = {"clip_norm": 0.0, "weight_decay": 0.1, "warmup": 1}
  return tiny_config(
    path,
    sync={"frozen": frozen} | groups.pop("sync", {}),
    **{"model": model, "inner": inner, **groups},
  )


def test_frozen_parameters_keep_their_bits_and_the_others_move_as_ever(path):
  """One step of Adam, element by element; nothing is clipped here."""
  program, state, metrics = run(config_of(path, "^embedding|mlp/"), steps=1)
  _, free, free_metrics = run(config_of(path, ""), steps=1)
  before, after, unfrozen = (
    flat(x.params) for x in (program.init(), state, free)
  )
  frozen = [name for name in after if name == "embedding" or "mlp/" in name]
  for name, tensor in after.items():
    assert not np.array_equal(unfrozen[name], before[name]), name
    if name in frozen:
      np.testing.assert_array_equal(tensor, before[name])
    else:
      np.testing.assert_allclose(tensor, unfrozen[name], atol=1e-5)
  moments = [x for x in jax.tree.leaves(state.inner) if x.ndim]
  trained = [x for name, x in after.items() if name not in frozen]
  assert sum(x.size for x in moments) == 2 * sum(x.size for x in trained)
  assert metrics[0]["loss"] == pytest.approx(free_metrics[0]["loss"], rel=1e-6)
  assert metrics[0]["grad_norm"] < free_metrics[0]["grad_norm"]


@pytest.mark.slow
def test_learners_keep_the_same_frozen_bits_without_exchanging_them(path):
  config = config_of(
    path,
    "^embedding|norm",
    learners={"count": 2, "batch_size": (4,)},
    sync={"num_fragments": 1, "interval_steps": 3},
    codec={"up": "f32"},
    merge={"rule": "average"},
    stop={"rounds": 9},
  )
  world = Lockstep(config, [build(config, m) for m in range(2)]).start()
  world.run_to_round(3)
  world.learners[1].kill()
  world.join(1)
  world.run()
  initial = jax.device_get(jax.tree.leaves(world.programs[0].init().params))
  committed = world.params_at(9)
  names = [spec.path for spec in world.layout.tensors]
  for name, tensor, first in zip(names, committed, initial, strict=True):
    assert (tensor is None) == (name == "embedding" or "norm" in name)
    assert tensor is None or not np.array_equal(tensor, first)
  for node in world.learners.values():
    for ours, tensor, first in zip(
      node.params, committed, initial, strict=True
    ):
      if tensor is None:
        np.testing.assert_array_equal(ours, first)


@pytest.mark.parametrize(
  "pattern, words", [("emmbedding", "no path"), (".", "every path")]
)
def test_patterns_that_cannot_be_meant_are_refused(path, pattern, words):
  with pytest.raises(ConfigError, match=f"sync.frozen: .*{words}"):
    build(config_of(path, pattern), 0)
