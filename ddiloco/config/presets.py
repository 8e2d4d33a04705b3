"""Named shapes of models, from 0.1 M parameters to those of the paper.

The paper's models are a customised Gemma 4 whose shapes are not published
(arXiv 2604.21428, Sec. 4). The large presets are public shapes of the Gemma
line, or between two of them, whose parameter count is the paper's when the
vocabulary has 262,144 entries:

  dense_2b    2.05 B  half the width of Gemma 3 12B, about
  dense_5b    5.03 B  between Gemma 3 4B and 12B
  dense_9b    9.26 B  Gemma 2 9B
  dense_12b  11.77 B  Gemma 3 12B
  moe_a2.8b  17.6 B, 2.77 B of them active; a narrower moe_a3.8b
  moe_a3.8b  25.2 B, 3.75 B of them active; Gemma 4 26B-A4B

The small ones are for bytes: 0.1 M, 0.8 M and, of experts, 0.3 M parameters,
0.1 M of them active.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ddiloco.config.schema import ConfigError, ModelConfig

_LARGE = {
  "head_width": 256,
  "local_window": 1024,
  "compute_dtype": "bfloat16",
  "scan_layers": True,
  "remat": True,
}

# What a preset leaves out has the default value.
PRESETS: Mapping[str, Mapping[str, Any]] = {
  "dense_tiny": {
    "width": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 12,
    "hidden": 240,
  },
  "dense_small": {
    "width": 128,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 32,
    "hidden": 384,
  },
  "dense_2b": {
    **_LARGE,
    "width": 2048,
    "layers": 24,
    "heads": 8,
    "kv_heads": 4,
    "hidden": 8192,
  },
  "dense_5b": {
    **_LARGE,
    "width": 3072,
    "layers": 32,
    "heads": 8,
    "kv_heads": 4,
    "hidden": 12288,
  },
  "dense_9b": {
    **_LARGE,
    "width": 3584,
    "layers": 42,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 14336,
  },
  "dense_12b": {
    **_LARGE,
    "width": 3840,
    "layers": 48,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 15360,
  },
  "moe_tiny": {
    "width": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 12,
    "hidden": 96,
    "experts": 8,
    "shared_hidden": 96,
  },
  "moe_a2.8b": {
    **_LARGE,
    "width": 2304,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 640,
    "experts": 128,
    "experts_per_token": 8,
    "shared_hidden": 1920,
  },
  "moe_a3.8b": {
    **_LARGE,
    "width": 2816,
    "layers": 30,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 704,
    "experts": 128,
    "experts_per_token": 8,
    "shared_hidden": 2112,
  },
}


def with_preset(values: Mapping[str, Any]) -> Mapping[str, Any]:
  """A config's values with `model.preset` filled in; raises `ConfigError`.

  What `model` sets wins over its preset; None is not set. A config that was
  filled in before comes back as it is.
  """
  model = values.get("model") if isinstance(values, Mapping) else None
  if not isinstance(model, Mapping):
    return values
  given = {key: value for key, value in model.items() if value is not None}
  name = given.get("preset", "")
  if not name:
    return {**values, "model": given}
  preset = PRESETS.get(name) if isinstance(name, str) else None
  if preset is None:
    near = difflib.get_close_matches(str(name), PRESETS, n=3)
    raise ConfigError(
      f"model.preset = {name!r} is no preset. Choose one of "
      f"{', '.join(near or PRESETS)}."
    )
  defaults = {field.name: field.default for field in fields(ModelConfig)}
  if all(given.get(key) == defaults[key] for key in preset):
    raise ConfigError(
      f"model.preset = {name!r}, but every key that it gives ("
      f"{', '.join(preset)}) is set, to its default value, and would win. "
      "Leave them out of the config, or set them to None."
    )
  if all(given.get(key, value) != value for key, value in preset.items()):
    raise ConfigError(
      f"model.preset = {name!r}, but the config sets every key that it gives ("
      f"{', '.join(preset)}) to another value, and would win. Leave the preset "
      "out, or set the keys to None."
    )
  return {**values, "model": {**preset, **given}}
