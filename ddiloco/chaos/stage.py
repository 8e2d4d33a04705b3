"""What faults act on: the run's processes, its store, and what these show.

A fault is a generator that is resumed at every look of the supervisor, so it
reads as what happens in order. What it has done it undoes in a `finally`.
"""

import contextlib
import dataclasses
import pathlib
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ddiloco.chaos.kinds import Draw
from ddiloco.chaos.mounts import ReadOnly
from ddiloco.chaos.proxy import Proxy
from ddiloco.config import Config
from ddiloco.engine.ports import Exchange, ExchangeError, ExchangeRefused
from ddiloco.live.children import Child, Journal, is_stopped
from ddiloco.live.monitor import View
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import Commit, Lease, Member
from ddiloco.protocol.schedule import make_schedule

AIM_S = 45.0  # to find a process in the middle of something
BACK_S = 120.0  # for a process to be at work again, on a busy machine too
_SPIN_S = 0.008  # of every look, while something is aimed at
LEARNER, SYNCER, STANDBY = "learner", "syncer", "standby"
FIRST = "first shard"  # of the syncer, which takes the snapshots

Steps = Iterator[None]


class TooLate(Exception):
  """There was nothing to hit any more, or it did not show in time."""


@dataclasses.dataclass
class Job:
  """One fault on its way to its proof."""

  draw: Draw
  rng: random.Random = dataclasses.field(init=False)
  steps: Steps | None = None  # None: over, or not begun
  begun_s: float | None = None  # when there was something to hit
  who: str = "exchange"
  names: list[str] = dataclasses.field(default_factory=list)  # busy with it
  evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
  took_effect: bool = False
  cut_short: bool = False  # before its proof, by the end of the session
  done: bool = False

  @property
  def counts(self) -> bool:
    """Whether it must have taken effect."""
    return self.begun_s is not None and not self.cut_short

  def __post_init__(self):
    self.rng = random.Random(self.draw.seed)

  def begin(self, who: str = "exchange") -> None:
    """From here on it must take effect."""
    self.who = who
    if self.begun_s is None:
      self.begun_s = time.monotonic()

  def span_s(self, low: float, high: float) -> float:
    """A drawn duration, which the journal tells."""
    return round(self.rng.uniform(low, high), 3)


class Session(Protocol):
  """The supervisor, as far as faults are concerned."""

  children: dict[str, Child]
  journal: Journal

  @property
  def view(self) -> View:
    """What an onlooker knows of the run."""

  def at_work(self, actor: str) -> str | None:
    """The process that merges now, for `syncer` or `syncer 1`."""


