"""The bounds of a config, and the combinations that cannot work."""

import math
import re

from ddiloco.config import algorithms, codecs
from ddiloco.config.data import check_data
from ddiloco.config.models import check_model
from ddiloco.config.optimizers import check_optimizers
from ddiloco.config.schema import (
  Config,
  ConfigError,
  did_you_mean,
  flatten,
  island_mesh,
  learner_value,
  require,
)
from ddiloco.config.unused import check_unused
from ddiloco.types import Anchor, Apply, Wait

# Dotted key -> smallest allowed value.
_MINIMA = {
  "seed": 0,
  "codec.down_full_every": 1,
  "learners.count": 1,
  "learners.global_batch": 0,
  "learners.threads": 1,
  "sync.num_fragments": 1,
  "sync.interval_steps": 1,
  "sync.overlap_steps": 0,
  "sync.quorum_min": 0,
  "sync.outlier_factor": 0.0,
  "outer.momentum_delay": 1,
  "outer.restart_every": 0,
  "outer.warmup": 0,
  "outer.decay": 0,
  "inner.learning_rate": 0.0,
  "inner.weight_decay": 0.0,
  "inner.clip_norm": 0.0,
  "inner.warmup": 0,
  "inner.decay": 1,
  "model.width": 1,
  "model.layers": 1,
  "model.heads": 1,
  "model.kv_heads": 1,
  "model.head_width": 2,
  "model.hidden": 1,
  "model.logit_soft_cap": 0.0,
  "model.local_window": 0,
  "model.local_per_global": 1,
  "model.experts": 0,
  "model.experts_per_token": 1,
  "model.shared_hidden": 0,
  "model.balance_loss": 0.0,
  "model.router_z_loss": 0.0,
  "model.rope_base": 1.0,
  "model.image_size": 0,
  "model.patch_size": 1,
  "data.vocab_size": 257,
  "data.sequence_length": 2,
  "data.shards": 1,
  "data.heldout_documents": 1,
  "eval.every_rounds": 0,
  "eval.sequences": 1,
  "eval.batch_size": 1,
  "stop.rounds": 0,
  "stop.tokens": 0,
  "sim.step_s": 1e-6,
  "sim.jitter": 0.0,
  "sim.spell_chance": 0.0,
  "sim.spell_factor": 1.0,
  "sim.merge_s": 0.0,
  "sim.start_s": 0.0,
  "sim.delay_s": 0.0,
  "sim.drift_ppm": 0,
  "elastic.slices": 1,
  "elastic.down_s": 0.0,
  "elastic.up_s": 0.0,
  "live.dead_after_s": 0.1,
  "live.heartbeat_s": 0.05,
  "live.standbys": 0,
  "live.lease_s": 0.1,
  "live.poll_min_s": 0.0005,
  "live.store_deadline_s": 0.1,
  "live.tape_flush_s": 0.01,
  "live.checkpoint_every_steps": 0,
  "live.start_deadline_s": 1.0,
  "live.restart_limit": 0,
  "live.restart_backoff_s": 0.0,
  "recovery.checkpoint_rounds_max": 0,
  "recovery.donors_max": 0,
  "recovery.donor_timeout_s": 0.01,
  "recovery.transfers_max": 1,
  "syncer.shards": 1,
  "snapshot.every_rounds": 0,
  "snapshot.keep": 1,
  "snapshot.patience_s": 0.01,
}

_CHOICES = {
  "live.file_locking": ("os", "lockfile"),
  "live.file_sync": ("durable", "all", "none"),
  "inner.name": ("adamw", "muon", "sgd", "lion"),
  "inner.on_overwrite": ("keep", "zero", "scale"),
  "inner.schedule": ("constant", "cosine"),
  "inner.clock": ("tokens", "round"),
  "model.compute_dtype": ("float32", "bfloat16"),
  "data.source": ("sotu", "text", "array_record", "easy_vqa"),
  "data.tokenizer": ("byte", "bpe"),
  "data.partition": ("iid", "domain", "language", "time", "dirichlet"),
  "codec.up": codecs.NAMES,
  "codec.down": (codecs.NONE, *codecs.NAMES),
  "codec.scale": ("bf16", "f32"),
  "codec.rounding": ("nearest", "stochastic"),
  "merge.rule": ("average", "rda"),
  "recovery.params": ("commit", "peer"),
  "merge.embedding_rule": ("average", "rda"),
  "merge.rda_scope": ("tensor", "row", "fragment"),
  "outer.schedule": ("constant", "cosine", "linear"),
  "outer.clock": ("merges", "round"),
  "sync.fragmentation": (
    "balanced_tensor",
    "tensor",
    "layer_strided",
    "layer_sequential",
    "balanced_sub_tensor",
  ),
}


