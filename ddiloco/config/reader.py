"""From a plain dict to a `Config`, and from one run's config to the next."""

import dataclasses
import difflib
import enum
import math
import typing
from collections.abc import Mapping
from typing import Any

from ddiloco.config.checks import validate
from ddiloco.config.presets import with_preset
from ddiloco.config.schema import Config, ConfigError, flatten

# What may differ when a run is resumed; every change is recorded.
RESUMABLE = (
  "eval",
  "faults",
  "init.path",  # but not what it holds: init.sha256
  "learners",
  "live",
  "recovery",
  "snapshot",
  "stop",
  "sync.grace",
  "sync.grace_margin",
  "sync.outlier_factor",
  "sync.quorum_min",
)


def from_dict(values: Mapping[str, Any]) -> Config:
  """Builds and validates a config; raises `ConfigError`."""
  config = _build(Config, with_preset(values), "")
  validate(config)
  return config


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
  """The dotted keys whose values differ, with both values."""
  flat_old, flat_new = flatten(old.to_dict()), flatten(new.to_dict())
  missing = "(absent)"
  return {
    key: (flat_old.get(key, missing), flat_new.get(key, missing))
    for key in sorted(flat_old.keys() | flat_new.keys())
    if flat_old.get(key, missing) != flat_new.get(key, missing)
  }


def check_resumable(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
  """The changes a resumed run makes; `ConfigError` if one is not allowed."""
  changes = differences(old, new)
  for key, (before, after) in changes.items():
    if not any(key == name or key.startswith(name + ".") for name in RESUMABLE):
      raise ConfigError(
        f"{key} = {after!r}, but the run in this workdir was started with "
        f"{before!r}, and {key} cannot change on resume. Use the old value, "
        "or a new workdir."
      )
  return changes


def _build(cls: type, values: Any, prefix: str) -> Any:
  if not isinstance(values, Mapping):
    raise ConfigError(
      f"{prefix.rstrip('.') or 'the config'} = {values!r}: a group of keys is "
      "expected here."
    )
  fields = {field.name: field for field in dataclasses.fields(cls)}
  for key in values:
    if key not in fields:
      near = difflib.get_close_matches(str(key), fields, n=1)
      hint = f"did you mean {prefix}{near[0]}?" if near else "known keys are: "
      raise ConfigError(
        f"unknown key {prefix}{key} = {values[key]!r}; "
        + (hint if near else hint + ", ".join(sorted(fields)) + ".")
      )
  hints = typing.get_type_hints(cls)
  return cls(
    **{
      key: _convert(hints[key], value, prefix + key)
      for key, value in values.items()
    }
  )


def _convert(hint: Any, value: Any, key: str) -> Any:
  if dataclasses.is_dataclass(hint):
    return _build(hint, value, key + ".")
  origin = typing.get_origin(hint)
  if origin is tuple:
    if not isinstance(value, (list, tuple)):
      raise _type_error(key, value, "a tuple")
    item = typing.get_args(hint)[0]
    return tuple(_convert(item, v, f"{key}[{i}]") for i, v in enumerate(value))
  if origin is not None and issubclass(origin, Mapping):
    if not isinstance(value, Mapping):
      raise _type_error(key, value, "a group of keys")
    return dict(value)
  if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
    known = [str(member) for member in hint]
    if value not in known:
      raise ConfigError(f"{key} = {value!r}: choose one of {', '.join(known)}.")
    return hint(value)
  if hint is float and type(value) in (int, float):
    if not math.isfinite(value):
      raise _type_error(key, value, "a finite number")
    return float(value)
  if type(value) is not hint:
    raise _type_error(key, value, f"of type {hint.__name__}")
  return value


def _type_error(key: str, value: Any, expected: str) -> ConfigError:
  return ConfigError(
    f"{key} = {value!r} ({type(value).__name__}): expected {expected}."
  )
