"""What a swarm's seed draws: a config, a weather, a fault script.

Which kinds of trouble exist is drawn before their rates: most bugs need two
or three kinds at once and are hidden by the others.
"""

import dataclasses
import random
from typing import Any

from ddiloco import config as config_lib
from ddiloco.config import Config, seconds_to_ns
from ddiloco.protocol import faults as script
from ddiloco.protocol.fault_kinds import Fault
from ddiloco.sim.clock import stream
from ddiloco.sim.exchange import Weather

_KIND_CHANCE = 0.35  # of a kind of trouble to exist
_TROUBLES = (
  "late",
  "lost",
  "refused",
  "unconfirmed",
  "doubled",
  "stale",
  "lagging",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
  """Everything about one seed. The first phase ends at the horizon."""

  config: Config
  weather: Weather
  faults: tuple[Fault, ...]
  crash_chance: float  # per event of any role, anywhere in what follows
  restart_ns: int  # at most, from such a crash to the next life
  horizon_ns: int

  def __str__(self) -> str:
    """In the forms that a config and a fault script are written in."""
    given = config_lib.differences(Config(), self.config)
    values = {key: new for key, (_, new) in given.items()}
    return (
      f"config {values}; weather {self.weather}; crash chance "
      f"{self.crash_chance:.4f}; until {self.horizon_ns / 1e9:.1f} s; faults "
      f"'{script.to_text(self.faults)}'"
    )


def draw(seed: int, config: Config | None = None) -> Plan:
  """The plan of a seed; a given config is kept as it is."""
  if config is None:
    values = _config(stream(seed, "config"))
    _vary(stream(seed, "family"), values)
    config = config_lib.from_dict(values)
  rng = stream(seed, "plan")
  step_ns = seconds_to_ns(config.sim.step_s)
  start_ns = seconds_to_ns(config.sim.start_s)
  horizon_ns = 2 * start_ns + step_ns * rng.randint(20, 120)
  crash_chance = 10 ** rng.uniform(-3, -1.7) if _exists(rng) else 0.0
  return Plan(
    config=config,
    weather=_weather(seed, seconds_to_ns(config.sim.delay_s)),
    faults=_faults(seed, config, horizon_ns),
    crash_chance=crash_chance,
    restart_ns=2 + 10 * step_ns,
    horizon_ns=horizon_ns,
  )


def _exists(rng: random.Random) -> bool:
  return rng.random() < _KIND_CHANCE


# --- The config -------------------------------------------------------------


def _config(rng: random.Random) -> dict[str, Any]:
  count = rng.randint(1, 5)
  dead_after_s = rng.choice((0.5, 2.0, 10.0))
  step_s = rng.choice((0.02, 0.1, 0.5))
  return {
    "learners": {
      "count": count,
      "batch_size": tuple(rng.randint(1, 8) for _ in range(count)),
      "slowdown": tuple(rng.choice((1.0, 1.0, 1.3, 3.0)) for _ in range(count)),
    },
    "sync": _sync(rng, count),
    "live": {
      "dead_after_s": dead_after_s,
      "heartbeat_s": dead_after_s / rng.choice((2, 5)),
      "store_deadline_s": rng.choice((0.1, 1.0, 5.0)),
      "tape_flush_s": rng.choice((0.2, 1.0)),
      "checkpoint_every_steps": rng.choice((0, 3, 20)),
    },
    "stop": {"rounds": rng.choice((25, 1_000_000, 1_000_000))},
    "sim": {
      "step_s": step_s,
      "jitter": rng.choice((0.0, 0.05, 0.3)),
      "spell_chance": rng.choice((0.0, 0.02)),
      "merge_s": step_s * rng.choice((0.01, 0.1, 1.0)),
      "start_s": rng.choice((0.1, 1.0)),
      "delay_s": rng.choice((0.0005, 0.002, 0.02)),
      "drift_ppm": rng.choice((0, 50, 1000)),
    },
    "codec": _codec(rng),
  }


def _codec(rng: random.Random) -> dict[str, Any]:
  """Without arrays, any codec of the way down stands for all of them."""
  down = {"down": "int4", "down_full_every": rng.randint(1, 4)}
  return down if _exists(rng) else {}


def _sync(rng: random.Random, count: int) -> dict[str, Any]:
  interval = rng.randint(2, 8)
  sync = {
    "num_fragments": rng.randint(1, 6),
    "interval_steps": interval,
    "overlap_steps": rng.randint(1, min(3, interval - 1)),
    "quorum_min": min(rng.randint(1, count), rng.randint(1, count)),
    "grace": rng.random() < 0.8,
    "grace_margin": rng.choice((0.5, 0.9)),
    "outlier_factor": rng.choice((0.0, 20.0)),
  }
  policy = rng.choices(("default", "any", "exact", "own"), (7, 1, 1, 1))[0]
  if policy == "any":
    sync |= {"anchor": "any"}
  elif policy == "exact":
    sync |= {
      "wait": "exact",
      "overlap_steps": rng.randint(0, min(3, interval - 1)),
      "apply": rng.choice(("when_seen", "at_overlap")),
    }
  elif policy == "own":
    sync |= {"apply": "own", "anchor": "any", "num_fragments": 1}
  return sync


def _vary(rng: random.Random, values: dict[str, Any]) -> None:
  """Options of the family; a stream of its own, so that no seed changes."""
  learners, sync = values["learners"], values["sync"]
  step_s = values["sim"]["step_s"]
  slices = rng.randint(1, min(learners["batch_size"]))
  down_s, up_s = (step_s * rng.choice((0.5, 5.0)) for _ in range(2))
  values["elastic"] = {"slices": slices, "down_s": down_s, "up_s": up_s}
  if not sync["grace"]:
    del sync["grace_margin"]  # it would mean nothing
  sync["blend"] = rng.choice((0.0, 0.0, 0.5))
  sync["dynamic_steps"] = sync.get("apply") == "own" and rng.random() < 0.5
  if min(learners["batch_size"]) > 1 and rng.random() < 0.3:
    learners["global_batch"] = -(-sum(learners["batch_size"]) // 2)
  values["recovery"] = {
    "checkpoint_rounds_max": rng.choice((0, 5, 240)),
    "donors_max": rng.randint(0, 2),
    "donor_timeout_s": step_s * rng.choice((3, 100)),
    "transfers_max": rng.randint(1, 2),
  }
  default = not ({"wait", "apply"} & sync.keys())
  if default and values["recovery"]["donors_max"] and rng.random() < 0.5:
    values["recovery"]["params"] = "peer"
  values["snapshot"] = {
    "every_rounds": rng.choice((0, 3, 10)),
    "keep": rng.randint(1, 3),
    "patience_s": step_s * rng.choice((1, 100)),
  }
  rounds = min(sync["num_fragments"], sync["interval_steps"])
  values["syncer"] = {"shards": rng.choice((1, rng.randint(1, min(rounds, 3))))}


# --- What befalls it --------------------------------------------------------


def _weather(seed: int, delay_ns: int) -> Weather:
  rates = {}
  for name in _TROUBLES:
    rng = stream(seed, f"weather/{name}")  # a new one shifts no other
    rates[name] = 10 ** rng.uniform(-3, -1.3) if _exists(rng) else 0.0
  rng = stream(seed, "weather")
  return Weather(
    delay_ns=delay_ns,
    spread=rng.choice((0.0, 0.5, 1.0)),
    torn=0.5 if _exists(rng) else 0.0,
    lag_ns=rng.choice((10, 500)) * delay_ns,
    timeout_ns=rng.choice((10, 200)) * delay_ns,
    **rates,
  )


def _faults(seed: int, config: Config, horizon_ns: int) -> tuple[Fault, ...]:
  """A script without contradictions."""
  drawn: list[Fault] = []
  for what in script.KINDS:
    rng = stream(seed, f"faults/{what}")
    if not _exists(rng):
      continue
    if what == "clog":
      drawn += _swizzle(rng, config, horizon_ns)
      continue
    for _ in range(rng.randint(1, 8 if what == "rival" else 4)):
      drawn.append(_fault(rng, what, config, horizon_ns))
  kept: list[Fault] = []
  shards, rng = config.syncer.shards, stream(seed, "faults/shards")
  for fault in drawn:
    if fault.who == "syncer":
      fault = dataclasses.replace(fault, shard=rng.randrange(shards))
    try:
      script.check(
        (*kept, fault),
        learners=config.learners.count,
        stop_rounds=config.stop.rounds or None,
        shards=shards,
        live=False,
      )
    except ValueError:
      continue  # it contradicts an earlier one
    kept.append(fault)
  return tuple(kept)


def _fault(
  rng: random.Random, what: str, config: Config, horizon_ns: int
) -> Fault:
  kind = script.KINDS[what]
  who = rng.choice(kind.actors)
  at_round = rng.randint(1, 20) if rng.random() < 0.3 else None
  for_ns = None
  if kind.span == "required" or (
    kind.span == "optional" and rng.random() < 0.8
  ):
    step_ns = seconds_to_ns(config.sim.step_s)
    for_ns = round(step_ns * 10 ** rng.uniform(-0.5, 1.7))
  return Fault(
    at_round=at_round,
    at_ns=rng.randrange(horizon_ns) if at_round is None else None,
    who=who,
    learner=(
      rng.randrange(config.learners.count) if who == "learner" else None
    ),
    what=what,
    for_ns=for_ns,
    factor_permille=(
      rng.choice((1500, 4000, 30_000)) if kind.has_factor else None
    ),
  )


def _swizzle(
  rng: random.Random, config: Config, horizon_ns: int
) -> list[Fault]:
  """Clogs a subset one by one and lets them go in another order."""
  everybody = [None, *range(config.learners.count)]
  subset = rng.sample(everybody, rng.randint(1, len(everybody)))
  times = sorted(rng.randrange(horizon_ns) for _ in range(2 * len(subset)))
  begins, ends = times[: len(subset)], times[len(subset) :]
  rng.shuffle(ends)
  return [
    Fault(
      at_round=None,
      at_ns=begin,
      who="syncer" if learner is None else "learner",
      learner=learner,
      what="clog",
      for_ns=max(end - begin, 1),
    )
    for learner, begin, end in zip(subset, begins, ends, strict=True)
  ]
