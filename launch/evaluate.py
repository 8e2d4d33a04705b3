"""Evaluates a run: `python -m launch.evaluate --workdir=... [--follow]`.

Without --config the run's own resolved config (config.json) holds, as for
every command.
"""

from absl import flags

from launch import command
from launch import flags as common

FOLLOW = flags.DEFINE_boolean(
  "follow", False, "Evaluate every eval.every_rounds rounds until the end."
)


def main() -> int:
  """Measures held-out loss; only reads the exchange."""
  workdir = common.workdir()
  config = common.config(workdir)
  command.prepare_jax(1, config.learners.threads, workdir / "cache")
  from ddiloco.live.evaluator import run_evaluator  # imports JAX

  return run_evaluator(
    config,
    workdir=workdir,
    exchange=common.EXCHANGE.value,
    follow=FOLLOW.value,
  )


if __name__ == "__main__":
  command.run(main)
