"""Real arrays for a simulated run: only its time is virtual.

All learners share this process's devices, learner i the first ones that its
island needs. Steps are computed when they are dispatched; how long they take
is the world's business.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ddiloco.algo import codecs
from ddiloco.config import Config
from ddiloco.engine.downlink import make_downlink
from ddiloco.engine.facts import facts
from ddiloco.engine.learner_arrays import LearnerArrays, travelling
from ddiloco.engine.learner_bytes import LearnerBytes
from ddiloco.engine.loading import (
  Model,
  answer_bytes,
  load_model,
  rounding_words,
)
from ddiloco.engine.records import place_params
from ddiloco.engine.recovery import Source
from ddiloco.engine.resumption import Resumption
from ddiloco.engine.state_bytes import StateBytes
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.protocol import wire
from ddiloco.protocol.messages import Commit


class JaxCompute:
  """What `NullCompute` is, with the numbers."""

  def __init__(self, config: Config, cache_dir: str):
    """Builds the program and lays it out; raises `ConfigError`."""
    self._config, self._cache_dir = config, cache_dir
    self.facts = facts()
    self.model = load_model(config, None, cache_dir)
    check = getattr(self.model.program, "check", None)
    if check is not None:
      check()
    self._learners: dict[int, Model] = {}
    self._saved: dict[int, tuple[Any, dict[str, int]]] = {}
    layout = self.model.layout
    self.layout_digest = layout.digest
    self.layout_json = wire.canonical_json(layout.to_json()).decode()
    self.answer_bytes = answer_bytes(layout, self.model.codec)
    self.downlink = make_downlink(config, layout)

  def travel(self, learner: int) -> StateBytes:
    """How the learner's state goes to a peer."""
    model = self._learner(learner)
    return travelling(self._config, model.program, model.state)

  def learner_arrays(
    self, learner: int, source: Source, params: dict[int, bytes | None]
  ) -> LearnerArrays | None:
    """A life's arrays; None if a fragment is gone or damaged."""
    model = self._learner(learner)
    state = model.state
    if source.checkpoint:
      state, _ = self._saved[learner]
    try:
      if source.donation is not None:
        state = self.travel(learner).unpack(state, source.donation.data)
      if not source.borrowed:
        placed = place(model, source.newest.commit, params, state)
        state = model.program.with_params(state, placed)
    except ValueError:
      return None
    # Steps donate their state, and another life may need it again.
    state = jax.tree.map(jnp.copy, state)
    return LearnerArrays(self._config, model, state)

  def bytes(self, learner: int) -> LearnerBytes:
    """How the learner lies in a snapshot."""
    model = self._learner(learner)
    parts = model.program, model.state, model.layout, model.codec
    return LearnerBytes(*parts)

  def resumed_arrays(self, learner: int, found: Resumption) -> LearnerArrays:
    """Those of a life that goes on with a snapshot; `ValueError`."""
    model, attempts = self._learner(learner), found.header.attempts
    captured = self.bytes(learner).unpack(model.state, attempts, found.data)
    return LearnerArrays.resumed(self._config, model, captured)

  def syncer_arrays(self) -> SyncerArrays:
    """A life's arrays, with the initial parameters."""
    model = self.model
    # A device computes what it was given first, first: on a learner's, every
    # check of an answer would wait for a step, and nothing would overlap.
    arrays = SyncerArrays.from_config(
      self._config, model.layout, model.codec, device=jax.devices()[-1]
    )
    params = model.program.params(model.state)
    arrays.initialise(jax.device_get(jax.tree.leaves(params)))
    return arrays

  def scaled(self, part: bytes, due: tuple[int, ...], factor: float) -> bytes:
    """An encoded answer to these fragments, `factor` times as large."""
    codec, pieces, offset = self.model.codec, [], 0
    for p in due:
      shapes = self.model.layout.shapes(p)
      piece = part[offset : offset + self.answer_bytes[p]]
      offset += self.answer_bytes[p]
      tensors = codec.decode(codecs.from_bytes(codec, shapes, piece), shapes)
      scaled = tuple(factor * tensor for tensor in tensors)
      words = rounding_words(self._config, None, 0, 0, p)
      payload, _ = codec.encode(codec.init(shapes), scaled, words)
      pieces.append(codecs.to_bytes(payload))
    return b"".join(pieces)

  def position(self, learner: int) -> dict[str, int]:
    """Where the learner's own checkpoint was taken; empty: it has none."""
    return self._saved.get(learner, (None, {}))[1]

  def saver(self, learner: int) -> Any:
    """What the plane calls to save a checkpoint."""

    def save(state: Any, position: dict[str, int]) -> None:
      self._saved[learner] = state, position

    return save

  def _learner(self, learner: int) -> Model:
    if learner not in self._learners:
      model = load_model(self._config, learner, self._cache_dir)
      self._learners[learner] = model
    return self._learners[learner]


def place(
  model: Model, commit: Commit, data: dict[int, bytes | None], state: Any
) -> Any:
  """The parameters as of a commit; `ValueError` if one is gone or damaged.

  `data` has the object of every fragment; frozen parameters are the state's.
  """
  objects = [data[p] for p in range(len(commit.fragments))]
  own = model.program.params(state)
  return place_params(model.layout, own, commit.fragments, objects)
