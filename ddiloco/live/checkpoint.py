"""A learner's own checkpoints: its program's state and data position."""

import hashlib
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from ddiloco.algo.fragments import tensor_path
from ddiloco.live.log import logger

_KEEP = 2
_STATE = "state"  # the name of Orbax's item for it
_NAMED = 3  # tensors that a message names
_DIGEST = "sha256"  # of the state, beside the position


class Restored(NamedTuple):
  """A checkpoint read back. `position` as it was given to `save`."""

  state: Any
  position: dict[str, int]


class Checkpoints:
  """Orbax checkpoints of one learner, numbered by their data position.

  The position never shrinks over a learner's lives, so the newest complete
  checkpoint is the one with the highest number; one that a kill cut short is
  never listed.
  """

  def __init__(self, directory: pathlib.Path):
    self._directory = epath.Path(directory.absolute())
    self._manager = ocp.CheckpointManager(
      directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=_KEEP, enable_async_checkpointing=False
      ),
    )

  def save(self, state: Any, position: dict[str, int]) -> None:
    """Writes a checkpoint; returns once it is complete.

    A disk that is full costs the checkpoint, not the learner.
    """
    number = position["next_sample"]
    try:
      self._manager.save(
        number,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          position=ocp.args.JsonSave({**position, _DIGEST: _digest(state)}),
        ),
      )
    except (ValueError, RuntimeError, OSError) as error:
      logger.warning(
        "checkpoint %d was not written, training goes on: %s",
        number,
        str(error).partition("\n")[0],
      )

  def restore(self, like: Any) -> Restored | None:
    """The newest complete checkpoint, sharded as `like`; None if none fits.

    One whose shapes differ was written by another program: it is left alone,
    and the learner starts with a fresh optimizer.
    """
    number = self._manager.latest_step()
    if number is None:
      return None
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
      self._check_shapes(number, abstract)
      restored = self._manager.restore(
        number,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract),
          position=ocp.args.JsonRestore(),
        ),
      )
      state, position = restored["state"], dict(restored["position"])
      # Orbax itself takes a flipped bit for a number. Those of an earlier
      # release have no digest.
      digest = position.pop(_DIGEST, None)
      if digest is not None and digest != _digest(state):
        raise ValueError("it is not what was saved: its files are damaged")
    # What Orbax meets in the middle of an array it raises as a bare Exception.
    except Exception as error:  # noqa: BLE001
      logger.warning(
        "checkpoint %d is not used, the inner optimizer starts fresh: %s",
        number,
        str(error).partition("\n")[0],
      )
      return None
    return Restored(state, position)

  def _check_shapes(self, number: int, abstract: Any) -> None:
    """`ValueError` if a checkpoint holds other shapes than these.

    Before anything is read: a restore that fails half-way leaves reads behind.
    """
    if any(
      jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
      for x in jax.tree.leaves(abstract)
    ):
      return  # typed keys are saved as their data
    saved = ocp.StandardCheckpointHandler().metadata(
      self._directory / str(number) / _STATE
    )
    found, wanted = _shapes(saved.tree), _shapes(abstract)
    if found == wanted:
      return
    odd = [
      f"{path} has shape {wanted.get(path, 'none')} here and "
      f"{found.get(path, 'none')} there"
      for path in wanted | found  # ours first
      if found.get(path) != wanted.get(path)
    ]
    raise ValueError(
      f"it is another program's, {len(odd)} tensors differ: "
      + "; ".join(odd[:_NAMED])
    )

  def close(self) -> None:
    """Releases Orbax's threads."""
    self._manager.close()


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """By path, which Orbax saves as names alone."""
  flat, _ = jax.tree.flatten_with_path(tree)
  return {tensor_path(path): tuple(x.shape) for path, x in flat}


def _digest(state: Any) -> str:
  """SHA-256 of all numbers of a state, in order."""
  found = hashlib.sha256()
  for leaf in jax.tree.leaves(state):
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
      leaf = jax.random.key_data(leaf)
    numbers = np.ascontiguousarray(jax.device_get(leaf)).reshape(-1)
    found.update(numbers.view(np.uint8))  # bfloat16 is no buffer
  return found.hexdigest()
