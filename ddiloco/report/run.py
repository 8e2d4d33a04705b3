"""One run, read from its exchange and workdir."""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

from ddiloco import config as config_lib
from ddiloco.config import Config, ConfigError
from ddiloco.protocol import keys, ledger, messages, wire
from ddiloco.protocol.messages import Commit, Origin
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules, make_rules
from ddiloco.protocol.tape import Header
from ddiloco.report import workdir as workdir_lib
from ddiloco.report.lives import COMPLETED, LearnerLife
from ddiloco.report.rounds import SyncerRecords
from ddiloco.report.tapes import Exchange, TapeReader, find_lives
from ddiloco.report.workdir import Process, Session
from ddiloco.types import Exit, Status


class NoRun(ConfigError):
  """There is no run to report on, or none that can be read."""


@dataclasses.dataclass
class Run:
  """What all reports are computed from."""

  run_id: str
  config: Config  # of the run's start
  config_sha256: str
  has_arrays: bool  # False: the protocol ran alone, nothing was trained
  fragment_bytes: tuple[int, ...]  # f32 parameters of each fragment
  learners: dict[int, list[LearnerLife]]  # lives, ascending
  syncer: SyncerRecords
  sessions: list[Session]
  evaluations: list[dict[str, Any]]
  changes: dict[str, tuple[Any, Any]]  # of a resumed run's config
  warnings: list[str]
  verdicts: ledger.Verdicts
  status: Status
  reason: str  # why it ended, as the launcher said
  origin: Origin | None = None  # the snapshot that it goes on from

  @property
  def num_fragments(self) -> int:
    """P."""
    return self.config.sync.num_fragments

  def session_of(self, unix_ns: int) -> int:
    """Index of the session a moment belongs to."""
    begun = sum(session.started_ns <= unix_ns for session in self.sessions)
    return max(begun - 1, 0)

  def completed(self, session: int) -> bool:
    """Whether the run came to its end in a session."""
    told = self.sessions[session].status == Status.COMPLETED
    last = session == len(self.sessions) - 1
    return told or (last and self.status is Status.COMPLETED)

  def process_of(self, who: str, started_ns: int, pid: int) -> Process | None:
    """The process that a life which began then ran in, if it was seen."""
    if not self.sessions:
      return None
    session = self.sessions[self.session_of(started_ns)]
    return session.process_of(who, started_ns, pid)

  def died(self, life: LearnerLife) -> bool:
    """Whether a life ended before the run did, however it ended."""
    if self.learners[life.learner][-1] is not life:
      return True
    if life.stopped == COMPLETED:
      return False
    if self.status is Status.COMPLETED:
      return True
    if life.exit_code not in (None, Exit.OK, Exit.STOPPED):
      return True
    dead_after_ns = config_lib.seconds_to_ns(self.config.live.dead_after_s)
    return self.last_ns - life.last_ns > dead_after_ns

  @property
  def last_ns(self) -> int:
    """The last thing any tape tells. Unix ns."""
    lives = [*self.syncer.lives, *itertools.chain(*self.learners.values())]
    return max((life.last_ns for life in lives), default=0)


def load(exchange: Exchange, workdir: pathlib.Path) -> Run:
  """Reads a run; `NoRun` if there is none."""
  warnings: list[str] = []
  genesis_commit = read_first(exchange, workdir)
  genesis = genesis_commit.genesis
  config = _config(genesis.config)
  rules = make_rules(
    config,
    run_id=genesis_commit.run_id,
    layout=wire.sha256(genesis.layout.encode()),
    answer_bytes=(0,) * config.sync.num_fragments,
  )
  lines = workdir_lib.read_lines(workdir / workdir_lib.JOURNAL, warnings)
  sessions = workdir_lib.read_sessions(lines)
  syncer, learners = _read_tapes(exchange, rules, sessions, warnings)
  committed = _read_commits(exchange, syncer, warnings)
  if not sessions:
    sessions = _sessions_of_tapes(syncer, learners)
  status, reason = _status(sessions, syncer)
  run = Run(
    run_id=genesis_commit.run_id,
    config=config,
    config_sha256=genesis.config_sha256,
    has_arrays=genesis.has_arrays,
    origin=genesis.origin,
    fragment_bytes=tuple(f.params_bytes for f in genesis_commit.fragments),
    learners=learners,
    syncer=syncer,
    sessions=sessions,
    evaluations=workdir_lib.read_evaluations(
      workdir / workdir_lib.EVALUATIONS, warnings
    ),
    changes=_changes(workdir, config),
    warnings=warnings,
    verdicts=_verdicts(syncer, learners, committed),
    status=status,
    reason=reason,
  )
  lived: set[tuple[str, int]] = set()
  for life in itertools.chain(*learners.values()):
    who = f"learner {life.learner}"
    process = run.process_of(who, life.started_ns, life.pid)
    # A process has one life: a later one was started by somebody else.
    if process is not None and (process.who, process.started_ns) not in lived:
      lived.add((process.who, process.started_ns))
      life.process_ns = process.started_ns
      life.exited_ns, life.exit_code = process.exited_ns, process.code
  return run


def read_first(exchange: Exchange, where: pathlib.Path | str) -> Commit:
  """Commit 0, which has the run's genesis; `NoRun` if there is none."""
  item = exchange.get(keys.commit(0))
  if item is None:
    raise NoRun(
      f"there is no run in {where} (its exchange has no commit 0). Name the "
      "workdir of a run that has started, and its --exchange if that is not "
      "in the workdir."
    )
  try:
    commit = messages.decode(Commit, item.value)
  except wire.WireError as error:
    raise NoRun(f"commit 0 of the run is damaged: {error}") from error
  if commit.genesis is None:
    raise NoRun("commit 0 says nothing about its run: not a ddiloco run")
  return commit


