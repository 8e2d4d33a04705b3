"""Studies: many simulated runs of one question, paired by seed.

A study is a grid of runs. Each is `launch.simulate` in a process of its own,
so that a study can be interrupted and taken up again: a finished run stands in
`runs/<name>/summary.json` and is not repeated, one that was cut short is.
Whatever differs between two variants of a seed is what the study varies: data
order, initial parameters and the virtual schedule come from the seed.
"""

import concurrent.futures
import json
import math
import os
import pathlib
import queue
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


def execute(
  runs: Iterable[Run], folder: pathlib.Path, *, jobs: int = 1
) -> dict[str, Any]:
  """Runs what has not been run; the summaries of all, by name.

  Args:
    runs: of distinct names.
    folder: where they are kept, each in a folder of its own.
    jobs: how many at once. The CPUs are dealt among them: two runs on a core
      each are done sooner than one after the other on both.

  Raises `RuntimeError` with the end of a run's log if one fails; what runs
  beside it is finished first. `ValueError` where the folder has a run of that
  name that was told otherwise (fewer tokens, say).
  """
  runs = list(runs)
  found = {run.name: _finished(run, folder / "runs" / run.name) for run in runs}
  missing = [run for run in runs if found[run.name] is None]
  print(f"{len(missing)} of {len(runs)} runs to do", file=sys.stderr)
  shares: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
  cpus = sorted(os.sched_getaffinity(0))
  for job in range(jobs):
    shares.put(set(cpus[job::jobs]) or {cpus[job % len(cpus)]})
  begun_s = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
    pending = {
      pool.submit(_simulate, run, folder / "runs" / run.name, shares): run
      for run in missing
    }
    try:
      for done, future in enumerate(
        concurrent.futures.as_completed(pending), 1
      ):
        name = pending[future].name
        found[name] = future.result()
        left_s = (time.monotonic() - begun_s) / done * (len(missing) - done)
        print(
          f"{done} of {len(missing)}: {name}, about {left_s / 60:.0f} min left",
          file=sys.stderr,
          flush=True,
        )
    except BaseException:
      pool.shutdown(cancel_futures=True)
      raise
  return found


def _simulate(
  run: Run, workdir: pathlib.Path, shares: queue.SimpleQueue[set[int]]
) -> dict[str, Any]:
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
  log, cpus = workdir / "log.txt", shares.get()
  try:
    with log.open("w") as file:
      print(" ".join(command), file=file, flush=True)
      process = subprocess.Popen(command, stdout=file, stderr=file)
      os.sched_setaffinity(process.pid, cpus)  # before it counts them
      code = process.wait()
  finally:
    shares.put(cpus)
  summary = _summary(workdir)
  if code or summary is None:
    tail = "\n".join(log.read_text().splitlines()[-8:])
    raise RuntimeError(f"run {run.name} ended with {code}; {log}:\n{tail}")
  return summary


def _finished(run: Run, workdir: pathlib.Path) -> dict[str, Any] | None:
  summary = _summary(workdir)
  if summary is None:
    return None
  told = (workdir / "log.txt").read_text().partition("\n")[0]
  if f" {' '.join(run.arguments)} --config.seed=" not in told:
    raise ValueError(
      f"{workdir} was made by\n  {told}\nnot with\n  "
      f"{' '.join(run.arguments)}\nGive this study another output folder, or "
      "delete that run."
    )
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
