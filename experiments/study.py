"""Studies: many simulated runs of one question, paired by seed.

A study is a grid of runs. Each is `launch.simulate` in a process of its own,
so that a study can be interrupted and taken up again: a finished run stands in
`runs/<name>/summary.json` and is not repeated, one that was cut short is.
Whatever differs between two variants of a seed is what the study varies: data
order, initial parameters and the virtual schedule come from the seed.
"""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import scipy.stats

_CONFIDENCE = 0.95


class Run(NamedTuple):
  """One simulated run: what it varies, and how it is told to."""

  variant: str
  seed: int
  arguments: tuple[str, ...]  # of launch.simulate, workdir and seed apart

  @property
  def name(self) -> str:
    """The folder it is kept in."""
    return f"{self.variant}.{self.seed}"


class Interval(NamedTuple):
  """A mean and its confidence interval; without one where n = 1."""

  mean: float
  low: float
  high: float
  n: int

  def __str__(self) -> str:
    if self.n < 2:
      return f"{self.mean:.2f} (one seed)"
    return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def execute(runs: Iterable[Run], folder: pathlib.Path) -> dict[str, Any]:
  """Runs what has not been run; the summaries of all, by name.

  Raises `RuntimeError` with the end of a run's log if one fails.
  """
  runs, found = list(runs), {}
  begun_s, done = time.monotonic(), 0
  for number, run in enumerate(runs, 1):
    workdir = folder / "runs" / run.name
    summary = _summary(workdir)
    if summary is None:
      left = len(runs) - number + 1
      pace_s = (time.monotonic() - begun_s) / done if done else 0
      hint = f", about {left * pace_s / 60:.0f} min left" if done else ""
      print(f"{number} of {len(runs)}: {run.name}{hint}", file=sys.stderr)
      summary = _simulate(run, workdir)
      done += 1
    found[run.name] = summary
  return found


def _simulate(run: Run, workdir: pathlib.Path) -> dict[str, Any]:
  shutil.rmtree(workdir, ignore_errors=True)
  workdir.mkdir(parents=True)
  command = [
    sys.executable,
    "-m",
    "launch.simulate",
    *run.arguments,
    f"--config.seed={run.seed}",
    f"--seed={run.seed}",
    f"--workdir={workdir}",
  ]
  log = workdir / "log.txt"
  with log.open("w") as file:
    print(" ".join(command), file=file, flush=True)
    code = subprocess.run(command, stdout=file, stderr=file).returncode
  summary = _summary(workdir)
  if code or summary is None:
    tail = "\n".join(log.read_text().splitlines()[-8:])
    raise RuntimeError(f"run {run.name} ended with {code}; {log}:\n{tail}")
  return summary


def _summary(workdir: pathlib.Path) -> dict[str, Any] | None:
  try:
    summary = json.loads((workdir / "summary.json").read_text())
  except (OSError, ValueError):
    return None
  return summary if summary["status"] == "completed" else None


# --- Numbers ----------------------------------------------------------------


def interval(values: Sequence[float]) -> Interval:
  """The mean with its 95% interval (Student's t)."""
  n, mean = len(values), sum(values) / len(values)
  if n < 2:
    return Interval(mean, mean, mean, n)
  variance = sum((x - mean) ** 2 for x in values) / (n - 1)
  quantile = scipy.stats.t.ppf((1 + _CONFIDENCE) / 2, n - 1)
  half = quantile * math.sqrt(variance / n)
  return Interval(mean, mean - half, mean + half, n)


def gap_percent(
  values: Mapping[int, float], baseline: Mapping[int, float]
) -> Interval:
  """How much larger `values` are, seed by seed, in percent.

  Both are by seed; the seeds they share count.
  """
  seeds = sorted(values.keys() & baseline.keys())
  if not seeds:
    raise ValueError("no seed has both a variant's run and its baseline's")
  return interval([100 * (values[s] / baseline[s] - 1) for s in seeds])


def losses(
  runs: Iterable[Run], summaries: Mapping[str, Any]
) -> dict[str, dict[int, float]]:
  """Held-out nats per byte at the end, by variant and seed."""
  found: dict[str, dict[int, float]] = {}
  for run in runs:
    loss = summaries[run.name]["eval"]["loss"]
    found.setdefault(run.variant, {})[run.seed] = loss
  return found


# --- What is kept -----------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
  """A Markdown table."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def publish(
  folder: pathlib.Path, text: str, results: Mapping[str, Any]
) -> None:
  """Writes `results.md` and `results.json`, and prints the first."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "results.md").write_text(text)
  (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
  print(text)
