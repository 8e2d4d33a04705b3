"""Builds a config's program and lays out its parameters."""

import functools
import importlib
from typing import Any, NamedTuple

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout, make_layout
from ddiloco.config import Config, ConfigError
from ddiloco.engine.records import fragment_shapes


class Model(NamedTuple):
  """A program, its initial state, and how its parameters are exchanged."""

  program: Any
  state: Any
  layout: Layout
  codec: codecs.Codec


def load_model(config: Config, learner: int | None, cache_dir: str) -> Model:
  """The model of a learner, or (None) of the others; raises `ConfigError`."""
  program = load_program(config, learner, cache_dir)
  state = program.init()
  try:
    layout = make_layout(
      program.params(state),
      config.sync.num_fragments,
      config.sync.fragmentation,
    )
  except ValueError as error:
    raise ConfigError(f"sync.num_fragments: {error}") from error
  return Model(program, state, layout, make_codec(config))


def load_program(config: Config, learner: int | None, cache_dir: str) -> Any:
  """Builds `config.program`; raises `ConfigError` if there is none such."""
  module, _, function = config.program.partition(":")
  try:
    build = getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(
      f"program = {config.program!r} cannot be loaded ({error}). Write "
      "'module:function', importable from here."
    ) from error
  return build(config, learner, cache_dir=cache_dir)


def make_codec(config: Config) -> codecs.Codec:
  """How a config's outer gradients travel."""
  return _codec(
    config.codec.up,
    block_size=config.codec.block_size,
    error_feedback=config.codec.error_feedback and config.codec.up != "f32",
  )


# One object for all, as compiled encoders are kept by their codec.
_codec = functools.cache(codecs.make_codec)


def answer_bytes(layout: Layout, codec: codecs.Codec) -> tuple[int, ...]:
  """The encoded size of every fragment."""
  return tuple(
    codecs.payload_bytes(codec, fragment_shapes(layout, p))
    for p in range(layout.num_fragments)
  )
