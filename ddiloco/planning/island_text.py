"""What `launch.compile` found, for a terminal."""

from typing import Any

from ddiloco.config import Config
from ddiloco.planning.island import EXCHANGE
from ddiloco.planning.tpus import GIB
from ddiloco.report.story import count, duration, percent, size
from ddiloco.types import SECOND_NS


def remedies(made: dict[str, Any], config: Config) -> list[str]:
  """What would make the step fit, the cheapest first; nothing if it does."""
  if made["memory"]["fits"]:
    return []
  found, searched = [], made.get("largest_batch")
  data, fsdp, tensor, *rest = made["mesh"]
  if made["memory"]["what"] != EXCHANGE:
    if searched and searched["batch"]:
      batch = searched["batch"]
      found.append(f"--config.learners.batch_size='({batch},)' fits")
    if not searched:
      found.append("a smaller batch, if one fits: look with --largest_batch")
    if not config.model.remat:
      found.append("--config.model.remat=True keeps fewer activations")
  if data > 1:
    split = (1, data * fsdp, tensor, *rest)
    found.append(
      f"--config.learners.mesh='{split}', if the model's widths divide by it, "
      f"splits parameters and optimizer state over {data} times as many chips"
    )
  if not searched or not searched["batch"]:
    beside = made["state_bytes"] + made["memory"]["kept_bytes"]
    found.append(
      f"a larger slice than {made['topology']}: a chip's share of parameters, "
      f"optimizer state, anchors and residuals alone is {_gib(beside)}"
    )
  return found


def text(made: dict[str, Any]) -> str:
  """The report."""
  mesh = " x ".join(map(str, made["mesh"]))
  lines = [
    f"{count(made['parameters'])} parameters on {made['topology']} "
    f"({made['chips']} chips, mesh {mesh}), {made['batch']} sequences, "
    f"{count(made['tokens_per_step'])} tokens a step",
    "",
    *_memory(made),
  ]
  if "roofline" in made:
    lines += _speed(made) + _moved(made["moved"])
  if "exchange" in made:
    lines += _exchange(made["exchange"])
  return "\n".join(lines)


def _memory(made: dict[str, Any]) -> list[str]:
  memory = made["memory"]
  usable = _gib(memory["usable_bytes"])
  if memory["fits"]:
    whole = memory["peak_bytes"] + memory["kept_bytes"]
    lines = [
      f"memory of a chip   fits: {_gib(whole)} of {usable} at its peak, "
      f"{_gib(memory['kept_bytes'])} of it anchors and residuals",
      f"                   arguments {_gib(memory['arguments_bytes'])}, "
      f"temporaries {_gib(memory['temporaries_bytes'])} reserved, "
      f"program {_gib(memory['code_bytes'])}",
    ]
  else:
    lines = [f"memory of a chip   DOES NOT FIT: {_excess(memory)}"]
    lines += [f"                   {line}" for line in made["remedies"]]
  if "largest_batch" in made:
    lines.append(f"largest batch      {_largest(made['largest_batch'])}")
  return lines


def _excess(memory: dict[str, Any]) -> str:
  needed, usable = memory["needed_bytes"], memory["usable_bytes"]
  what = memory["what"]
  if needed is None:
    return f"{what} needs more than the {_gib(usable)} that a program can use"
  return (
    f"{what} needs {_gib(needed)}, {_gib(needed - usable)} more than the "
    f"{_gib(usable)} that a program can use"
  )


def _largest(found: dict[str, Any]) -> str:
  if not found["batch"]:
    least = "none" if found["refused"] == found["unit"] else "not found"
    return f"{least}: even {found['refused']} sequences do not fit"
  least = "and more may" if found["refused"] is None else ""
  refused = least or f"{found['refused']} do not"
  return f"{found['batch']} sequences fit, {refused} (compiled to see)"


def _speed(made: dict[str, Any]) -> list[str]:
  least, flops = made["roofline"], made["flops"]
  chip = (flops["model"] + flops["recomputed"]) / made["chips"]
  best = made["model_flops_utilisation_at_most"]
  return [
    f"operations         {flops['model']:.3g} a step forward and backward, "
    f"{flops['recomputed']:.3g} recomputed; {chip:.3g} a chip",
    f"no step shorter    than {_s(least['step_s'])}, which {least['bound']} "
    f"takes at published peaks: compute {_s(least['compute_s'])}, memory "
    f"{_s(least['memory_s'])}, network {_s(least['network_s'])}",
    f"                   at best {percent(best)} of the chips' peak in model "
    "operations",
  ]


def _moved(moved: dict[str, Any]) -> list[str]:
  lines = [
    f"moved by a chip    {size(moved['memory_bytes'])} to and from memory, "
    f"{size(moved['sent_bytes'])} to other chips"
  ]
  for item in moved["collectives"]:
    if item["sent_bytes"] >= 0.01 * moved["sent_bytes"]:
      group = f" among {item['group']}" if item["group"] > 1 else ""
      lines.append(
        f"                   {size(item['sent_bytes']):>9} by "
        f"{item['count']:,} {item['kind']}{group}"
      )
  return lines


def _exchange(exchange: dict[str, Any]) -> list[str]:
  share = percent(exchange["share_of_step"])
  lines = [
    f"exchange           {share} of a step's time, at the same peaks, to "
    "encode answers and apply commits"
  ]
  for row in exchange["rows"]:
    lines.append(
      f"                   {row['work']} fragment {row['fragment']} "
      f"({size(row['fragment_bytes'])}): {_s(row['least_s'])}, "
      f"{_gib(row['peak_bytes'])} at its peak; stands for "
      f"{row['stands_for']}"
    )
  return lines


def _gib(n: float) -> str:
  return f"{n / GIB:.3g} GiB"


def _s(seconds: float) -> str:
  if seconds < 1e-3:
    return f"{seconds * 1e6:.0f} us"
  return duration(seconds * SECOND_NS)
