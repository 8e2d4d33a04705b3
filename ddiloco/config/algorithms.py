"""The family: what makes an algorithm itself, as keys of one config.

All of them run on the same machines, model, data and accounting. A config
names its `algorithm`; `check` refuses keys that contradict it or that mean
nothing to it, and `preset` gives the keys that turn a default config into it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ddiloco.config.schema import (
  Config,
  ConfigError,
  did_you_mean,
  flatten,
)

Keys = Mapping[str, Any]  # dotted key -> value


class Algorithm(NamedTuple):
  """Keys that it fixes, with their only value; and where it starts from."""

  summary: str
  fixed: Keys
  start: Keys = {}
  all_learners: bool = False  # K is their number


_PLAIN: Keys = {
  "sync.anchor": "current",
  "sync.eager": False,
  "sync.dynamic_steps": False,
}
_SYNCHRONOUS: Keys = _PLAIN | {"sync.wait": "exact", "sync.grace": False}
# Of one answer, every rule makes the same.
_ONE_ANSWER: Keys = {"merge.rule": "average", "merge.embedding_rule": "average"}
_ONE_FRAGMENT: Keys = {
  "sync.num_fragments": 1,
  "sync.fragmentation": "balanced_tensor",
}
_ONE_STEP: Keys = _SYNCHRONOUS | {
  "learners.count": 1,
  **_ONE_FRAGMENT,
  "sync.interval_steps": 1,
  "sync.overlap_steps": 0,
  "sync.apply": "when_seen",
  "sync.blend": 0.0,
  "codec.up": "f32",
  "codec.down": "none",
  **_ONE_ANSWER,
  "outer.name": "sgd",
  "outer.learning_rate": 1.0,
  "outer.momentum": 0.0,
  "outer.schedule": "constant",
  "outer.warmup": 0,
  "inner.on_overwrite": "keep",  # a commit overwrites all, at every step
}

ALGORITHMS: Mapping[str, Algorithm] = {
  "data_parallel": Algorithm(
    "one learner on one mesh; every inner step is a round",
    _ONE_STEP | {"elastic.slices": 1},
    {"codec.error_feedback": False},
    all_learners=True,
  ),
  "elastic_data_parallel": Algorithm(
    "the same, going on with fewer slices after a failure",
    _ONE_STEP,
    {"codec.error_feedback": False, "elastic.slices": 8},
    all_learners=True,
  ),
  "diloco": Algorithm(
    "all parameters at once every H steps; everybody waits (2311.08105)",
    _SYNCHRONOUS
    | {
      **_ONE_FRAGMENT,
      "sync.overlap_steps": 0,
      "sync.apply": "when_seen",
      "sync.blend": 0.0,
    },
    {"merge.rule": "average", "codec.up": "f32", "codec.error_feedback": False},
    all_learners=True,
  ),
  "streaming_diloco": Algorithm(
    "staggered fragments, overlapped by tau steps (2501.18512)",
    {k: v for k, v in _SYNCHRONOUS.items() if k != "sync.eager"}
    | {"sync.apply": "at_overlap"},
    {"merge.rule": "average", "sync.blend": 0.5},
    all_learners=True,
  ),
  "async_local_sgd": Algorithm(
    "one learner at a time, from whatever it last saw (2401.09135)",
    {
      **_ONE_FRAGMENT,
      "sync.overlap_steps": 1,
      "sync.quorum_min": 1,
      "sync.grace": False,
      "sync.wait": "never",
      "sync.anchor": "any",
      "sync.apply": "own",
      "sync.blend": 0.0,
      "sync.eager": False,
      **_ONE_ANSWER,
    },
    {"codec.up": "f32", "codec.error_feedback": False},
  ),
  # Its policies include those of all the others, so it fixes nothing.
  "decoupled_diloco": Algorithm(
    "a quorum of K, a grace window, nobody waits (2604.21428)", {}
  ),
}


def preset(name: str) -> dict[str, Any]:
  """The dotted keys of an algorithm, to be set on a default config."""
  algorithm = _named(name)
  keys = {"algorithm": name, **algorithm.start, **algorithm.fixed}
  if algorithm.all_learners:
    keys["sync.quorum_min"] = 0
  return keys


def check(config: Config) -> None:
  """Raises `ConfigError` for the first key that the algorithm excludes."""
  for key, value, bound in _contradictions(config):
    raise ConfigError(
      f"{key} = {value!r}, but algorithm = {config.algorithm!r} "
      f"({_named(config.algorithm).summary}) has {key} = {bound!r}. Leave it "
      "out, or choose another algorithm."
    )
  elastic, smallest = config.elastic, min(config.learners.batch_size)
  if elastic.slices > smallest:
    raise ConfigError(
      f"elastic.slices = {elastic.slices}, but learners.batch_size has "
      f"{smallest}: every slice takes a sample at least. Raise the batch size."
    )


def _contradictions(config: Config) -> Iterator[tuple[str, Any, Any]]:
  algorithm = _named(config.algorithm)
  flat = flatten(config.to_dict())
  for key, bound in algorithm.fixed.items():
    if flat[key] != bound:
      yield key, flat[key], bound
  if algorithm.all_learners and config.quorum != config.learners.count:
    yield "sync.quorum_min", config.quorum, config.learners.count


def _named(name: str) -> Algorithm:
  if name not in ALGORITHMS:
    hint = did_you_mean(name, ALGORITHMS)
    raise ConfigError(
      f"algorithm = {name!r} is unknown. {hint + ' ' if hint else ''}There are "
      f"{', '.join(ALGORITHMS)}."
    )
  return ALGORITHMS[name]
