"""Options that mean nothing beside others, and are refused.

An option that nothing reads is refused rather than ignored: a sweep over it
would compare equal runs.
"""

import operator
from collections.abc import Callable

from ddiloco.config.codecs import blocked
from ddiloco.config.schema import Config, ConfigError
from ddiloco.types import Apply, Wait

_DEFAULTS = Config()


def _has_moments(config: Config) -> bool:
  return config.inner.name != "sgd" or config.inner.momentum > 0


def _has_floor(config: Config) -> bool:
  return config.inner.schedule != "constant" or config.inner.warmup > 0


# Dotted key; whether it means something; what it needs for that.
_OPTIONS: tuple[tuple[str, Callable[[Config], bool], str], ...] = (
  ("sync.grace_margin", lambda c: c.sync.grace, "sync.grace = True"),
  (
    "sync.dynamic_steps",
    lambda c: c.sync.apply is Apply.OWN,
    "sync.apply = 'own'",
  ),
  (
    "sync.eager",
    lambda c: c.sync.wait is Wait.EXACT and c.sync.overlap_steps > 0,
    "sync.wait = 'exact' and an overlap to bridge",
  ),
  (
    "codec.block_size",
    lambda c: blocked(c.codec.up) or blocked(c.codec.down),
    "a codec that has blocks (all but f32 and bf16)",
  ),
  (
    "merge.rda_scope",
    lambda c: "rda" in (c.merge.rule, c.merge.embedding_rule),
    "merge.rule = 'rda' or merge.embedding_rule = 'rda'",
  ),
  (
    "merge.embedding_pattern",
    lambda c: c.merge.rule != c.merge.embedding_rule,
    "a merge.embedding_rule other than merge.rule",
  ),
  (
    "outer.nesterov",
    lambda c: c.outer.momentum > 0,
    "outer.momentum above 0",
  ),
  (
    "inner.final_fraction",
    _has_floor,
    "inner.schedule = 'cosine' or a warm-up",
  ),
  (
    "inner.on_overwrite",
    _has_moments,
    "moments (inner.momentum above 0, or another inner.name)",
  ),
  (
    "data.path",
    lambda c: c.data.source != "sotu",
    "data.source = 'text', or another that reads files",
  ),
  (
    "data.vocab_size",
    lambda c: c.data.tokenizer == "bpe",
    "data.tokenizer = 'bpe'",
  ),
  (
    "model.local_per_global",
    lambda c: c.model.local_window > 0,
    "model.local_window above 0",
  ),
  (
    "options",
    lambda c: c.program != _DEFAULTS.program,
    "a program of your own that reads it",
  ),
)


def check_unused(config: Config) -> None:
  """Raises `ConfigError` for the first option that nothing reads."""
  for key, means_something, needs in _OPTIONS:
    get = operator.attrgetter(key)
    value = get(config)
    if value != get(_DEFAULTS) and not means_something(config):
      raise ConfigError(
        f"{key} = {value!r} means nothing without {needs}. Set that, or leave "
        f"{key} out."
      )
