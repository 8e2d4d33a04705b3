"""Checkpoints: what is complete comes back, on any mesh; nothing else does."""

import os
import random
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ddiloco.live import checkpoint, log
from ddiloco.live.checkpoint import Checkpoints
from tests.live.processes import (
  DEADLINE_S,
  ROOT,
  environment,
  fill,
  small_disk,
  wait_for,
)


class State(NamedTuple):
  """As a program's: parameters, an optax state, a counter."""

  params: dict[str, Any]
  optimizer: Any
  count: Any


def make_state(seed=0, width=8, devices=1, axis=0):
  """A state on a mesh of `devices`, sharded along an axis of its matrices."""
  mesh = jax.make_mesh(
    (devices,),
    ("data",),
    axis_types=(AxisType.Auto,),
    devices=jax.devices()[:devices],
  )
  key = jax.random.key(seed)
  params = {
    "w": jax.random.normal(key, (width, 16)),
    "b": jnp.arange(16, dtype=jnp.float32) + seed,
  }
  optimizer = optax.adamw(1e-3).init(params)
  optimizer = jax.tree.map(lambda x: x + seed, optimizer)
  state = State(params, optimizer, jnp.int32(seed))

  def place(leaf):
    spec = [None] * leaf.ndim
    if leaf.ndim == 2:
      spec[axis] = "data"
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

  return jax.tree.map(place, state)


@pytest.fixture
def open_checkpoints(tmp_path):
  """Opens the same directory again and again, as a learner's lives do."""
  opened = []

  def make(directory=tmp_path / "checkpoints"):
    opened.append(Checkpoints(directory))
    return opened[-1]

  yield make
  for checkpoints in opened:
    checkpoints.close()


@pytest.fixture
def warnings(monkeypatch):
  said = []
  monkeypatch.setattr(
    log.logger, "warning", lambda *a: said.append(a[0] % a[1:])
  )
  return said


