"""Held-out loss of a simulated run's commits, as a live evaluator tells it."""

import pathlib
from collections.abc import Callable

from ddiloco.config import Config
from ddiloco.engine.loading import Model
from ddiloco.engine.records import params_digest
from ddiloco.engine.telemetry import Telemetry
from ddiloco.protocol.messages import Commit
from ddiloco.report.workdir import EVALUATIONS, append_line
from ddiloco.sim.jax_compute import place


class Evaluations:
  """Measures what is due; writes into `eval.jsonl` and for TensorBoard."""

  def __init__(
    self, config: Config, model: Model | None, workdir: pathlib.Path
  ):
    """Without a model, or one that evaluates, nothing is ever due."""
    program = model and model.program
    self._model = model if hasattr(program, "evaluate") else None
    self._sequences = config.eval.sequences
    self._every = config.eval.every_rounds
    self._path = workdir / EVALUATIONS
    self._path.unlink(missing_ok=True)  # of a run that was cut short
    self._telemetry = Telemetry(workdir, "evaluator") if self._model else None
    self._newest = -1

  def evaluate(
    self,
    commit: Commit,
    params: Callable[[int], bytes | None],
    unix_ns: int,
    *,
    final: bool = False,
  ) -> None:
    """Measures a commit if that is due, or the final one.

    Args:
      commit: names the parameters.
      params: the object of each fragment.
      unix_ns: when it is measured.
      final: no other will follow.
    """
    t, model = commit.round, self._model
    due = self._every > 0 and t >= max(self._newest, 0) + self._every
    due = due or final or self._newest < 0
    if model is None or t == self._newest or not due:
      return
    data = {p: params(p) for p in range(len(commit.fragments))}
    placed = place(model, commit, data, model.state)
    measured = model.program.evaluate(placed)
    numbers = {name: float(value) for name, value in measured.items()}
    line = {
      "unix_ns": unix_ns,
      "of": "syncer",
      "round": t,
      "tokens": commit.tokens,
      "params_digest": params_digest(model.layout, placed),
      "sequences": self._sequences,
      **numbers,
    }
    append_line(self._path, line)
    heldout = {f"heldout/{name}": value for name, value in numbers.items()}
    self._telemetry.scalars(heldout, commit.tokens)
    self._newest = t

  def close(self) -> None:
    """Ends the event file."""
    if self._telemetry is not None:
      self._telemetry.close()
