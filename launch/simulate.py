"""Runs a whole run in virtual time.

  python -m launch.simulate --config=experiments/quickstart/config.py \
    --workdir=runs/s --seed=7

trains as `launch.local` does and leaves what that leaves; only time is
virtual. Without arrays, many small worlds test the protocol under faults:

  python -m launch.simulate --compute=none --seeds=1000 [--seed=N] \
    --output=swarm.json [--config=...] [--until=EVENT]
"""

import json
import pathlib
import sys

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command, faults
from launch import flags as common

COMPUTE = flags.DEFINE_enum(
  "compute", "jax", ["jax", "none"], "Train, or test the protocol alone."
)
SEED = flags.DEFINE_integer(
  "seed", 0, "Of every chance; the first one of a swarm.", lower_bound=0
)
SEEDS = flags.DEFINE_integer(
  "seeds", 100, "How many seeds a swarm runs.", lower_bound=1
)
OUTPUT = flags.DEFINE_string(
  "output", None, "Where a swarm's counts are written, as JSON."
)
UNTIL = flags.DEFINE_integer(
  "until",
  0,
  "Stop just before this event of --seed, and show every actor.",
  lower_bound=0,
)


def main() -> int:
  """Trains in virtual time, or runs a swarm."""
  return _train() if COMPUTE.value == "jax" else _swarm()


def _train() -> int:
  from ddiloco.live import workdir as workdir_lib

  workdir = common.workdir()
  config = common.config(workdir)
  script = faults.script(config, live=False)
  command.prepare_simulation(config, workdir / "cache")
  from ddiloco.sim.train import simulate  # imports JAX

  with workdir_lib.lock(workdir):
    url = workdir_lib.exchange_url(workdir, common.EXCHANGE.value)
    store = workdir_lib.open_exchange(url)
    if workdir_lib.has_run(store):
      raise ConfigError(
        f"{url} holds a run already, and a simulation starts a new one: choose "
        "another --workdir."
      )
    workdir_lib.settle_config(workdir, config, started=False)
    return simulate(
      config, workdir=workdir, store=store, seed=SEED.value, faults=script
    )


def _swarm() -> int:
  from ddiloco.sim import swarm

  config = None
  if common.CONFIG.value is not None:
    config = common.config(pathlib.Path())
  if UNTIL.value:
    print(swarm.show(SEED.value, config, UNTIL.value))
    return Exit.OK
  command.write_output(OUTPUT.value, "")  # before the work, not after it
  found = swarm.run(
    SEED.value,
    SEEDS.value,
    config=config,
    arguments=[a for a in sys.argv[1:] if a.startswith("--config")],
  )
  command.write_output(OUTPUT.value, json.dumps(found, indent=2) + "\n")
  if found["violations"]:
    return Exit.FAILED
  return Exit.OK if found["seeds"] == SEEDS.value else Exit.STOPPED


if __name__ == "__main__":
  command.run(main)
