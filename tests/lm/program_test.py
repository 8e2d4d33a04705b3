"""The program: initial bits on any mesh, shards, refusals."""

import logging

import jax
import numpy as np
import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.lm.program import build
from tests.lm.tiny import flat, run, tiny_config, write_text


def island(path: str, mesh: tuple[int, int, int], **learners):
  devices = int(np.prod(mesh))
  return tiny_config(
    path, learners={"devices": (devices,), "mesh": mesh, **learners}
  )


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2), (1, 4, 2), (4, 2, 1)])
def test_initial_bits_are_the_same_on_any_mesh(mesh):
  # The text does not exist: the initial state needs none.
  learner = build(island("nowhere", mesh), 0)
  syncer = build(island("nowhere", mesh), None)
  assert learner.mesh.devices.shape == mesh
  assert syncer.mesh.devices.shape == (1, 1, 1)
  a, b = flat(syncer.init()), flat(learner.init())
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_seeds_differ():
  first = flat(build(tiny_config("x"), None).init().params)
  values = tiny_config("x").to_dict()
  other = flat(build(from_dict({**values, "seed": 2**40}), None).init().params)
  assert not np.array_equal(first["embedding"], other["embedding"])


def test_training_is_repeatable(tmp_path):
  config = tiny_config(write_text(tmp_path))
  _, first, metrics = run(config)
  _, second, again = run(config)
  assert metrics == again
  a, b = flat(first), flat(second)
  assert all(np.array_equal(a[name], b[name]) for name in a)


def test_learners_read_different_shards(tmp_path):
  config = tiny_config(
    write_text(tmp_path), learners={"count": 2, "batch_size": (8, 4)}
  )
  learners = [build(config, i) for i in range(2)]
  assert [program.samples_per_step for program in learners] == [8, 4]
  rows = [
    {row.tobytes() for i in range(9) for row in program.batch(4 * i, 4).tokens}
    for program in learners
  ]
  assert rows[0] and rows[1] and not rows[0] & rows[1]


def test_learners_of_unlike_shards_read_their_own_labels(tmp_path, caplog):
  for name in ("aaa", "bbb"):
    write_text(tmp_path / name)
    for path in (tmp_path / name).iterdir():
      path.write_text(name * 200)
  config = tiny_config(str(tmp_path), data={"partition": "domain", "shards": 2})
  for learner, letter in ((0, "a"), (1, "b")):
    tokens = build(config, learner).batch(0, 8).tokens
    assert np.isin(tokens, [ord(letter), 256]).mean() > 0.98
  with caplog.at_level(logging.INFO, "ddiloco"):
    build(config, None).check()
  assert "a window's shard tells 1.000 bits of its label" in caplog.text


def test_with_params_keeps_the_rest():
  program = build(island("x", (1, 2, 2)), 0)
  state = program.init()
  host = jax.tree.map(lambda x: np.array(x) + 1.0, program.params(state))
  changed = program.with_params(state, host)
  assert changed.inner is state.inner
  for name, leaf in flat(program.params(changed)).items():
    np.testing.assert_array_equal(leaf, flat(host)[name])
  assert jax.tree.map(lambda x: x.sharding, changed.params) == jax.tree.map(
    lambda x: x.sharding, state.params
  )


def test_too_few_devices_are_refused():
  config = island("x", (2, 2, 2))
  with pytest.raises(ConfigError) as error:
    build(config, 0, devices=jax.devices()[:3])
  for word in ("needs 8 devices", "3 are present", "device_count=8"):
    assert word in str(error.value)


def test_the_given_devices_are_used():
  devices = jax.devices()[5:]
  program = build(island("x", (1, 2, 1)), 0, devices=devices)
  assert program.mesh.devices.flatten().tolist() == devices[:2]


def test_a_program_without_a_learner_has_no_data():
  with pytest.raises(ValueError, match="only learners have a data shard"):
    build(tiny_config("x"), None).batch(0, 1)


def test_missing_text_is_refused_when_it_is_needed():
  program = build(tiny_config("nowhere"), 0)
  with pytest.raises(ConfigError, match="does not exist"):
    program.batch(0, 1)
