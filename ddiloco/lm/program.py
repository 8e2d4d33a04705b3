"""The language model as a `Program`: what the engine runs."""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from ddiloco.algo.fragments import Piece
from ddiloco.config import (
  Config,
  ConfigError,
  island_mesh,
  learner_value,
)
from ddiloco.lm import export, flops, partition
from ddiloco.lm.data import Batch, SampleReader
from ddiloco.lm.optimizer import overwrite_scale, scale_moments
from ddiloco.lm.text import TextData
from ddiloco.lm.tokenizer import Tokenizer, vocab_size
from ddiloco.lm.train_step import State, make_trainer
from ddiloco.lm.vision import CHANNELS
from ddiloco.lm.vqa import VqaData

_logger = logging.getLogger("ddiloco")
_AXES = ("data", "fsdp", "tensor", "expert")


def build(
  config: Config,
  learner: int | None,
  *,
  devices: Sequence[jax.Device] | None = None,
  abstract: bool = False,
  cache_dir: str | None = None,
) -> "LanguageModel":
  """The program of one learner, or (None) of the syncer or an evaluator.

  A learner takes the first of `devices` (default: all) that its island needs,
  the others take one. An `abstract` one has none: it can tell shapes and
  shardings alone. Text is opened when it is first needed, and what is made from
  it is kept under `cache_dir`. Raises `ConfigError`.
  """
  shape = (1, 1, 1) if learner is None else island_mesh(config, learner)
  if abstract:
    return LanguageModel(config, learner, _abstract_mesh(shape), cache_dir)
  needed = math.prod(shape)
  devices = list(jax.devices() if devices is None else devices)
  if len(devices) < needed:
    raise ConfigError(
      f"learner {learner} needs {needed} devices (mesh {shape}), but "
      f"{len(devices)} are present. Lower learners.devices; on CPU, devices "
      f"are emulated with XLA_FLAGS=--xla_force_host_platform_device_count="
      f"{needed}."
    )
  return LanguageModel(
    config, learner, _make_mesh(shape, devices[:needed]), cache_dir
  )


def _make_mesh(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> Mesh:
  # An axis that fills no whole sides of a torus may take a part of one.
  placed = mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )
  return Mesh(placed, _AXES[: len(shape)], axis_types=_auto(shape))


def _abstract_mesh(shape: tuple[int, ...]) -> AbstractMesh:
  return AbstractMesh(shape, _AXES[: len(shape)], axis_types=_auto(shape))


def _auto(shape: tuple[int, ...]) -> tuple[AxisType, ...]:
  return (AxisType.Auto,) * len(shape)


