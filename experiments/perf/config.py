"""Runs that measure: learners that sleep, or small models.

  python -m launch.local --config=experiments/perf/config.py:sleeping \
    --workdir=runs/sleeping

`sleeping`: steps of 0.1 s that compute nothing, 0.5 M parameters.
`model`: a decoder of 0.5 M parameters on real text.
`timed`: the quickstart's model; every train step is timed.
"""

import ml_collections

from experiments.quickstart import config as quickstart


def get_config(kind: str = "sleeping") -> ml_collections.ConfigDict:
  """The config of one of the kinds."""
  config = quickstart.get_config()
  config.stop.tokens = 0
  config.stop.rounds = 200
  config.eval.every_rounds = 0
  if kind == "model":
    config.model.width = 96
    config.model.hidden = 320
    config.learners.batch_size = (4,)
    config.stop.rounds = 100_000  # whoever measures ends it
    return config
  if kind == "timed":
    config.program = "experiments.perf.timed:build"
    config.stop.rounds = 200
    return config
  if kind != "sleeping":
    raise ValueError(f"{kind!r}: choose sleeping, model or timed")
  config.program = "experiments.perf.sleeping:build"
  config.options = ml_collections.ConfigDict({"step_s": 0.1, "params": 500_000})
  config.sync.num_fragments = 8
  config.sync.interval_steps = 8
  config.learners.count = 2
  config.learners.batch_size = (1,)
  config.learners.threads = 1
  return config
