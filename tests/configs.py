"""How tests vary a config."""

from collections.abc import Mapping
from typing import Any

from ddiloco.config import Config, from_dict


def override(
  values: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]
) -> Config:
  """The config of these values, single keys of `groups` replaced."""
  changed = {
    group: {**values.get(group, {}), **keys} for group, keys in groups.items()
  }
  return from_dict({**values, **changed})
