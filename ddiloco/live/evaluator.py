"""Evaluates the syncer's parameters on held-out data; only reads.

Neither the syncer nor a learner spends time on it. Results are appended to
`eval.jsonl` in the workdir and written for TensorBoard.
"""

import json
import pathlib
import signal
import threading
import time
from typing import Any

from ddiloco.config import Config, ConfigError
from ddiloco.engine import startup
from ddiloco.engine.records import params_digest
from ddiloco.engine.telemetry import Telemetry
from ddiloco.live import setup as setup_lib
from ddiloco.live.log import logger
from ddiloco.types import Exit

RESULTS = "eval.jsonl"
_POLL_S = 0.5


def run_evaluator(
  config: Config, *, workdir: pathlib.Path, exchange: str, follow: bool
) -> Exit:
  """Evaluates the newest commit once, or (follow) until the run ends."""
  interrupt = threading.Event()
  signal.signal(signal.SIGTERM, lambda number, frame: interrupt.set())
  signal.signal(signal.SIGINT, lambda number, frame: interrupt.set())
  setup = setup_lib.open_setup(
    config, None, workdir=workdir, exchange=exchange, interrupt=interrupt
  )
  if not hasattr(setup.program, "evaluate"):
    raise ConfigError(
      f"program = {config.program!r} has no evaluate(params) -> dict of "
      "numbers, so there is nothing to evaluate."
    )
  newest = setup_lib.wait_for_run(setup)
  startup.check_genesis(newest.genesis, config, setup.layout)
  evaluator = _Evaluator(setup)
  if not evaluator.results:
    evaluator.initial()
  while follow and not interrupt.is_set():
    newest = setup_lib.wait_for_run(setup)
    if setup.rules(newest.commit.run_id).ended(
      newest.commit.round, newest.commit.tokens
    ):
      break
    if evaluator.due(newest.commit.round):
      evaluator.evaluate_newest()
    interrupt.wait(_POLL_S)
  evaluator.evaluate_newest()
  return Exit.STOPPED if follow and interrupt.is_set() else Exit.OK


class _Evaluator:
  """The held-out data, and what was measured on it so far."""

  def __init__(self, setup: setup_lib.Setup):
    self._setup = setup
    self._path = setup.workdir / RESULTS
    self._telemetry = Telemetry(setup.workdir, "evaluator")
    self.results = read_results(setup.workdir)

  def due(self, t: int) -> bool:
    """Whether round t is far enough from the last one evaluated."""
    every = self._setup.config.eval.every_rounds
    last = max((result["round"] for result in self.results), default=0)
    return every > 0 and t >= last + every

  def initial(self) -> None:
    """The parameters every run of this seed starts from."""
    params = self._setup.program.params(self._setup.state)
    self._record(0, 0, params)

  def evaluate_newest(self) -> None:
    """The newest commit's parameters, unless they were evaluated already."""
    setup = self._setup
    while True:
      newest = setup_lib.wait_for_run(setup)
      commit = newest.commit
      if any(result["round"] == commit.round for result in self.results):
        return
      try:
        params = setup_lib.load_params(setup, commit)
        break
      except ValueError as error:  # retention was faster
        if setup.interrupt.is_set():
          return
        logger.info("reading the newest commit again: %s", error)
    self._record(commit.round, commit.tokens, params)

  def _record(self, t: int, tokens: int, params: Any) -> None:
    measured = self._setup.program.evaluate(params)
    result = {
      "unix_ns": time.time_ns(),
      "round": t,
      "tokens": tokens,
      "params_digest": params_digest(self._setup.layout, params),
      **{name: float(value) for name, value in measured.items()},
    }
    with open(self._path, "a") as file:
      file.write(json.dumps(result) + "\n")
    self.results.append(result)
    self._telemetry.scalars(
      {f"heldout/{name}": float(v) for name, v in measured.items()}, tokens
    )
    numbers = ", ".join(f"{k} {float(v):.4f}" for k, v in measured.items())
    logger.info("round %d, %d tokens: %s", t, tokens, numbers)


def read_results(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """What was measured so far; a torn last line is dropped."""
  try:
    lines = (workdir / RESULTS).read_text().splitlines()
  except FileNotFoundError:
    return []
  results = []
  for line in lines:
    try:
      results.append(json.loads(line))
    except ValueError:
      continue
  return results
