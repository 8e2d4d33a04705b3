"""Trains along a recorded history: its arrays anew, its decisions as they are.

Who stepped, answered, was counted, died and came back, and when, stands on
the tapes of a run, usually one that was simulated without arrays. Quorum and
timing decide nothing here; every life executes its script (`script`).
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from ddiloco.config import Config
from ddiloco.engine import startup
from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.engine.ports import Exchange, StepResult
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.engine.version import code_version
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import Step, StepDone
from ddiloco.protocol.messages import Commit, FragmentState, Member
from ddiloco.protocol.tape import CommitDigest
from ddiloco.report import summary
from ddiloco.report.workdir import JOURNAL, read_lines
from ddiloco.sim import history as history_lib
from ddiloco.sim import replay as replay_lib
from ddiloco.sim import script as script_lib
from ddiloco.sim.evaluations import Evaluations
from ddiloco.sim.history import BadTape, History, Life
from ddiloco.sim.islands import MemoryStore
from ddiloco.sim.jax_compute import JaxCompute
from ddiloco.sim.observers import Observer
from ddiloco.sim.retell import Found, Retelling
from ddiloco.sim.terminal import Progress, interruptible
from ddiloco.types import Exit, Status


class _Stopped(Exception):
  """Somebody wants the training to end here."""


def follow(
  config: Config,
  source: Exchange,
  folder: pathlib.Path,
  *,
  workdir: pathlib.Path,
  store: Exchange,
) -> Exit:
  """Trains to the end of a history; leaves what a simulated run leaves.

  Args:
    config: of the training; see `history.check_followable`.
    source: the exchange that the history lies in.
    folder: the workdir it was recorded in.
    workdir: gets the journal, evaluations and the report.
    store: gets the run's exchange once it is over.

  Raises:
    ConfigError: the history and the config, or its program, do not fit.
  """
  history = history_lib.load(source)
  history_lib.check_followable(history, config)
  journal = read_lines(folder / JOURNAL, [])
  following = _Following(config, history, workdir)
  begun_s = time.monotonic()
  with (
    interruptible(following.request_stop),
    contextlib.closing(following),
    following.progress as progress,
  ):
    try:
      following.train()
      status, exit_ = None, Exit.OK
    except _Stopped as stop:
      status, exit_ = (Status.STOPPED, str(stop)), Exit.STOPPED
    except replay_lib.NotFinite as error:
      status, exit_ = (Status.FAILED, str(error)), Exit.FAILED
    if status is not None:
      progress.say(": ".join(status))
    last_ns = following.export(source, store)
  lines = [line for line in journal if status is None or _before(line, last_ns)]
  if status is not None:
    end = {"what": "end", "status": status[0], "reason": status[1]}
    lines.append({"unix_ns": last_ns, **end})
  if lines and lines[-1]["what"] == "end":
    lines[-1]["trained_in_s"] = round(time.monotonic() - begun_s, 3)
  (workdir / JOURNAL).write_text("".join(json.dumps(x) + "\n" for x in lines))
  print(summary.text(summary.write(store, workdir)))
  return exit_


def _before(line: dict[str, Any], unix_ns: int) -> bool:
  return line["unix_ns"] <= unix_ns and line["what"] != "end"


class _Following(Observer):
  """The training, and what comes out of it."""

  def __init__(self, config: Config, history: History, workdir: pathlib.Path):
    self._cache_dir = str(workdir / "cache")
    commits: dict[str, Commit] = {}
    difference = replay_lib.redecide_all(history, commits)
    if difference is not None:
      raise BadTape(
        f"record {difference.index} of {difference.actor}, life "
        f"{difference.life}, is decided otherwise now: the history was edited, "
        f"or recorded by another release (this is {code_version()}). Record it "
        "again."
      )
    chain = history_lib.chain(history, commits, history.lives)
    self._scripts = script_lib.write(history, chain)
    self._ends = chain[-1].round if chain else 0
    self._compute = JaxCompute(config, self._cache_dir)
    self._old, self._new = history, self._renamed(history, config)
    self._times = _times(history, chain)
    self._taken = {life.name: _steps(life) for life in history.lives}
    self._found = Found()
    self._pending: dict[str, tuple[int, LearnerArrays, StepResult]] = {}
    self._arrays: dict[int, SyncerArrays] = {}  # by fragment
    self._evaluations = Evaluations(config, self._compute.model, workdir)
    self._reason = ""
    self.progress = Progress(self._line)

  def _renamed(self, history: History, config: Config) -> History:
    """The history as a run of this config."""
    run_id = f"{history.first.run_id}-{config.digest[:8]}"
    layout = self._compute.model.layout
    lives = [dataclasses.replace(life, config=config) for life in history.lives]
    return dataclasses.replace(
      history,
      genesis=startup.make_genesis(config, layout, code_version()),
      config=config,
      first=replace(history.first, run_id=run_id),
      lives=tuple(lives),
    )

  def request_stop(self, reason: str) -> None:
    """Ends the training after the step that is under way."""
    self._reason = reason

  def train(self) -> None:
    """Trains to the end; raises `_Stopped`, `NotFinite` or `BadTape`."""
    store = MemoryStore(script_lib.wanted(self._scripts))
    replay_lib.genesis(self._new, self._compute.model, store, self)
    for key in replay_lib.run_scripts(
      self._new,
      self._new.lives,
      self._scripts,
      store,
      self,
      cache_dir=self._cache_dir,
    ):
      if key:
        raise BadTape(f"every life waits: the first one for {key}")

  # --- What comes out -------------------------------------------------------

  def stepped(
    self, life: Life, arrays: LearnerArrays, step: Step, result: StepResult
  ) -> None:
    """See `Observer`."""
    took = self._taken[life.name].get(step.step)
    has = (result.samples, result.tokens)
    if took is not None and took != has:
      raise BadTape(
        f"step {step.step} of {life.name} took {took[0]} samples, {took[1]} "
        f"tokens, in the history, but {has[0]} samples, {has[1]} tokens, in "
        "this config's program. Record the history with this program and its "
        "data, or use what it was recorded with."
      )
    self._finish(life.name)  # the one before: this one may still run
    self._pending[life.name] = step.step, arrays, result
    self._look_up()

  def answered(self, key: str, part: bytes) -> None:
    """See `Observer`."""
    self._found.answers[key] = wire.sha256(part)

  def committed(
    self, commit: Commit, arrays: SyncerArrays, states: dict[int, FragmentState]
  ) -> None:
    """See `Observer`."""
    for p, state in states.items():
      self._found.states[commit.round, p] = state
    self._found.commits.append(commit)
    self._arrays |= dict.fromkeys(states, arrays)
    self._evaluate()
    self._look_up()

  def _look_up(self) -> None:
    self.progress.update()
    if self._reason:
      raise _Stopped(self._reason)

  def _finish(self, life: str) -> None:
    if life in self._pending:
      step, arrays, result = self._pending.pop(life)
      loss = arrays.finish(result)
      self._found.losses.setdefault(life, {})[step] = loss

  def _evaluate(self, *, final: bool = False) -> None:
    commit = self._found.commits[-1]
    states = [
      self._found.states[ref.version, p]
      for p, ref in enumerate(commit.fragments)
    ]
    self._evaluations.evaluate(
      replace(commit, fragments=tuple(states)),
      lambda p: self._arrays[p].stored(p)[0],
      self._times[commit.round],
      final=final,
    )

  def _line(self) -> str:
    commits = self._found.commits
    t, tokens = (commits[-1].round, commits[-1].tokens) if commits else (0, 0)
    return f"round {t} of {self._ends}, {tokens:,} tokens"

  # --- What is left ---------------------------------------------------------

  def export(self, source: Exchange, store: Exchange) -> int:
    """Writes the run as far as it came; returns its last moment, Unix ns."""
    for life in list(self._pending):
      self._finish(life)
    self._evaluate(final=True)
    facts = self._compute.facts
    retelling = Retelling(self._old, self._new, self._found, facts)
    for name, data in retelling.tapes():
      store.put(name, data)
    for p, ref in enumerate(retelling.newest.fragments):
      params, outer = self._arrays[p].stored(p)
      where = ref.version, p, ref.epoch
      store.put(keys.params(*where), params)
      store.put(keys.outer_state(*where), outer)
    # Whoever goes on with the run must not take the name of a life there was.
    for name in (*source.list(keys.MEMBERS), *source.list(keys.LEASES)):
      store.put(name, self._renamed_member(source.get(name).value))
    for name, data in retelling.commits():  # commit 0 makes it a run
      store.put(name, data)
    return retelling.last_ns

  def close(self) -> None:
    """Ends the event file."""
    self._evaluations.close()

  def _renamed_member(self, data: bytes) -> bytes:
    try:
      member = messages.decode(Member, data)
    except wire.WireError:
      return data  # a lease
    return messages.encode(replace(member, run_id=self._new.first.run_id))


def _steps(life: Life) -> dict[int, tuple[int, int]]:
  """Samples and tokens of each step."""
  return {
    record.event.step: (record.event.samples, record.event.tokens)
    for record in life.records
    if isinstance(record.event, StepDone)
  }


def _times(history: History, chain: Sequence[Commit]) -> dict[int, int]:
  """When each commit was written, Unix ns."""
  epochs = {commit.round: commit.epoch for commit in chain}
  times = {0: min(life.header.started_unix_ns for life in history.lives)}
  for life in history.lives:
    offset_ns = life.header.started_unix_ns - life.header.started_ns
    for record in life.records if life.learner is None else ():
      for command in record.commands:
        if isinstance(command, CommitDigest):
          if epochs.get(command.round) == life.incarnation:
            times[command.round] = record.event.now_ns + offset_ns
  return times
