"""Evaluates a run's parameters on held-out data; only reads.

Neither the syncer nor a learner spends time on it. Results are appended to
`eval.jsonl` in the workdir, each with whose parameters they are of; those of
the syncer are written for TensorBoard too.
"""

import pathlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco.config import Config, ConfigError
from ddiloco.engine import startup
from ddiloco.engine.ports import DamagedRun, ExchangeError, ExchangeRefused
from ddiloco.engine.records import params_digest
from ddiloco.engine.sealing import RunKey
from ddiloco.engine.telemetry import Telemetry
from ddiloco.live import setup as setup_lib
from ddiloco.live.checkpoint import Checkpoints, Restored
from ddiloco.live.log import logger
from ddiloco.protocol.messages import Commit
from ddiloco.report.workdir import EVALUATIONS, append_line, read_lines
from ddiloco.types import Exit

SYNCER, MEAN, LEARNER = "syncer", "mean", "learner:"
_POLL_S = 0.5
_TRIES = 3  # to read a checkpoint that its learner may be replacing

# (program, params) -> numbers by name.
Measure = Callable[[Any, Any], Mapping[str, Any]]


def run_evaluator(
  config: Config,
  *,
  workdir: pathlib.Path,
  exchange: str,
  run_key: RunKey | None = None,
  follow: bool = False,
  of: str = SYNCER,
  measure: Measure | None = None,
) -> Exit:
  """Evaluates once, or (follow) the newest commits until the run ends.

  Args:
    config: the run's.
    workdir: of the run; where learners' checkpoints are.
    exchange: its URL; empty: in the workdir.
    run_key: of the run, if it has one.
    follow: evaluate every `eval.every_rounds` rounds; of the syncer only.
    of: "syncer", "learner:i" (of the run's), or "mean".
    measure: what to measure instead of the program's own `evaluate`.
  """
  interrupt = threading.Event()
  signal.signal(signal.SIGTERM, lambda number, frame: interrupt.set())
  signal.signal(signal.SIGINT, lambda number, frame: interrupt.set())
  setup = setup_lib.open_setup(
    config,
    None,
    workdir=workdir,
    exchange=exchange,
    interrupt=interrupt,
    run_key=run_key,
  )
  if measure is None and not hasattr(setup.program, "evaluate"):
    raise ConfigError(
      f"program = {config.program!r} has no evaluate(params) -> dict of "
      "numbers, so there is nothing to evaluate."
    )
  newest = setup_lib.wait_for_run(setup)
  startup.check_genesis(newest.genesis, config, setup.layout)
  evaluator = _Evaluator(setup, measure)
  try:
    if of != SYNCER:
      evaluator.evaluate_learners(of)
      return Exit.OK
    if measure is None and not evaluator.results:
      if newest.genesis.origin is None:
        evaluator.initial()
      else:  # a restored run began with other parameters
        evaluator.evaluate_newest()
    if follow:
      evaluator.follow()
    evaluator.evaluate_newest()
  finally:
    evaluator.close()
  return Exit.STOPPED if follow and interrupt.is_set() else Exit.OK


