"""A run's whole history, read strictly from its tapes: what a replay replays.

A report reads tapes as far as they go; here nothing that matters may be
missing. Nothing in this module needs JAX: what it reads decides how JAX is
set up.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from ddiloco import config as config_lib
from ddiloco.config import Config, ConfigError
from ddiloco.engine import snapshots
from ddiloco.engine.ports import run_calls
from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.learner_types import Joined, Resumed
from ddiloco.protocol.messages import Commit, Genesis
from ddiloco.protocol.rules import Rules, make_rules
from ddiloco.protocol.snapshots import LearnerSnapshot, restored
from ddiloco.protocol.syncer_types import Opened
from ddiloco.report.tapes import Exchange, LifeKeys, find_lives

# What of a config decides what happens in a run, apart from time.
DECIDING = (
  "learners.batch_size",
  "learners.count",
  "learners.global_batch",
  "live.checkpoint_every_steps",
  "live.dead_after_s",
  "stop",
  "sync",
  "syncer",
)


class BadTape(ConfigError):
  """A tape that cannot be replayed: which one, why, the remedy."""


class Shape(NamedTuple):
  """What of a process XLA chooses its sums' order from."""

  backend: str
  threads: int
  devices: int


@dataclasses.dataclass(frozen=True)
class Life:
  """One life of an actor: its header and all its records."""

  learner: int | None  # None: the syncer
  incarnation: int
  name: str
  header: tape.Header
  config: Config
  records: tuple[tape.Record, ...]

  @property
  def shape(self) -> Shape:
    """Of the process it ran in."""
    header = self.header
    return Shape(header.backend, header.threads, header.devices)


@dataclasses.dataclass(frozen=True)
class Base:
  """The snapshot that a replay begins with, instead of a program's init."""

  commit: Commit  # the one it is of, in the run that is replayed
  digest: str
  fragments: tuple[tuple[bytes, bytes], ...]  # parameters, outer state
  learners: dict[int, tuple[LearnerSnapshot, bytes]]
  within: bool  # it was taken in this run, in the middle of its tapes


@dataclasses.dataclass(frozen=True)
class History:
  """Everything the tapes of a run tell."""

  genesis: Genesis
  config: Config  # of the run's start
  first: Commit
  first_digest: str
  newest: Commit
  newest_digest: str
  lives: tuple[Life, ...]
  base: Base | None = None

  @property
  def start(self) -> Commit:
    """The commit that a replay begins with."""
    return self.base.commit if self.base else self.first

  @property
  def start_digest(self) -> str:
    """Of its record."""
    return self.base.digest if self.base else self.first_digest

  @property
  def shapes(self) -> list[Shape]:
    """The different process shapes of its lives, ascending."""
    return sorted({life.shape for life in self.lives})


class Difference(NamedTuple):
  """The first record on which the machine now decides something else."""

  actor: str
  life: int
  index: int
  recorded: Any
  decided: Any


def load(exchange: Exchange, since: int | None = None) -> History:
  """Reads a run; `BadTape` or another `ConfigError` if it cannot be replayed.

  From its start, or `since` the round of one of its snapshots.

  A run that is still under way is read up to its newest commit: first that
  commit, then the learners' tapes, then the syncer's, so that whatever one
  of them saw is on the tapes that are read after it.
  """
  first = _commit(exchange, 0)
  if first is None or first[0].genesis is None:
    raise ConfigError(
      "there is no run in this exchange (it has no commit 0). Name the workdir "
      "of a run that has started, and its --exchange if that is elsewhere."
    )
  listed = [keys.commit_round(name) for name in exchange.list(keys.COMMITS)]
  newest = _commit(exchange, max(t for t in listed if t is not None))
  assert newest is not None, "the newest commit is never deleted"
  genesis = first[0].genesis
  started = _started(genesis)
  base = None
  if since is not None:
    base = _base(exchange, keys.snapshot(since), first, within=True)
  elif genesis.origin is not None:
    base = _base(exchange, keys.ORIGIN, first, within=False)
  lives = [
    _read(exchange, life, first[0].run_id, started)
    for life in reversed(find_lives(exchange))
  ]
  lives = tuple(reversed(lives))
  return History(genesis, started, *first, *newest, lives, base)


