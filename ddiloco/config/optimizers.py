"""The bounds of the outer and the inner optimizer, and what they ignore.

An option that the chosen optimizer does not read is refused: a sweep over it
would compare equal runs.
"""

from ddiloco.config.schema import (
  Config,
  InnerConfig,
  OuterConfig,
  did_you_mean,
  require,
)

# Optimizer -> the options that it alone or with a few others reads.
OUTER = {
  "sgd": ("momentum", "nesterov"),
  "adam": ("b1", "b2", "eps"),
  "delayed_nesterov": ("momentum", "momentum_delay", "momentum_activation"),
}
INNER = {
  "adamw": ("b1", "b2", "eps"),
  "muon": ("momentum", "b1", "b2", "eps"),
  "sgd": ("momentum",),
  "lion": ("b1", "b2"),
}


def check_optimizers(config: Config) -> None:
  """Raises `ConfigError` for the first thing that cannot work."""
  _check_outer(config.outer)
  _check_outer_schedule(config)
  _check_inner(config.inner)
  _check_overwrite(config)


def _check_outer(outer: OuterConfig) -> None:
  own = ":" in outer.name
  require(
    own or outer.name in OUTER,
    "outer.name",
    outer.name,
    f"the choices are {', '.join(OUTER)} and 'module:function'",
    did_you_mean(outer.name, OUTER) or "Choose one.",
  )
  if not own:
    _check_unused(outer, "outer", OUTER)
  require(
    outer.learning_rate > 0,
    "outer.learning_rate",
    outer.learning_rate,
    "it must be positive",
    "0.7 suits short runs.",
  )
  require(
    0 <= outer.momentum < 1,
    "outer.momentum",
    outer.momentum,
    "it must be at least 0 and below 1",
    "0 to 0.3 suits short runs, 0.9 long ones.",
  )
  _check_adam(outer, "outer")
  _check_delayed(outer, own)
  stateless = outer.name == "sgd" and not outer.momentum
  require(
    not (outer.restart_every and stateless),
    "outer.restart_every",
    outer.restart_every,
    "sgd without momentum has nothing to restart",
    "Set outer.momentum, or leave it out.",
  )
  require(
    outer.restart_every % outer.momentum_delay == 0,
    "outer.restart_every",
    outer.restart_every,
    f"outer.momentum_delay = {outer.momentum_delay} does not divide it",
    "Outer gradients that wait for the next refresh would be lost.",
  )


def _check_delayed(outer: OuterConfig, own: bool) -> None:
  delay, share = outer.momentum_delay, outer.momentum_activation
  require(
    0 <= share <= 1 / delay,
    "outer.momentum_activation",
    share,
    f"it must lie between 0 and 1 / outer.momentum_delay = {1 / delay:.3g}",
    "0 uses the momentum when it is refreshed only.",
  )
  if outer.name != "delayed_nesterov":
    return
  require(
    delay > 1,
    "outer.momentum_delay",
    delay,
    "delayed_nesterov refreshes its momentum every so many merges",
    "Use at least 2 (the number of learners is usual), or outer.name='sgd'.",
  )
  require(
    outer.momentum > 0,
    "outer.momentum",
    outer.momentum,
    "delayed_nesterov delays momentum, and there is none",
    "0.9 is usual; without momentum use outer.name='sgd'.",
  )


def _check_outer_schedule(config: Config) -> None:
  outer, default = config.outer, OuterConfig()
  constant = outer.schedule == "constant"
  for key in ("decay", "final_fraction"):
    value = getattr(outer, key)
    require(
      not constant or value == getattr(default, key),
      f"outer.{key}",
      value,
      "outer.schedule is 'constant'",
      "Set outer.schedule to cosine or linear, or leave it out.",
    )
  require(
    constant or outer.decay > outer.warmup,
    "outer.decay",
    outer.decay,
    f"outer.schedule = {outer.schedule!r} falls from outer.warmup = "
    f"{outer.warmup} to there",
    "Set it to the merges of a fragment, or the rounds, that a run has.",
  )
  require(
    not constant or outer.warmup > 0 or outer.clock == default.clock,
    "outer.clock",
    outer.clock,
    "outer.schedule is 'constant' without a warm-up",
    "Set outer.schedule or outer.warmup, or leave it out.",
  )
  require(
    0 <= outer.final_fraction <= 1,
    "outer.final_fraction",
    outer.final_fraction,
    "it must lie between 0 and 1",
    "It is a share of outer.learning_rate.",
  )
  require(
    (constant and not outer.warmup)
    or outer.clock == "round"
    or not config.sync.eager,
    "outer.clock",
    outer.clock,
    "sync.eager steps at the learners, which do not count merges",
    "Set outer.clock='round'.",
  )


def _check_inner(inner: InnerConfig) -> None:
  _check_unused(inner, "inner", INNER)
  _check_adam(inner, "inner")
  require(
    0 <= inner.momentum < 1,
    "inner.momentum",
    inner.momentum,
    "it must be at least 0 and below 1",
    "0.9 and 0.95 are usual.",
  )
  require(
    inner.schedule == "constant" or inner.decay > inner.warmup,
    "inner.decay",
    inner.decay,
    f"inner.warmup = {inner.warmup} is not shorter",
    "Both count the clock from 0; decay is where the floor is reached.",
  )
  require(
    0 <= inner.final_fraction <= 1,
    "inner.final_fraction",
    inner.final_fraction,
    "it must lie between 0 and 1",
    "It is a share of inner.learning_rate.",
  )


def _check_overwrite(config: Config) -> None:
  inner, default = config.inner, InnerConfig()
  require(
    inner.on_overwrite == "scale"
    or inner.overwrite_scale == default.overwrite_scale,
    "inner.overwrite_scale",
    inner.overwrite_scale,
    f"inner.on_overwrite = {inner.on_overwrite!r} does not use it",
    "Set inner.on_overwrite='scale', or leave it out.",
  )
  require(
    0 < inner.overwrite_scale < 1,
    "inner.overwrite_scale",
    inner.overwrite_scale,
    "it must lie between 0 and 1",
    "For these set inner.on_overwrite to zero or keep.",
  )


def _check_adam(group: InnerConfig | OuterConfig, name: str) -> None:
  for key in ("b1", "b2"):
    value = getattr(group, key)
    require(
      0 <= value < 1,
      f"{name}.{key}",
      value,
      "it must lie between 0 and 1",
      "See the optimizer of that name in optax for the usual values.",
    )
  require(
    group.eps > 0,
    f"{name}.eps",
    group.eps,
    "it must be positive",
    "It keeps a division by a vanishing second moment finite.",
  )


def _check_unused(
  group: InnerConfig | OuterConfig, name: str, known: dict[str, tuple]
) -> None:
  default = type(group)()
  for key in sorted({key for keys in known.values() for key in keys}):
    users = [user for user, keys in known.items() if key in keys]
    value = getattr(group, key)
    require(
      group.name in users or value == getattr(default, key),
      f"{name}.{key}",
      value,
      f"{name}.name = {group.name!r} does not use it",
      f"Leave it out, or choose {' or '.join(users)}.",
    )
