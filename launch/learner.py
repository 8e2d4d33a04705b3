"""Runs one learner: `python -m launch.learner --learner=0 --config=...`."""

from absl import flags

from ddiloco.config import ConfigError, learner_value
from launch import command
from launch import flags as common

LEARNER = flags.DEFINE_integer("learner", 0, "Which learner.", lower_bound=0)


def main() -> int:
  """Joins the run and trains until it ends."""
  workdir, learner = common.workdir(), LEARNER.value
  config = common.config(workdir)
  if learner >= config.data.shards:
    raise ConfigError(
      f"--learner={learner}, but data.shards = {config.data.shards}: learners "
      f"are numbered from 0 to {config.data.shards - 1}."
    )
  command.prepare_jax(
    learner_value(config.learners.devices, learner),
    config.learners.threads,
    workdir / "cache",
  )
  from ddiloco.live.learner import run_learner  # imports JAX

  return run_learner(
    config, learner, workdir=workdir, exchange=common.EXCHANGE.value
  )


if __name__ == "__main__":
  command.run(main)
