"""Studies: what they compute from runs, and that they can be taken up again."""

import json

import numpy as np
import pytest

from ddiloco.config import from_dict
from experiments import study
from experiments.outer_lr import analysis as outer_lr
from experiments.parity import analysis as parity
from experiments.parity import config as parity_config


def test_an_interval_covers_the_mean_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for _ in range(400):
    found = study.interval(list(rng.normal(3.0, 2.0, size=4)))
    covered += found.low <= 3.0 <= found.high
  assert 0.92 * 400 < covered < 0.98 * 400


def test_one_seed_has_no_interval():
  found = study.interval([1.5])
  assert (found.mean, found.low, found.high, found.n) == (1.5, 1.5, 1.5, 1)
  assert "one seed" in str(found)


def test_gaps_are_paired_by_seed():
  """Seeds differ by far more than the variants do."""
  baseline = {0: 1.0, 1: 2.0, 2: 4.0, 9: 7.0}
  values = {0: 1.02, 1: 2.04, 2: 4.08, 5: 1.0}
  found = study.gap_percent(values, baseline)
  assert found.n == 3
  assert found.mean == pytest.approx(2.0)
  assert found.high - found.low < 1e-9
  with pytest.raises(ValueError, match="no seed"):
    study.gap_percent({1: 1.0}, {2: 1.0})


def test_a_table_is_markdown():
  text = study.table(["a", "b"], [(1, "x"), (2, "y")])
  assert text == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |\n"


@pytest.mark.parametrize("variant", parity_config.VARIANTS)
def test_variants_of_parity_are_legal_and_train_on_the_same_batch(variant):
  config = from_dict(parity_config.get_config(variant).to_dict())
  sizes = config.learners.batch_size * config.learners.count
  assert sum(sizes) == parity_config.LEARNERS * parity_config.BATCH


def test_parity_says_what_was_measured():
  runs = parity.grid([10, 20], seeds=2)
  assert len(runs) == 2 * 2 + 4 * 2
  assert len({run.name for run in runs}) == len(runs)
  factor = {"data_parallel": 1.0, "decoupled": 1.03, "int4_up": 1.032}
  losses = {}
  for run in runs:
    variant = run.variant.partition("-")[0]
    loss = (2 + run.seed) * factor.get(variant, 1.04)
    losses.setdefault(run.variant, {})[run.seed] = loss
  found = parity.conclude(losses, [10, 20])
  assert found["gap_percent"][20].mean == pytest.approx(3.2)
  assert found["codec_percent"]["int4_up"].mean == pytest.approx(
    100 * (1.032 / 1.03 - 1)
  )
  text = parity.report(losses, found)
  assert "| 20 | 2.5000 | 2.5800 | 3.20 (3.20 to 3.20) | below 4.0 |" in text


def test_the_sweep_names_the_best_of_each():
  runs = outer_lr.grid(
    ["2", "8"], ["0.4", "0.7"], ["0.0"], ["rda"], tokens=10, seeds=1
  )
  assert len(runs) == 4
  losses = {"2-0.4-0.0-rda": {0: 2.0}, "2-0.7-0.0-rda": {0: 1.9}}
  assert outer_lr.best(losses)["2-rda"]["rate"] == "0.7"
  assert "| 0.7 | 1.900 |" in outer_lr.report(losses)


@pytest.mark.slow
def test_a_study_is_taken_up_where_it_was(tmp_path):
  runs = [
    study.Run(name, 1, ("--config=tests/sim/small.py", f"--config.{change}"))
    for name, change in (
      ("one", "stop.rounds=3"),
      ("two", "stop.rounds=4"),
      ("three", "stop.rounds=5"),
    )
  ]
  found = study.execute(runs[:1], tmp_path)
  assert found["one.1"]["rounds"] == 3
  kept = tmp_path / "runs" / "one.1" / "summary.json"
  begun = tmp_path / "runs" / "two.1"
  begun.mkdir()
  (begun / "summary.json").write_text(json.dumps({"status": "stopped"}))
  before = kept.stat().st_mtime_ns
  found = study.execute(runs, tmp_path, jobs=2)
  assert kept.stat().st_mtime_ns == before
  assert [found[run.name]["rounds"] for run in runs] == [3, 4, 5]
  losses = study.losses(runs, found)
  assert losses["two"][1] < losses["one"][1]

  told_otherwise = runs[0]._replace(arguments=runs[1].arguments)
  with pytest.raises(ValueError, match="(?s)stop.rounds=3.*stop.rounds=4"):
    study.execute([told_otherwise], tmp_path)
  assert kept.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path):
  bad = study.Run("bad", 0, ("--config=tests/sim/small.py", "--config.seed=x"))
  with pytest.raises(RuntimeError, match="bad.0 ended with 2"):
    study.execute([bad], tmp_path)
