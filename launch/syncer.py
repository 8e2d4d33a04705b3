"""Runs the syncer: `python -m launch.syncer --config=... --workdir=...`.

With --standby it waits until one that merges now is gone, on this machine or
another, and goes on from the newest commit. Where the syncer has several shards
(--config.syncer.shards), --shard says which one this is; a standby takes any.
"""

from absl import flags

from ddiloco.config import ConfigError
from launch import command
from launch import flags as common

STANDBY = flags.DEFINE_bool("standby", False, "Wait for the lease.")
SHARD = flags.DEFINE_integer(
  "shard", None, "Which of the syncer's; default: 0, of a standby any."
)


def main() -> int:
  """Starts or resumes the run and merges until it ends."""
  workdir = common.workdir()
  config = common.config(workdir)
  shard = SHARD.value
  if shard is not None and not 0 <= shard < config.syncer.shards:
    raise ConfigError(
      f"--shard={shard}: syncer.shards = {config.syncer.shards}, so they are 0 "
      f"to {config.syncer.shards - 1}."
    )
  command.prepare_jax(1, config.learners.threads, workdir / "cache")
  from ddiloco.live.syncer import run_syncer  # imports JAX

  return run_syncer(
    config,
    workdir=workdir,
    exchange=common.EXCHANGE.value,
    run_key=common.run_key(),
    standby=STANDBY.value,
    shard=shard,
  )


if __name__ == "__main__":
  command.run(main)