class LanguageModel:
  """A decoder, its data shard and its train step, on one mesh."""

  def __init__(
    self,
    config: Config,
    learner: int | None,
    mesh: Mesh | AbstractMesh,
    cache_dir: str | None,
  ):
    self.mesh = mesh
    self._config, self._learner = config, learner
    self._data = (
      VqaData(config)
      if config.data.source == "easy_vqa"
      else TextData(config, cache_dir)
    )
    self._vocab_size = vocab_size(config.data)
    self._trainer = make_trainer(
      config.model,
      config.inner,
      self._vocab_size,
      mesh,
      config.sync.frozen,
    )
    # Samples per inner step; whoever only merges or evaluates trains on none.
    self.samples_per_step: int = (
      0
      if learner is None
      else learner_value(config.learners.batch_size, learner)
    )

  reads_init = True  # `init.path`

  def init(self) -> State:
    """The initial state: the same bits in every process and on every mesh."""
    state = self._trainer.init(self._config.seed)
    config = self._config
    if not config.init.path:
      return state
    like = self.abstract_params()
    return self.with_params(state, export.load(config.init, config.model, like))

  def abstract_params(self) -> dict[str, Any]:
    """What `params` returns, as `jax.ShapeDtypeStruct`s with shardings."""
    return self._trainer.abstract.params

  def abstract_state(self) -> State:
    """What `init` returns, likewise."""
    return self._trainer.abstract

  def params(self, state: State) -> dict[str, Any]:
    """Nested dicts of f32 arrays."""
    return state.params

  def with_params(self, state: State, params: dict[str, Any]) -> State:
    """The state with these parameters, placed on the mesh."""
    # A few tensors of many are new: placing them all again takes 4 ms.
    placed = jax.tree.map(_place, params, self.abstract_params())
    return state._replace(params=placed)

  def overwritten(self, state: State, pieces: Sequence[Piece]) -> State:
    """The state with the moments of overwritten parameters as configured."""
    scale = overwrite_scale(self._config.inner)
    if scale == 1.0:
      return state
    owners = self._trainer.owners
    inner = scale_moments(state.inner, owners, pieces, scale)
    return state._replace(inner=inner)

  def batch(self, first_sample: int, count: int) -> Batch:
    """Samples of this learner's shard; short batches are masked."""
    return self._reader.batch(first_sample, count)

  def tokens(self, batch: Batch) -> int:
    """Targets in the unmasked rows."""
    return batch.num_targets

  def step(
    self, state: State, batch: Batch, clock: int
  ) -> tuple[State, dict[str, jax.Array]]:
    """One inner step; donates `state`. Metrics are device scalars."""
    # Transfers are explicit, so that a transfer guard can forbid the others.
    # The clock may exceed an int32; as f32 it is exact enough for a schedule.
    placed = jax.device_put(batch, self._trainer.batch_sharding)
    now = jax.device_put(np.float32(clock), self._trainer.replicated)
    return self._trainer.step(state, placed, now)

  def lower(self) -> jax.stages.Lowered:
    """The train step before compilation, of a model that need not exist."""
    rows, length = self.samples_per_step, self._config.data.sequence_length
    batch = Batch(
      tokens=jax.ShapeDtypeStruct((rows, length + 1), np.int32),
      mask=jax.ShapeDtypeStruct((rows,), np.float32),
    )
    if size := self._config.model.image_size:
      batch = batch._replace(
        images=jax.ShapeDtypeStruct((rows, size, size, CHANNELS), np.uint8),
        targets=jax.ShapeDtypeStruct((rows, length), np.float32),
      )
    clock = jax.ShapeDtypeStruct((), np.float32)
    return self._trainer.step.lower(self._trainer.abstract, batch, clock)

  def flops_per_sample(self) -> flops.Flops:
    """What an inner step computes of each sample."""
    return flops.per_sequence(self._config)

  def evaluate(self, params: dict[str, Any]) -> dict[str, float]:
    """Held-out "loss" in nats per byte, "bits_per_byte" and what else there is.

    Of experts, their "load_entropy"; of questions, the "vqa_accuracy".
    """
    return self._data.evaluate(self._trainer, params)

  def logits(self, params: dict[str, Any], tokens_BxL: jax.Array) -> jax.Array:
    """Next-token logits [B, L, V]; ids from the vocabulary's size on pad V."""
    return self._trainer.logits(params, tokens_BxL)

  @property
  def tokenizer(self) -> Tokenizer:
    """What turns text into token ids."""
    return self._data.tokenizer

  @property
  def sequence_length(self) -> int:
    """The tokens that the model sees at once."""
    return self._config.data.sequence_length

  @property
  def eval_batch_size(self) -> int:
    """Sequences evaluated at once."""
    return self._config.eval.batch_size

  def check(self) -> None:
    """Opens the data for all learners at once; raises `ConfigError`.

    For whoever starts a run: nothing exists yet that a mistake could spoil,
    and what is made from it is in the cache when learners come.
    """
    self._data.reader(0, max(self._config.learners.batch_size))
    if self._config.init.path:
      export.check_tokenizer(self._config, self.tokenizer)
    if self._config.data.partition != "iid":
      _logger.info("data shards:\n%s", partition.describe(self.label_mix()))

  def label_mix(self) -> partition.Mix | None:
    """How the text's labels are spread over the data shards, if it has any."""
    return self._data.label_mix()

  @functools.cached_property
  def _reader(self) -> SampleReader:
    if self._learner is None:
      raise ValueError(
        "batch() of a program without a learner: only learners have a data "
        "shard. Build it with the learner's number."
      )
    return self._data.reader(self._learner, self.samples_per_step)


def _place(tensor: Any, abstract: jax.ShapeDtypeStruct) -> jax.Array:
  if getattr(tensor, "sharding", None) == abstract.sharding:
    return tensor
  return jax.device_put(tensor, abstract.sharding)
