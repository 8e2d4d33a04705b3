"""What a run on a set of islands would come to: speed, exchange, failures."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ddiloco.algo.fragments import Layout
from ddiloco.config import Config, ConfigError, island_mesh, learner_value
from ddiloco.engine import loading
from ddiloco.planning.goodput import YEAR_S, Cluster, simulate
from ddiloco.planning.goodput_table import describe
from ddiloco.planning.island import (
  batch_unit,
  kept_bytes,
  on_slice,
  state_bytes,
)
from ddiloco.planning.tpus import Slice
from ddiloco.protocol.schedule import make_schedule

_DAY_S = 86_400.0
_BITS = 8
_HOURS = 24 * 90  # of failures: an island of 64 chips fails every few days
_SEEDS = range(10)
# Values of answers that a core of a Xeon merges a second, by RDA (BUILD_NOTES).
MERGED_PER_CORE_S = 5e7
# Of a round, one after the other: an answer is put, its commit looked for, a
# version fetched; the syncer finds and reads answers, puts tape, state and
# commit. Simulated, grace ends where the sum is 13 to 20, and rounds follow
# each other by 14 of the syncer's (tests/planning/plan_against_simulation).
_ISLAND_LATENCIES = 5
_SYNCER_LATENCIES = 11
_SYNCER_LATENCIES_SERIAL = 14
_LEAST = 1e-9  # of what must be positive
_TOTAL_WITHIN = 1.5  # of the config's, for batches that fit the meshes
_ADAMW_BYTES = 12  # parameters and two moments, in f32


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """What no config tells. Each is a flag of `launch.plan`."""

  wan_gbps: float  # of each island's link to the exchange
  latency_s: float = 0.05  # from an island to the exchange, one way
  syncer_latency_s: float = 0.002  # from the syncer, likewise
  mfu: float = 0.4  # share of published peak that model operations reach
  syncer_cores: float = 64
  mtbi_years: float = 1.0  # of a chip
  restart_s: float = 120.0  # from an island's return to its next step

  def __post_init__(self):
    """Refuses what cannot be; `ValueError`."""
    for name in ("wan_gbps", "syncer_cores", "mtbi_years"):
      if not _LEAST < getattr(self, name) < math.inf:
        raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
    for name in ("latency_s", "syncer_latency_s", "restart_s"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f"{name} = {getattr(self, name)}: must not be negative"
        )
    if not 0 < self.mfu <= 1:
      raise ValueError(f"mfu = {self.mfu}: above 0, at most 1")


class Island(NamedTuple):
  """One learner's slice, its batch, and what that gives."""

  slice: Slice
  batch: int
  unit: int  # batches are multiples of it
  step_s: float
  state_bytes: int  # of a chip between steps: training state, anchors, ...
  compiled: bool  # whether a compiler's roofline was asked


class Model(NamedTuple):
  """What the plan needs of a config's model."""

  params: Any  # `jax.ShapeDtypeStruct`s
  flops_per_sample: int  # model operations
  layout: Layout

  @property
  def parameters(self) -> int:
    """How many there are."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.params))


class Exchange(NamedTuple):
  """A round of the largest and of a middling fragment, in s and bytes."""

  up_bytes: int  # of an island's largest answer
  down_bytes: int
  send_s: float
  merge_s: float
  fetch_s: float
  latency_s: float  # of all operations of a round
  usual_s: float  # of a round with a middling fragment
  serial_s: float  # of it, before the syncer can commit another one
  between_s: float  # rounds, at the pace of the fastest island
  mean_gbps: float  # of an island's busier direction, all steps together
  slack_s: float  # what tau steps leave, in a round with the largest
  grace_s: float

  @property
  def round_s(self) -> float:
    """From an answer to its commit, fetched."""
    return self.send_s + self.merge_s + self.fetch_s + self.latency_s


def model_of(config: Config) -> Model:
  """Of a config; no array is made. `ConfigError` if the program tells not."""
  program = loading.load_program(config, None, "")
  if not hasattr(program, "flops_per_sample"):
    raise ConfigError(
      f"program = {config.program!r} does not tell what a step computes: it "
      "needs the method flops_per_sample (see ddiloco.engine.ports.Program)."
    )
  params = loading.abstract_params(program)
  return Model(
    params,
    program.flops_per_sample().model,
    loading.lay_out(config, params),
  )


def balance(
  config: Config,
  slices: Sequence[Slice],
  model: Model,
  assumed: Assumptions,
  floors_s: Mapping[str, float],
) -> list[Island]:
  """Islands whose steps end together, with about the config's samples in all.

  Args:
    config: whose learners' batches, or global batch, are dealt out anew.
    slices: of the islands.
    model: of the config.
    assumed: gives the speed of a chip.
    floors_s: least seconds per sample by slice, where it was compiled.
  """
  total = config.learners.global_batch or sum(
    learner_value(config.learners.batch_size, i) for i in range(len(slices))
  )
  sample_s = [_sample_s(of, model, assumed, floors_s) for of in slices]
  meshes = [_unit_and_state_bytes(config, of, model) for of in slices]
  units = [unit for unit, _ in meshes]
  batches = _batches(total, units, sample_s)
  return [
    Island(
      of,
      batch,
      unit,
      batch * seconds,
      state_bytes,
      str(of) in floors_s,
    )
    for of, (unit, state_bytes), batch, seconds in zip(
      slices, meshes, batches, sample_s, strict=True
    )
  ]


def _batches(
  total: int, units: Sequence[int], sample_s: Sequence[float]
) -> list[int]:
  """Multiples of units that end together, else with the wanted total."""
  speed = sum(1 / s for s in sample_s)
  best = None
  for i, unit in enumerate(units):
    ideal = total / sample_s[i] / speed / unit
    near = {
      math.floor(ideal * x) for x in (1 / _TOTAL_WITHIN, 1, _TOTAL_WITHIN)
    }
    for k in range(max(min(near), 1), max(*near, 1) + 1):
      step_s = k * unit * sample_s[i]
      batches = [
        max(round(step_s / s / u), 1) * u
        for u, s in zip(units, sample_s, strict=True)
      ]
      times = [b * s for b, s in zip(batches, sample_s, strict=True)]
      spread = round(max(times) / min(times), 2)
      off = abs(math.log(sum(batches) / total))
      best = min(best or (math.inf,), (spread, off, batches))
  return best[-1]


def as_configured(config: Config, islands: Sequence[Island]) -> list[Island]:
  """The same with the config's own batches."""
  found = []
  for i, island in enumerate(islands):
    batch = learner_value(config.learners.batch_size, i)
    step_s = island.step_s / island.batch * batch
    found.append(island._replace(batch=batch, step_s=step_s))
  return found


