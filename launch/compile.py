"""Compiles an island's train step for a TPU slice, without the slice.

  python -m launch.compile --config=experiments/tpu/config.py:dense_2b \
    --topology=v5p:4x4x4 [--output=compile.json]

Whether it fits, the largest batch that does, what it computes and moves, and
the least time that takes at published peaks. Needs pip install '.[tpu]'.
"""

import json
import os
import pathlib
import sys

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command
from launch import flags as common

TOPOLOGY = flags.DEFINE_string(
  "topology", None, "The slice of every island, as v5e:4x4, v5p:4x4x4, v6e:8x8."
)
LEARNER = flags.DEFINE_integer("learner", 0, "Whose batch is taken.")
LARGEST = flags.DEFINE_boolean(
  "largest_batch", True, "Look for the largest batch that fits: minutes."
)
OUTPUT = flags.DEFINE_string("output", None, "JSON.")


def main() -> int:
  """Compiles for the config of --config, or of the run in --workdir."""
  from ddiloco.planning import tpus

  if TOPOLOGY.value is None:
    raise ConfigError("--topology is missing: name a slice, as v5p:4x4x4.")
  try:
    of = tpus.parse_slice(TOPOLOGY.value)
  except ValueError as error:
    raise ConfigError(f"--topology: {error}") from error
  if common.CONFIG.value is None and not common.WORKDIR.value:
    raise ConfigError("name a run with --workdir, or give --config.")
  config = common.config(pathlib.Path(common.WORKDIR.value or ""))
  command.write_output(OUTPUT, "")  # before the work, not after it
  os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU that is there is left alone
  from ddiloco.planning import island, island_text  # imports JAX

  def say(line: str) -> None:
    print(f"{line} ...", file=sys.stderr, flush=True)

  made = island.study(config, of, LEARNER.value, search=LARGEST.value, say=say)
  made["remedies"] = island_text.remedies(made, config)
  print(island_text.text(made))
  command.write_output(OUTPUT, json.dumps(made, indent=1) + "\n")
  return Exit.OK if made["memory"]["fits"] else Exit.FAILED


if __name__ == "__main__":
  command.run(main)
