"""Runs a whole run on this machine: a syncer, M learners, an evaluator.

  python -m launch.local --config=experiments/quickstart/config.py \
    --workdir=runs/a [--config.learners.count=4] [--exchange=URL] \
    [--faults='at round 60 kill learner 1 for 5s']

Run again on the same workdir, it resumes.
"""

import pathlib

from ddiloco.config import Config, ConfigError
from ddiloco.engine.sealing import SealedExchange
from ddiloco.protocol.faults import Fault
from ddiloco.types import Exit, Status
from launch import command, faults
from launch import flags as common

_LOOK_S = 2.0


def main() -> int:
  """Trains until the run ends; prints the summary and where the report is."""
  workdir = common.workdir()
  config = common.config(workdir)
  if config.elastic.slices > 1:
    raise ConfigError(
      f"elastic.slices = {config.elastic.slices}, but slices that fail and "
      "return are simulated only: use launch.simulate, or "
      "--config.elastic.slices=1."
    )
  script = faults.script(config, live=True)
  return train(workdir, config, script, common.open_exchange(workdir))


def train(
  workdir: pathlib.Path,
  config: Config,
  script: tuple[Fault, ...],
  exchange: SealedExchange,
) -> int:
  """Trains in this workdir until the run ends, under a fault script."""
  from ddiloco.live import workdir as workdir_lib
  from ddiloco.live.supervisor import Supervisor
  from ddiloco.report import summary as report

  with workdir_lib.lock(workdir):
    started = workdir_lib.has_run(exchange)
    workdir_lib.settle_config(workdir, config, started=started)
    supervisor = Supervisor(
      config,
      script,
      workdir=workdir,
      # Who watches must not hang where the store does.
      exchange=common.open_exchange_at(exchange.url, deadline_s=_LOOK_S),
      arguments=(f"--workdir={workdir}", *common.whereabouts(exchange)),
    )
    status = supervisor.run()
    nothing = supervisor.exit is Exit.USER_ERROR or supervisor.lost
    if nothing or not workdir_lib.has_run(exchange):
      return supervisor.exit
    print(report.text(report.write(exchange, workdir)))
    if status is Status.STOPPED:
      print("Stopped. The same command goes on from here.")
    return supervisor.exit


if __name__ == "__main__":
  command.run(main)