def position(n):
  return {"next_sample": n, "step": n // 2, "seen": n // 4}


def assert_same(restored, state):
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_a_new_life_gets_what_the_last_one_saved(open_checkpoints, warnings):
  open_checkpoints().save(make_state(3), position(40))
  restored = open_checkpoints().restore(make_state(0))
  assert_same(restored.state, make_state(3))
  assert restored.position == position(40)
  assert isinstance(restored.state, State) and warnings == []


def test_without_a_checkpoint_there_is_none(open_checkpoints, warnings):
  assert open_checkpoints().restore(make_state()) is None
  assert warnings == []


def test_the_newest_is_the_one_furthest_in_the_data(open_checkpoints, tmp_path):
  checkpoints = open_checkpoints()
  for n in (8, 20, 100):
    checkpoints.save(make_state(n), position(n))
  assert open_checkpoints().restore(make_state()).position == position(100)
  names = [p.name for p in (tmp_path / "checkpoints").iterdir()]
  assert sorted(filter(str.isdigit, names)) == ["100", "20"], "two are kept"


@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_no_number(open_checkpoints, warnings, tmp_path, bit):
  """Orbax would take most of them for one."""
  state = make_state(3, width=512)
  open_checkpoints().save(state, position(40))
  folder = tmp_path / "checkpoints/40"
  files = [p for p in folder.rglob("*") if p.is_file()]
  largest = max(files, key=lambda path: path.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 1 << bit
  largest.write_bytes(data)
  assert open_checkpoints().restore(make_state(0, width=512)) is None
  assert "checkpoint 40 is not used, the inner optimizer" in warnings[-1]


GARBLED = {
  "cut": lambda data: data[: len(data) // 2],
  "emptied": lambda data: b"",
  "noise": lambda data: random.Random(1).randbytes(len(data)),
  "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("how", GARBLED)
@pytest.mark.parametrize("which", range(3))
def test_garbage_in_its_files_costs_the_checkpoint_only(
  open_checkpoints, warnings, tmp_path, how, which
):
  """The largest ones have its arrays; Orbax fails in the middle of one."""
  state = make_state(3, width=512)
  open_checkpoints().save(state, position(40))
  folder = tmp_path / "checkpoints/40"
  files = [p for p in folder.rglob("*") if p.is_file()]
  files.sort(key=lambda path: (-path.stat().st_size, path.name))
  files[which].write_bytes(GARBLED[how](files[which].read_bytes()))
  restored = open_checkpoints().restore(make_state(0, width=512))
  if restored is None:
    assert "checkpoint 40 is not used, the inner optimizer" in warnings[-1]
  else:  # a file that nobody needs to read the checkpoint
    assert which > 0
    for a, b in zip(
      jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True
    ):
      np.testing.assert_array_equal(a, b)


def test_checkpoints_of_an_earlier_release_have_no_digest(
  open_checkpoints, monkeypatch
):
  state = State({"w": jnp.ones(8, jnp.bfloat16)}, (), jax.random.key(1))
  json_save = checkpoint.ocp.args.JsonSave
  with monkeypatch.context() as patch:
    patch.setattr(
      checkpoint.ocp.args, "JsonSave", lambda told: json_save(position(40))
    )
    open_checkpoints().save(state, position(40))
  restored = open_checkpoints().restore(state)
  assert restored.position == position(40)
  open_checkpoints().save(state, position(44))
  assert open_checkpoints().restore(state).position == position(44)


@pytest.mark.parametrize("saved, axis, read", [(4, 0, 1), (1, 0, 8), (2, 1, 4)])
def test_any_mesh_reads_what_another_wrote(open_checkpoints, saved, axis, read):
  state = make_state(5, devices=saved, axis=axis)
  open_checkpoints().save(state, position(2))
  like = make_state(0, devices=read)
  restored = open_checkpoints().restore(like).state
  assert_same(restored, state)
  shardings = [x.sharding for x in jax.tree.leaves(restored)]
  assert shardings == [x.sharding for x in jax.tree.leaves(like)]


def test_another_programs_checkpoint_is_left_alone(
  open_checkpoints, warnings, tmp_path
):
  open_checkpoints().save(make_state(3), position(40))
  other = make_state(0, width=24)
  assert open_checkpoints().restore(other) is None
  assert len(warnings) == 1 and "checkpoint 40 is not used" in warnings[0]
  assert "params/w has shape (24, 16) here and (8, 16) there" in warnings[0]
  assert open_checkpoints().restore(make_state()).position == position(40)


def test_a_state_of_another_structure_is_left_alone(open_checkpoints, warnings):
  open_checkpoints().save(make_state(3), position(40))
  assert open_checkpoints().restore({"other": jnp.zeros(3)}) is None
  assert len(warnings) == 1
  assert "other has shape (3,) here and none there" in warnings[0]


def test_tensors_whose_shapes_are_swapped_are_named(open_checkpoints, warnings):
  saved = {"a": jnp.zeros((2, 3)), "b": [jnp.zeros((4, 5))]}
  open_checkpoints().save(saved, position(40))
  swapped = {"a": jnp.zeros((4, 5)), "b": [jnp.zeros((2, 3))]}
  assert open_checkpoints().restore(swapped) is None
  assert "a has shape (4, 5) here and (2, 3) there" in warnings[0]
  assert "b/0 has shape (2, 3) here and (4, 5) there" in warnings[0]


SAVER = """
import pathlib, sys
import jax.numpy as jnp
from ddiloco.live.checkpoint import Checkpoints
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
for n in range(1, 1000):
  state = {f"w{i}": jnp.full((64, 1024), float(n)) for i in range(16)}
  checkpoints.save(state, {"next_sample": n})
  print(n, flush=True)
"""


@pytest.mark.live
@pytest.mark.parametrize("after", [1, 3])
def test_a_kill_while_saving_leaves_the_last_complete_one(
  open_checkpoints, tmp_path, after
):
  directory = tmp_path / "checkpoints"
  saver = subprocess.Popen(
    [sys.executable, "-c", SAVER, str(directory)],
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
  )
  try:
    for n in range(1, after + 1):
      assert saver.stdout.readline() == b"%d\n" % n
    wait_for("save under way", lambda: half_written(directory), DEADLINE_S)
    saver.send_signal(signal.SIGKILL)
    rest, _ = saver.communicate(timeout=DEADLINE_S)
  finally:
    saver.kill()
    saver.wait()
  complete = [after, *map(int, rest.split())][-1]
  like = {f"w{i}": jnp.zeros((64, 1024)) for i in range(16)}
  restored = open_checkpoints().restore(like)
  number = restored.position["next_sample"]
  # It may have become complete between our last look and the signal.
  assert number in (complete, complete + 1)
  for leaf in jax.tree.leaves(restored.state):
    np.testing.assert_array_equal(leaf, np.full((64, 1024), float(number)))
  # And the next life goes on saving where the killed one was.
  again = open_checkpoints()
  again.save(like, {"next_sample": number + 1})
  assert again.restore(like).position == {"next_sample": number + 1}


def half_written(directory):
  """Whether a checkpoint is being written at this moment."""
  if not directory.is_dir():
    return False
  return any("tmp" in name for name in os.listdir(directory))


def test_a_full_disk_costs_the_checkpoint_only(
  open_checkpoints, warnings, tmp_path
):
  with small_disk(tmp_path / "disk", "1m") as disk:
    checkpoints = open_checkpoints(disk / "checkpoints")
    checkpoints.save(make_state(3), position(2))
    filler = disk / "filler"
    fill(filler)
    checkpoints.save(make_state(4), position(4))
    assert len(warnings) == 1
    assert "checkpoint 4 was not written, training goes on" in warnings[0]
    filler.unlink()
    again = open_checkpoints(disk / "checkpoints")
    assert again.restore(make_state()).position == position(2)
    again.save(make_state(6), position(6))
    assert_same(again.restore(make_state()).state, make_state(6))
    for opened in (checkpoints, again):
      opened.close()
