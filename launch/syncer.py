"""Runs the syncer: `python -m launch.syncer --config=... --workdir=...`."""

from launch import command
from launch import flags as common


def main() -> int:
  """Starts or resumes the run and merges until it ends."""
  workdir = common.workdir()
  config = common.config(workdir)
  command.prepare_jax(1, config.learners.threads, workdir / "cache")
  from ddiloco.live.syncer import run_syncer  # imports JAX

  return run_syncer(config, workdir=workdir, exchange=common.EXCHANGE.value)


if __name__ == "__main__":
  command.run(main)