def _sample_s(
  of: Slice,
  model: Model,
  assumed: Assumptions,
  floors_s: Mapping[str, float],
) -> float:
  peak = of.chips * of.generation.flops * assumed.mfu
  return max(model.flops_per_sample / peak, floors_s.get(str(of), 0.0))


def _unit_and_state_bytes(
  config: Config, of: Slice, model: Model
) -> tuple[int, int]:
  """What batches are multiples of; and what a chip holds between steps.

  Raises `ConfigError` where the mesh fits slice or model not.
  """
  unit = batch_unit(config, of)
  on = on_slice(config, of, unit)
  if loading.takes(config, "abstract"):
    program = loading.load_program(on, 0, "", abstract=True)
    return unit, state_bytes(program) + kept_bytes(config, program)
  _, *ways = island_mesh(on, 0)
  return unit, math.ceil(_ADAMW_BYTES * model.parameters / math.prod(ways))


def exchange(
  config: Config,
  model: Model,
  islands: Sequence[Island],
  assumed: Assumptions,
) -> Exchange:
  """What rounds take beside the inner steps."""
  up, down = loading.traffic_bytes(config, model.layout)
  schedule = make_schedule(config.sync)
  step_s = min(island.step_s for island in islands)
  rate = assumed.wan_gbps * 1e9 / _BITS
  rate_merged = assumed.syncer_cores * MERGED_PER_CORE_S
  rounds = []
  for t in range(schedule.interval, 2 * schedule.interval):
    if due := schedule.fragments(t):
      values = sum(model.layout.fragment_bytes(p) for p in due) / 4
      sent, fetched = sum(up[p] for p in due), sum(down[p] for p in due)
      merge_s = len(islands) * values / rate_merged
      rounds.append(
        (sent / rate + merge_s + fetched / rate, sent, fetched, merge_s)
      )
  latency_s = (
    _ISLAND_LATENCIES * assumed.latency_s
    + _SYNCER_LATENCIES * assumed.syncer_latency_s
  )
  usual = sorted(rounds)[(len(rounds) - 1) // 2]
  longest_s, sent, fetched, merge_s = max(rounds)
  round_s = longest_s + latency_s
  slack_s = config.sync.overlap_steps * step_s - round_s
  grace_s = min(max(config.sync.grace_margin * slack_s, 0.0), step_s)
  return Exchange(
    up_bytes=sent,
    down_bytes=fetched,
    send_s=sent / rate,
    merge_s=merge_s,
    fetch_s=fetched / rate,
    latency_s=latency_s,
    usual_s=usual[0] + latency_s,
    serial_s=usual[3] + _SYNCER_LATENCIES_SERIAL * assumed.syncer_latency_s,
    between_s=schedule.interval * step_s / len(rounds),
    mean_gbps=max(sum(up), sum(down))
    * _BITS
    / 1e9
    / (schedule.interval * step_s),
    slack_s=slack_s,
    grace_s=grace_s if config.sync.grace else 0.0,
  )


def failures(
  islands: Sequence[Island], assumed: Assumptions
) -> dict[str, dict[str, Any]]:
  """Goodput and uptime: of these islands, and of them as one data-parallel run.

  Islands are taken to be of the same size, and each to be one slice, which
  stops when a chip of it fails.
  """
  count = len(islands)
  chips = sum(island.slice.chips for island in islands)
  cluster = Cluster(
    chips=chips - chips % count,
    learners=count,
    slices=count,
    mtbi_s=assumed.mtbi_years * YEAR_S,
    step_s=max(island.step_s for island in islands),
    up_s=assumed.restart_s,
  )
  one = dataclasses.replace(
    cluster, learners=1, elastic=False, restart_s=assumed.restart_s
  )
  return {
    name: describe(simulate(made, hours=_HOURS, seeds=_SEEDS))
    for name, made in (("decoupled", cluster), ("data_parallel", one))
  }


def quorum_up(count: int, quorum: int, share: float) -> float:
  """How likely `quorum` of `count` islands are up, each for `share`."""
  return math.fsum(
    math.comb(count, k) * share**k * (1 - share) ** (count - k)
    for k in range(quorum, count + 1)
  )


def budget(
  tokens: int, islands: Sequence[Island], length: int, goodput: float
) -> dict[str, Any]:
  """What a budget of tokens takes; 0 is none."""
  per_s = sum(island.batch * length / island.step_s for island in islands)
  days = tokens / (per_s * goodput * _DAY_S)
  chips = sum(island.slice.chips for island in islands)
  return {
    "tokens": tokens,
    "tokens_per_day": per_s * goodput * _DAY_S,
    "days": days,
    "chip_hours": days * 24 * chips,
  }
