"""What each life has to compute again, and what it needs from the others.

A life's script is its array commands in tape order. An entry waits until
what it needs is there; a tape is in the order of cause and effect, so the
scripts never wait for each other in a circle.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  ApplyFragments,
  Checkpoint,
  Encode,
  Fetch,
  Give,
  Joined,
  Resumed,
  Settle,
  Snapshot,
  Step,
)
from ddiloco.protocol.messages import Commit, Counted
from ddiloco.protocol.snapshots import LearnerSnapshot
from ddiloco.protocol.syncer_types import Merge, Opened
from ddiloco.sim.history import BadTape, Base, History, Life, owned


class Entry(NamedTuple):
  """One piece of array work. Keys name bytes that lives hand each other."""

  work: Any  # a command, or the event that starts a life
  needs: tuple[str, ...] = ()
  gives: tuple[str, ...] = ()


Script = list[Entry]


def params_key(version: int, p: int, epoch: int) -> str:
  """One version of a fragment's parameters."""
  return f"params.{version}.{p}.{epoch}"


def outer_key(version: int, p: int, epoch: int) -> str:
  """The outer state that belongs to them."""
  return f"outer.{version}.{p}.{epoch}"


def answer_key(t: int, item: Counted) -> str:
  """The encoded outer gradient of a counted answer."""
  return f"answer.{t}.{item.learner}.{item.incarnation}.{item.attempt}"


def commit_key(commit: Commit) -> str:
  """Nothing but that a commit was computed, by whichever shard."""
  return f"commit.{commit.round}"


def snapshot_key(learner: int) -> str:
  """The arrays of a learner in the snapshot that a replay begins with."""
  return f"snapshot.{learner}"


def write(history: History, commits: Sequence[Commit]) -> list[Script]:
  """The script of every life of a history, in their order.

  Raises `BadTape` if a commit depends on what is on no tape.
  """
  newest = commits[-1].round if commits else history.start.round
  scripts = []
  for life in history.lives:
    if life.learner is None:
      scripts.append(list(_syncer(history, life, commits, newest)))
    else:
      scripts.append(list(_learner(history, life, newest)))
  given = {key for script in scripts for entry in script for key in entry.gives}
  for p, ref in enumerate(history.start.fragments):
    where = ref.version, p, ref.epoch
    given |= {params_key(*where), outer_key(*where)}
  if history.base is not None:
    for learner, (header, _) in history.base.learners.items():
      given.add(snapshot_key(learner))
      given |= set(open_answers(header))
  _check_merges(history, commits, scripts, given)
  for life, script in zip(history.lives, scripts, strict=True):
    for entry in script:
      for key in entry.needs:
        if key not in given:
          raise BadTape(
            f"tape of {life.name} needs {key}, which no other tape gives: "
            + _remedy(history, "a tape was truncated or removed")
          )
  return scripts


def open_answers(header: LearnerSnapshot) -> list[str]:
  """The keys of a learner's open answers, in the order of its attempts."""
  life = f"{header.state.learner}.{header.state.incarnation}"
  return [
    f"answer.{item.round}.{life}.{item.attempt}" for item in header.attempts
  ]


def _remedy(history: History, fault: str) -> str:
  base = history.base
  if base is None or not base.within:
    return f"{fault}. Restore it from a copy of the exchange."
  return (
    f"it is from before round {base.commit.round}, and not in that snapshot. "
    "Replay from an earlier snapshot, or from the start."
  )


def wanted(scripts: Sequence[Script]) -> collections.Counter[str]:
  """How often each key is needed: what is given beyond that is not kept."""
  return collections.Counter(
    key for script in scripts for entry in script for key in entry.needs
  )