class _Evaluator:
  """The held-out data, and what was measured on it so far."""

  def __init__(self, setup: setup_lib.Setup, measure: Measure | None):
    self._setup, self._measure = setup, measure
    self._path = setup.workdir / EVALUATIONS
    self._telemetry = Telemetry(setup.workdir, "evaluator")
    self.results = [
      result
      for result in read_lines(self._path, [])
      if result.get("of", SYNCER) == SYNCER and "tasks" not in result
    ]

  def follow(self) -> None:
    """Evaluates every so many rounds until the run ends or is interrupted."""
    setup = self._setup
    while not setup.interrupt.is_set():
      try:
        commit = setup_lib.wait_for_run(setup).commit
        if setup.rules(commit.run_id).ended(commit.round, commit.tokens):
          return
        if self._due(commit.round):
          self.evaluate_newest()
      except ExchangeRefused:
        raise
      except ExchangeError as error:
        logger.warning("the evaluator looks again: %s", error)
      setup.interrupt.wait(_POLL_S)

  def _due(self, t: int) -> bool:
    """Whether round t is far enough from the last one evaluated."""
    every = self._setup.config.eval.every_rounds
    last = max((result["round"] for result in self.results), default=0)
    return every > 0 and t >= last + every

  def close(self) -> None:
    """Ends the event file and the connection to the exchange."""
    self._telemetry.close()
    self._setup.exchange.close()

  def initial(self) -> None:
    """The parameters every run of this seed starts from."""
    params = self._setup.program.params(self._setup.state)
    self._record(params, {"of": SYNCER, "round": 0, "tokens": 0})

  def evaluate_newest(self) -> None:
    """The newest commit's parameters, unless they were evaluated already."""
    commit, params = newest_params(self._setup)
    sequences = self._setup.config.eval.sequences
    known = [
      result
      for result in self.results
      if result["round"] == commit.round
      and result.get("sequences") == sequences  # of as much text
    ]
    if known and self._measure is None:
      _say(known[-1])
      return
    if params is None:
      return
    about = {"of": SYNCER, "round": commit.round, "tokens": commit.tokens}
    self._record(params, about)

  def evaluate_learners(self, of: str) -> None:
    """One learner's newest checkpoint, or (mean) that of all who have one."""
    learners = self._learners() if of == MEAN else [int(of[len(LEARNER) :])]
    restored = {i: self._checkpoint(i) for i in learners}
    found = {i: item for i, item in restored.items() if item is not None}
    if not found:
      who = "no learner" if of == MEAN else f"learner {learners[0]}"
      every = self._setup.config.live.checkpoint_every_steps
      raise ConfigError(
        f"--of={of}, but {self._setup.workdir} holds "
        f"{'no' if of != MEAN else 'a'} checkpoint of {who} that can be read "
        "(a warning above says why, if there is one). A live learner "
        "writes them into the workdir of its own machine when it stops and "
        f"every live.checkpoint_every_steps = {every} steps; a simulation "
        "keeps its own in memory."
      )
    if len(found) < len(restored):
      logger.warning("the mean is that of learners %s only", list(found))
    program = self._setup.program
    params = mean([program.params(item.state) for item in found.values()])
    seen = [item.position.get("seen", 0) for item in found.values()]
    about = {"of": of, "round": max(seen), "learners": list(found)}
    about["samples"] = [i.position["next_sample"] for i in found.values()]
    self._record(params, about)

  def _learners(self) -> list[int]:
    """Those of the config, and who has joined from this workdir besides."""
    config = self._setup.config
    joined = range(config.learners.count, config.data.shards)
    return [
      *range(config.learners.count),
      *(i for i in joined if self._folder(i).is_dir()),
    ]

  def _folder(self, learner: int) -> pathlib.Path:
    return self._setup.workdir / "checkpoints" / f"learner-{learner}"

  def _checkpoint(self, learner: int) -> Restored | None:
    folder = self._folder(learner)
    if not folder.is_dir():
      return None
    for _ in range(_TRIES):
      checkpoints = Checkpoints(folder)
      try:
        restored = checkpoints.restore(self._setup.state)
      finally:
        checkpoints.close()
      if restored is not None:
        return restored
    return None

  def _record(self, params: Any, about: dict[str, Any]) -> None:
    program = self._setup.program
    measured = (self._measure or type(program).evaluate)(program, params)
    numbers = {name: float(value) for name, value in measured.items()}
    digest = params_digest(self._setup.layout, params)
    result = {"unix_ns": time.time_ns(), **about, "params_digest": digest}
    if self._measure:
      result["tasks"] = numbers
    else:
      result |= {"sequences": self._setup.config.eval.sequences, **numbers}
    append_line(self._path, result)
    if about["of"] == SYNCER:
      self.results.append(result)
      kind = "tasks" if self._measure else "heldout"
      scalars = {f"{kind}/{name}": x for name, x in numbers.items()}
      self._telemetry.scalars(scalars, about["tokens"])
    _say(result)


def _say(result: Mapping[str, Any]) -> None:
  """Logs what was measured: every number that says not of what it is."""
  numbers = result.get("tasks", result)
  shown = [f"{k} {x:.4f}" for k, x in numbers.items() if type(x) is float]
  of = result.get("of", SYNCER)
  logger.info("%s, round %d: %s", of, result["round"], ", ".join(shown))


def newest_params(setup: setup_lib.Setup) -> tuple[Commit, Any]:
  """The newest commit and its parameters; None for them if interrupted."""
  failed = None
  while True:
    commit = setup_lib.wait_for_run(setup).commit
    try:
      return commit, setup_lib.load_params(setup, commit, setup.state)
    except ValueError as error:
      if setup.interrupt.is_set():
        return commit, None
      if commit == failed:  # retention deletes what a newer commit replaced
        raise DamagedRun(
          f"the parameters of round {commit.round}, the newest commit, cannot "
          f"be read: {error}"
        ) from error
      failed = commit
      logger.info("reading the newest commit again: %s", error)
      setup.interrupt.wait(_POLL_S)


def mean(trees: list[Any]) -> Any:
  """The unweighted mean of f32 pytrees, summed in f64; as host arrays."""

  def average(*leaves):
    return np.mean(jax.device_get(leaves), axis=0, dtype=np.float64).astype(
      "f4"
    )

  return jax.tree.map(average, *trees) if len(trees) > 1 else trees[0]
