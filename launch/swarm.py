"""What `launch.simulate` does for a swarm, and the flags of that."""

import json
import pathlib
import sys

from absl import flags

from ddiloco.types import Exit
from launch import command
from launch import flags as common

FLAGS = ("seeds", "output", "until")
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


def run(seed: int) -> int:
  """Runs the seeds from `seed` on, or shows where one stands."""
  from ddiloco.sim import swarm

  config = None
  if common.CONFIG.value is not None:
    config = common.config(pathlib.Path())
  if UNTIL.value:
    print(swarm.show(seed, config, UNTIL.value))
    return Exit.OK
  command.write_output(OUTPUT, "")  # before the work, not after it
  found = swarm.run(
    seed,
    SEEDS.value,
    config=config,
    arguments=[a for a in sys.argv[1:] if a.startswith("--config")],
  )
  command.write_output(OUTPUT, json.dumps(found, indent=2) + "\n")
  if found["violations"]:
    return Exit.FAILED
  return Exit.OK if found["seeds"] == SEEDS.value else Exit.STOPPED
