"""Measures the simulator against its targets; prints, asserts nothing.

  python -m experiments.perf.sim --output=sim.json [--seeds=N] \
    [--quickstart=WORKDIR]

Five measurements, about five minutes on one core with 100 seeds (a finished
live quickstart adds its replay):
  1. events per second of CPU time, protocol only. An event is an entry of the
     world's heap that ran: an arrival at the store or back, a timer, the end
     of a step. A machine's transition comes with every fourth;
  2. memory of a run without history, and tape bytes, per round;
  3. a swarm: seeds with a violation, and its events per second;
  4. simulated training: wall time over the sum of its train steps;
  5. replay: commits whose parameters do not come out the same.
"""

import gc
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import tracemalloc
from typing import Any

from absl import app, flags

from ddiloco.config import from_dict
from ddiloco.protocol import keys
from ddiloco.sim import swarm
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.world import SYNCER, World
from experiments.perf import report

OUTPUT = flags.DEFINE_string("output", "", "Where the JSON goes.")
SEEDS = flags.DEFINE_integer("seeds", 100, "Of the swarm.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 0, "The swarm's first.", lower_bound=0)
QUICKSTART = flags.DEFINE_string(
  "quickstart", "", "A finished live run's workdir, to be replayed too."
)
_LEARNERS = 3
_ROUNDS = 300  # of a stretch that is timed
_STRETCHES = 7


def main(argv: list[str]) -> None:
  """Runs the measurements one after the other."""
  del argv
  targets = []
  with tempfile.TemporaryDirectory() as folder:
    for measure in (_speed, _memory, _swarm, _training):
      print(f"{measure.__doc__.splitlines()[0]}", file=sys.stderr)
      targets += measure(pathlib.Path(folder))
  report.publish(targets, OUTPUT.value)


def _world(*, history: bool) -> World:
  """A calm run of three learners that does not end by itself."""
  config = from_dict(
    {
      "stop": {"rounds": 10**9},
      "learners": {"count": _LEARNERS},
      "sync": {"num_fragments": 6, "interval_steps": 6},
    }
  )
  world = World(
    config, NullCompute(config), seed=7, code_version="perf", history=history
  )
  world.start(SYNCER)
  for i in range(_LEARNERS):
    world.start(f"learner-{i}")
  return world


def _advance(world: World, rounds: int) -> None:
  goal = world.committed + rounds
  world.run(lambda: world.committed >= goal, events_max=10**9)


def _speed(folder: pathlib.Path) -> list[dict[str, Any]]:
  """1: events per second of CPU time."""
  del folder
  world, rates = _world(history=True), []
  _advance(world, 20)
  for _ in range(_STRETCHES):
    events, begin_s = world.heap.count, time.process_time()
    _advance(world, _ROUNDS)
    elapsed_s = time.process_time() - begin_s
    rates.append((world.heap.count - events) / elapsed_s)
  return [
    report.target(
      "protocol only, one core", rates, "events/s", 20_000, at_least=True
    )
  ]


def _memory(folder: pathlib.Path) -> list[dict[str, Any]]:
  """2: memory of a run without history, and tape bytes, per round."""
  del folder
  world = _world(history=False)
  _advance(world, _ROUNDS)  # caches are full, and retention sweeps
  tracemalloc.start()
  _advance(world, _ROUNDS)
  before_bytes = _traced_bytes()
  _advance(world, 3 * _ROUNDS)
  grown_bytes = _traced_bytes() - before_bytes
  tracemalloc.stop()
  world = _world(history=True)
  _advance(world, _ROUNDS)
  names = world.exchange.names(keys.TAPES)
  tapes_bytes = sum(len(world.exchange.peek(name)) for name in names)
  return [
    # What stays of a swept commit is its key, and who has it.
    report.target(
      "memory per round, without history",
      [grown_bytes / (3 * _ROUNDS)],
      "bytes",
      512,
    ),
    report.target(
      f"tapes per round, {_LEARNERS} learners and the syncer",
      [tapes_bytes / _ROUNDS],
      "bytes",
      8192,
    ),
  ]


def _traced_bytes() -> int:
  gc.collect()
  return tracemalloc.get_traced_memory()[0]


def _swarm(folder: pathlib.Path) -> list[dict[str, Any]]:
  """3: the swarm."""
  del folder

  def say(text: str) -> None:
    print(text, file=sys.stderr)

  found = swarm.run(SEED.value, SEEDS.value, report=say)
  return [
    report.target(
      f"violations in {SEEDS.value} seeds from {SEED.value} on",
      [found["violations"]],
      "seeds",
      0,
    ),
    report.target(
      "swarm, audits included",
      [found["events_per_s"]],
      "events/s",
      20_000,
      at_least=True,
    ),
  ]


def _training(folder: pathlib.Path) -> list[dict[str, Any]]:
  """4, 5: simulated training, and its replay."""
  workdir = folder / "training"
  config = "--config=experiments/perf/config.py:timed"
  told = _run("experiments.perf.training", config, f"--workdir={workdir}")
  ratios = json.loads(told.splitlines()[-1])["ratios"]
  targets = [
    report.target(
      "simulated training, wall time over train steps", ratios, "ratio", 1.1
    ),
    _replay(workdir, folder, "simulated"),
  ]
  if QUICKSTART.value:
    targets.append(_replay(pathlib.Path(QUICKSTART.value), folder, "live"))
  return targets


def _replay(
  workdir: pathlib.Path, folder: pathlib.Path, kind: str
) -> dict[str, Any]:
  output = folder / f"{kind}.json"
  _run("launch.replay", f"--workdir={workdir}", f"--output={output}")
  found = json.loads(output.read_text())
  return report.target(
    f"replay of a {kind} run: of {found['commits']} commits, unlike",
    [found["commits"] - found["matched"]],
    "commits",
    0,
  )


def _run(module: str, *arguments: str) -> str:
  """The output of a command; one that fails has said why."""
  done = subprocess.run(
    [sys.executable, "-m", module, *arguments],
    stdout=subprocess.PIPE,
    text=True,
    check=False,
  )
  return done.stdout


if __name__ == "__main__":
  app.run(main)