def _base(
  exchange: Exchange, prefix: str, first: tuple[Commit, str], *, within: bool
) -> Base:
  """A snapshot of this run, or the one it was restored from."""
  try:
    manifest = run_calls(snapshots.read_manifest(prefix), exchange)
    refs = enumerate(manifest.commit.fragments)
    fragments = tuple(
      run_calls(snapshots.read_fragment(prefix, p, ref), exchange)
      for p, ref in refs
    )
    learners = {
      header.state.learner: (
        header,
        run_calls(snapshots.read_learner(prefix, header), exchange),
      )
      for header in manifest.learners
    }
  except ValueError as error:
    there = snapshots.complete_rounds(exchange.list(keys.SNAPSHOTS))
    raise BadTape(
      f"a replay cannot begin with {prefix}: {error}. The run has complete "
      f"snapshots of rounds {', '.join(map(str, there)) or '(none)'}."
    ) from error
  if within:
    commit, digest = manifest.commit, manifest.digest
  else:
    commit = restored(manifest, first[0].run_id, first[1])
    digest = wire.sha256(messages.encode(commit))
  return Base(commit, digest, fragments, learners, within)


def _commit(exchange: Exchange, t: int) -> tuple[Commit, str] | None:
  item = exchange.get(keys.commit(t))
  if item is None:
    return None
  try:
    return messages.decode(Commit, item.value), wire.sha256(item.value)
  except wire.WireError as error:
    raise BadTape(f"{keys.commit(t)} is damaged: {error}") from error


def _started(genesis: Genesis) -> Config:
  try:
    return config_lib.from_dict(json.loads(genesis.config))
  except ValueError as error:
    raise BadTape(
      f"the run's config is not one that this release reads ({error}). Replay "
      "it with the release that it was made with."
    ) from error


def _read(
  exchange: Exchange, where: LifeKeys, run_id: str, started: Config
) -> Life:
  header, records = _join(exchange, where)
  actor = "syncer"
  if where.learner is not None:
    actor = tape.learner_actor(where.learner)
  if (header.actor, header.incarnation) != (actor, where.incarnation):
    raise BadTape(
      f"tape of {where.name} is that of {header.actor}, life "
      f"{header.incarnation}: put every tape back in its place."
    )
  if header.run_id != run_id:
    raise BadTape(
      f"tape of {where.name} belongs to run {header.run_id}, but the exchange "
      f"holds run {run_id}. Replay a run from its own exchange."
    )
  config = _config(where, header, started)
  if records and not isinstance(records[0].event, Joined | Resumed | Opened):
    kind = type(records[0].event).__name__
    raise BadTape(f"tape of {where.name} begins with {kind}: it was edited.")
  return Life(
    where.learner, where.incarnation, where.name, header, config, records
  )


def _join(
  exchange: Exchange, where: LifeKeys
) -> tuple[tape.Header, tuple[tape.Record, ...]]:
  segments = []
  for number in range(max(where.segments) + 1):
    key = where.segments.get(number)
    item = None if key is None else exchange.get(key)
    if item is None:
      raise BadTape(
        f"tape of {where.name}: segment {number} of {max(where.segments) + 1} "
        "is missing. Restore it from a copy of the exchange."
      )
    try:
      segments.append(tape.decode_segment(item.value))
    except wire.WireError as error:
      raise BadTape(
        f"tape of {where.name}: segment {number} ({key}) cannot be read, it "
        f"was truncated, edited or written by another release: {error}"
      ) from error
  try:
    return tape.join(segments)
  except wire.WireError as error:
    raise BadTape(f"tape of {where.name} does not fit: {error}") from error


