"""Fits the goodput model's parameters to the paper's Table 1.

  python -m experiments.goodput.fit --output=runs/goodput [--evaluations=60]

The paper gives no parameter of its simulation but the mean time between a
chip's interruptions. With --evaluations=0 the defaults are only compared.
"""

import pathlib

import numpy as np
from absl import app, flags
from scipy import optimize

from ddiloco.planning import cluster_flags, goodput_page
from ddiloco.planning.goodput import Cluster
from ddiloco.planning.goodput_table import table
from ddiloco.planning.returns import with_mean
from experiments import study
from experiments.goodput import analysis

OUTPUT = flags.DEFINE_string("output", None, "Folder.", required=True)
EVALUATIONS = flags.DEFINE_integer("evaluations", 60, "Of the fit; 0: none.")
SEEDS = flags.DEFINE_integer("seeds", 20, "Of the table that is compared.")
HOURS = flags.DEFINE_float("hours", 24, "Of each seed of it.")

_CHIPS = 150_000
_SHAPES = (2.0, 1.5)  # of returns: they hardly matter
_START = (1.0, 12.0, 12.0, 75.0)  # step, down, up, mean return; s
_FIT_SEEDS, _FIT_HOURS = range(100, 106), 12.0  # none that is compared


def cluster(values: np.ndarray) -> Cluster:
  """The base cluster of these parameters, kept where they make sense."""
  step_s, down_s, up_s, return_s = np.maximum(values, (0.1, 0.0, 0.0, 1.0))
  return Cluster(
    _CHIPS,
    step_s=float(step_s),
    down_s=float(down_s),
    up_s=float(up_s),
    returns=with_mean(*_SHAPES, float(return_s)),
  )


def loss(values: np.ndarray) -> float:
  """Mean absolute error in points, and what is far weighs more."""
  rows = table(cluster(values), hours=_FIT_HOURS, seeds=_FIT_SEEDS)
  errors = np.array([abs(cell.error) for cell in analysis.cells(rows)])
  found = errors.mean() + np.maximum(errors - analysis.FAR + 1, 0).sum() / 10
  print(f"{found:6.3f}  {np.round(values, 2)}", flush=True)
  return float(found)


def fit(evaluations: int) -> Cluster:
  """The best parameters found (Nelder and Mead), to two digits."""
  start = np.array(_START)
  corners = start * (1 + 0.25 * np.eye(len(start)))
  found = optimize.minimize(
    loss,
    start,
    method="Nelder-Mead",
    options={
      "maxfev": evaluations,
      "initial_simplex": np.vstack((start, corners)),
    },
  )
  return cluster(np.array([float(f"{x:.2g}") for x in found.x]))


def main(argv: list[str]) -> None:
  """Fits, compares, and writes results.md, results.json and results.html."""
  del argv
  folder = pathlib.Path(OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  made = fit(EVALUATIONS.value) if EVALUATIONS.value else Cluster(_CHIPS)
  rows = table(made, hours=HOURS.value, seeds=range(SEEDS.value))
  note = cluster_flags.note(made, HOURS.value, SEEDS.value)
  text = analysis.report(rows, note)
  results = {
    "made_with": note,
    "mean_absolute_error": analysis.mean_error(rows),
    "rows": rows,
  }
  study.publish(folder, text, results)
  (folder / "results.html").write_text(goodput_page.render(rows, note))


if __name__ == "__main__":
  app.run(main)
