"""Sweeps the outer optimizer: rate x momentum x learners x merge rule.

  python -m experiments.outer_lr.run --output=runs/outer_lr [--seeds=1] \
    [--tokens=1500000] [--learners=2,4,8] [--rates=0.2,0.4,0.7,1.0] \
    [--momenta=0.0,0.5,0.9] [--rules=rda,average]

On the model and data of `experiments/parity`. Interrupted, it goes on where it
was. The question: is the best rate of radial-directional averaging the same
for any number of learners, and that of the plain average not?
"""

import pathlib

from absl import app, flags

from experiments import study
from experiments.outer_lr import analysis

OUTPUT = flags.DEFINE_string(
  "output", None, "Folder of runs and results.", required=True
)
JOBS = flags.DEFINE_integer("jobs", 1, "Runs at once.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 1, "Per point.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 1_500_000, "Of each run.")
LEARNERS = flags.DEFINE_list("learners", ["2", "4", "8"], "Numbers of them.")
RATES = flags.DEFINE_list("rates", ["0.2", "0.4", "0.7", "1.0"], "Outer ones.")
MOMENTA = flags.DEFINE_list("momenta", ["0.0", "0.5", "0.9"], "Nesterov's.")
RULES = flags.DEFINE_list("rules", ["rda", "average"], "Of merging.")


def main(argv: list[str]) -> None:
  """Runs what is missing, then writes results.md and results.json."""
  del argv
  folder = pathlib.Path(OUTPUT.value)
  runs = analysis.grid(
    LEARNERS.value,
    RATES.value,
    MOMENTA.value,
    RULES.value,
    tokens=TOKENS.value,
    seeds=SEEDS.value,
  )
  losses = study.losses(runs, study.execute(runs, folder, jobs=JOBS.value))
  study.publish(
    folder,
    analysis.report(losses),
    {"losses": losses, "best": analysis.best(losses)},
  )


if __name__ == "__main__":
  app.run(main)
