"""What of a config cannot work on the islands that it is planned for."""

from collections.abc import Sequence

from ddiloco.config import Config
from ddiloco.planning import plan
from ddiloco.planning.plan import Assumptions, Exchange, Island, Model
from ddiloco.planning.tpus import GIB
from ddiloco.types import Anchor, Wait

_UNLIKE = 1.15  # step times further apart than this are told
_MERGES_FEW = 50
_WEIGHTS_APART = 10


def warnings(
  config: Config,
  model: Model,
  islands: Sequence[Island],
  assumed: Assumptions,
  share_up: float,
) -> list[str]:
  """What of the config as it is would not work, or not well."""
  asked = plan.as_configured(config, islands)
  made = plan.exchange(config, model, asked, assumed)
  found = [
    *_rounds(config, made, asked, assumed),
    *_quorum_warnings(config, islands, share_up),
    *_speeds(config, asked),
    *_weights(islands),
    *_memory(islands),
  ]
  if config.learners.count != len(islands):
    found.append(
      f"learners.count = {config.learners.count}, but the number of islands "
      f"is {len(islands)}"
    )
  if len(islands) == 1:
    found.append("one island has nobody to be decoupled from")
  per_step = sum(i.batch for i in asked) * config.data.sequence_length
  if config.stop.tokens:
    merges = config.stop.tokens / per_step / config.sync.interval_steps
    if merges < _MERGES_FEW:
      found.append(
        f"stop.tokens gives each fragment {merges:.0f} merges; with so few, "
        "quality falls behind data-parallel training (experiments/parity)"
      )
  return found


def _rounds(
  config: Config,
  made: Exchange,
  islands: Sequence[Island],
  assumed: Assumptions,
) -> list[str]:
  sync, step_s, found = config.sync, min(i.step_s for i in islands), []
  if made.mean_gbps > assumed.wan_gbps:
    found.append(
      f"the exchange needs {made.mean_gbps:.3g} Gbit/s on average and links "
      f"have {assumed.wan_gbps:.3g}: rounds fall ever further behind. Raise "
      "sync.interval_steps, or use lighter codecs"
    )
  if made.serial_s > made.between_s * config.syncer.shards:
    found.append(
      f"a syncer takes {made.serial_s:.3g} s for a round and one is due every "
      f"{made.between_s:.3g} s: rounds fall behind, and H is longer than it "
      "says. Use fewer fragments (sync.num_fragments), or syncer.shards"
    )
  if made.slack_s <= 0 and sync.wait is not Wait.EXACT:
    found.append(
      f"a round takes {made.round_s / step_s:.3g} steps and "
      f"sync.overlap_steps = {sync.overlap_steps}: no slack, so no grace"
      + (
        ", and K = 1 merges one learner a round and throws the others' work "
        "away. Raise the overlap or sync.quorum_min"
        if config.quorum < len(islands) and config.quorum == 1
        else ". Raise the overlap"
      )
    )
  elif made.slack_s <= 0:
    found.append(
      f"a round takes {made.round_s / step_s:.3g} steps and "
      f"sync.overlap_steps = {sync.overlap_steps}: everybody waits for it"
    )
  return found


def _quorum_warnings(
  config: Config, islands: Sequence[Island], share_up: float
) -> list[str]:
  count, quorum = len(islands), config.quorum
  if quorum > count:
    return [
      f"the quorum is {quorum} and the number of islands {count}: no round "
      "would ever close"
    ]
  there = plan.quorum_up(count, quorum, share_up)
  if quorum > 1 and there < 0.99:
    return [
      f"a quorum of {quorum} of {count} islands is there {100 * there:.3g}% of "
      "the time; no round closes in the rest. Lower sync.quorum_min"
    ]
  return []


def _speeds(config: Config, islands: Sequence[Island]) -> list[str]:
  times = [island.step_s for island in islands]
  ratio, interval = max(times) / min(times), config.sync.interval_steps
  never = config.sync.anchor is not Anchor.ANY and ratio >= interval
  if never and ratio > _UNLIKE:
    return [
      f"with learners.batch_size = {config.learners.batch_size} the slowest "
      f"island sees {ratio:.3g} global steps in one of its own, and H = "
      f"{config.sync.interval_steps}: it could contribute nothing"
    ]
  if ratio > _UNLIKE:
    return [
      f"with learners.batch_size = {config.learners.batch_size} steps take "
      f"{min(times):.3g} to {max(times):.3g} s; the suggested batches end "
      "together"
    ]
  return []


def _weights(islands: Sequence[Island]) -> list[str]:
  batches = [island.batch for island in islands]
  ratio = (max(batches) / min(batches)) ** 2
  if ratio <= _WEIGHTS_APART:
    return []
  return [
    f"batches of {min(batches)} and {max(batches)} count 1 to {ratio:.3g} in "
    "merges, for weights go with tokens^2 / steps: the small islands hardly "
    "matter. Give them more chips, or leave them out"
  ]


def _memory(islands: Sequence[Island]) -> list[str]:
  found = {}
  for island in islands:
    usable = island.slice.generation.usable_bytes
    if island.state_bytes > usable:
      found[str(island.slice)] = (
        f"{island.slice}: training state, anchors and residuals alone take "
        f"{island.state_bytes / GIB:.3g} GiB of a chip's {usable / GIB:.3g}. "
        "Split them over more chips (learners.mesh), or take a larger slice"
      )
  return list(found.values())
