"""Runs the syncer: `python -m launch.syncer --config=... --workdir=...`.

With --standby it waits until the one that merges now is gone, on this machine
or another, and goes on from the newest commit.
"""

from absl import flags

from launch import command
from launch import flags as common

STANDBY = flags.DEFINE_bool("standby", False, "Wait for the lease.")


def main() -> int:
  """Starts or resumes the run and merges until it ends."""
  workdir = common.workdir()
  config = common.config(workdir)
  command.prepare_jax(1, config.learners.threads, workdir / "cache")
  from ddiloco.live.syncer import run_syncer  # imports JAX

  return run_syncer(
    config,
    workdir=workdir,
    exchange=common.EXCHANGE.value,
    run_key=common.run_key(),
    standby=STANDBY.value,
  )


if __name__ == "__main__":
  command.run(main)
