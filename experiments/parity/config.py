"""Parity: decoupled learners and data-parallel training, at equal tokens.

A byte-level decoder of 0.8 M parameters on the State of the Union addresses.
After a colon, the variant:

  data_parallel   one learner, its batch as large as that of all four
  decoupled       M = 4, K = 1 with grace, P = H = 24, tau = 2, f32 answers
  int4_up         the same with int4 answers
  int4_both       and int4 on the way down too

  python -m launch.simulate --config=experiments/parity/config.py:int4_up \
    --workdir=runs/int4_up
"""

import ml_collections

from experiments.quickstart import config as quickstart

TOKENS = 6_000_000
LEARNERS = 4
BATCH = 8  # of each
_CODECS = {
  "decoupled": {"codec.up": "f32"},
  "int4_up": {"codec.up": "int4"},
  "int4_both": {"codec.up": "int4", "codec.down": "int4"},
}
VARIANTS = ("data_parallel", *_CODECS)


def get_config(variant: str = "int4_up") -> ml_collections.ConfigDict:
  """The config of one variant."""
  if variant not in VARIANTS:
    raise ValueError(f"variant {variant!r}: choose {', '.join(VARIANTS)}")
  alone = variant == "data_parallel"
  config = quickstart.get_config(
    "data_parallel" if alone else "decoupled_diloco"
  )
  config.model.preset = "dense_small"
  config.faults = ""
  config.learners.count = 1 if alone else LEARNERS
  config.learners.batch_size = (LEARNERS * BATCH if alone else BATCH,)
  # All of the text is somebody's: a learner of 16 shards would see each of its
  # own ten times, and one that is alone would learn it by heart.
  config.data.shards = config.learners.count
  if not alone:
    config.outer.learning_rate = 0.4
    config.outer.momentum = 0.5
    config.update_from_flattened_dict(_CODECS[variant])
  config.stop.tokens = TOKENS
  config.inner.decay = TOKENS
  config.inner.learning_rate = 4e-3
  config.eval.every_rounds = 0
  config.eval.sequences = 1024
  return config
