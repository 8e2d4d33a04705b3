"""Follows a run from outside: reads its commits and members, nothing else."""

import dataclasses
import socket
import time
from collections.abc import Collection

from ddiloco.engine.ports import Exchange, ExchangeError, ExchangeRefused
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import Commit, Lease, Member
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.schedule import Schedule

_MEMBERS_EVERY_S = 0.5
_LIST_AFTER_S = 2.0


@dataclasses.dataclass
class View:
  """What an onlooker knows."""

  commit: Commit | None = None
  commit_s: float = 0.0  # when it was seen, on the onlooker's clock
  members: dict[int, Member] = dataclasses.field(default_factory=dict)
  # Of this machine's processes that have leases, by shard of the syncer.
  syncer_pids: dict[int, int] = dataclasses.field(default_factory=dict)
  beat_s: dict[int, float] = dataclasses.field(default_factory=dict)

  @property
  def round(self) -> int:
    """The newest commit seen."""
    return 0 if self.commit is None else self.commit.round

  def is_live(self, learner: int, within_s: float) -> bool:
    """Whether a member has shown itself so recently, and has not left."""
    since_s = time.monotonic() - self.beat_s[learner]
    return since_s < within_s and not self.members[learner].left

  def elsewhere(self, own: Collection[int | None]) -> list[int]:
    """The members that are none of one's own."""
    return sorted(self.members.keys() - own)


class Monitor:
  """Keeps a `View` fresh; never raises for a store that is away."""

  def __init__(self, exchange: Exchange, schedule: Schedule, shards: int = 1):
    self._exchange, self._schedule = exchange, schedule
    self._shards = shards
    self._members_s = self._listed_s = 0.0
    self.view = View()

  def poll(self) -> bool:
    """Looks once; True if a new commit was there."""
    try:
      moved = self._poll_commits()
      if time.monotonic() - self._members_s > _MEMBERS_EVERY_S:
        self._members_s = time.monotonic()
        self._poll_members()
      return moved
    except (ExchangeError, wire.WireError):
      return False

  def lost(self) -> bool:
    """Whether the run that was seen is not in the exchange any more."""
    try:
      first = self._exchange.get(keys.commit(0))
    except ExchangeRefused:
      first = None
    except ExchangeError:
      return False
    return self.view.commit is not None and first is None

  def _poll_commits(self) -> bool:
    view, moved = self.view, False
    if view.commit is None:
      self._see(keys.commit(0))
    while view.commit is not None:
      if not self._see(keys.commit(self._schedule.next_round(view.round))):
        break
      moved = True
    since_s = max(view.commit_s, self._listed_s)
    if not moved and time.monotonic() - since_s > _LIST_AFTER_S:
      rounds = [
        keys.commit_round(name) or 0
        for name in self._exchange.list(keys.COMMITS)
      ]
      self._listed_s = time.monotonic()
      if max(rounds, default=0) > view.round:
        moved = self._see(keys.commit(max(rounds)))
    return moved

  def _see(self, key: str) -> bool:
    item = self._exchange.get(key)
    if item is None or item.value == SWEPT:
      return False
    self.view.commit = messages.decode(Commit, item.value)
    self.view.commit_s = time.monotonic()
    return True

  def _poll_lease(self, shard: int) -> None:
    item = self._exchange.get(keys.lease(shard))
    try:
      lease = item and messages.decode(Lease, item.value)
    except wire.WireError:
      return  # garbage, which its holder writes over
    # Not `workplace.host`, which comes with JAX: launchers have none.
    here = lease is not None and lease.host == socket.gethostname()
    self.view.syncer_pids[shard] = lease.pid if here else 0

  def _poll_members(self) -> None:
    for shard in range(self._shards):
      self._poll_lease(shard)
    newest = keys.newest_lives(self._exchange.list(keys.MEMBERS))
    for learner, incarnation in newest.items():
      item = self._exchange.get(keys.member(learner, incarnation))
      if item is None:
        continue
      try:
        member = messages.decode(Member, item.value)
      except wire.WireError:
        continue  # garbage is no sign of life, and hides nobody else
      if member != self.view.members.get(learner):
        self.view.members[learner] = member
        self.view.beat_s[learner] = time.monotonic()
