"""Runs one learner, on any machine that sees the run's exchange.

  python -m launch.learner --learner=7 --config=... --workdir=... \
    [--exchange=URL] [--run_key_file=FILE]

It joins the run that is there, or waits for its start; SIGTERM ends it in good
order. Numbers from learners.count up to data.shards - 1 are free for learners
that nobody has planned. Taking a number that is at work replaces that learner.
"""

from absl import flags

from ddiloco.config import check_learner, learner_value
from launch import command
from launch import flags as common

LEARNER = flags.DEFINE_integer("learner", 0, "Which learner.", lower_bound=0)


def main() -> int:
  """Joins the run and trains until it ends."""
  workdir, learner = common.workdir(), LEARNER.value
  config = common.config(workdir)
  check_learner(config, learner)
  run_key = common.run_key()
  command.prepare_jax(
    learner_value(config.learners.devices, learner),
    config.learners.threads,
    workdir / "cache",
  )
  from ddiloco.live.learner import run_learner  # imports JAX

  return run_learner(
    config,
    learner,
    workdir=workdir,
    exchange=common.EXCHANGE.value,
    run_key=run_key,
  )


if __name__ == "__main__":
  command.run(main)
