"""Runs the parity study and writes its results.

  python -m experiments.parity.run --output=runs/parity [--seeds=3] \
    [--tokens=1500000,3000000,6000000]

The gap between `int4_up` and data-parallel training is measured at every
number of tokens, each with a schedule of its own; what codecs cost at the
largest one. Interrupted, it goes on where it was.
"""

import pathlib

from absl import app, flags

from experiments import study
from experiments.parity import analysis, config

OUTPUT = flags.DEFINE_string(
  "output", None, "Folder of runs and results.", required=True
)
JOBS = flags.DEFINE_integer("jobs", 1, "Runs at once.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Per variant.", lower_bound=1)
TOKENS = flags.DEFINE_list(
  "tokens", ["1500000", "3000000", str(config.TOKENS)], "Budgets, ascending."
)


def main(argv: list[str]) -> None:
  """Runs what is missing, then writes results.md and results.json."""
  del argv
  folder, budgets = pathlib.Path(OUTPUT.value), [int(n) for n in TOKENS.value]
  runs = analysis.grid(budgets, SEEDS.value)
  losses = study.losses(runs, study.execute(runs, folder, jobs=JOBS.value))
  found = analysis.conclude(losses, budgets)
  study.publish(
    folder, analysis.report(losses, found), {"losses": losses, **found}
  )


if __name__ == "__main__":
  app.run(main)
