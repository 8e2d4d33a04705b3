"""What the README shows works as shown."""

import importlib.util
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ddiloco.config import Config, from_dict
from tests.engine.lockstep import Lockstep
from tests.engine.regression import free_config

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_program_trains_as_written():
  optimizer = optax.adam(0.1)

  @jax.jit
  def my_jitted_step(state, batch):
    params, inner = state
    loss, grads = jax.value_and_grad(
      lambda p: jnp.mean((batch - p["mean"][None]) ** 2)
    )(params)
    updates, inner = optimizer.update(grads, inner, params)
    return (optax.apply_updates(params, updates), inner), {"loss": loss}

  def my_data(shard, first_sample, count):
    rng = np.random.default_rng((shard, first_sample))
    return rng.normal(3, 1, (count, 2)).astype(np.float32)

  (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
  names = {
    "my_params": lambda: {"mean": jnp.zeros(2), "spread": jnp.ones(2)},
    "optimizer": optimizer,
    "my_data": my_data,
    "my_jitted_step": my_jitted_step,
  }
  exec(compile(code, "README.md", "exec"), names)
  config = free_config(2, 2, 4, stop={"rounds": 150})
  programs = [names["build"](config, learner) for learner in (0, 1)]
  world = Lockstep(config, programs).start().run()
  mean, spread = world.params_at(150)
  assert np.all(np.abs(mean - 3) < 1) and np.all(spread == 1)


@pytest.mark.parametrize(
  "module", sorted(set(re.findall(r"python -m ([\w.]+)", README)))
)
def test_its_commands_exist(module):
  assert importlib.util.find_spec(module) is not None


def test_its_overrides_name_keys_of_the_configuration():
  known = Config().to_dict()
  found = re.findall(r"--config\.([\w.]+)", README)
  assert len(found) > 4
  for key in found:
    value = known
    for name in key.split("."):
      assert name in value, key
      value = value[name]


def test_its_examples_of_values_are_legal():
  values: dict = {"stop": {"rounds": 1}}
  for text in re.findall(r"--config\.[^|\n`]*", README):
    for flag in shlex.split(text):
      match = re.fullmatch(r"--config\.(\w+)\.(\w+)=(.*)", flag)
      if match:
        group, key, value = match.groups()
        text = re.fullmatch(r"[a-z][\w/]*", value)
        values.setdefault(group, {})[key] = text[0] if text else eval(value, {})
  assert {"learners", "stop"} <= values.keys()
  from_dict(values)


def test_its_links_lead_somewhere():
  links = re.findall(r"\]\((?!https?://)([^)]+)\)", README)
  assert links
  for link in links:
    assert (ROOT / link).exists(), link


def test_its_layout_names_every_folder():
  listed = set(re.findall(r"^    (\w[\w/]*)/ ", README, re.M))
  there = {
    path.relative_to(ROOT).as_posix()
    for parent in (ROOT / "ddiloco", ROOT)
    for path in parent.iterdir()
    if path.is_dir()
    and list(path.glob("*.py"))
    and path.name not in ("config",)
  }
  there.discard("ddiloco")
  assert listed >= there - {"docs", "build"}, there - listed