@dataclasses.dataclass
class Stage:
  """The place of all that happens."""

  config: Config
  workdir: pathlib.Path
  store: Exchange  # by no proxy, with the run's key if it has one
  raw: Exchange  # the same as who has no key sees it
  arguments: tuple[str, ...]  # of every role
  directory: pathlib.Path | None = None  # of a store that is one
  proxy: Proxy | None = None  # of a store that is a server
  read_only: ReadOnly | None = None
  session: Session | None = None
  commits: dict[int, Commit] = dataclasses.field(default_factory=dict)  # seen
  exits: dict[int, int] = dataclasses.field(default_factory=dict)
  pids: dict[str, int] = dataclasses.field(default_factory=dict)
  restarts: dict[str, float] = dataclasses.field(default_factory=dict)
  excused: dict[int, int] = dataclasses.field(default_factory=dict)
  clocks: dict[int, int] = dataclasses.field(default_factory=dict)  # how wrong
  joined: dict[str, Child] = dataclasses.field(default_factory=dict)
  busy: set[str] = dataclasses.field(default_factory=set)
  absent: set[str] = dataclasses.field(default_factory=set)  # until they join

  # --- Whom to hit ----------------------------------------------------------

  @property
  def round(self) -> int:
    """The newest commit seen."""
    return self.session.view.round

  def victim(self, job: Job, *roles: str) -> Iterator[None]:
    """Waits for a process of a role; returns it, busy with this fault."""
    role = job.rng.choice(roles)
    while not (pool := [c for c in self._of(role) if c.name not in self.busy]):
      yield
    child = job.rng.choice(pool)
    self.take(job, child)
    return child

  def take(self, job: Job, child: Child) -> None:
    """Nobody else is to hit this one meanwhile."""
    self.busy.add(child.name)
    job.names.append(child.name)
    job.evidence.setdefault("pid", child.process.pid)
    job.evidence.setdefault("at_round", self.round)
    job.begin(job.who if job.begun_s else child.name)

  def release(self, job: Job, child: Child) -> None:
    """Others may hit it again, though this fault is not over."""
    self.busy.discard(child.name)
    job.names.remove(child.name)  # else its end would free it of another's

  def learners(self) -> list[Child]:
    """Those that step, whoever has started them."""
    found = [*self.session.children.values(), *self.joined.values()]
    return [c for c in found if c.learner is not None and c.running and c.ready]

  def next_number(self) -> int | None:
    """A learner's that nobody has had yet; None: all are taken."""
    config = self.config
    taken = {c.learner for c in self.joined.values()}
    free = range(config.learners.count, config.data.shards)
    return next((i for i in free if i not in taken), None)

  def _of(self, role: str) -> list[Child]:
    children = self.session.children
    if role == LEARNER:
      return [c for c in self.learners() if c.name in children]
    merging, shards = self.merging(), self.config.syncer.shards
    pool = [c for c in children.values() if c.running]
    if role == SYNCER:
      return [c for c in pool if c.name in merging]
    if role == FIRST:
      return [c for c in pool if merging.get(c.name) == 0]
    if role == STANDBY:
      others = [c for c in pool if c.merges and c.name not in merging]
      return others if len(merging) == shards else []
    return [c for c in pool if c.name == role]

  def merging(self) -> dict[str, int]:
    """The processes that merge now, each with its shard of the syncer."""
    found = {}
    for shard in range(self.config.syncer.shards):
      name = self.session.at_work(f"{SYNCER} {shard}" if shard else SYNCER)
      if name is not None:
        found[name] = shard
    return found

  def owns(self, child: Child, t: int | None) -> bool:
    """Whether a round is for a process, which merges, to commit."""
    schedule = make_schedule(self.config.sync)
    shards = self.config.syncer.shards
    own = self.merging().get(child.name)
    return t is not None and schedule.shard(t, shards) == own

  # --- What happens to it ---------------------------------------------------

  def wait(self, span_s: float) -> Steps:
    """Lets time pass."""
    end_s = time.monotonic() + span_s
    while time.monotonic() < end_s:
      yield

  def until(
    self, what: str, find: Callable[[], Any], within_s: float = AIM_S
  ) -> Iterator[None]:
    """The first true value; `TooLate` if there is none in time."""
    end_s = time.monotonic() + within_s
    while not (found := find()):
      if time.monotonic() > end_s:
        raise TooLate(f"no {what} within {within_s:.0f} s")
      yield
    return found

  def strike(self, child: Child, down_s: float) -> Iterator[None]:
    """SIGKILL; the exit code. It comes back after `down_s`."""
    pid = child.process.pid
    self.restarts[child.name] = time.monotonic() + down_s
    self.excused[pid] = -signal.SIGKILL
    child.send(signal.SIGKILL)
    while pid not in self.exits:
      yield
    return self.exits[pid]

  def kill(self, job: Job, child: Child) -> Steps:
    """SIGKILL, proved by the exit code; until the process is back."""
    begin_s, pid = time.monotonic(), child.process.pid
    code = yield from self.strike(child, job.span_s(0, 4))
    job.evidence["exit_code"] = code
    job.took_effect = code == -signal.SIGKILL
    yield from self.back(job, child, pid)
    job.evidence["back_after_s"] = round(time.monotonic() - begin_s, 3)

  def back(self, job: Job, child: Child, pid: int) -> Steps:
    """Waits until a new process of the role is at work."""
    with contextlib.suppress(TooLate):
      yield from self.until(
        "return", lambda: is_other(child, pid) and child.ready, BACK_S
      )

  def aim(self, child: Child, look: Callable[[], Any]) -> Iterator[None]:
    """Stops a process while `look` is true; returns what it says.

    Raises `TooLate` if that cannot be had; the process runs then.
    """
    end_s = time.monotonic() + AIM_S
    while time.monotonic() < end_s:
      spin_s = time.monotonic() + _SPIN_S
      while time.monotonic() < spin_s:
        if not child.running:
          raise TooLate(f"{child.name} is gone")
        if look():
          self.stop(child)
          if found := look():
            return found
          child.send(signal.SIGCONT)
      yield
    raise TooLate("it was never found in the middle of it")

  def stop(self, child: Child) -> None:
    """SIGSTOP; returns once the kernel says that it stands; `TooLate`."""
    if not child.running:
      raise TooLate(f"{child.name} is gone")
    child.send(signal.SIGSTOP)
    end_s = time.monotonic() + 1.0
    while not is_stopped(child.process.pid) and time.monotonic() < end_s:
      time.sleep(0.0005)

  # --- What it shows --------------------------------------------------------

  def get(self, key: str) -> bytes | None:
    """An object's bytes; None too if the store does not say."""
    try:
      item = self.store.get(key)
    except ExchangeError as error:
      if isinstance(error, ExchangeRefused):
        raise
      return None
    return None if item is None else item.value

  def names(self, prefix: str) -> list[str]:
    """The keys that start so; none if the store does not say."""
    try:
      return self.store.list(prefix)
    except ExchangeError:
      return []

  def member(self, learner: int) -> Member | None:
    """The newest life's record, read anew."""
    known = self.session.view.members.get(learner)
    if known is None:
      return None
    return decode(Member, self.get(keys.member(learner, known.incarnation)))

  def beat(self, child: Child) -> tuple[int, int] | None:
    """(beat, life) of a process, as its records in the exchange tell."""
    if child.learner is None:
      for shard in range(self.config.syncer.shards):
        lease = decode(Lease, self.get(keys.lease(shard)))
        if lease is not None and lease.pid == child.process.pid:
          return lease.beat, lease.epoch
      return None
    member = self.member(child.learner)
    own = member is not None and member.pid == child.process.pid
    return (member.beat, member.incarnation) if own else None

  def log_end(self, child: Child) -> int:
    """How long its log is."""
    return child.log.stat().st_size if child.log.exists() else 0

  def log_since(self, child: Child, end: int) -> str:
    """What it has said since then."""
    with contextlib.suppress(OSError), open(child.log, "rb") as file:
      file.seek(end)
      return file.read().decode(errors="replace")
    return ""


def is_other(child: Child, pid: int) -> bool:
  """Whether the role has a process, and another one than that."""
  return child.running and child.process.pid != pid


def wrong_hours_s(rng: random.Random) -> int:
  """By how much a clock is wrong: whole hours, either way."""
  return rng.choice((-1, 1)) * rng.randint(1, 9) * 3600


def file_limit(pid: int) -> int:
  """The largest file that a process may write, as the kernel has it."""
  return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]


def decode(kind: Any, data: bytes | None) -> Any:
  """A record; None if it is none."""
  try:
    return None if data is None else messages.decode(kind, data)
  except wire.WireError:
    return None
