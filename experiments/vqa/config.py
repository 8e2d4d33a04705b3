"""Three learners and a syncer learn to answer questions about images.

A decoder of 0.22 M parameters sees an image of the package easy-vqa as 16
patches in front of a question; only the answer is trained on. Held out are
9,673 questions about 1,000 other images.

  pip install '.[vqa]'
  python -m launch.local --config=experiments/vqa/config.py --workdir=runs/vqa

After a colon, another algorithm, as for the quickstart.

Hardware: 2 CPU cores. Time: 5 minutes.
Expected: 85% of the held-out questions answered (85.1% in a live run, 85.8% in
a simulated one). Who sees no image gets 37.3% with the commonest answer, and
66.9% with the commonest one to the very same question (python -m
experiments.vqa.baselines).
"""

import ml_collections

from experiments.quickstart import config as quickstart

TOKENS = 240_000  # of answers, two in most: three epochs of 38,575 questions


def get_config(
  algorithm: str = "decoupled_diloco",
) -> ml_collections.ConfigDict:
  """Every key of a run, so that each can be overridden on the command line.

  Args:
    algorithm: a name of `ddiloco.config.algorithms`.
  """
  config = quickstart.get_config(algorithm)
  config.data.source = "easy_vqa"
  config.data.tokenizer = "bpe"
  config.data.vocab_size = 400  # every word of the questions is one token
  config.data.sequence_length = 16
  config.data.shards = 3  # every question is in some learner's shard
  config.learners.batch_size = (16,)
  if config.learners.count == 1:  # the same global batch
    config.learners.batch_size = (48,)

  config.model.layers = 3
  config.model.hidden = 192
  config.model.image_size = 64
  config.model.patch_size = 16

  config.inner.learning_rate = 4e-3
  config.inner.warmup = 10_000
  config.inner.decay = TOKENS
  config.eval.sequences = 9_673
  config.eval.batch_size = 100
  config.eval.every_rounds = 500
  config.stop.tokens = TOKENS
  config.faults = ""
  return config
