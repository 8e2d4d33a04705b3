"""Starts a run from a snapshot of another one, and trains on.

  python -m launch.restore --workdir=runs/a [--exchange=URL]   # a list
  python -m launch.restore --workdir=runs/a --round=240 --into=runs/b

A run takes snapshots with --config.snapshot.every_rounds=100.
"""

import pathlib

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command, local
from launch import flags as common

ROUND = flags.DEFINE_integer("round", None, "Whose snapshot; none: list them.")
INTO = flags.DEFINE_string("into", None, "Workdir of the new run.")
INTO_EXCHANGE = flags.DEFINE_string(
  "into_exchange", "", "URL of its exchange; default: in its workdir."
)
LEARNERS = flags.DEFINE_integer(
  "learners", None, "How many the new run has; default: as the old one."
)
START = flags.DEFINE_boolean(
  "start", True, "Train on; else only make the run, for launch.local to."
)


def main() -> int:
  """Lists a run's snapshots, or starts a new run from one of them."""
  from ddiloco.live import workdir as workdir_lib

  workdir = common.workdir()
  source = common.open_exchange(workdir)
  workdir_lib.has_run(source)  # refuses one without arrays
  if ROUND.value is None:
    return _list(source)
  if not INTO.value:
    raise ConfigError("--into is missing: name a workdir for the new run.")
  return _restore(workdir, source)


def _list(source) -> int:
  from ddiloco.live import restore

  found = restore.listing(source)
  if not found:
    raise ConfigError(
      f"there is no complete snapshot in {source.url}. A run takes them with "
      "--config.snapshot.every_rounds=100."
    )
  print(f"{'round':>8} {'tokens':>14} {'MB':>9}  learners")
  for item in found:
    learners = ", ".join(map(str, item.learners)) or "none"
    without = ", ".join(map(str, item.left_out))
    print(
      f"{item.round:>8} {item.tokens:>14,} {item.num_bytes / 1e6:>9.1f}  "
      + learners
      + (f" (without {without})" if without else "")
    )
  return Exit.OK


def _restore(workdir: pathlib.Path, source) -> int:
  from ddiloco.live import restore
  from ddiloco.live import workdir as workdir_lib

  into = pathlib.Path(INTO.value).absolute()
  if into == workdir:
    raise ConfigError(
      "--into is the --workdir: give the new run one of its own."
    )
  if common.CONFIG.value is not None:
    if LEARNERS.value is not None:
      raise ConfigError(
        "--learners and --config both say how many learners there are: give "
        f"--config.learners.count={LEARNERS.value} instead of --learners."
      )
    config = common.config(workdir)
  else:
    config = restore.config_of(source, LEARNERS.value)
  url = workdir_lib.exchange_url(into, INTO_EXCHANGE.value)
  target = common.open_exchange_at(url)
  manifest = restore.find(source, ROUND.value, config)
  into.mkdir(parents=True, exist_ok=True)
  with workdir_lib.lock(into):
    restore.restore(source, manifest, target, config)
    workdir_lib.settle_config(into, config, started=True)
  print(f"{into} holds a run that goes on from round {ROUND.value}.")
  if not START.value:
    where = f" --exchange={url}" if INTO_EXCHANGE.value else ""
    print(f"Train on: python -m launch.local --workdir={into}{where}")
    return Exit.OK
  return local.train(into, config, (), target)


if __name__ == "__main__":
  command.run(main)
