"""The language model as a `Program`: what the engine runs."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ddiloco.config import (
  Config,
  ConfigError,
  island_mesh,
  learner_value,
)
from ddiloco.lm import evaluation
from ddiloco.lm.corpus import Corpus, load_corpus
from ddiloco.lm.data import Batch, ShardReader
from ddiloco.lm.tokenizer import vocab_size
from ddiloco.lm.train_step import State, make_trainer


def build(
  config: Config,
  learner: int | None,
  *,
  devices: Sequence[jax.Device] | None = None,
  cache_dir: str | None = None,
) -> "LanguageModel":
  """The program of one learner, or (None) of the syncer or an evaluator.

  A learner takes the first of `devices` (default: all) that its island needs,
  the others take one. Text is opened when it is first needed, and what is made
  from it is kept under `cache_dir`. Raises `ConfigError`.
  """
  shape = (1, 1, 1) if learner is None else island_mesh(config, learner)
  needed = math.prod(shape)
  devices = list(jax.devices() if devices is None else devices)
  if len(devices) < needed:
    raise ConfigError(
      f"learner {learner} needs {needed} devices (mesh {shape}), but "
      f"{len(devices)} are present. Lower learners.devices; on CPU, devices "
      f"are emulated with XLA_FLAGS=--xla_force_host_platform_device_count="
      f"{needed}."
    )
  mesh = jax.make_mesh(
    shape,
    ("data", "fsdp", "tensor"),
    axis_types=(AxisType.Auto,) * 3,
    devices=devices[:needed],
  )
  return LanguageModel(config, learner, mesh, cache_dir)


class LanguageModel:
  """A decoder, its data shard and its train step, on one mesh."""

  def __init__(
    self, config: Config, learner: int | None, mesh: Mesh, cache_dir: str | None
  ):
    self.mesh = mesh
    self._config, self._learner, self._cache_dir = config, learner, cache_dir
    self._vocab_size = vocab_size(config.data)
    self._trainer = make_trainer(
      config.model, config.inner, self._vocab_size, mesh
    )
    # Samples per inner step; whoever only merges or evaluates trains on none.
    self.samples_per_step: int = (
      0
      if learner is None
      else learner_value(config.learners.batch_size, learner)
    )

  def init(self) -> State:
    """The initial state: the same bits in every process and on every mesh."""
    return self._trainer.init(self._config.seed)

  def params(self, state: State) -> dict[str, Any]:
    """Nested dicts of f32 arrays."""
    return state.params

  def with_params(self, state: State, params: dict[str, Any]) -> State:
    """The state with these parameters, placed on the mesh."""
    # A few tensors of many are new: placing them all again takes 4 ms.
    placed = jax.tree.map(_place, params, self._trainer.params_sharding)
    return state._replace(params=placed)

  def batch(self, first_sample: int, count: int) -> Batch:
    """Samples of this learner's shard; short batches are masked."""
    return self._reader.batch(first_sample, count)

  def tokens(self, batch: Batch) -> int:
    """Targets in the unmasked rows."""
    return int(batch.mask.sum()) * (batch.tokens.shape[1] - 1)

  def step(
    self, state: State, batch: Batch, clock: int
  ) -> tuple[State, dict[str, jax.Array]]:
    """One inner step; donates `state`. Metrics are device scalars."""
    # Transfers are explicit, so that a transfer guard can forbid the others.
    # The clock may exceed an int32; as f32 it is exact enough for a schedule.
    placed = jax.device_put(batch, self._trainer.batch_sharding)
    now = jax.device_put(np.float32(clock), self._trainer.replicated)
    return self._trainer.step(state, placed, now)

  def evaluate(self, params: dict[str, Any]) -> dict[str, float]:
    """Held-out "loss" in nats per byte, and "bits_per_byte"."""
    corpus = self._corpus
    return evaluation.evaluate(
      self._trainer,
      params,
      corpus.heldout,
      corpus.tokenizer.token_bytes,
      self._config.data.sequence_length,
      self._config.eval,
    )

  def check(self) -> None:
    """Opens the text for all learners at once; raises `ConfigError`.

    For whoever starts a run: nothing exists yet that a mistake could spoil,
    and what is made from the text is in the cache when learners come.
    """
    learners, data = self._config.learners, self._config.data
    for batch_size in sorted(set(learners.batch_size)):
      ShardReader(
        self._corpus.train,
        seed=self._config.seed,
        shard=0,
        shards=data.shards,
        sequence_length=data.sequence_length,
        batch_size=batch_size,
      )

  @property
  def _corpus(self) -> Corpus:
    return load_corpus(self._config.data, self._cache_dir)

  @functools.cached_property
  def _reader(self) -> ShardReader:
    if self._learner is None:
      raise ValueError(
        "batch() of a program without a learner: only learners have a data "
        "shard. Build it with the learner's number."
      )
    data = self._config.data
    return ShardReader(
      self._corpus.train,
      seed=self._config.seed,
      shard=self._learner,
      shards=data.shards,
      sequence_length=data.sequence_length,
      batch_size=self.samples_per_step,
    )


def _place(tensor: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  if getattr(tensor, "sharding", None) == sharding:
    return tensor
  return jax.device_put(tensor, sharding)
