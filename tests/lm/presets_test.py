"""Presets: sizes, overrides, refusals; the large ones without arrays."""

import math
import re

import jax
import numpy as np
import pytest

from ddiloco.algo.fragments import make_layout
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.config.presets import PRESETS
from ddiloco.lm.program import build
from experiments.quickstart.config import get_config

LARGE = tuple(name for name in PRESETS if re.search(r"\d", name))
# The vocabulary of the Gemma models that the large presets are shaped after.
GEMMA_VOCAB = 262_144


def preset_config(name: str, learners: dict | None = None, **model) -> Config:
  data = (
    {"tokenizer": "bpe", "vocab_size": GEMMA_VOCAB} if name in LARGE else {}
  )
  return from_dict(
    {
      "model": {"preset": name, **model},
      "data": data,
      "learners": learners or {},
      "stop": {"rounds": 1},
    }
  )


def count(tree, path: str = "") -> int:
  """Elements of the tensors whose path matches."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return sum(
    math.prod(leaf.shape)
    for keys, leaf in leaves
    if re.search(path, jax.tree_util.keystr(keys, simple=True, separator="/"))
  )


@pytest.mark.parametrize(
  "name, total, active",
  [
    ("dense_tiny", 0.1e6, 0.1e6),
    ("dense_small", 0.8e6, 0.8e6),
    ("dense_2b", 2e9, 2e9),
    ("dense_5b", 5e9, 5e9),
    ("dense_9b", 9e9, 9e9),
    ("dense_12b", 12e9, 12e9),
    ("moe_tiny", 0.28e6, 0.11e6),
    ("moe_a2.8b", 17.6e9, 2.8e9),
    ("moe_a3.8b", 25.2e9, 3.8e9),
  ],
)
def test_parameter_counts(name, total, active):
  config = preset_config(name)
  params = build(config, None).abstract_params()
  leaves = jax.tree.leaves(params)
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
  found, model = count(params), config.model
  idle = 1 - model.experts_per_token / max(model.experts, 1)
  used = found - idle * count(params, "moe/(gate|up|down)")
  print(f"{name}: {found:,} parameters, {round(used):,} of them active")
  assert found == pytest.approx(total, rel=0.035)
  assert used == pytest.approx(active, rel=0.035)


def test_every_preset_is_counted():
  marks = test_parameter_counts.pytestmark
  assert [row[0] for row in marks[0].args[1]] == list(PRESETS)


@pytest.mark.parametrize("name", LARGE)
def test_large_models_are_fragmented_without_arrays(name):
  params = build(preset_config(name), None).abstract_params()
  layout = make_layout(params, 24)
  sizes = sorted(layout.fragment_bytes(p) for p in range(24))
  assert sum(sizes) == 4 * count(params)
  # The embedding is alone in its fragment; the others are balanced.
  assert sizes[-2] < 4 / 3 * np.mean(sizes[:-1])


@pytest.mark.parametrize("name", LARGE)
def test_large_models_lower_without_arrays(name):
  mesh = (1, 2, 2, 2) if "moe" in name else (1, 4, 2)
  config = preset_config(
    name, {"devices": (8,), "mesh": mesh, "batch_size": (4,)}
  )
  before = sum(x.nbytes for x in jax.live_arrays())
  program = build(config, 0)
  text = program.lower().as_text()
  # Layers are loops, forward and backward, not copies of each other.
  assert text.count("stablehlo.while") >= 2
  embedding = program.abstract_params()["embedding"]
  shard = embedding.sharding.shard_shape(embedding.shape)
  assert math.prod(shard) == math.prod(embedding.shape) // (mesh[1] * mesh[2])
  assert sum(x.nbytes for x in jax.live_arrays()) < before + 2**20


def test_single_keys_win_over_the_preset():
  model = preset_config("dense_2b", layers=3, remat=None).model
  assert (model.layers, model.width, model.remat) == (3, 2048, True)
  assert model.preset == "dense_2b"


@pytest.mark.parametrize("name", PRESETS)
def test_a_filled_in_config_comes_back_as_it_is(name):
  config = preset_config(name, local_window=7)
  assert from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
  "name, words",
  [
    ("dens_2b", ["dens_2b", "dense_2b"]),
    ("dense-small", ["dense-small", "dense_small"]),
    ("llama", ["llama", *PRESETS]),
    (3, ["3", *PRESETS]),
  ],
)
def test_unknown_names_are_refused_with_the_nearest(name, words):
  with pytest.raises(ConfigError) as error:
    preset_config(name)
  for word in ["model.preset", *words]:
    assert word in str(error.value)


def test_a_preset_that_would_give_nothing_is_refused():
  values = Config().to_dict()["model"] | {"preset": "dense_small"}
  with pytest.raises(ConfigError, match="every key.*None"):
    from_dict({"model": values, "stop": {"rounds": 1}})


def test_a_preset_that_a_shape_of_ones_own_hides_is_refused():
  keys = PRESETS["dense_12b"]
  own = {key: value + value for key, value in keys.items()}
  with pytest.raises(ConfigError, match="dense_12b.*to another value"):
    preset_config("dense_12b", **own)


def test_a_config_file_leaves_the_model_to_the_preset():
  config = get_config().lock()
  assert from_dict(config.to_dict()).model == Config().model
  config.model.preset = "dense_small"
  config.model.layers = 2
  model = from_dict(config.to_dict()).model
  assert (model.width, model.layers) == (128, 2)
