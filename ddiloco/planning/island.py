"""An island's real train step on a TPU slice: memory, time, what it moves."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax

from ddiloco import config as config_lib
from ddiloco.algo.fragments import Layout
from ddiloco.config import Config, ConfigError, island_mesh, learner_value
from ddiloco.engine import loading
from ddiloco.engine.lowering import lower_exchange
from ddiloco.planning import aot
from ddiloco.planning.aot import Compiled, DoesNotFit
from ddiloco.planning.largest_batch import Tried, largest_batch
from ddiloco.planning.roofline import Roofline, roofline
from ddiloco.planning.tpus import Slice

Say = Callable[[str], None]
EXCHANGE = "the exchange's work"  # what did not fit, if not the step
_F32_BYTES = 4


def on_slice(config: Config, of: Slice, batch: int | None = None) -> Config:
  """The config with islands of this slice; `ConfigError` if it cannot be.

  Args:
    config: of the run.
    of: the slice of every island.
    batch: samples of a step, instead of the config's.
  """
  values = config.to_dict()
  values["learners"]["devices"] = [of.chips]
  if batch is not None:
    values["learners"]["batch_size"] = [batch]
  return config_lib.from_dict(values)


def batch_unit(config: Config, of: Slice) -> int:
  """What batches of an island are multiples of."""
  learners = dataclasses.replace(config.learners, devices=(of.chips,))
  mesh = island_mesh(dataclasses.replace(config, learners=learners), 0)
  data, fsdp, _, *expert = mesh
  ways = math.prod((data, fsdp, *expert))
  return ways * -(-config.elastic.slices // ways)  # each slice needs a sample


def study(
  config: Config,
  of: Slice,
  learner: int = 0,
  *,
  exchange: bool = True,
  search: bool = True,
  say: Say = lambda line: None,
) -> dict[str, Any]:
  """Everything that `launch.compile` reports, as JSON takes it.

  Args:
    config: of the run.
    of: the slice of the island.
    learner: whose batch is taken.
    exchange: compile its work too.
    search: for the largest batch that fits, which takes further compilations.
    say: told what is being done.
  """
  batch = learner_value(config.learners.batch_size, learner)
  config = on_slice(config, of, batch)
  devices = aot.devices(of)
  program = _program(config, devices)
  layout = loading.lay_out(config, program.abstract_params())
  kept = kept_bytes(config, program)
  say(f"compiling the train step, {batch} samples, for {of}")
  step = _compile_step(program, of, kept)
  made = _head(config, of, program) | {"memory": _memory(step, of, kept)}
  if isinstance(step, Compiled):
    made |= _speed(config, of, program, step)
    if exchange:
      say("compiling what the exchange does on the chips")
      try:
        made["exchange"] = _exchange(
          config, of, program, layout, made["roofline"]["step_s"]
        )
      except DoesNotFit as error:
        made["memory"] = _memory(error, of, kept) | {"what": EXCHANGE}
  if search:
    made["largest_batch"] = _largest(config, of, program, step, say)
  return made


def _compile_step(
  program: Any, of: Slice, kept: int, *, quickly: bool = False
) -> Compiled | DoesNotFit:
  """With what the learner keeps beside it, which no compiler knows of."""
  usable = of.generation.usable_bytes
  try:
    made = aot.compile_lowered(program.lower(), quickly=quickly)
  except DoesNotFit as error:
    needed = error.needed_bytes
    return DoesNotFit(needed and needed + kept, error.usable_bytes or usable)
  if made.peak_bytes + kept > usable:
    return DoesNotFit(made.peak_bytes + kept, usable)
  return made


def _program(config: Config, devices: Any) -> Any:
  program = None
  if loading.takes(config, "devices"):
    program = loading.load_program(config, 0, "", devices=devices)
  for name in ("lower", "flops_per_sample", "abstract_params"):
    if not hasattr(program, name):
      raise ConfigError(
        f"program = {config.program!r} cannot be compiled for a slice: its "
        "build function needs the argument devices, and what it builds the "
        "methods lower, flops_per_sample and abstract_params (see "
        "ddiloco.engine.ports.Program)."
      )
  return program


def _head(config: Config, of: Slice, program: Any) -> dict[str, Any]:
  batch = config.learners.batch_size[0]
  leaves = jax.tree.leaves(program.abstract_params())
  return {
    "topology": str(of),
    "chips": of.chips,
    "mesh": island_mesh(config, 0),
    "parameters": sum(leaf.size for leaf in leaves),
    "state_bytes": state_bytes(program),
    "batch": batch,
    "tokens_per_step": batch * config.data.sequence_length,
  }


def _memory(
  step: Compiled | DoesNotFit, of: Slice, kept: int
) -> dict[str, Any]:
  made = {
    "usable_bytes": of.generation.usable_bytes,
    "what": "the step",
    "kept_bytes": kept,
  }
  if isinstance(step, DoesNotFit):
    return made | {
      "fits": False,
      "needed_bytes": step.needed_bytes,
      "usable_bytes": step.usable_bytes or of.generation.usable_bytes,
    }
  return made | {
    "fits": True,
    "arguments_bytes": step.arguments_bytes,
    "temporaries_bytes": step.temporaries_bytes,
    "peak_bytes": step.peak_bytes,
    "code_bytes": step.code_bytes,
  }


def _speed(
  config: Config, of: Slice, program: Any, step: Compiled
) -> dict[str, Any]:
  batch = config.learners.batch_size[0]
  flops = program.flops_per_sample()
  least = roofline(
    of.generation,
    flops=batch * flops.all / of.chips,
    memory_bytes=step.traffic.memory_bytes,
    sent_bytes=step.traffic.sent_bytes,
  )
  return {
    "flops": {
      "model": batch * flops.model,
      "recomputed": batch * flops.recomputed,
    },
    "moved": {
      "memory_bytes": step.traffic.memory_bytes,
      "sent_bytes": step.traffic.sent_bytes,
      "collectives": [
        dataclasses.asdict(item) for item in step.traffic.collectives
      ],
    },
    "roofline": _as_dict(least),
    "model_flops_utilisation_at_most": batch
    * flops.model
    / of.chips
    / of.generation.flops
    / least.step_s,
  }


def _as_dict(least: Roofline) -> dict[str, Any]:
  return least._asdict() | {"step_s": least.step_s, "bound": least.bound}


def _exchange(
  config: Config, of: Slice, program: Any, layout: Layout, step_s: float
) -> dict[str, Any]:
  """The work of all fragments, from the largest's and a middling one's."""
  params = program.abstract_params()
  count = layout.num_fragments
  sizes = [layout.fragment_bytes(p) for p in range(count)]
  largest = sizes.index(max(sizes))
  others = [size for p, size in enumerate(sizes) if p != largest]
  chosen = {largest: 1}
  if others:
    middling = sizes.index(statistics.median_low(others))
    chosen[middling] = chosen.get(middling, 0) + count - 1
  rows = [
    {
      "work": name,
      "fragment": p,
      "fragment_bytes": sizes[p],
      "stands_for": times,
      **_work(of, lowered),
    }
    for p, times in chosen.items()
    for name, lowered in lower_exchange(config, layout, params, p).items()
  ]
  total_s = sum(row["stands_for"] * row["least_s"] for row in rows)
  per_step_s = total_s / config.sync.interval_steps
  return {"rows": rows, "share_of_step": per_step_s / step_s}


def _work(of: Slice, lowered: jax.stages.Lowered) -> dict[str, Any]:
  # With little effort, as the work is little: a third of the time.
  made = aot.compile_lowered(lowered, quickly=True)
  least = roofline(
    of.generation,
    flops=0,
    memory_bytes=made.traffic.memory_bytes,
    sent_bytes=made.traffic.sent_bytes,
  )
  return {
    "peak_bytes": made.peak_bytes,
    "memory_bytes": made.traffic.memory_bytes,
    "sent_bytes": made.traffic.sent_bytes,
    "least_s": least.step_s,
  }


def _largest(
  config: Config,
  of: Slice,
  program: Any,
  step: Compiled | DoesNotFit,
  say: Say,
) -> dict[str, Any]:
  """Tries batches, compiled with little effort: only memory is asked for."""
  kept, limit = kept_bytes(config, program), float(of.generation.usable_bytes)

  def tried(made: Compiled | DoesNotFit) -> Tried:
    if isinstance(made, Compiled):
      return Tried(True, made.peak_bytes + kept)
    return Tried(False, made.needed_bytes or 2 * limit, made.usable_bytes)

  def attempt(samples: int) -> Tried:
    other = _program(on_slice(config, of, samples), aot.devices(of))
    found = tried(_compile_step(other, of, kept, quickly=True))
    say(f"a batch of {samples} {'fits' if found.fits else 'does not fit'}")
    return found

  found = largest_batch(
    attempt,
    unit=batch_unit(config, of),
    batch=config.learners.batch_size[0],
    first=tried(step),
    fixed_bytes=state_bytes(program) + kept,
    limit_bytes=limit,
  )
  return {
    "batch": found.batch,
    "refused": found.refused,
    "unit": batch_unit(config, of),
  }


def state_bytes(program: Any) -> int:
  """Of a chip's share of the training state, or of the parameters alone."""
  tree = getattr(program, "abstract_state", program.abstract_params)()
  return sum(
    leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
    for leaf in jax.tree.leaves(tree)
  )


def kept_bytes(config: Config, program: Any) -> int:
  """Of a chip's anchors and residuals, which lie beside the training state."""
  copies = 1 + (config.codec.error_feedback and config.codec.up != "f32")
  params = program.abstract_params()
  layout = loading.lay_out(config, params)
  return sum(
    copies * _F32_BYTES * math.prod(leaf.sharding.shard_shape(leaf.shape))
    for leaf, fragments in zip(
      jax.tree.leaves(params), layout.assignment, strict=True
    )
    if fragments is not None
  )
