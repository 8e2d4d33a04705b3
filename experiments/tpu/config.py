"""Large presets on slices of Cloud TPUs: what to compile and to plan for.

  python -m launch.compile --config=experiments/tpu/config.py:dense_2b \
    --topology=v5p:4x4x4

After the colon, any preset of `ddiloco.config.presets`. Every island is one
slice, its parameters split over all chips: `learners.mesh` is (data, fsdp,
tensor). Widths must divide by fsdp, and key-value heads by tensor.

Text is read from data.path (*.array_record files); a vocabulary of 262,144
entries, as the presets' parameter counts assume, is trained on it.
Nothing here has run on a TPU yet.
"""

import ml_collections

from experiments.quickstart import config as quickstart

TOKENS = 40_000_000_000


def get_config(preset: str = "dense_2b") -> ml_collections.ConfigDict:
  """Every key of a run, so that each can be overridden on the command line.

  Args:
    preset: the model, one of `ddiloco.config.presets`.
  """
  config = quickstart.get_config()
  config.model.preset = preset
  config.data.source = "array_record"
  config.data.path = "data"
  config.data.tokenizer = "bpe"
  config.data.vocab_size = 262_144
  config.data.sequence_length = 2048

  config.learners.count = 4
  config.learners.devices = (64,)
  config.learners.mesh = (1, -1, 1)
  config.learners.batch_size = (128,)
  config.codec.down = "int4"

  config.inner.learning_rate = 3e-4
  config.inner.warmup = 1_000_000_000  # tokens
  config.inner.decay = TOKENS
  config.inner.weight_decay = 0.1
  config.stop.tokens = TOKENS
  config.faults = ""
  return config
