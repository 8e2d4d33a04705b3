"""What a simulated run computes: nothing, or the real thing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddiloco.config import Config, codecs, learner_value
from ddiloco.engine.loading import load_program
from ddiloco.engine.null_arrays import (
  ANSWER_BYTES,
  NullDownlink,
  NullLearnerArrays,
  NullLearnerBytes,
  NullStateBytes,
  NullSyncerArrays,
)
from ddiloco.engine.recovery import Source
from ddiloco.engine.resumption import Resumption
from ddiloco.protocol.messages import NO_LAYOUT

_TOKENS_PER_SAMPLE = 64  # where no program is asked
_LANGUAGE_MODEL = Config().program


class Intake(NamedTuple):
  """What a learner's inner steps take in."""

  samples_per_step: int
  tokens: Callable[[int, int], int]  # of (first sample, how many)


def intakes(config: Config, cache_dir: str) -> list[Intake]:
  """What each learner takes in, as the config's program has it.

  The language model is not built to tell that of text: its islands may not be
  here. Any other program is, and makes its batches.
  """
  text = config.program == _LANGUAGE_MODEL and config.data.source != "easy_vqa"
  if text:
    return _alike(config, config.data.sequence_length)
  return [
    _of_program(load_program(config, i, cache_dir))
    for i in range(config.learners.count)
  ]


def _alike(config: Config, tokens_per_sample: int) -> list[Intake]:
  return [
    Intake(
      learner_value(config.learners.batch_size, i),
      lambda first, count: count * tokens_per_sample,
    )
    for i in range(config.learners.count)
  ]


def _of_program(program: Any) -> Intake:
  return Intake(
    program.samples_per_step,
    lambda first, count: program.tokens(program.batch(first, count)),
  )


class NullCompute:
  """Protocol only: the objects are there, the numbers are not."""

  layout_digest = "null"
  layout_json = NO_LAYOUT
  facts = {
    "backend": "none",
    "devices": 0,
    "processes": 1,
    "threads": 0,
    "cpu_features": "",
    "libraries": (),
  }

  def __init__(self, config: Config, intakes: Sequence[Intake] = ()):
    """Takes the `intakes` of the learners, if anybody wants true ones."""
    self._config = config
    self._intakes = intakes or _alike(config, _TOKENS_PER_SAMPLE)
    self._positions: dict[int, dict[str, int]] = {}
    steps = config.codec.down != codecs.NONE
    self.downlink = NullDownlink() if steps else None

  @property
  def answer_bytes(self) -> tuple[int, ...]:
    """The encoded size of every fragment."""
    return (ANSWER_BYTES,) * self._config.sync.num_fragments

  def travel(self, learner: int) -> NullStateBytes:
    """How the learner's state goes to a peer."""
    del learner
    return NullStateBytes()

  def learner_arrays(
    self, learner: int, source: Source, params: dict[int, bytes | None]
  ) -> NullLearnerArrays | None:
    """A life's arrays; None if a fragment is gone or damaged."""
    arrays = self._arrays(learner)
    for p, ref in enumerate(source.newest.commit.fragments):
      try:
        arrays.place(ref.version, p, ref, params[p])
      except ValueError:
        return None
    return arrays

  def _arrays(self, learner: int) -> NullLearnerArrays:
    intake = self._intakes[learner]
    return NullLearnerArrays(
      samples_per_step=intake.samples_per_step,
      tokens=intake.tokens,
      num_fragments=self._config.sync.num_fragments,
      downlink=self.downlink,
    )

  def bytes(self, learner: int) -> NullLearnerBytes:
    """How the learner lies in a snapshot."""
    del learner
    return NullLearnerBytes(self._config.sync.num_fragments)

  def resumed_arrays(self, learner: int, found: Resumption) -> Any:
    """Those of a life that goes on with a snapshot."""
    arrays = self._arrays(learner)
    arrays.resume(found.header.attempts)
    return arrays

  def syncer_arrays(self) -> NullSyncerArrays:
    """A life's arrays."""
    return NullSyncerArrays(self._config.sync.num_fragments, self.downlink)

  def scaled(self, part: bytes, due: tuple[int, ...], factor: float) -> bytes:
    """An encoded answer to these fragments, `factor` times as large."""
    size = ANSWER_BYTES
    return b"".join(
      round(factor * int.from_bytes(part[i * size :][:size])).to_bytes(size)
      for i in range(len(due))
    )

  def position(self, learner: int) -> dict[str, int]:
    """Where the learner's own checkpoint was taken; empty: it has none."""
    return self._positions.get(learner, {})

  def saver(self, learner: int) -> Any:
    """What the plane calls to save a checkpoint."""

    def save(state: Any, position: dict[str, int]) -> None:
      del state
      self._positions[learner] = position

    return save
