"""What a planned run should set, why, and what of its config cannot work."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddiloco import config as config_lib
from ddiloco.config import Config, ConfigError
from ddiloco.engine import loading
from ddiloco.planning import plan
from ddiloco.planning.plan import Assumptions, Exchange, Island, Model
from ddiloco.planning.tpus import GIB
from ddiloco.types import Anchor, Wait

_KEYS = (
  "learners.count",
  "learners.devices",
  "learners.batch_size",
  "codec.up",
  "codec.down",
  "sync.interval_steps",
  "sync.num_fragments",
  "sync.fragmentation",
  "sync.overlap_steps",
  "sync.quorum_min",
)
_INTERVALS = (24, 48, 96, 192)
_SHARE = 0.5  # of a link that the exchange may need on average
_ROOM_STEPS = 0.5  # of slack, for the grace window
_TAU_HARMLESS = 5  # Streaming DiLoCo, arXiv 2501.18512
_UNLIKE = 1.15  # step times further apart than this are told
_MERGES_FEW = 50
_WEIGHTS_APART = 10


class Suggestion(NamedTuple):
  """A key of the config, what it is, what it should be, and why."""

  key: str
  now: Any
  value: Any
  why: str


class Advised(NamedTuple):
  """A config with all suggestions, and what its exchange comes to."""

  config: Config
  exchange: Exchange
  suggestions: list[Suggestion]


def advise(
  config: Config,
  model: Model,
  islands: Sequence[Island],
  assumed: Assumptions,
) -> Advised:
  """Chooses codecs, fragments, H, tau and K for these islands.

  Raises `ConfigError` where the result is no valid config.
  """
  asked = config
  found: dict[str, Suggestion] = {}  # the last of a key stands

  def choose(key: str, value: Any, why: str) -> None:
    nonlocal config
    group, name = key.split(".")
    part = getattr(config, group)
    now = getattr(getattr(asked, group), name)
    found[key] = Suggestion(key, now, value, why)
    changed = dataclasses.replace(part, **{name: value})
    config = dataclasses.replace(config, **{group: changed})

  def measure() -> Exchange:
    layout = loading.lay_out(config, model.params)
    return plan.exchange(
      config, model._replace(layout=layout), islands, assumed
    )

  _islands(choose, islands)
  if config.algorithm == "decoupled_diloco":
    _codecs(choose, measure, assumed)
    _fragments(choose, measure)
    _interval(choose, measure, assumed)
    _overlap(choose, measure, islands, config.sync.interval_steps)
    _quorum(choose, measure(), islands)
  config_lib.from_dict(config.to_dict())
  ordered = [found[key] for key in _KEYS if key in found]
  return Advised(config, measure(), ordered)


Choose = Callable[[str, Any, str], None]
Measure = Callable[[], Exchange]


def _islands(choose: Choose, islands: Sequence[Island]) -> None:
  count, times = len(islands), [island.step_s for island in islands]
  choose(
    "learners.count",
    count,
    f"one learner an island: with {count}, the loss of one leaves "
    f"{100 * (count - 1) / count:.0f}% at work"
    if count > 1
    else "there is one island",
  )
  choose(
    "learners.devices",
    tuple(island.slice.chips for island in islands),
    "the slices' chips",
  )
  choose(
    "learners.batch_size",
    tuple(island.batch for island in islands),
    f"so that steps end together: {min(times):.3g} to {max(times):.3g} s",
  )


def _codecs(choose: Choose, measure: Measure, assumed: Assumptions) -> None:
  choose(
    "codec.up",
    "int4",
    "no worse than f32 in our runs (experiments/parity), at an eighth of it",
  )
  choose("codec.down", "none", "")
  full = measure()
  needed = full.mean_gbps / assumed.wan_gbps
  down, why = (
    "none",
    (
      f"parameters in f32 take {_percent(needed)} of a link, "
      f"{full.fetch_s:.2g} s in the largest round"
    ),
  )
  if needed > _SHARE / 2 or full.fetch_s > full.send_s + full.merge_s:
    down = "int4"
    why = f"{why}; encoded steps take an eighth"
  choose("codec.down", down, why)


def _fragments(choose: Choose, measure: Measure) -> None:
  def measured(strategy: str) -> Exchange:
    choose("sync.fragmentation", strategy, "")
    return measure()

  choose("sync.interval_steps", _INTERVALS[0], "")
  choose("sync.overlap_steps", 2, "")
  choose("sync.num_fragments", _INTERVALS[0], "")
  cut = measured("balanced_sub_tensor")
  try:
    whole = measured("balanced_tensor")
  except ConfigError:
    why = f"there are fewer than {_INTERVALS[0]} tensors"
    choose("sync.fragmentation", "balanced_sub_tensor", why)
    return
  if whole.round_s > 1.5 * cut.round_s:
    why = (
      f"the largest tensor alone makes a round of {whole.round_s:.2g} s; cut, "
      f"the longest takes {cut.round_s:.2g} s"
    )
    choose("sync.fragmentation", "balanced_sub_tensor", why)
  else:
    choose("sync.fragmentation", "balanced_tensor", "no tensor sticks out")


def _interval(choose: Choose, measure: Measure, assumed: Assumptions) -> None:
  for interval in _INTERVALS:
    choose("sync.interval_steps", interval, "")
    share = measure().mean_gbps / assumed.wan_gbps
    why = f"links are busy {_percent(share)} of the time"
    if share <= _SHARE:
      break
    why = f"{why} even so: give them more bandwidth"
  choose("sync.interval_steps", interval, why)
  _how_many(choose, measure, interval)


def _how_many(choose: Choose, measure: Measure, interval: int) -> None:
  """One fragment at every step, or as many as the syncer keeps up with."""
  fragments, why = interval, "one at every step, as the paper's"
  while True:
    choose("sync.num_fragments", fragments, why)
    try:
      made = measure()
    except ConfigError:  # there are not so many tensors
      fragments, why = fragments // 2, "there are not tensors for more"
      continue
    if made.serial_s <= made.between_s or fragments < 2:
      return
    fragments = fragments // 2
    why = (
      f"a syncer takes {made.serial_s:.2g} s for a round, so one at every step "
      f"of {made.between_s:.2g} s is too much"
    )


def _overlap(
  choose: Choose,
  measure: Measure,
  islands: Sequence[Island],
  interval: int,
) -> None:
  step_s, round_s = min(i.step_s for i in islands), measure().round_s
  steps = max(math.ceil(round_s / step_s + _ROOM_STEPS), 2)
  steps = min(steps, interval - 1)
  why = (
    f"a round takes {round_s / step_s:.2g} steps at most, and half a step is "
    "left for grace"
  )
  if steps > _TAU_HARMLESS:
    why += f"; more than {_TAU_HARMLESS} may cost quality"
  choose("sync.overlap_steps", steps, why)


def _quorum(choose: Choose, made: Exchange, islands: Sequence[Island]) -> None:
  count, step_s = len(islands), min(i.step_s for i in islands)
  if made.grace_s >= _ROOM_STEPS / 2 * step_s or count == 1:
    choose(
      "sync.quorum_min",
      1,
      f"a grace of {made.grace_s / step_s:.2g} steps waits for the others, and "
      "no failure stops the run",
    )
  else:
    choose(
      "sync.quorum_min",
      max((count + 1) // 2, 2),
      "there is no grace: K = 1 would merge one learner a round and throw most "
      "work away",
    )


def _percent(share: float) -> str:
  return f"{100 * share:.2g}%" if share < 1 else f"{100 * share:,.0f}%"


# --- Warnings ---------------------------------------------------------------


def warnings(
  config: Config,
  model: Model,
  islands: Sequence[Island],
  assumed: Assumptions,
  share_up: float,
) -> list[str]:
  """What of the config as it is would not work, or not well."""
  made = plan.exchange(config, model, islands, assumed)
  found = [
    *_rounds(config, made, islands, assumed),
    *_quorum_warnings(config, islands, share_up),
    *_speeds(config, islands),
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
  per_step = sum(i.batch for i in islands) * config.data.sequence_length
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
  if made.serial_s > made.between_s:
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
  times = plan.as_configured(config, islands)
  ratio = max(times) / min(times)
  if config.sync.anchor is not Anchor.ANY and (
    ratio >= config.sync.interval_steps
  ):
    return [
      f"with learners.batch_size = {config.learners.batch_size} the slowest "
      f"island sees {ratio:.3g} rounds in a step of its own, and H = "
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
    hbm = island.slice.generation.hbm_bytes
    if island.state_bytes > hbm:
      found[str(island.slice)] = (
        f"{island.slice}: parameters and AdamW's moments alone take "
        f"{island.state_bytes / GIB:.3g} GiB of a chip's {hbm / GIB:.3g}. "
        "Split them over more chips (learners.mesh), or take a larger slice"
      )
  return list(found.values())
