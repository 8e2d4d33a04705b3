"""Trains in virtual time and prints what that cost beside the train steps.

Run by `experiments.perf.sim` with `experiments/perf/config.py:timed`. Prints
JSON: of every block of steps, its wall time over that of the steps alone.
"""

import json

from launch import command
from launch import flags as common

_SKIPPED = 5  # blocks: compilation


def main() -> int:
  """Trains, then prints."""
  workdir = common.workdir()
  config = common.config(workdir)
  command.prepare_simulation(config, workdir / "cache")
  from ddiloco.live import workdir as workdir_lib
  from ddiloco.sim.train import simulate
  from experiments.perf import timed

  store = workdir_lib.open_exchange(workdir_lib.exchange_url(workdir, ""))
  workdir_lib.settle_config(workdir, config, started=False)
  code = simulate(config, workdir=workdir, store=store, seed=1)
  ratios = [
    together_ns / alone_ns for together_ns, alone_ns in timed.blocks_ns
  ][_SKIPPED:]
  print(json.dumps({"ratios": ratios}))
  return code


if __name__ == "__main__":
  command.run(main)