def _config(where: LifeKeys, header: tape.Header, started: Config) -> Config:
  try:
    config = config_lib.from_dict(json.loads(header.config))
  except ValueError as error:
    raise BadTape(
      f"tape of {where.name}: this release cannot read its config ({error}). "
      "Replay it with the release it was recorded with."
    ) from error
  if config.digest != header.config_sha256:
    raise BadTape(
      f"tape of {where.name} names config {header.config_sha256[:12]}, but "
      f"holds {config.digest[:12]}: it was edited."
    )
  try:
    config_lib.check_resumable(started, config)
  except ConfigError as error:
    raise BadTape(
      f"tape of {where.name} was recorded with another config than the run's: "
      f"{error}"
    ) from error
  return config


def check_followable(history: History, config: Config) -> None:
  """`ConfigError` if a history would have been another under this config."""
  if history.base is not None:
    raise ConfigError(
      "the history is that of a restored run, which begins with a snapshot's "
      "arrays. Train along a history that begins at round 0."
    )
  for recorded in (history.config, *(life.config for life in history.lives)):
    changes = config_lib.differences(recorded, config)
    for key, (before, given) in changes.items():
      if any(key == name or key.startswith(f"{name}.") for name in DECIDING):
        raise ConfigError(
          f"{key} = {given!r}, but the history was recorded with {before!r}, "
          f"and {key} decides what happens in it. Use that value, or record a "
          "history with this one (launch.simulate --compute=none)."
        )
    was, now = _machine_rules(recorded), _machine_rules(config)
    for name, before in was.items():
      if now[name] != before:  # by another key, or by several
        raise ConfigError(
          f"the history was recorded with {name} = {before!r}, but this config "
          f"gives {now[name]!r}, which decides what happens in it. Use the "
          "history's config, and change what concerns arrays alone."
        )


def owned(life: Life) -> tuple[int, ...]:
  """The fragments that a life of the syncer merges."""
  rules = make_rules(life.config, run_id="", layout="", answer_bytes=())
  return rules.owned(life.incarnation)


def _machine_rules(config: Config) -> dict[str, Any]:
  """What the machines are told, apart from how answers are encoded."""
  rules = make_rules(config, run_id="", layout="", answer_bytes=())
  return dataclasses.asdict(dataclasses.replace(rules, codec=""))


# --- Decisions --------------------------------------------------------------


def redecide(
  life: Life, rules: Rules, commits: dict[str, Commit]
) -> Difference | None:
  """Gives the machine a life's events again; the first other decision.

  Args:
    life: whose tape it is.
    rules: those it ran with.
    commits: gets the commits that the syncer decided to write, by digest.
  """
  machine = learner_machine if life.learner is not None else syncer_machine
  state = None
  for record in life.records:
    try:
      if state is None:
        state, commands = machine.start(record.event, rules)
      else:
        state, commands = machine.step(state, record.event, rules)
    # An edited tape may hold what no machine can meet.
    except (AssertionError, LookupError, TypeError, ValueError) as error:
      decided: Any = f"the machine cannot meet this event: {error!r}"
      return _difference(life, record, decided)
    decided = tuple(map(tape.recorded, commands))
    if decided != record.commands:
      return _difference(life, record, decided)
    for command, digest in zip(commands, decided, strict=True):
      if isinstance(digest, tape.CommitDigest):
        commits[digest.sha256] = command.commit
  return None


def _difference(life: Life, record: tape.Record, decided: Any) -> Difference:
  return Difference(
    life.header.actor, life.incarnation, record.index, record.commands, decided
  )


def chain(
  history: History, commits: dict[str, Commit], lives: Iterable[Life]
) -> list[Commit]:
  """The commits of the run after the first one, ascending.

  Each names the digest of the one before, so the newest one decides which of
  those that were ever written are the run's. `BadTape` if one is missing.
  """
  found: list[Commit] = []
  digest, t = history.newest_digest, history.newest.round
  while digest != history.start_digest:
    commit = commits.get(digest)
    if commit is None:
      ends = ", ".join(
        f"life {life.incarnation} at record {len(life.records)}"
        for life in lives
        if life.learner is None
      )
      raise BadTape(
        f"commit {t} ({digest[:12]}) is on no tape of the syncer; they end: "
        f"{ends or 'there is none'}. They were truncated: restore them from a "
        "copy of the exchange."
      )
    found.append(commit)
    digest = commit.previous
    t = max(commit.round - 1, 0)
  return found[::-1]
