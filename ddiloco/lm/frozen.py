"""Parameters that are not trained (`sync.frozen`).

A frozen parameter keeps its initial bits: it has no gradient and no optimizer
state, counts in no norm, and is not exchanged. In a tree of what is trained
None takes its place.
"""

from typing import Any

import jax

from ddiloco.algo.fragments import frozen_paths, tensor_path
from ddiloco.config import ConfigError


class Frozen:
  """Tells trained parameters from frozen ones."""

  def __init__(self, params: Any, pattern: str):
    """Takes the tree of parameters, arrays or not; raises `ConfigError`."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    paths = [tensor_path(path) for path, _ in leaves]
    try:
      self._paths = frozen_paths(paths, pattern)
    except ValueError as error:
      raise ConfigError(f"sync.frozen: {error}.") from error

  def trained(self, params: Any) -> Any:
    """The tree without its frozen leaves."""

    def keep(path: Any, leaf: Any) -> Any:
      return None if tensor_path(path) in self._paths else leaf

    return jax.tree_util.tree_map_with_path(keep, params)

  def join(self, trained: Any, params: Any) -> Any:
    """The trained leaves, and the frozen ones of `params`."""
    return jax.tree.map(
      lambda own, whole: whole if own is None else own,
      trained,
      params,
      is_leaf=lambda x: x is None,
    )
