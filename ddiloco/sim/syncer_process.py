"""A life of a syncer in the virtual world."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ddiloco.config import Config, seconds_to_ns
from ddiloco.engine import startup
from ddiloco.engine.actor import Actor
from ddiloco.engine.ports import Call, Job
from ddiloco.engine.syncer_plane import SyncerPlane
from ddiloco.protocol import invariants, keys, messages, tape
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.messages import Genesis, Lease
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import Opened, StopRequested, Tick
from ddiloco.sim.process import (
  RETRY_NS,
  SELDOM_NS,
  Header,
  Process,
  TellingTape,
)


class SyncerProcess(Process):
  """One life of the syncer."""

  def __init__(
    self,
    *args: Any,
    config: Config,
    rules: Rules,
    compute: Any,
    genesis: Genesis,
    header: Header,
    merge_ns: Callable[[], int],
    shard: int = 0,
    machine: Any = syncer_machine,
    **kwargs: Any,
  ):
    super().__init__(*args, **kwargs)
    self.rules = rules
    self._config, self._compute = config, compute
    self._genesis, self._header = genesis, header
    self._merge_ns, self._machine = merge_ns, machine
    self._shard = shard
    self._wanted: tuple = ()
    self._awaited: int | None = None
    self._looks: dict[str, Callable[[], Job]] = {}
    self._lease: Lease | None = None
    self._generation: bytes | None = None
    self._renewing = False

  def start(self) -> None:
    """Takes the lease, then creates the run or goes on with it."""
    self.run(self._patient(self._open()), self._opened)

  def _open(self) -> Job:
    if self._shard and (yield from startup.find_first()) is None:
      return None  # the first shard makes the run
    which = self._shard, self.rules.shards
    held = yield Call("get", (keys.lease(self._shard),))
    claim = yield from startup.claim_lease(self.name, "sim", 0, held, *which)
    if claim is None:
      return None
    self._lease, self._generation = claim
    epoch = self._lease.epoch
    writer = TellingTape(self, self._header(tape.SYNCER, epoch), durable=True)
    plane = SyncerPlane(
      arrays=self._compute.syncer_arrays(),
      rules=self.rules,
      epoch=epoch,
      tape=writer,
      snapshot=self._config.snapshot,
    )
    newest = yield from startup.find_newest(self.rules.schedule)
    if newest is None and self._shard:
      return None  # a read lags behind
    if newest is None:
      fragments = yield from plane.initialise()
      newest = yield from startup.create_run(
        self.rules.run_id, self._genesis, epoch, fragments
      )
    else:
      yield from plane.load(newest.commit, newest.digest)
    yield from plane.sweep_all(newest.commit)
    return newest, epoch, plane, writer

  def _opened(self, found: Any) -> None:
    if found is None:
      self.heap.after(RETRY_NS, self.guard(self.start))
      return
    newest, epoch, plane, writer = found
    self.actor = Actor(
      start=self._machine.start,
      step=self._machine.step,
      check=invariants.check_syncer,
      rules=self.rules,
      plane=plane,
      tape=writer,
    )
    self.deliver(Opened(0, epoch, newest.commit, newest.digest))
    self._seldom()
    self._renew_later()
    self.flush_every(seconds_to_ns(self._config.live.tape_flush_s))

  # --- Process --------------------------------------------------------------

  def wake_ns(self, now_ns: int) -> int | None:
    """See `Process`."""
    return self._machine.wake_ns(self.actor.state, now_ns, self.rules)

  def tick(self) -> Any:
    """See `Process`."""
    return Tick(0)

  def watched(self) -> dict[str, Callable[[], Job]]:
    """The next answers of everybody known, and another shard's commit."""
    state, plane = self.actor.state, self.actor.plane
    wanted = self._machine.watched(state)
    awaited = self._machine.awaited(state, self.rules)
    # Most transitions change nothing here.
    if (wanted, awaited) != (self._wanted, self._awaited):
      self._wanted, self._awaited = wanted, awaited
      self._looks = {
        keys.answer_header(*key): lambda key=key: plane.poll_answer(key)
        for key in wanted
      }
      if awaited is not None:
        look = functools.partial(plane.poll_commit, awaited)
        self._looks[keys.commit(awaited)] = look
    return self._looks

  def compute_ns(self) -> int:
    """A merge."""
    return self._merge_ns()

  def stop(self, reason: str) -> None:
    """Asks the life to end once no commit is under way."""
    if self.actor is None:
      self.end(reason)
    else:
      self.deliver(StopRequested(0, reason))

  # --- What runs beside -----------------------------------------------------

  def _renew_later(self) -> None:
    every_ns = seconds_to_ns(self._config.live.heartbeat_s)
    self.heap.after(
      every_ns,
      self.guard(lambda: self.run(self._patient(self._renew()), self.deliver)),
    )

  def _renew(self) -> Job:
    """Keeps the lease, or stops: somebody else is the syncer now."""
    self._renew_later()
    if self._renewing:  # still, where the store is slower than the heartbeat
      return None
    lease = dataclasses.replace(self._lease, beat=self._lease.beat + 1)
    self._renewing = True
    try:
      generation = yield Call(
        "compare_and_swap",
        (keys.lease(self._shard), messages.encode(lease), self._generation),
      )
    finally:
      self._renewing = False
    if generation is None:
      return StopRequested(0, syncer_machine.LEASE_LOST)
    self._lease, self._generation = lease, generation
    return None

  def _seldom(self) -> None:
    """What no watched key tells: members, odd answers, other syncers."""
    if self.actor.state.done:
      return
    self.run(self._patient(self._look_around()), self._seen)

  def _look_around(self) -> Job:
    plane, events = self.actor.plane, []
    for view in self.actor.state.rounds:
      known = {(view.round, *life) for life in view.tried}
      for key in (yield from plane.list_answers(view.round)):
        if key not in known:
          events.append((yield from plane.poll_answer(key)))
    for life in (yield from plane.list_members()):
      events.append((yield from plane.poll_member(*life)))
    rounds = self.actor.state.rounds
    if rounds:
      events.append((yield from plane.poll_overtaken(rounds[0].round)))
    return events

  def _seen(self, events: list[Any] | None) -> None:
    for event in events or ():
      self.deliver(event)
    self.heap.after(SELDOM_NS, self.guard(self._seldom))
