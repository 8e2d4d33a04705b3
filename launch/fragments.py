"""Shows how a config cuts its model into fragments; nothing is trained.

  python -m launch.fragments --config=experiments/quickstart/config.py \
    --config.sync.fragmentation=layer_strided [--all] [--output=f.json]

Sizes, peak over mean, idle steps, bytes per step. --all compares every
strategy. No array is made, so it works for models that fit no machine.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.protocol.schedule import make_schedule
from ddiloco.types import Exit
from launch import command
from launch import flags as common

ALL = flags.DEFINE_boolean("all", False, "Compare all strategies.")
OUTPUT = flags.DEFINE_string(
  "output", None, "Where to write the table, or with --all the list, as JSON."
)


def main() -> int:
  """Prints the fragments of --config, or of the run in --workdir."""
  if common.CONFIG.value is None and not common.WORKDIR.value:
    raise ConfigError("name a run with --workdir, or give --config.")
  config = common.config(pathlib.Path(common.WORKDIR.value or ""))
  command.write_output(OUTPUT, "")  # before the work, not after it
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from ddiloco.algo.fragments import STRATEGIES  # imports JAX
  from ddiloco.engine import loading
  from ddiloco.report import fragments

  params = loading.abstract_params(loading.load_program(config, None, ""))
  sync = config.sync
  schedule = make_schedule(sync)

  def describe(strategy: str) -> dict[str, Any]:
    chosen = dataclasses.replace(sync, fragmentation=strategy)
    layout = loading.lay_out(dataclasses.replace(config, sync=chosen), params)
    up, down = loading.traffic_bytes(config, layout)
    return fragments.describe(layout, schedule, up=up, down=down)

  if ALL.value:
    made = fragments.compare(STRATEGIES, describe)
    print(fragments.comparison(made))
  else:
    made = describe(sync.fragmentation)
    print(fragments.text(made))
  command.write_output(OUTPUT, json.dumps(made, indent=2) + "\n")
  return Exit.OK


if __name__ == "__main__":
  command.run(main)