def validate(config: Config) -> None:
  """Raises `ConfigError` for the first thing that cannot work."""
  flat = flatten(config.to_dict())
  for key, minimum in _MINIMA.items():
    require(
      flat[key] >= minimum,
      key,
      flat[key],
      f"it must be at least {minimum}",
      "Raise it.",
    )
  for key, choices in _CHOICES.items():
    require(
      flat[key] in choices,
      key,
      flat[key],
      f"the choices are {', '.join(choices)}",
      did_you_mean(flat[key], choices) or "Choose one.",
    )
  algorithms.check(config)
  _validate_sync(config)
  _validate_patterns(config)
  _validate_stop(config)
  codecs.check_codecs(config)
  check_optimizers(config)
  _validate_islands(config)
  _validate_recovery(config)
  check_model(config)
  check_data(config)
  check_unused(config)


def _validate_sync(config: Config) -> None:
  sync, count = config.sync, config.learners.count
  require(
    sync.quorum_min <= count,
    "sync.quorum_min",
    sync.quorum_min,
    f"there are learners.count = {count} learners, so no round could close",
    "Lower the quorum or add learners.",
  )
  rounds = min(sync.num_fragments, sync.interval_steps)
  require(
    config.syncer.shards <= rounds,
    "syncer.shards",
    config.syncer.shards,
    f"an interval of H = {sync.interval_steps} global steps has {rounds} "
    "rounds, and a shard without one would have nothing to do",
    "Use fewer shards or more fragments (sync.num_fragments).",
  )
  require(
    sync.overlap_steps < sync.interval_steps,
    "sync.overlap_steps",
    sync.overlap_steps,
    f"it must be below sync.interval_steps = {sync.interval_steps}",
    "A fragment's sync must end before its next one starts.",
  )
  require(
    sync.overlap_steps > 0 or sync.wait is Wait.EXACT,
    "sync.overlap_steps",
    0,
    f"sync.wait is {str(sync.wait)!r}",
    "Without overlap learners must wait: set sync.wait='exact' or overlap "
    "at least one step.",
  )
  require(
    0 < sync.grace_margin < 1,
    "sync.grace_margin",
    sync.grace_margin,
    "it must lie between 0 and 1",
    "The paper's gamma leaves part of the slack unused.",
  )
  require(
    0 <= sync.blend < 1,
    "sync.blend",
    sync.blend,
    "it must be at least 0 and below 1",
    "It is the share that a learner keeps; 0 takes the commit as it is.",
  )
  if sync.apply is Apply.OWN:
    require(
      sync.num_fragments == 1
      and sync.anchor is Anchor.ANY
      and sync.wait is Wait.NEVER,
      "sync.apply",
      "own",
      f"sync.num_fragments = {sync.num_fragments}, sync.anchor = "
      f"{str(sync.anchor)!r} and sync.wait = {str(sync.wait)!r}",
      "Applying only one's own commits needs one fragment, anchor='any' and "
      "wait='never': which commits others get is nothing to wait for.",
    )
  require(
    sync.apply is not Apply.AT_OVERLAP or sync.wait is Wait.EXACT,
    "sync.apply",
    "at_overlap",
    f"sync.wait is {str(sync.wait)!r}",
    "Steps of a learner that never waits are no global clock: set "
    "sync.wait='exact'.",
  )


def _validate_patterns(config: Config) -> None:
  for key, value, groups in (
    ("sync.layer_pattern", config.sync.layer_pattern, 1),
    ("sync.frozen", config.sync.frozen, 0),
    ("merge.embedding_pattern", config.merge.embedding_pattern, 0),
  ):
    try:
      found = re.compile(value).groups
    except re.error as error:
      raise ConfigError(
        f"{key} = {value!r}, but it is not a regular expression: {error}."
      ) from error
    require(
      found == groups or not groups,
      key,
      value,
      f"it has {found} groups instead of {groups}",
      "The group is the layer's number; write others as (?:...).",
    )


