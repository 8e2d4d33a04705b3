"""Trains under random faults, and proves that nothing was lost.

  python -m launch.chaos --config=experiments/quickstart/config.py \
    --workdir=runs/chaos --minutes=10 --seed=3 --output=chaos.json

Live processes as of launch.local, with standbys; docs/chaos.md says what
befalls them and what is checked. Exit code 1: something was lost, an
invariant broken, or a fault took no effect. Ctrl-C ends it early.
"""

import json

from absl import flags

from ddiloco.chaos import mounts
from ddiloco.chaos.kinds import FILE, S3, STORES
from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command
from launch import flags as common

MINUTES = flags.DEFINE_float(
  "minutes", 10.0, "For how long faults are injected.", lower_bound=0.01
)
SEED = flags.DEFINE_integer("seed", 0, "What draws the faults.", lower_bound=0)
EVERY_S = flags.DEFINE_float(
  "every_s", 10.0, "Seconds from fault to fault, on average.", lower_bound=0.1
)
STORE = flags.DEFINE_enum(
  "store", FILE, STORES, "The exchange: in the workdir, or on an S3 server."
)
OUTPUT = flags.DEFINE_string("output", None, "Where to write chaos.json.")


def main() -> int:
  """Runs chaos to its end; prints the verdict."""
  if common.EXCHANGE.value:
    raise ConfigError(
      "--exchange: chaos garbles what is there, so it makes an exchange of its "
      f"own. Leave it out, and choose --store={FILE} or --store={S3}."
    )
  from ddiloco.chaos import harness

  workdir = common.workdir()
  command.write_output(OUTPUT, "")  # before the work, not after it
  result = harness.run(
    common.config(workdir),
    workdir,
    seed=SEED.value,
    minutes=MINUTES.value,
    every_s=EVERY_S.value,
    store=STORE.value,
    open_at=common.open_exchange_at,
    flags_of=common.whereabouts,
    prepare=lambda: command.prepare_jax(1, 1, workdir / "cache"),
  )
  if isinstance(result, Exit):
    return result
  text = json.dumps(result, indent=2)
  print(text)
  command.write_output(OUTPUT, text + "\n")
  return Exit.FAILED if harness.failed(result) else Exit.OK


if __name__ == "__main__":
  mounts.start_again_as_root("launch.chaos")
  command.run(main)
