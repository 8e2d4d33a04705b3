"""Programs that cannot be used are refused before anything is written."""

import functools
import types

import numpy as np
import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.engine import loading
from tests.sim import small
from tests.sim.program import build as sound

HERE = "tests.engine.loading_test"


def no_cache(config, learner):
  return sound(config, learner)


def methodless(config, learner, *, cache_dir):
  return types.SimpleNamespace(samples_per_step=1, init=dict)


def of_numpy(config, learner, *, cache_dir):
  program = sound(config, learner, cache_dir=cache_dir)
  program.params = lambda state: {"deep": {"w": np.zeros(3, np.float32)}}
  return program


def make_config(**changes):
  return from_dict({**small.make_config().to_dict(), **changes})


@pytest.mark.parametrize(
  "program, words",
  [
    ("os:sep", "'os:sep': '/' is not a callable"),
    ("os:getcwd", "too many positional arguments.*build.config, learner"),
    (HERE + ":no_cache", "unexpected keyword argument .cache_dir."),
    (HERE + ":methodless", "lacks params, with_params, batch, tokens, step"),
    (HERE + ":of_numpy", "'deep/w' as numpy.ndarray.*jax.Arrays.*asarray"),
  ],
)
def test_programs_that_are_none_are_refused(program, words, tmp_path):
  load = functools.partial(loading.load_model, learner=0, cache_dir=tmp_path)
  load(make_config())
  with pytest.raises(ConfigError, match=words):
    load(make_config(program=program))


def test_a_program_that_does_not_start_from_a_checkpoint_is_refused(tmp_path):
  config = make_config(init={"path": "x", "sha256": "0"})
  with pytest.raises(ConfigError, match="init.path = 'x'.*reads_init = True"):
    loading.load_program(config, 0, str(tmp_path))
