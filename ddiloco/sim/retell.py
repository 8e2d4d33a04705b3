"""Tells a history again as the run that trained along it.

All decisions stay. What only arrays can tell, the digests of commits and the
losses of steps, takes the place of what the history had: the machines are
given the same events with these in them, and what they decide is the tape.
The trained run can therefore be reported on and replayed like any other.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ddiloco.engine.version import code_version
from ddiloco.protocol import keys, messages, tape, wire
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  CaughtUp,
  CommitSeen,
  Joined,
  StepDone,
)
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  FragmentState,
  PartRef,
)
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import (
  AnswerSeen,
  Committed,
  Followed,
  Merged,
  Opened,
  WriteCommit,
)
from ddiloco.sim.history import History, Life
from ddiloco.sim.replay import rules_of

_SEGMENT_RECORDS = 2000


@dataclasses.dataclass
class Found:
  """What training along a history has given so far."""

  commits: list[Commit] = dataclasses.field(default_factory=list)
  states: dict[tuple[int, int], FragmentState] = dataclasses.field(
    default_factory=dict
  )  # by version and fragment
  answers: dict[str, str] = dataclasses.field(default_factory=dict)  # SHA-256
  losses: dict[str, dict[int, float]] = dataclasses.field(
    default_factory=dict
  )  # by life and step


class Retelling:
  """A history as far as it was trained along."""

  def __init__(
    self, old: History, new: History, found: Found, facts: dict[str, Any]
  ):
    """Chains the commits anew.

    Args:
      old: the history.
      new: the same with the run's id, config and genesis.
      found: the rest. Its commits are the history's, ascending from commit 0.
      facts: of this process, for the headers of tapes.
    """
    self._old, self._new, self._found = old, new, found
    self._facts = facts
    self.last_ns = 0  # the last thing told by any tape so far, Unix ns
    self._commits: dict[int, tuple[Commit, str]] = {}
    previous = ""
    for commit in found.commits:
      states = [
        found.states[ref.version, p] for p, ref in enumerate(commit.fragments)
      ]
      told = replace(
        commit,
        run_id=new.first.run_id,
        previous=previous,
        fragments=tuple(states),
        genesis=commit.genesis and new.genesis,
      )
      previous = wire.sha256(messages.encode(told))
      self._commits[commit.round] = told, previous

  @property
  def newest(self) -> Commit:
    """The last commit."""
    return self._commits[max(self._commits)][0]

  def commits(self) -> Iterator[tuple[str, bytes]]:
    """Their objects as retention leaves them, the newest first."""
    kept = self.newest.round - 2 * self._new.config.sync.interval_steps
    for t, (commit, _) in sorted(self._commits.items(), reverse=True):
      whole = t == 0 or t > kept
      yield keys.commit(t), messages.encode(commit) if whole else SWEPT

  def tapes(self) -> Iterator[tuple[str, bytes]]:
    """The objects of all tapes."""
    for old, new in zip(self._old.lives, self._new.lives, strict=True):
      records = list(self._records(old, new))
      header = self._header(new)
      for number, i in enumerate(range(0, len(records), _SEGMENT_RECORDS)):
        where = (header.actor, header.incarnation, number)
        some = records[i : i + _SEGMENT_RECORDS]
        data = tape.encode_segment(*where, None if i else header, some)
        yield keys.tape(*where), data

  def _header(self, life: Life) -> tape.Header:
    config = self._new.config
    return dataclasses.replace(
      life.header,
      run_id=self._new.first.run_id,
      config=wire.canonical_json(config.to_dict()).decode(),
      config_sha256=config.digest,
      code_version=code_version(),
      **self._facts,
    )

  def _records(self, old: Life, new: Life) -> Iterator[tape.Record]:
    machine = learner_machine if new.learner is not None else syncer_machine
    before, rules = rules_of(self._old, old), rules_of(self._new, new)
    offset_ns = new.header.started_unix_ns - new.header.started_ns
    state, written = None, {}
    for record in new.records:
      event = self._event(new, record.event, written, before, rules)
      if event is None:
        return
      if state is None:
        state, commands = machine.start(event, rules)
      else:
        state, commands = machine.step(state, event, rules)
      for command in commands:
        if isinstance(command, WriteCommit):
          digest = wire.sha256(messages.encode(command.commit))
          written[command.commit.round] = digest
      self.last_ns = max(self.last_ns, event.now_ns + offset_ns)
      yield tape.Record(record.index, event, tuple(commands))

  def _event(
    self,
    life: Life,
    event: Any,
    written: dict[int, str],
    before: Rules,
    rules: Rules,
  ) -> Any:
    """An event with what was found; None where training has not got to."""
    newest = max(self._commits)
    match event:
      case Joined() if event.seen > newest:
        return None
      case CommitSeen() | CaughtUp() | Committed() if event.round > newest:
        return None
      case Opened() | Followed() if event.commit.round > newest:
        return None
      case StepDone():
        loss = self._found.losses.get(life.name, {}).get(event.step)
        return None if loss is None else replace(event, loss=loss)
      case Opened() | Followed():
        commit, digest = self._commits[event.commit.round]
        return replace(event, commit=commit, digest=digest)
      case AnswerSeen():
        return replace(event, header=self._answer(event, before, rules))
      case Merged() if self._merged_for_good(life, event.round):
        due = rules.schedule.fragments(event.round)
        states = [self._found.states[event.round, p] for p in due]
        return replace(event, fragments=tuple(states))
      case Committed():  # what it wrote, whether it was the first or not
        return replace(event, digest=written[event.round])
    return event

  def _merged_for_good(self, life: Life, t: int) -> bool:
    """Whether what a syncer merged for a round is in its commit."""
    commit, _ = self._commits.get(t, (None, ""))
    return commit is not None and commit.epoch == life.incarnation

  def _answer(
    self, event: AnswerSeen, before: Rules, rules: Rules
  ) -> AnswerHeader:
    """An answer as this run's; what was wrong with it still is."""
    header = event.header
    changes: dict[str, Any] = {"metrics": ()}
    for name in ("run_id", "layout", "codec"):
      if getattr(header, name) == getattr(before, name):
        changes[name] = getattr(rules, name)
    due = before.schedule.fragments(header.round)
    stated = sum(part.bytes for part in header.parts)
    if stated == sum(before.answer_bytes[p] for p in due):
      size = sum(rules.answer_bytes[p] for p in due)
      # Only what is counted is computed to the last byte.
      key = f"answer.{'.'.join(map(str, event.key))}"
      changes["parts"] = (PartRef(size, self._found.answers.get(key, "")),)
    return replace(header, **changes)
