"""What a language model trains and is judged on, if that is text."""

from typing import Any

from ddiloco.config import Config
from ddiloco.lm import evaluation, partition
from ddiloco.lm.corpus import Corpus, load_corpus
from ddiloco.lm.data import ShardReader
from ddiloco.lm.tokenizer import Tokenizer
from ddiloco.lm.train_step import Trainer


class TextData:
  """A corpus, opened when it is first needed."""

  def __init__(self, config: Config, cache_dir: str | None):
    self._config, self._cache_dir = config, cache_dir

  @property
  def tokenizer(self) -> Tokenizer:
    """What turns text into token ids."""
    return self._corpus.tokenizer

  def reader(self, shard: int, batch_size: int) -> ShardReader:
    """The samples of a shard; raises `ConfigError`."""
    return ShardReader(
      self._corpus.train,
      self._shards,
      seed=self._config.seed,
      shard=shard,
      sequence_length=self._config.data.sequence_length,
      batch_size=batch_size,
    )

  def evaluate(self, trainer: Trainer, params: Any) -> dict[str, float]:
    """Held-out "loss" in nats per byte, and "bits_per_byte"."""
    return evaluation.evaluate(
      trainer,
      params,
      self._corpus.heldout,
      self._corpus.tokenizer.token_bytes,
      self._config.data.sequence_length,
      self._config.eval,
    )

  def label_mix(self) -> partition.Mix | None:
    """How the text's labels are spread over the shards, if it has any."""
    length = self._config.data.sequence_length
    labels = partition.window_labels(self._corpus, length)
    return labels and partition.mix(labels, self._shards)

  @property
  def _corpus(self) -> Corpus:
    return load_corpus(self._config.data, self._cache_dir)

  @property
  def _shards(self) -> partition.Shards:
    data, seed = self._config.data, self._config.seed
    return partition.make_shards(self._corpus, data, seed)