def _validate_stop(config: Config) -> None:
  require(
    config.stop.rounds > 0 or config.stop.tokens > 0,
    "stop.rounds",
    config.stop.rounds,
    "stop.tokens is 0 too, so the run would never end",
    "Set one of them.",
  )


def _validate_islands(config: Config) -> None:
  learners = config.learners
  for key in ("devices", "batch_size", "slowdown"):
    values = getattr(learners, key)
    require(
      len(values) > 0 and all(value >= 1 for value in values),
      f"learners.{key}",
      values,
      "it needs at least one entry, each at least 1",
      "Learner i takes entry i modulo the length.",
    )
  require(
    len(learners.mesh) in (3, 4)
    and learners.mesh.count(-1) <= 1
    and all(size == -1 or size >= 1 for size in learners.mesh),
    "learners.mesh",
    learners.mesh,
    "it must name three or four axis sizes (data, fsdp, tensor[, expert])",
    "One of them may be -1.",
  )
  require(
    learners.count <= config.data.shards,
    "learners.count",
    learners.count,
    f"data.shards = {config.data.shards} is fewer",
    "Every learner reads a shard of its own: raise data.shards.",
  )
  for learner in range(learners.count):
    _check_island(config, learner)
  live = config.live
  require(
    live.poll_min_s <= live.poll_max_s,
    "live.poll_max_s",
    live.poll_max_s,
    f"live.poll_min_s = {live.poll_min_s} is larger",
    "Raise it.",
  )
  require(
    live.heartbeat_s < live.dead_after_s,
    "live.dead_after_s",
    live.dead_after_s,
    f"it must exceed live.heartbeat_s = {live.heartbeat_s}",
    "A learner is live as long as its heartbeats are younger than this.",
  )


def _check_island(config: Config, learner: int) -> None:
  data, fsdp, _, *expert = island_mesh(config, learner)
  batch = learner_value(config.learners.batch_size, learner)
  ways = math.prod((data, fsdp, *expert))
  require(
    batch % ways == 0,
    "learners.batch_size",
    batch,
    f"learner {learner}'s mesh splits a batch {ways} ways",
    f"Use a multiple of {ways}, or another mesh.",
  )


def check_learner(config: Config, learner: int) -> None:
  """Raises `ConfigError` if a learner of that number can have no part."""
  count, shards = config.learners.count, config.data.shards
  if learner >= shards:
    raise ConfigError(
      f"--learner={learner}, but data.shards = {shards}: learners are numbered "
      f"from 0 to {shards - 1}, for each reads a shard of its own, and a run "
      "keeps the shards that it starts with."
    )
  if learner < count:
    return  # the config was checked for it
  if algorithms.ALGORITHMS[config.algorithm].all_learners:
    raise ConfigError(
      f"--learner={learner}, but algorithm = {config.algorithm!r} merges all "
      f"of learners.count = {count} learners in every round, and nobody else. "
      "Stop the run and go on with a larger learners.count."
    )
  if config.learners.global_batch:
    raise ConfigError(
      f"--learner={learner}, but learners.global_batch = "
      f"{config.learners.global_batch} is shared out among learners.count = "
      f"{count} learners, and nothing is left. Stop the run and go on with a "
      "larger learners.count."
    )
  _check_island(config, learner)


def _validate_recovery(config: Config) -> None:
  recovery, sync = config.recovery, config.sync
  if recovery.params != "peer":
    return
  require(
    recovery.donors_max > 0,
    "recovery.params",
    "peer",
    "recovery.donors_max = 0, so no peer is ever asked",
    "Ask at least one, or take the commit's.",
  )
  require(
    sync.wait is Wait.NEVER and sync.apply is Apply.WHEN_SEEN,
    "recovery.params",
    "peer",
    f"sync.wait = {str(sync.wait)!r} and sync.apply = {str(sync.apply)!r}",
    "A fragment taken from a peer is not answered before its next commit, "
    "which others would wait for: take the commit's.",
  )
