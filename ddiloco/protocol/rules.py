"""What both machines are told about the run, all in integers."""

import dataclasses

from ddiloco.config import CodecConfig, Config, codecs, seconds_to_ns
from ddiloco.protocol.schedule import Schedule, make_schedule
from ddiloco.protocol.shares import Share, make_shares, samples
from ddiloco.types import Anchor, Apply, Wait

PERMILLE = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
  """The configuration of the machines; times in ns, factors in 1/1000."""

  run_id: str
  layout: str
  codec: str
  answer_bytes: tuple[int, ...]  # encoded size of each fragment
  schedule: Schedule
  quorum_min: int
  grace: bool
  grace_margin_permille: int
  wait: Wait
  anchor: Anchor
  apply: Apply
  outlier_permille: int
  dead_after_ns: int
  stop_rounds: int
  stop_tokens: int
  checkpoint_every_steps: int
  dynamic_steps: bool = False  # apply = own: H in proportion to speed
  full_every: int = 0  # versions to a full one between steps; 0: no steps
  blended: bool = False  # learners keep a share of their own parameters
  global_batch: int = 0  # samples of all learners per step; 0: not fixed
  shares: tuple[Share, ...] = ()  # of it
  transfers_max: int = 1  # that a learner gives at once
  snapshot_every: int = 0  # global steps between snapshots; 0: none
  shards: int = 1  # of the syncer, each with its own offsets t_p

  @property
  def writes_max(self) -> int:
    """Answers a learner may have on their way to the store at once."""
    return max(self.schedule.overlap, 1) + 1

  def samples(self, learner: int, seen: int) -> int:
    """How many a learner takes next; 0: as many as its program does."""
    return samples(self.shares, self.global_batch, learner, seen)

  def shard_of(self, epoch: int) -> int:
    """A life's; those of a shard have every `shards`-th epoch."""
    return (epoch - 1) % self.shards

  def owns(self, epoch: int, t: int) -> bool:
    """Whether round t is for a life of the syncer to commit."""
    return self.schedule.shard(t, self.shards) == self.shard_of(epoch)

  def owned(self, epoch: int) -> tuple[int, ...]:
    """The fragments whose rounds a life owns, ascending."""
    schedule = self.schedule
    return tuple(
      p
      for p in range(schedule.num_fragments)
      if self.owns(epoch, schedule.offset(p))
    )

  def marks(self, t: int) -> bool:
    """Whether round t is the first at or after a snapshot's global step."""
    every = self.snapshot_every
    return every > 0 and t // every > self.schedule.previous_round(t) // every

  def ended(self, t: int, tokens: int) -> bool:
    """Whether the run ends with the commit of round t."""
    return (0 < self.stop_rounds <= t) or (0 < self.stop_tokens <= tokens)


def make_rules(
  config: Config,
  *,
  run_id: str,
  layout: str,
  answer_bytes: tuple[int, ...],
) -> Rules:
  """The machines' rules for a validated config."""
  sync = config.sync
  return Rules(
    run_id=run_id,
    layout=layout,
    codec=codec_name(config),
    answer_bytes=answer_bytes,
    schedule=make_schedule(sync),
    quorum_min=config.quorum,
    grace=sync.grace,
    grace_margin_permille=round(sync.grace_margin * PERMILLE),
    wait=sync.wait,
    anchor=sync.anchor,
    apply=sync.apply,
    outlier_permille=round(sync.outlier_factor * PERMILLE),
    dead_after_ns=seconds_to_ns(config.live.dead_after_s),
    stop_rounds=config.stop.rounds,
    stop_tokens=config.stop.tokens,
    checkpoint_every_steps=config.live.checkpoint_every_steps,
    dynamic_steps=sync.dynamic_steps,
    full_every=(
      0 if config.codec.down == codecs.NONE else config.codec.down_full_every
    ),
    blended=sync.blend > 0,
    global_batch=config.learners.global_batch,
    shares=make_shares(config),
    transfers_max=config.recovery.transfers_max,
    snapshot_every=config.snapshot.every_rounds,
    shards=config.syncer.shards,
  )


def codec_name(config: Config) -> str:
  """What answers state as their codec; differing ones cannot be mixed."""
  codec, default = config.codec, CodecConfig()
  name = codec.up
  if codecs.blocked(name):
    name += f"/{codec.block_size}"
  for option in ("scale", "topk_fraction"):
    value = getattr(codec, option)
    if codecs.uses(codec.up, option) and value != getattr(default, option):
      name += f"/{value}"
  return name
