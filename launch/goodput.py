"""What share of a cluster's time is training when its chips keep failing.

  python -m launch.goodput --table --output=t1.json          # as in Table 1
  python -m launch.goodput --learners=8 --chips=1.2e6 --mtbi_years=1
  python -m launch.goodput --learners=4 --chips=8192 --failures=log.csv

The parameters' defaults are a fit to the paper's Table 1 (experiments/goodput),
not its authors'. --faults writes the failures as a script for launch.simulate.
"""

import json

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command

TABLE = flags.DEFINE_boolean("table", False, "6 kinds of run x 5 sizes.")
LEARNERS = flags.DEFINE_integer("learners", 8, "Of the run.")
CHIPS = flags.DEFINE_float("chips", 1.2e6, "Of all of them.")
ELASTIC = flags.DEFINE_boolean("elastic", True, "Step on with fewer slices.")
MTBI = flags.DEFINE_float("mtbi_years", 1.0, "Between a chip's interruptions.")
SLICE_CHIPS = flags.DEFINE_float("slice_chips", 0, "0: 128 slices in all.")
STEP = flags.DEFINE_float("step_s", None, "An inner step.")
DOWN = flags.DEFINE_float("downscale_s", None, "To go on with fewer slices.")
UP = flags.DEFINE_float("upscale_s", None, "To take slices back.")
RETURN = flags.DEFINE_string(
  "return", None, "As exponweib(a=2, c=1.5, mean=80)."
)
RESTART = flags.DEFINE_float("restart_s", None, "Not elastic: to start again.")
CHECKPOINT = flags.DEFINE_float("checkpoint_s", None, "Not elastic: of work.")
SPEED = flags.DEFINE_float("speed_std", None, "Of chips' speeds, relative.")
HOURS = flags.DEFINE_float("hours", 24, "To simulate, of each seed.")
SEEDS = flags.DEFINE_integer("seeds", 5, "How many, from --seed on.")
SEED = flags.DEFINE_integer("seed", 0, "The first.")
FAILURES = flags.DEFINE_string("failures", "", "CSV of start, end, chips.")
FAULTS = flags.DEFINE_string("faults", None, "Where to write the first seed's.")
OUTPUT = flags.DEFINE_string("output", None, "JSON.")
PAGE = flags.DEFINE_string("page", None, "HTML with the plots of --table.")


def main() -> int:
  """Simulates, prints, and writes what is asked for."""
  from ddiloco.planning import (
    cluster_flags,
    fault_script,
    goodput_page,
    goodput_table,
  )
  from ddiloco.planning.goodput import simulate
  from ddiloco.protocol import faults as faults_lib

  seeds = range(SEED.value, SEED.value + SEEDS.value)
  for flag in (OUTPUT, PAGE, FAULTS):
    command.write_output(flag, "")  # before the work, not after it
  try:
    cluster = cluster_flags.cluster(
      learners=LEARNERS.value,
      chips=CHIPS.value,
      elastic=ELASTIC.value,
      mtbi_years=MTBI.value,
      slice_chips=SLICE_CHIPS.value,
      step_s=STEP.value,
      down_s=DOWN.value,
      up_s=UP.value,
      return_form=RETURN.value,
      restart_s=RESTART.value,
      checkpoint_s=CHECKPOINT.value,
      speed_std=SPEED.value,
    )
    if TABLE.value:
      rows = goodput_table.table(cluster, hours=HOURS.value, seeds=seeds)
    else:
      log = cluster_flags.read_log(FAILURES.value, cluster.chips)
      outcome = simulate(cluster, hours=HOURS.value, seeds=seeds, log=log)
      rows = [goodput_table.describe(outcome)]
      script = fault_script.faults(outcome)
      made = json.dumps(faults_lib.to_json(script), indent=1) + "\n"
      command.write_output(FAULTS, made)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  print(goodput_table.text(rows))
  source = "" if TABLE.value else FAILURES.value
  note = cluster_flags.note(cluster, HOURS.value, len(seeds), source)
  print(f"\n{note}")
  found = json.dumps({"rows": rows, "made_with": note}, indent=1) + "\n"
  command.write_output(OUTPUT, found)
  command.write_output(PAGE, goodput_page.render(rows, note))
  return Exit.OK


if __name__ == "__main__":
  command.run(main)