def _learner(history: History, life: Life, newest: int) -> Iterator[Entry]:
  """Up to what depends on later commits, if the run is still under way.

  Within a run, from the snapshot on: what came before is none of it.
  """
  epochs: dict[int, int] = {}
  base = history.base if history.base and history.base.within else None
  begun = base is None
  for record in life.records:
    if isinstance(record.event, Joined):
      if record.event.seen > newest:
        return
      begun = begun or record.event.seen >= base.commit.round
      if begun:
        yield _join(life, record.event)
    elif isinstance(record.event, Resumed) and begun:
      yield Entry(record.event, (snapshot_key(life.learner),))
    for command in record.commands:
      if isinstance(command, Fetch):
        epochs[command.round] = command.epoch
      if not begun:
        if isinstance(command, Snapshot) and command.round == base.commit.round:
          begun = _has(base, life)
          if begun:
            yield Entry(command, (snapshot_key(life.learner),))
        continue
      match command:
        case ApplyFragments():
          if command.round > newest:
            return
          epoch = epochs[command.round]
          needs = [
            params_key(command.round, p, epoch) for p in command.fragments
          ]
          yield Entry(command, tuple(needs))
        case Encode():
          key = f"answer.{command.round}.{life.learner}.{life.incarnation}"
          yield Entry(command, gives=(f"{key}.{command.attempt}",))
        case Checkpoint():
          key = f"checkpoint.{life.learner}.{life.incarnation}.{command.step}"
          yield Entry(command, gives=(key,))
        case Give():
          yield Entry(command, gives=(_gift_key(life, command),))
        case Step() | Settle():
          yield Entry(command)


def _has(base: Base, life: Life) -> bool:
  """Whether a snapshot has a life's learner as that life was."""
  if life.learner not in base.learners:
    return False
  header, _ = base.learners[life.learner]
  return header.state.incarnation == life.incarnation


def _gift_key(life: Life, command: Give) -> str:
  giver = f"{life.learner}.{life.incarnation}.{command.step}"
  return f"gift.{giver}.{command.recipient}"


def _join(life: Life, event: Joined) -> Entry:
  needs = [
    params_key(version, p, epoch)
    for p, (version, epoch) in enumerate(event.versions)
  ]
  if life.header.restored is not None:
    earlier, step = life.header.restored
    needs.append(f"checkpoint.{life.learner}.{earlier}.{step}")
  if life.header.donor is not None:
    donor, incarnation, step = life.header.donor
    needs.append(f"gift.{donor}.{incarnation}.{step}.{life.learner}")
  return Entry(event, tuple(needs))


def _syncer(
  history: History, life: Life, commits: Sequence[Commit], newest: int
) -> Iterator[Entry]:
  own = {c.round: c for c in commits if c.epoch == life.incarnation}
  before = {c.round: earlier for earlier, c in itertools.pairwise(commits)}
  for record in life.records:
    if isinstance(record.event, Opened):
      opened = record.event
      if opened.commit.round > newest:
        return
      if opened.commit.round < history.start.round:
        if not own:
          return
        opened = replace(opened, commit=history.start)
      refs = {p: opened.commit.fragments[p] for p in owned(life)}
      needs = [
        key(ref.version, p, ref.epoch)
        for p, ref in refs.items()
        for key in (params_key, outer_key)
      ]
      yield Entry(opened, tuple(needs))
    for command in record.commands:
      if isinstance(command, Merge) and command.round in own:
        commit = own[command.round]
        gives = [
          key(command.round, p, commit.epoch)
          for p, ref in enumerate(commit.fragments)
          if ref.version == command.round
          for key in (params_key, outer_key)
        ]
        needs = [answer_key(command.round, item) for item in commit.counted]
        if command.round in before:  # whose order is theirs for everybody
          needs.append(commit_key(before[command.round]))
        gives.append(commit_key(commit))
        yield Entry(commit, tuple(needs), tuple(gives))


def _check_merges(
  history: History,
  commits: Sequence[Commit],
  scripts: Sequence[Script],
  given: set[str],
) -> None:
  """Every commit's merge, and every answer it counts, is on a tape."""
  ends = {
    (life.learner, life.incarnation): len(life.records)
    for life in history.lives
  }
  merged = {
    entry.work.round
    for script in scripts
    for entry in script
    if isinstance(entry.work, Commit)
  }
  for commit in commits:
    t = commit.round
    if t not in merged:
      raise BadTape(
        f"the merge of commit {t} is not on the tape of syncer, life "
        f"{commit.epoch}: it was truncated. Restore it from a copy."
      )
    for item in commit.counted:
      if answer_key(t, item) not in given:
        end = ends.get((item.learner, item.incarnation))
        where = "is missing" if end is None else f"ends at record {end}"
        raise BadTape(
          f"commit {t} counts attempt {item.attempt} of learner "
          f"{item.learner}, life {item.incarnation}, but that life's tape "
          f"{where}, before the answer: " + _remedy(history, "it was truncated")
        )
