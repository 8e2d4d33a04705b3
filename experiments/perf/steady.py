"""Measures whether a long run stays as it is; prints, asserts nothing.

  python -m experiments.perf.steady --output=steady.json [--rounds=900]

One run of the quickstart's model with snapshots, sampled every second:
  1. by how much the memory of each process grows over 500 rounds (a line
     through what it has had since round `--settled`, and nothing is asked of
     the rounds before: programs are compiled and caches filled then);
  2. how large the exchange is at its largest, without its tapes, against the
     bound of docs/protocol.md, "Retention".
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from absl import app, flags

from ddiloco.algo.fragments import Layout
from ddiloco.engine.loading import answer_bytes, make_codec
from ddiloco.live.workdir import exchange_url, open_exchange, read_config
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit
from experiments.perf import report

OUTPUT = flags.DEFINE_string("output", "", "Where the JSON goes.")
ROUNDS = flags.DEFINE_integer("rounds", 900, "Of the run.", lower_bound=100)
SETTLED = flags.DEFINE_integer("settled", 300, "Sampled from this round on.")
_SNAPSHOTS_EVERY, _KEPT = 100, 2
_ATTEMPTS = 2  # of an answer; more are rare
_GROWTH_MAX_MB = 20  # per 500 rounds: a tenth of a leak of 0.4 MB a round


def main(argv: list[str]) -> None:
  """Runs, samples, and compares."""
  del argv
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    samples, sizes = _run(workdir)
    bound = _bound(workdir)
  targets = []
  for who, found in sorted(samples.items()):
    rounds, resident = np.array(found, np.float64).T
    if len(rounds) > 10:
      slope, _ = np.polyfit(rounds, resident, 1)
      grown = [round(float(slope) * 500 / 1e6, 2)]
      targets.append(
        report.target(f"{who} grows in 500 rounds", grown, "MB", _GROWTH_MAX_MB)
      )
  share = [round(max(sizes) / bound, 3)]
  targets.append(report.target("exchange, of its bound", share, "parts", 1))
  report.publish(targets, OUTPUT.value)


def _run(workdir: pathlib.Path) -> tuple[dict[str, list], list[int]]:
  """(round, resident bytes) of every process, and the exchange's sizes."""
  command = [
    *(sys.executable, "-m", "launch.local"),
    "--config=experiments/quickstart/config.py",
    f"--workdir={workdir}",
    "--faults=",
    "--config.stop.tokens=0",
    f"--config.stop.rounds={ROUNDS.value}",
    f"--config.snapshot.every_rounds={_SNAPSHOTS_EVERY}",
    f"--config.snapshot.keep={_KEPT}",
  ]
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  samples: dict[str, list[tuple[int, int]]] = {}
  sizes: list[int] = []
  while process.poll() is None:
    time.sleep(1.0)
    t = _newest(workdir)
    if t < SETTLED.value:
      continue
    sizes.append(_stored(workdir / "exchange"))
    pids = {"launcher": process.pid} | _pids(workdir)
    for who, pid in pids.items():
      resident = _resident(pid)
      if resident:
        samples.setdefault(who, []).append((t, resident))
  if process.returncode:
    sys.exit(f"the run has failed with exit code {process.returncode}")
  return samples, sizes


def _newest(workdir: pathlib.Path) -> int:
  names = (path.name for path in (workdir / "exchange/commit").glob("*"))
  return max((int(name) for name in names if name.isdigit()), default=0)


def _pids(workdir: pathlib.Path) -> dict[str, int]:
  """The newest process of every role."""
  found = {}
  for text in (workdir / "launch.jsonl").read_text().splitlines():
    line: dict[str, Any] = json.loads(text)
    if line["what"] == "start":
      found[line["who"]] = line["pid"]
  return found


def _resident(pid: int) -> int:
  try:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
  except OSError:
    return 0
  for line in status.splitlines():
    if line.startswith("VmRSS:"):
      return 1024 * int(line.split()[1])
  return 0


def _stored(exchange: pathlib.Path) -> int:
  """Bytes of all objects but tapes."""
  total = 0
  for path in exchange.rglob("*"):
    if path.relative_to(exchange).parts[0] == "tape":
      continue
    try:
      total += path.stat().st_size if path.is_file() else 0
    except OSError:
      pass  # swept meanwhile
  return total


def _bound(workdir: pathlib.Path) -> int:
  """docs/protocol.md, "Retention", with what this run has in it."""
  config = read_config(workdir)
  store = open_exchange(exchange_url(workdir, ""))
  names = store.list(keys.COMMITS)
  first = messages.decode(Commit, store.get(keys.commit(0)).value)
  newest = store.get(names[-1]).value
  refs = messages.decode(Commit, newest).fragments
  fragments = [ref.params_bytes + ref.outer_bytes for ref in refs]
  layout = Layout.from_json(json.loads(first.genesis.layout))
  answers = answer_bytes(layout, make_codec(config))
  snapshots = (workdir / "exchange/snapshot").glob("*")
  snapshot = sum(path.stat().st_size for path in snapshots) // _KEPT
  return (
    2 * sum(fragments)
    + max(fragments) * max(config.sync.overlap_steps, 1)
    + config.learners.count * sum(answers) * _ATTEMPTS
    + 2 * config.sync.interval_steps * len(newest)
    + 5 * len(names)
    + (_KEPT + 1) * snapshot
  )


if __name__ == "__main__":
  app.run(main)