def _config(text: str) -> Config:
  try:
    return config_lib.from_dict(json.loads(text))
  except ValueError as error:
    raise NoRun(
      f"the run's config is not one that this release reads ({error}). Use the "
      "release that the run was made with."
    ) from error


def _changes(
  workdir: pathlib.Path, config: Config
) -> dict[str, tuple[Any, Any]]:
  """What the newest start in the workdir changed; nothing if unknown."""
  try:
    stored = json.loads((workdir / "config.json").read_text())
    newest = config_lib.from_dict(stored["config"])
  except (OSError, ValueError, KeyError, TypeError):
    return {}
  return config_lib.differences(config, newest)


# --- Tapes and commits ------------------------------------------------------


def _read_tapes(
  exchange: Exchange,
  rules: Rules,
  sessions: list[Session],
  warnings: list[str],
) -> tuple[SyncerRecords, dict[int, list[LearnerLife]]]:
  syncer, learners = SyncerRecords(), {}
  for keys_ in find_lives(exchange):
    reader = TapeReader(exchange, keys_, warnings)
    if reader.header is None:
      continue
    if reader.header.run_id != rules.run_id:
      warnings.append(f"tape of {keys_.name} belongs to another run; left out")
      continue
    reader.header = _by_launcher(reader.header, keys_.learner, sessions)
    if keys_.learner is None:
      quorum_min = _quorum_min(reader.header, rules)
      syncer.read(reader, dataclasses.replace(rules, quorum_min=quorum_min))
    else:
      life = LearnerLife(reader, keys_.learner, rules.schedule.num_fragments)
      learners.setdefault(keys_.learner, []).append(life)
  return syncer, learners


def _by_launcher(
  header: Header, learner: int | None, sessions: list[Session]
) -> Header:
  """A life whose process the launcher saw, by the launcher's wall clock.

  The process's own may have been wrong.
  """
  who = "syncer" if learner is None else f"learner {learner}"
  for process in (p for session in sessions for p in session.processes):
    unix_ns = process.unix_ns(who, header.pid, header.started_ns)
    if unix_ns is not None:
      return dataclasses.replace(header, started_unix_ns=unix_ns)
  return header


def _quorum_min(header: Header, rules: Rules) -> int:
  """K may change when a run is resumed; nothing else that matters here."""
  try:
    return config_lib.from_dict(json.loads(header.config)).quorum
  except ValueError:
    return rules.quorum_min


def _read_commits(
  exchange: Exchange, syncer: SyncerRecords, warnings: list[str]
) -> int:
  """Fills in what tapes do not tell; returns the newest round."""
  listed = {
    t: key
    for key in exchange.list(keys.COMMITS)
    if (t := keys.commit_round(key))
  }
  syncer.committed = max([syncer.committed, *listed])

  def read(t: int) -> bytes | None:
    item = exchange.get(listed[t]) if t in listed else None
    return None if item is None or item.value == SWEPT else item.value

  def digest_of(t: int) -> str | None:
    data = read(t)
    return None if data is None else wire.sha256(data)

  syncer.resolve(digest_of)
  for t in sorted(listed.keys() - syncer.rounds.keys()):
    data = read(t)
    if data is None:
      continue
    try:
      syncer.take_commit(messages.decode(Commit, data))
    except wire.WireError as error:
      warnings.append(f"{listed[t]} is damaged: {error}")
  return syncer.committed


def _verdicts(
  syncer: SyncerRecords, learners: dict[int, list[LearnerLife]], committed: int
) -> ledger.Verdicts:
  """The syncer's word; where its tapes are gone, what learners saw."""
  counted = {}
  for lives in learners.values():
    for life in lives:
      committed = max([committed, *life.counted])
      for t, attempt in life.counted.items():
        if attempt:
          counted[t, life.learner, life.incarnation] = attempt
  for t, round_ in syncer.rounds.items():
    for learner, incarnation, attempt in round_.counted:
      counted[t, learner, incarnation] = attempt
  return ledger.Verdicts(
    committed=committed,
    counted=counted,
    refused=syncer.refused,
    seen=syncer.seen | syncer.refused.keys(),
  )


# --- Sessions ---------------------------------------------------------------


def _sessions_of_tapes(
  syncer: SyncerRecords, learners: dict[int, list[LearnerLife]]
) -> list[Session]:
  """For roles started by hand: a pause that all lives stopped for ends one."""
  lives = [*syncer.lives, *itertools.chain(*learners.values())]
  lives.sort(key=lambda life: life.started_ns)
  sessions: list[Session] = []
  last_ns, all_stopped = 0, False
  for life in lives:
    if not sessions or (all_stopped and life.started_ns > last_ns):
      sessions.append(Session(life.started_ns))
      all_stopped = True
    last_ns = max(last_ns, life.last_ns)
    all_stopped = all_stopped and bool(life.stopped)
  return sessions


def _status(
  sessions: list[Session], syncer: SyncerRecords
) -> tuple[Status, str]:
  told = sessions[-1].status if sessions else ""
  if told in [str(status) for status in Status]:
    return Status(told), sessions[-1].reason
  newest = {life.shard: life.stopped for life in syncer.lives}
  if COMPLETED in newest.values():
    return Status.COMPLETED, ""
  return Status.STOPPED, syncer.lives[-1].stopped if syncer.lives else ""
