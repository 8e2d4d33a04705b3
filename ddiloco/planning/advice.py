"""What a planned run should set, and why."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddiloco import config as config_lib
from ddiloco.config import CodecConfig, Config, ConfigError
from ddiloco.config.algorithms import ALGORITHMS
from ddiloco.engine import loading
from ddiloco.planning import plan
from ddiloco.planning.plan import Assumptions, Exchange, Island, Model
from ddiloco.protocol import shares
from ddiloco.types import Apply, Wait

_KEYS = (
  "learners.count",
  "learners.global_batch",
  "learners.devices",
  "learners.batch_size",
  "codec.up",
  "codec.down",
  "codec.topk_fraction",
  "codec.down_full_every",
  "codec.down_error_feedback",
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

  _islands(choose, config, islands)
  if config.algorithm == "decoupled_diloco" and (
    config.sync.apply is Apply.WHEN_SEEN and config.sync.wait is Wait.NEVER
  ):
    _codecs(choose, measure, assumed)
    _fragments(choose, measure)
    _interval(choose, measure, config, assumed)
    _left_over(choose, config)
    _overlap(choose, measure, islands, config.sync.interval_steps)
    _quorum(choose, measure(), islands)
  shares.make_shares(config_lib.from_dict(config.to_dict()))
  ordered = [found[key] for key in _KEYS if key in found]
  return Advised(config, measure(), ordered)


Choose = Callable[[str, Any, str], None]
Measure = Callable[[], Exchange]


def _islands(choose: Choose, config: Config, islands: Sequence[Island]) -> None:
  count, times = len(islands), [island.step_s for island in islands]
  total = sum(island.batch for island in islands)
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
    f"so that steps end together, after {min(times):.3g} to {max(times):.3g} "
    f"s; {total} samples in all",
  )
  if config.learners.global_batch:
    choose("learners.global_batch", total, "the sum of the islands' batches")
  if ALGORITHMS[config.algorithm].all_learners:
    choose("sync.quorum_min", 0, "all learners, as the algorithm has it")


def _left_over(choose: Choose, config: Config) -> None:
  """Options of codecs that are not used any more."""
  codec, default = config.codec, CodecConfig()
  unused = []
  if "topk" not in (codec.up, codec.down):
    unused.append("topk_fraction")
  if codec.down == "none":
    unused += ["down_full_every", "down_error_feedback"]
  for name in unused:
    if getattr(codec, name) != getattr(default, name):
      choose(f"codec.{name}", getattr(default, name), "nothing uses it then")


def _codecs(choose: Choose, measure: Measure, assumed: Assumptions) -> None:
  choose(
    "codec.up",
    "int4",
    "within 0.3% of f32 in our runs (experiments/parity), at an eighth of it",
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


def _fragments_most(measure: Measure, choose: Choose) -> int:
  """24, or fewer where the model has not so many entries."""
  choose("sync.fragmentation", "balanced_sub_tensor", "")
  fragments = _INTERVALS[0]
  while fragments > 1:
    choose("sync.num_fragments", fragments, "")
    try:
      measure()
      break
    except ConfigError:
      fragments //= 2
  return fragments


def _fragments(choose: Choose, measure: Measure) -> None:
  def measured(strategy: str) -> Exchange:
    choose("sync.fragmentation", strategy, "")
    return measure()

  choose("sync.interval_steps", _INTERVALS[0], "")
  choose("sync.overlap_steps", 2, "")
  choose("sync.num_fragments", _fragments_most(measure, choose), "")
  cut = measured("balanced_sub_tensor")
  try:
    whole = measured("balanced_tensor")
  except ConfigError:
    why = "there are too few tensors to keep them whole"
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


def _interval(
  choose: Choose, measure: Measure, config: Config, assumed: Assumptions
) -> None:
  for interval in _INTERVALS:
    choose("sync.interval_steps", interval, "")
    share = measure().mean_gbps / assumed.wan_gbps
    why = f"links are busy {_percent(share)} of the time"
    if share <= _SHARE:
      break
    why = f"{why} even so: give them more bandwidth"
  choose("sync.interval_steps", interval, why)
  _how_many(choose, measure, config, interval)


def _how_many(
  choose: Choose, measure: Measure, config: Config, interval: int
) -> None:
  """One fragment at every step, or as many as the syncer keeps up with."""
  fragments, why = interval, "one at every step, as the paper's"
  while True:
    choose("sync.num_fragments", fragments, why)
    try:
      made = measure()
    except ConfigError:  # there are not so many tensors
      if fragments < 2:
        raise
      fragments, why = fragments // 2, "there are not tensors for more"
      continue
    shards = config.syncer.shards
    if made.serial_s <= made.between_s * shards or fragments < 2 * shards:
      return
    fragments = fragments // 2
    why = (
      f"a syncer takes {made.serial_s:.2g} s for a round; at every step, of "
      f"{made.between_s:.2g} s, is too often"
    )


def _overlap(
  choose: Choose,
  measure: Measure,
  islands: Sequence[Island],
  interval: int,
) -> None:
  step_s, round_s = min(i.step_s for i in islands), measure().round_s
  steps = max(math.ceil(round_s / step_s + _ROOM_STEPS), 2)
  why = f"a round takes {round_s / step_s:.2g} steps at most"
  if steps >= interval:
    steps = max(interval - 1, 1)
    why += ", and H - 1 is all there can be: give it a faster link"
  else:
    why += ", and half a step is left for grace"
    if steps > _TAU_HARMLESS:
      why += f"; more than {_TAU_HARMLESS} may cost quality"
  choose("sync.overlap_steps", steps, why)


def _quorum(choose: Choose, made: Exchange, islands: Sequence[Island]) -> None:
  count, step_s = len(islands), min(i.step_s for i in islands)
  if count == 1:
    choose("sync.quorum_min", 1, "there is one island")
  elif made.grace_s >= _ROOM_STEPS / 2 * step_s:
    why = (
      f"a grace of {made.grace_s / step_s:.2g} steps waits for the others, and "
      "no failure stops the run"
    )
    choose("sync.quorum_min", 1, why)
  else:
    why = (
      "there is hardly any grace: K = 1 would merge one learner a round and "
      "throw most work away"
    )
    choose("sync.quorum_min", max((count + 1) // 2, 2), why)


def _percent(share: float) -> str:
  return f"{100 * share:.2g}%" if share < 1 else f"{100 * share:,.0f}%"
