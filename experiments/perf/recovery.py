"""Measures how fast a run heals; prints, asserts nothing.

  python -m experiments.perf.recovery --output=recovery.json [--kills=4]

Three measurements, some five minutes on two cores, on the quickstart's model:
  1. kill -9 of the syncer with a standby waiting: from the kill to the next
     commit, and the inner steps that learners lost by it;
  2. kill -9 of a learner with a checkpoint: from the start of its next process
     to its first answer, the compilation cache being warm;
  3. kill -9 of a learner without one: what its recovery moves, in copies of
     the model.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from ddiloco.live.workdir import exchange_url, open_exchange
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit
from experiments.perf import report, tapes

OUTPUT = flags.DEFINE_string("output", "", "Where the JSON goes.")
KILLS = flags.DEFINE_integer("kills", 4, "Of each kind.", lower_bound=1)
_APART = 120  # rounds between two kills
_GIVEN = re.compile(r"has the state of learner .*: (\d+) bytes")


def main(argv: list[str]) -> None:
  """Runs the measurements one after the other."""
  del argv
  targets = []
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    for measure in (_syncer, _learner, _transfer):
      print(f"{measure.__doc__.splitlines()[0]}", file=sys.stderr)
      targets += measure(root / measure.__name__)
  report.publish(targets, OUTPUT.value)


def _syncer(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """1: kill -9 of the syncer, a standby waiting."""
  _local(workdir, "syncer", "--config.live.standbys=1")
  lives = sorted(tapes.read(workdir, "syncer").items())
  committed = [e.now_ns for _, r in lives for e in tapes.events(r, "Committed")]
  learners = [tapes.read(workdir, f"learner-{i}") for i in range(3)]
  gaps_s, lost = [], []
  for kill_ns in _kills(workdir):
    gaps_s.append((min(t for t in committed if t > kill_ns) - kill_ns) / 1e9)
    lost.append(sum(map(_steps_lost, learners)))
  return [
    report.target("syncer killed to next commit, by a standby", gaps_s, "s", 5),
    report.target("inner steps lost by learners to it", lost, "steps", 0),
  ]


def _steps_lost(lives: dict[int, tapes.Records]) -> int:
  """Steps that a learner has not taken, or has taken twice."""
  numbers = [e.step for e in tapes.events(lives[1], "StepDone")]
  return len(numbers) - len(set(numbers)) + max(numbers) - len(set(numbers))


def _learner(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """2: kill -9 of a learner that has a checkpoint."""
  _local(workdir, "learner 1", "--config.live.checkpoint_every_steps=25")
  starts = _starts(workdir, "learner 1")
  lives = sorted(tapes.read(workdir, "learner-1").items())
  answers_s = []
  for (_, records), start_ns in list(zip(lives, starts, strict=True))[1:]:
    written = tapes.events(records, "AnswerWritten")
    if written:
      answers_s.append((written[0].now_ns - start_ns) / 1e9)
  return [
    report.target("killed learner started to answering", answers_s, "s", 15)
  ]


def _transfer(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """3: kill -9 of a learner that has none."""
  _local(workdir, "learner 1", "--config.live.checkpoint_every_steps=0")
  exchange = open_exchange(exchange_url(workdir, ""))
  newest = exchange.list(keys.COMMITS)[-1]
  commit = messages.decode(Commit, exchange.get(newest).value)
  model = sum(ref.params_bytes for ref in commit.fragments)
  log = (workdir / "logs/learner-1.log").read_text()
  # The optimizer's counters are some bytes beyond.
  moved = [round((int(n) + model) / model, 3) for n in _GIVEN.findall(log)]
  return [report.target("copies a recovery moves", moved, "models", 3)]


# --- The runs ---------------------------------------------------------------


def _local(workdir: pathlib.Path, who: str, *arguments: str) -> None:
  rounds = [_APART * (i + 1) for i in range(KILLS.value)]
  wait = "" if who == "syncer" else " for 0.1s"
  faults = ";".join(f"at round {t} kill {who}{wait}" for t in rounds)
  command = [
    *(sys.executable, "-m", "launch.local"),
    "--config=experiments/quickstart/config.py",
    f"--workdir={workdir}",
    f"--faults={faults}",
    "--config.stop.tokens=0",
    f"--config.stop.rounds={rounds[-1] + _APART}",
    # All are needed, so that the run waits for whoever is away.
    "--config.sync.quorum_min=3",
    *arguments,
  ]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _journal(workdir: pathlib.Path) -> list[dict[str, Any]]:
  lines = (workdir / "launch.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def _monotonic_ns(line: dict[str, Any]) -> int:
  """The journal has the wall clock; this machine's tapes the monotonic one."""
  return line["unix_ns"] - time.time_ns() + time.monotonic_ns()


def _kills(workdir: pathlib.Path) -> list[int]:
  return [
    _monotonic_ns(line)
    for line in _journal(workdir)
    if line["what"] == "exit" and line["code"] == -9
  ]


def _starts(workdir: pathlib.Path, who: str) -> list[int]:
  return [
    _monotonic_ns(line)
    for line in _journal(workdir)
    if line["what"] == "start" and line["who"] == who
  ]


if __name__ == "__main__":
  app.run(main)
