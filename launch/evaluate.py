"""Evaluates a run; results are appended to eval.jsonl in its workdir.

  python -m launch.evaluate --workdir=... [--follow]
  python -m launch.evaluate --workdir=... --of=learner:0
  python -m launch.evaluate --workdir=... --tasks=arc_easy,piqa

Without --config the run's own resolved config (config.json) holds, as for
every command.
"""

from absl import flags

from ddiloco.config import ConfigError
from launch import command
from launch import flags as common

FOLLOW = flags.DEFINE_boolean(
  "follow", False, "Evaluate every eval.every_rounds rounds until the end."
)
OF = flags.DEFINE_string(
  "of",
  "syncer",
  "Whose parameters: syncer (the newest commit), learner:i (its newest "
  "checkpoint), or mean (of the learners' newest checkpoints).",
)
TASKS = flags.DEFINE_list(
  "tasks",
  [],
  "Tasks of lm-evaluation-harness, instead of held-out loss. The paper's are "
  "arc_easy, arc_challenge, boolq, hellaswag, piqa, social_iqa, winogrande.",
)
TASK_DIR = flags.DEFINE_string(
  "task_dir", None, "A directory with further task definitions (*.yaml)."
)
LIMIT = flags.DEFINE_integer(
  "limit", None, "Examples of each task; default: all.", lower_bound=1
)


def main() -> int:
  """Measures held-out loss, or tasks; only reads the exchange."""
  workdir = common.workdir()
  config = common.config(workdir)
  _check(config.data.shards)
  command.prepare_jax(1, config.learners.threads, workdir / "cache")
  from ddiloco.live.evaluator import run_evaluator  # imports JAX

  return run_evaluator(
    config,
    workdir=workdir,
    exchange=common.EXCHANGE.value,
    run_key=common.run_key(),
    follow=FOLLOW.value,
    of=OF.value,
    measure=_tasks() if TASKS.value else None,
  )


def _check(shards: int) -> None:
  of = OF.value
  if of not in ("syncer", "mean", *(f"learner:{i}" for i in range(shards))):
    raise ConfigError(
      f"--of={of} is none of this run's: choose syncer, mean, or learner:0 to "
      f"learner:{shards - 1}."
    )
  if FOLLOW.value and (TASKS.value or of != "syncer"):
    raise ConfigError(
      "--follow measures the held-out loss of the syncer's parameters: leave "
      "out --of and --tasks, or --follow."
    )
  if not TASKS.value and (TASK_DIR.value or LIMIT.value):
    raise ConfigError("--task_dir and --limit need --tasks: name some.")


def _tasks():
  from ddiloco.lm import harness

  return harness.Measure(
    TASKS.value, task_dir=TASK_DIR.value, limit=LIMIT.value
  )


if __name__ == "__main__":
  command.run(main)
