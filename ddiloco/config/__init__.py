"""One run's configuration: frozen dataclasses, built once and validated.

Configs are written as `ml_collections.ConfigDict`s; `from_dict` converts the
plain dict of one, refuses what it does not know and checks every bound, so
that nothing after it has to.
"""

from ddiloco.config.checks import check_learner
from ddiloco.config.reader import (
  RESUMABLE,
  check_resumable,
  differences,
  from_dict,
)
from ddiloco.config.schema import (
  CodecConfig,
  Config,
  ConfigError,
  DataConfig,
  ElasticConfig,
  EvalConfig,
  InitConfig,
  InnerConfig,
  LearnersConfig,
  LiveConfig,
  MergeConfig,
  ModelConfig,
  OuterConfig,
  RecoveryConfig,
  SimConfig,
  SnapshotConfig,
  StopConfig,
  SyncConfig,
  SyncerConfig,
  island_mesh,
  learner_value,
  seconds_to_ns,
)

__all__ = [
  "RESUMABLE",
  "CodecConfig",
  "Config",
  "ConfigError",
  "DataConfig",
  "ElasticConfig",
  "EvalConfig",
  "InitConfig",
  "InnerConfig",
  "LearnersConfig",
  "LiveConfig",
  "MergeConfig",
  "ModelConfig",
  "OuterConfig",
  "RecoveryConfig",
  "SimConfig",
  "SnapshotConfig",
  "StopConfig",
  "SyncConfig",
  "SyncerConfig",
  "check_learner",
  "check_resumable",
  "differences",
  "from_dict",
  "island_mesh",
  "learner_value",
  "seconds_to_ns",
]
