"""What a simulated run computes: nothing, or the real thing."""

from typing import Any

from ddiloco.config import Config, learner_value
from ddiloco.engine.null_arrays import (
  ANSWER_BYTES,
  NullLearnerArrays,
  NullSyncerArrays,
)
from ddiloco.engine.startup import Newest

TOKENS_PER_SAMPLE = 64


class NullCompute:
  """Protocol only: the objects are there, the numbers are not."""

  layout_digest = "null"
  layout_json = "{}"
  facts = {
    "backend": "none",
    "devices": 0,
    "processes": 1,
    "threads": 0,
    "cpu_features": "",
    "libraries": (),
  }

  def __init__(self, config: Config):
    self._config = config
    self._positions: dict[int, dict[str, int]] = {}

  @property
  def answer_bytes(self) -> tuple[int, ...]:
    """The encoded size of every fragment."""
    return (ANSWER_BYTES,) * self._config.sync.num_fragments

  def learner_arrays(
    self, learner: int, newest: Newest, params: dict[int, bytes | None]
  ) -> NullLearnerArrays | None:
    """A life's arrays; None if a fragment is gone or damaged."""
    samples = learner_value(self._config.learners.batch_size, learner)
    arrays = NullLearnerArrays(
      tokens_per_step=samples * TOKENS_PER_SAMPLE, samples_per_step=samples
    )
    for p, ref in enumerate(newest.commit.fragments):
      try:
        arrays.place(ref.version, p, ref, params[p])
      except ValueError:
        return None
    return arrays

  def syncer_arrays(self) -> NullSyncerArrays:
    """A life's arrays."""
    return NullSyncerArrays(self._config.sync.num_fragments)

  def scaled(self, part: bytes, due: tuple[int, ...], factor: float) -> bytes:
    """An encoded answer to these fragments, `factor` times as large."""
    size = ANSWER_BYTES
    return b"".join(
      round(factor * int.from_bytes(part[i * size :][:size])).to_bytes(size)
      for i in range(len(due))
    )

  def position(self, learner: int) -> int:
    """The data position of the learner's own checkpoint."""
    return self._positions.get(learner, {}).get("next_sample", 0)

  def restored(self, learner: int) -> tuple[int, int] | None:
    """The (life, step) of the checkpoint the next life goes on from."""
    position = self._positions.get(learner)
    return position and (position["incarnation"], position["step"])

  def saver(self, learner: int) -> Any:
    """What the plane calls to save a checkpoint."""

    def save(state: Any, position: dict[str, int]) -> None:
      del state
      self._positions[learner] = position

    return save
