"""The whole plan of a run, as JSON takes it, and as text."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.config import Config, ConfigError
from ddiloco.planning import advice, aot, cautions, island, plan
from ddiloco.planning.plan import Assumptions, Exchange, Island, Model
from ddiloco.planning.tpus import GIB, Slice
from ddiloco.report.story import count, size

Say = Callable[[str], None]
_OF_ONE = ("data_parallel", "elastic_data_parallel")


def make_plan(
  config: Config,
  slices: Sequence[Slice],
  assumed: Assumptions,
  *,
  compiling: bool,
  say: Say = lambda line: None,
) -> dict[str, Any]:
  """Speed, exchange, failures, suggestions and warnings.

  Args:
    config: of the run, as the user has it.
    slices: one for each island.
    assumed: what no config tells.
    compiling: ask the compiler for each slice's roofline and memory: minutes.
    say: told what is being done.

  Raises `ConfigError` where the config cannot be on these slices.
  """
  if config.algorithm in _OF_ONE and len(slices) > 1:
    raise ConfigError(
      f"{len(slices)} islands, but algorithm = {config.algorithm!r} has one "
      "learner: plan for one slice, or for another algorithm."
    )
  if len(slices) > config.data.shards:
    raise ConfigError(
      f"{len(slices)} islands, but data.shards = {config.data.shards}: every "
      "learner reads a shard of its own. Raise it."
    )
  model = plan.model_of(config)
  place = functools.partial(plan.balance, config, slices, model, assumed)
  islands, floors, misfits = place({}), {}, []
  if compiling:
    floors, misfits = _compiled(config, islands, say)
    islands = place(floors)
  failing = plan.failures(islands, assumed)
  share_up = failing["decoupled"]["goodput"]
  warned = misfits + cautions.warnings(
    config, model, islands, assumed, share_up
  )
  advised = advice.advise(config, model, islands, assumed)
  asked = plan.as_configured(config, islands)
  length = config.data.sequence_length
  return {
    "parameters": model.parameters,
    "islands": [_island(made, islands, length) for made in islands],
    "tokens_per_step": sum(made.batch for made in islands) * length,
    "exchange": _exchange(plan.exchange(config, model, asked, assumed)),
    "suggested_exchange": _exchange(advised.exchange),
    "failures": failing,
    "quorum_up": plan.quorum_up(len(islands), advised.config.quorum, share_up),
    "budget": plan.budget(config.stop.tokens, islands, length, share_up),
    "suggestions": [item._asdict() for item in advised.suggestions],
    "warnings": warned,
    "assumptions": _assumptions(assumed, compiling),
    "curves": _curves(config, model, asked, assumed),
  }


def _compiled(
  config: Config, islands: Sequence[Island], say: Say
) -> tuple[dict[str, float], list[str]]:
  """Least seconds of a sample by slice, and what does not fit."""
  floors, misfits = {}, []
  for made in {str(made.slice): made for made in islands}.values():
    on = island.on_slice(config, made.slice, made.batch)
    study = island.study(on, made.slice, exchange=False, search=False, say=say)
    if "roofline" in study:
      floors[str(made.slice)] = study["roofline"]["step_s"] / made.batch
    if not study["memory"]["fits"]:
      needed = study["memory"]["needed_bytes"]
      told = f" ({needed / GIB:.3g} GiB needed)" if needed else ""
      misfits.append(
        f"{made.slice} has no room for {made.batch} sequences{told}. "
        f"launch.compile --topology={made.slice} tells what would fit"
      )
  return floors, misfits


def _island(
  made: Island, islands: Sequence[Island], length: int
) -> dict[str, Any]:
  batches = sum(other.batch**2 for other in islands)
  return {
    "slice": str(made.slice),
    "chips": made.slice.chips,
    "batch": made.batch,
    "batch_unit": made.unit,
    "step_s": made.step_s,
    "tokens_per_s": made.batch * length / made.step_s,
    # Token weights are c_tokens^2 / c_steps, and steps are equally many.
    "merge_weight": made.batch**2 / batches,
    "state_bytes": made.state_bytes,
    "compiled": made.compiled,
  }


def _exchange(made: Exchange) -> dict[str, Any]:
  return made._asdict() | {"round_s": made.round_s}


def _assumptions(assumed: Assumptions, compiling: bool) -> list[str]:
  speed = (
    f"model operations reach {assumed.mfu:.0%} of the published peak (--mfu)"
  )
  if compiling:
    speed += ", or less where the compiled step's roofline says so"
  elif aot.available():
    speed += "; steps were not compiled (--compile)"
  else:
    speed += (
      "; analytic step times: without libtpu no step was compiled "
      f"({aot.INSTALL})"
    )
  return [
    speed,
    f"links of {assumed.wan_gbps:g} Gbit/s and {1e3 * assumed.latency_s:g} ms "
    f"from islands to the exchange, {1e3 * assumed.syncer_latency_s:g} ms from "
    "the syncer (--wan_gbps, --latency_s, --syncer_latency_s)",
    f"each of {assumed.syncer_cores:g} cores of the syncer merges "
    f"{count(plan.MERGED_PER_CORE_S)} values of answers a second, as was "
    "measured on two (--syncer_cores)",
    f"a chip fails every {assumed.mtbi_years:g} years and takes its island "
    f"with it; {assumed.restart_s:g} s from its return to a step "
    "(--mtbi_years, --restart_s; returns as in experiments/goodput)",
  ]


def _curves(
  config: Config,
  model: Model,
  islands: Sequence[Island],
  assumed: Assumptions,
) -> dict[str, Any]:
  """What the page plots: rounds against bandwidth, by codecs."""
  gbps = [assumed.wan_gbps * 10 ** (k / 4) for k in range(-6, 7)]
  rounds = {}
  for up, down in (("f32", "none"), ("int4", "none"), ("int4", "int4")):
    codec = dataclasses.replace(config.codec, up=up, down=down)
    other = dataclasses.replace(config, codec=codec)
    rounds[f"{up} up, {'f32' if down == 'none' else down} down"] = [
      plan.exchange(
        other, model, islands, dataclasses.replace(assumed, wan_gbps=x)
      ).round_s
      for x in gbps
    ]
  return {
    "gbps": gbps,
    "round_s": rounds,
    "step_s": min(made.step_s for made in islands),
    "overlap_steps": config.sync.overlap_steps,
  }


# --- For a terminal ---------------------------------------------------------


def text(made: dict[str, Any]) -> str:
  """The plan."""
  return "\n".join(
    [
      *_islands_table(made),
      "",
      *_exchange_text(made),
      "",
      *_failures_text(made),
      "",
      "suggested",
      *map(_suggestion, made["suggestions"]),
      "",
      *(f"WARNING  {line}" for line in made["warnings"]),
      *([""] if made["warnings"] else []),
      "assuming that",
      *(f"  {line}" for line in made["assumptions"]),
    ]
  )


def _islands_table(made: dict[str, Any]) -> list[str]:
  lines = [
    f"{count(made['parameters'])} parameters, "
    f"{count(made['tokens_per_step'])} tokens in a step of all islands",
    "",
    "island  slice          chips    batch   step, s  tokens/s  weight  state",
  ]
  for i, row in enumerate(made["islands"]):
    lines.append(
      f"{i:>6}  {row['slice']:<12} {row['chips']:>7} {row['batch']:>8} "
      f"{row['step_s']:>9.3g} {count(row['tokens_per_s']):>9} "
      f"{100 * row['merge_weight']:>6.3g}%  {row['state_bytes'] / GIB:.2g} GiB"
    )
  return lines


def _exchange_text(made: dict[str, Any]) -> list[str]:
  step_s = min(row["step_s"] for row in made["islands"])
  lines = [
    "exchange   Gbit/s  longest round     send   merge   fetch   usual   slack"
    "   grace    answer   version"
  ]
  keys = ("send_s", "merge_s", "fetch_s", "usual_s", "slack_s", "grace_s")
  for name, key in (("asked", "exchange"), ("suggested", "suggested_exchange")):
    row = made[key]
    lines.append(
      f"{name:<10} {row['mean_gbps']:>6.3g} {row['round_s']:>6.2g} s = "
      f"{row['round_s'] / step_s:<6.2g}"
      + "".join(f"{row[k]:>8.2g}" for k in keys)
      + f"{size(row['up_bytes']):>10}{size(row['down_bytes']):>10}"
    )
  lines[1:1] = ["             mean  steps of the fastest island"]
  return lines


def _failures_text(made: dict[str, Any]) -> list[str]:
  lines = []
  for name, row in made["failures"].items():
    lines.append(
      f"{name.replace('_', '-'):<14} goodput {100 * row['goodput']:.2f}%, "
      f"uptime {100 * row['uptime']:.2f}%"
    )
  due = made["budget"]
  quorum = made["quorum_up"]
  lines[0] += f"; the suggested quorum is there {100 * quorum:.4g}% of the time"
  lines.append(f"{'speed':<14} {count(due['tokens_per_day'])} tokens a day")
  if due["tokens"]:
    lines[-1] += (
      f"; {count(due['tokens'])} tokens take {due['days']:.3g} days, "
      f"{count(due['chip_hours'])} chip-hours"
    )
  return lines


def _suggestion(item: dict[str, Any]) -> str:
  same = item["now"] == item["value"]
  now = "" if same else f" (now {item['now']})"
  return f"  {item['key']} = {item['value']}{now}: {item['why']}"
