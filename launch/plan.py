"""Plans a run on TPU slices: batches, speed, exchange, failures, what to set.

  python -m launch.plan --config=experiments/tpu/config.py:dense_2b \
    --islands='2*v5p:4x4x4,2*v6e:8x8' --wan_gbps=2 --mtbi_years=1 \
    [--output=plan.json] [--page=plan.html]

With pip install '.[tpu]' every kind of slice is compiled for (minutes); else,
and with --nocompile, step times are analytic.
"""

import dataclasses
import json
import os
import pathlib
import sys

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command
from launch import flags as common

ISLANDS = flags.DEFINE_string(
  "islands", None, "As 2*v5p:4x4x4,2*v6e:8x8: one learner each."
)
COMPILE = flags.DEFINE_boolean(
  "compile",
  None,
  "Compile for every kind of slice; default: if libtpu is there.",
)
WAN = flags.DEFINE_float("wan_gbps", None, "Gbit/s of each island's link.")
LATENCY = flags.DEFINE_float("latency_s", None, "To the exchange, one way.")
NEAR = flags.DEFINE_float("syncer_latency_s", None, "From the syncer to it.")
MFU = flags.DEFINE_float("mfu", None, "Share of peak in model operations.")
CORES = flags.DEFINE_float("syncer_cores", None, "That merge.")
MTBI = flags.DEFINE_float("mtbi_years", None, "Between a chip's interruptions.")
RESTART = flags.DEFINE_float("restart_s", None, "From a return to a step.")
TOKENS = flags.DEFINE_integer("tokens", None, "Budget, for stop.tokens.")
OUTPUT = flags.DEFINE_string("output", None, "JSON.")
PAGE = flags.DEFINE_string("page", None, "HTML with plots.")


def main() -> int:
  """Plans for the config of --config, or of the run in --workdir."""
  from ddiloco.planning import tpus

  for name in ("islands", "wan_gbps"):
    flag = flags.FLAGS[name]
    if flag.value is None:
      raise ConfigError(f"--{name} is missing: {flag.help}")
  if common.CONFIG.value is None and not common.WORKDIR.value:
    raise ConfigError("name a run with --workdir, or give --config.")
  config = common.config(pathlib.Path(common.WORKDIR.value or ""))
  if TOKENS.value is not None:
    stop = dataclasses.replace(config.stop, tokens=TOKENS.value)
    config = dataclasses.replace(config, stop=stop)
  for flag in (OUTPUT, PAGE):
    command.write_output(flag, "")  # before the work, not after it
  os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU that is there is left alone
  from ddiloco.engine import loading
  from ddiloco.planning import aot, plan_page, planner  # imports JAX
  from ddiloco.planning.plan import Assumptions

  given = {
    "wan_gbps": WAN.value,
    "latency_s": LATENCY.value,
    "syncer_latency_s": NEAR.value,
    "mfu": MFU.value,
    "syncer_cores": CORES.value,
    "mtbi_years": MTBI.value,
    "restart_s": RESTART.value,
  }
  try:
    slices = tpus.parse_islands(ISLANDS.value)
    assumed = Assumptions(**{k: v for k, v in given.items() if v is not None})
    compiling = COMPILE.value
    if compiling is None:
      compiling = aot.available() and loading.takes(config, "devices")
    made = planner.make_plan(
      config, slices, assumed, compiling=compiling, say=_say
    )
  except ValueError as error:
    raise ConfigError(str(error)) from error
  print(planner.text(made))
  command.write_output(OUTPUT, json.dumps(made, indent=1) + "\n")
  command.write_output(PAGE, plan_page.render(made))
  return Exit.OK


def _say(line: str) -> None:
  print(f"{line} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
  command.run(main)
