"""One learner with and without the exchange, in alternating blocks.

Run by `experiments.perf.live`, pinned to a core of its own; the syncer runs
on another one. Prints JSON: step times of every block, in ms, and the own
thread's exchange time per round.
"""

import json
import pathlib
import threading
import time

from absl import flags

from experiments.perf import tapes
from launch import command
from launch import flags as common

BLOCKS = flags.DEFINE_integer("blocks", 8, "Pairs of blocks.", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 60, "Steps of a block.", lower_bound=10)
_SKIPPED = 3  # of every block: caches and the first answers


def main() -> int:
  """Measures and prints."""
  workdir = common.workdir()
  config = common.config(workdir)
  command.prepare_jax(1, 1, workdir / "cache")
  from ddiloco.live import setup as setup_lib
  from ddiloco.live.checkpoint import Checkpoints
  from ddiloco.live.learner import Life

  setup = setup_lib.open_setup(
    config, 0, workdir=workdir, exchange="", interrupt=threading.Event()
  )
  checkpoints = Checkpoints(pathlib.Path(workdir / "checkpoints" / "perf"))
  blocks = {"on": [], "off": []}
  for number in range(2 * BLOCKS.value):
    setup.state = setup.program.init()
    if number % 2:
      blocks["off"].append(_plain_block(setup, STEPS.value))
      continue
    life = Life(setup, 0, checkpoints)
    driver = life.join()
    _stop_after(driver, STEPS.value)
    driver.run(life.joined)
    blocks["on"].append(life.joined.incarnation)
  lives = tapes.read(workdir, "learner-0")
  for index, incarnation in enumerate(blocks["on"]):
    done = tapes.events(lives[incarnation], "StepDone")
    blocks["on"][index] = tapes.gaps_ms(done)[_SKIPPED:]
  exchange_ms = [
    event.exchange_ns / 1e6
    for records in lives.values()
    for event in tapes.events(records, "StepDone")[_SKIPPED:]
    if event.exchange_ns
  ]
  print(json.dumps(blocks | {"exchange_ms": exchange_ms}))
  return 0


def _plain_block(setup, steps: int) -> list[float]:
  """The same program without the exchange: step, wait, step."""
  import jax

  program, state, times = setup.program, setup.state, []
  size = program.samples_per_step
  batch = program.batch(0, size)
  for i in range(steps + 1):
    state, metrics = program.step(state, batch, 0)
    batch = program.batch((i + 1) * size, size)
    jax.block_until_ready(metrics)
    times.append(time.monotonic_ns())
  pairs = zip(times, times[1:], strict=False)
  return [(b - a) / 1e6 for a, b in pairs][_SKIPPED:]


def _stop_after(driver, steps: int) -> None:
  def watch():
    while not driver.stopped.wait(0.02):
      state = driver.actor.state
      if state is not None and state.step >= steps:
        driver.request_stop("the block is over")
        return

  driver.background("watch", watch)


if __name__ == "__main__":
  command.run(main)
