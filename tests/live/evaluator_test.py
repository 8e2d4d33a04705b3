"""Whose parameters are evaluated: the syncer's, a learner's, the mean."""

import dataclasses
import json
import math
import shutil
import signal

import jax
import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.engine.ports import DamagedRun
from ddiloco.live import evaluator as lib
from ddiloco.live import workdir as workdir_lib
from ddiloco.live.checkpoint import Checkpoints
from ddiloco.lm.program import build
from ddiloco.report.workdir import EVALUATIONS, read_lines
from ddiloco.sim.train import simulate
from ddiloco.types import Exit
from tests.lm.tiny import run, tiny_config, write_text


@pytest.fixture(name="world", scope="module")
def world_fixture(tmp_path_factory):
  """A run that is over, and what two of its three learners have saved."""
  workdir = tmp_path_factory.mktemp("evaluator")
  config = tiny_config(
    write_text(workdir / "text"),
    learners={"count": 3, "batch_size": (4,)},
    sync={"num_fragments": 1, "interval_steps": 3, "overlap_steps": 1},
    stop={"rounds": 6},
    codec={"up": "f32"},  # quick to compile
    merge={"rule": "average"},
    model={"layers": 1},
  )
  store = workdir_lib.open_exchange(workdir_lib.exchange_url(workdir, ""))
  assert simulate(config, workdir=workdir, store=store, seed=1) is Exit.OK
  states = {}
  for learner, steps in ((0, 3), (2, 5)):
    _, states[learner], _ = run(config, learner, steps)
    folder = workdir / "checkpoints" / f"learner-{learner}"
    checkpoints = Checkpoints(folder)
    for n, state in ((1, build(config, learner).init()), (2, states[learner])):
      checkpoints.save(
        state,
        {"incarnation": 1, "step": n, "seen": n + learner, "next_sample": n},
      )
    checkpoints.close()
  return workdir, config, states


@pytest.fixture(autouse=True)
def signals_fixture():
  before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


def evaluate(world, **options):
  """Evaluates; returns the lines that this has added."""
  workdir, config, _ = world
  before = read_lines(workdir / EVALUATIONS, [])
  code = lib.run_evaluator(config, workdir=workdir, exchange="", **options)
  assert code is Exit.OK
  after = read_lines(workdir / EVALUATIONS, [])
  assert after[: len(before)] == before
  return after[len(before) :]


def test_a_learner_is_its_newest_checkpoint(world):
  _, config, states = world
  for learner in (0, 2):
    (line,) = evaluate(world, of=f"learner:{learner}")
    program = build(config, None)
    expected = program.evaluate(states[learner].params)
    assert line["of"] == f"learner:{learner}"
    assert (line["round"], line["samples"]) == (2 + learner, [2])
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert line["bits_per_byte"] == pytest.approx(
      line["loss"] / math.log(2), rel=1e-9
    )


def test_the_mean_is_that_of_the_learners_who_have_saved(world, caplog):
  workdir, config, states = world
  (line,) = evaluate(world, of="mean")
  assert (line["of"], line["learners"], line["round"]) == ("mean", [0, 2], 4)
  mean = jax.tree.map(
    lambda a, b: ((np.float64(a) + np.float64(b)) / 2).astype("f4"),
    states[0].params,
    states[2].params,
  )
  expected = build(config, None).evaluate(mean)["loss"]
  assert line["loss"] == pytest.approx(expected, rel=1e-6)
  single = [evaluate(world, of=f"learner:{i}")[0]["loss"] for i in (0, 2)]
  assert all(abs(line["loss"] - loss) > 1e-6 for loss in single)


def test_who_has_joined_unplanned_is_evaluated_too(world):
  workdir, _, _ = world
  joined = workdir / "checkpoints/learner-3"
  shutil.copytree(workdir / "checkpoints/learner-2", joined)
  try:
    (own,), (mean,) = (
      evaluate(world, of="learner:3"),
      evaluate(world, of="mean"),
    )
  finally:
    shutil.rmtree(joined)
  assert own["learners"] == [3] and mean["learners"] == [0, 2, 3]


def test_a_learner_without_a_checkpoint_is_refused(world):
  with pytest.raises(ConfigError) as error:
    evaluate(world, of="learner:1")
  for word in ("learner:1", "no checkpoint", "checkpoint_every_steps = 200"):
    assert word in str(error.value)


def test_reading_changes_no_checkpoint(world):
  workdir, _, _ = world

  def contents():
    files = sorted((workdir / "checkpoints").rglob("*"))
    return [(p, p.stat().st_mtime_ns, p.stat().st_size) for p in files]

  before = contents()
  evaluate(world, of="mean")
  assert contents() == before


def test_the_syncer_is_evaluated_once_whatever_else_was(world):
  workdir, _, _ = world
  evaluate(world, of="mean")
  lines = [r for r in read_lines(workdir / EVALUATIONS, []) if r["round"] == 6]
  assert lines and evaluate(world) == []  # the simulation has measured it
  (workdir / EVALUATIONS).unlink()
  evaluate(world, of="learner:0")
  found = evaluate(world)
  assert [(r["of"], r["round"]) for r in found] == [
    ("syncer", 0),
    ("syncer", 6),
  ]
  assert found[1]["loss"] == lines[0]["loss"]
  assert found[1]["params_digest"] == lines[0]["params_digest"]
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["params_digest"] == found[1]["params_digest"]


def test_other_text_is_measured_anew(world):
  workdir, config, states = world
  fewer = dataclasses.replace(
    config, eval=dataclasses.replace(config.eval, sequences=3)
  )
  (line,) = evaluate((workdir, fewer, states))
  assert (line["of"], line["sequences"]) == ("syncer", 3)
  assert evaluate((workdir, fewer, states)) == []


@pytest.mark.parametrize("damage", ["delete", "flip"])
def test_parameters_that_are_gone_or_damaged_end_it(world, damage, tmp_path):
  workdir, config, states = world
  copy = tmp_path / "copy"
  shutil.copytree(workdir, copy)
  (copy / EVALUATIONS).unlink()
  (object_,) = (copy / "exchange" / "state").glob("000000006.*params")
  if damage == "delete":
    object_.unlink()
  else:
    content = bytearray(object_.read_bytes())
    content[len(content) // 2] ^= 1
    object_.write_bytes(content)
  with pytest.raises(DamagedRun, match="round 6, the newest commit, cannot"):
    evaluate((copy, config, states))


def test_other_measures_are_kept_apart(world):
  workdir, _, _ = world
  measured = {"local/acc": np.float64(0.5), "local/n": 3}
  for of in ("syncer", "learner:2"):
    (line,) = evaluate(world, of=of, measure=lambda program, params: measured)
    assert (line["of"], line["tasks"]) == (of, {"local/acc": 0.5, "local/n": 3})
    assert "loss" not in line
