"""Builds a config's program and lays out its parameters."""

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from ddiloco.algo import codecs, outer
from ddiloco.algo.fragments import Layout, make_layout, tensor_path
from ddiloco.config import Config, ConfigError, MergeConfig, OuterConfig
from ddiloco.config import codecs as codec_options
from ddiloco.engine.ports import Program

# What a program must have.
_MEMBERS = (
  *Program.__annotations__,
  *(name for name in vars(Program) if not name.startswith("_")),
)
_SYNCER = -1  # among the numbers of learners


class Model(NamedTuple):
  """A program, its initial state, and how its parameters are exchanged."""

  program: Any
  state: Any
  layout: Layout
  codec: codecs.Codec
  learner: int | None = None  # whose it is


def load_model(config: Config, learner: int | None, cache_dir: str) -> Model:
  """The model of a learner, or (None) of the others; raises `ConfigError`."""
  program = load_program(config, learner, cache_dir)
  state = program.init()
  params = program.params(state)
  _check_arrays(config, params)
  layout = lay_out(config, params)
  return Model(program, state, layout, make_codec(config), learner)


def lay_out(config: Config, params: Any) -> Layout:
  """The fragments of these parameters; `ConfigError` if they have none such."""
  sync = config.sync
  try:
    layout = make_layout(
      params,
      sync.num_fragments,
      sync.fragmentation,
      layer_pattern=sync.layer_pattern,
      frozen=sync.frozen,
    )
  except ValueError as error:
    raise ConfigError(
      f"sync.num_fragments = {sync.num_fragments}, sync.fragmentation = "
      f"{sync.fragmentation!r}: {error}."
    ) from error
  pattern = config.merge.embedding_pattern
  if pattern != MergeConfig().embedding_pattern and not any(
    re.search(pattern, spec.path) for spec in layout.tensors
  ):
    raise ConfigError(
      f"merge.embedding_pattern = {pattern!r}, but it is found in no "
      f"parameter's path: they are {layout.tensors[0].path!r} and the like "
      "(launch.fragments --all lists them)."
    )
  return layout


def load_program(
  config: Config, learner: int | None, cache_dir: str, **options: Any
) -> Any:
  """Builds `config.program`; raises `ConfigError` if there is none such.

  `options` are for build functions that know them (see `takes`).
  """
  build = _load_function("program", config.program)
  try:
    inspect.signature(build).bind(config, learner, cache_dir=cache_dir)
  except (TypeError, ValueError) as error:  # ValueError: of some builtins
    raise _no_program(config, str(error)) from error
  program = build(config, learner, cache_dir=cache_dir, **options)
  missing = [name for name in _MEMBERS if not hasattr(program, name)]
  if missing:
    raise _no_program(config, f"what it returns lacks {', '.join(missing)}")
  if config.init.path and not getattr(program, "reads_init", False):
    raise ConfigError(
      f"init.path = {config.init.path!r}, but the program {config.program} "
      "does not start from it. Load it in init() and set reads_init = True, or "
      "leave it out."
    )
  if config.inner.on_overwrite != "keep":
    _require_hook(config, program)
  return program


def _no_program(config: Config, what: str) -> ConfigError:
  return ConfigError(
    f"program = {config.program!r}: {what}. It must be a function "
    "build(config, learner, *, cache_dir) that returns a "
    "ddiloco.engine.ports.Program."
  )


def _check_arrays(config: Config, params: Any) -> None:
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    if not isinstance(leaf, jax.Array):
      raise ConfigError(
        f"program = {config.program!r}: params() has {tensor_path(path)!r} as "
        f"{type(leaf).__module__}.{type(leaf).__name__}, but parameters must "
        "be jax.Arrays. Put jax.tree.map(jnp.asarray, ...) around them."
      )


def takes(config: Config, option: str) -> bool:
  """Whether the build function of `config.program` has this argument."""
  build = _load_function("program", config.program)
  return option in inspect.signature(build).parameters


def _require_hook(config: Config, program: Any) -> None:
  if not hasattr(program, "overwritten"):
    raise ConfigError(
      f"inner.on_overwrite = {config.inner.on_overwrite!r}, but the program "
      f"{config.program} has no method overwritten(state, pieces). Add it "
      "(see ddiloco.engine.ports.Program), or use keep."
    )


def _load_function(key: str, value: str) -> Callable[..., Any]:
  module, _, function = value.partition(":")
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ConfigError(
      f"{key} = {value!r} cannot be loaded ({error}). Write "
      "'module:function', importable from here."
    ) from error


def make_codec(config: Config) -> codecs.Codec:
  """How a config's outer gradients travel."""
  return _make_codec(config.codec.up, config, config.codec.error_feedback)


def make_down_codec(config: Config) -> codecs.Codec | None:
  """How a config's outer steps travel; None: parameters do, in full."""
  options = config.codec
  if options.down == codec_options.NONE:
    return None
  return _make_codec(options.down, config, options.down_error_feedback)


def _make_codec(name: str, config: Config, feedback: bool) -> codecs.Codec:
  """Of options that only the other direction has, the defaults."""
  given = {
    option: getattr(config.codec, option)
    for option in ("scale", "rounding", "topk_fraction")
    if codec_options.uses(name, option)
  }
  return _codec(
    name,
    block_size=config.codec.block_size,
    error_feedback=feedback and name != "f32",
    **given,
  )


def rounding_words(
  config: Config, learner: int | None, t: int, attempt: int, p: int
) -> np.ndarray:
  """What the rounding of a fragment draws from; None for the syncer's."""
  who = _SYNCER if learner is None else learner
  numbers = (config.seed, who, t, attempt, p)
  return np.array([n & 0xFFFFFFFF for n in numbers], np.uint32)


def make_outer(config: Config) -> optax.GradientTransformationExtraArgs:
  """How a config's merged outer gradients are applied; `ConfigError`."""
  return _outer(config.outer)


@functools.cache  # One object for all, as for codecs.
def _outer(options: OuterConfig) -> optax.GradientTransformationExtraArgs:
  if ":" not in options.name:
    return outer.make_outer(options)
  make = _load_function("outer.name", options.name)
  try:
    own = make(options)
    if not isinstance(own, optax.GradientTransformation):
      raise TypeError(f"it returns {type(own).__name__}")
  except Exception as error:  # a user's function may raise anything
    raise ConfigError(
      f"outer.name = {options.name!r}: {type(error).__name__}: {error}. It "
      "takes the outer group of the config and returns an "
      "optax.GradientTransformation."
    ) from error
  return outer.make_outer(options, own)


# One object for all, as compiled encoders are kept by their codec.
_codec = functools.cache(codecs.make_codec)


def abstract_params(program: Any) -> Any:
  """The program's parameters as `jax.ShapeDtypeStruct`s, if it can tell."""
  known = getattr(program, "abstract_params", None)
  if known is not None:
    return known()
  try:
    return jax.eval_shape(lambda: program.params(program.init()))
  except jax.errors.JAXTypeError:  # it needs to see numbers
    return program.params(program.init())


def traffic_bytes(
  config: Config, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Bytes of every fragment, on its way up and (not in full) down."""
  options = config.codec
  down = "f32" if options.down == codec_options.NONE else options.down
  down_codec = _make_codec(down, config, options.down_error_feedback)
  return (
    answer_bytes(layout, make_codec(config)),
    answer_bytes(layout, down_codec),
  )


def answer_bytes(layout: Layout, codec: codecs.Codec) -> tuple[int, ...]:
  """The encoded size of every fragment."""
  return tuple(
    codecs.payload_bytes(codec, layout.shapes(p))
    for p in range(layout.num_fragments)
  )
