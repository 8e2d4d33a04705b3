"""A life of a learner in the virtual world."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ddiloco.config import Config, seconds_to_ns
from ddiloco.engine import recovery, resumption, startup
from ddiloco.engine.actor import Actor
from ddiloco.engine.downlink import read_params
from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.engine.ports import Call, Job
from ddiloco.protocol import invariants, keys, messages, tape
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol.learner_types import (
  Joined,
  Resized,
  Resumed,
  StopRequested,
  Tick,
)
from ddiloco.protocol.messages import Member
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules
from ddiloco.sim.process import (
  RETRY_NS,
  SELDOM_NS,
  Header,
  Process,
  TellingTape,
)


class LearnerProcess(Process):
  """One life of a learner."""

  def __init__(
    self,
    *args: Any,
    learner: int,
    config: Config,
    rules: Rules,
    compute: Any,
    header: Header,
    step_ns: Callable[[], int],
    samples: Callable[[], int] = lambda: 0,
    machine: Any = learner_machine,
    **kwargs: Any,
  ):
    super().__init__(*args, **kwargs)
    self.learner, self.rules = learner, rules
    self._config, self._compute, self._header = config, compute, header
    self._step_ns, self._machine = step_ns, machine
    self._samples = samples
    self._member: Member | None = None
    self._looking = False  # for a commit; one look at a time

  def start(self) -> None:
    """Joins the run, as soon as there is one to join."""
    self.run(self._patient(self._join()), self._joined)

  def _join(self) -> Job:
    newest = yield from startup.find_newest(self.rules.schedule)
    if newest is None:
      return None
    layout = self._compute.bytes(self.learner)
    who = self.learner, self.name, "sim", 0
    resumed = yield from resumption.resume(newest, *who, layout)
    if not isinstance(resumed, str):
      return resumed
    position = self._compute.position(self.learner)
    source = yield from recovery.find_source(
      newest,
      position.get("seen"),
      learner=self.learner,
      nonce=self.name.replace("/", "-"),
      travel=self._compute.travel(self.learner),
      schedule=self.rules.schedule,
      options=self._config.recovery,
      heartbeat_ns=seconds_to_ns(self._config.live.heartbeat_s),
    )
    params = {}
    for p, ref in enumerate(source.newest.commit.fragments):
      try:
        params[p] = yield from read_params(p, ref, self._compute.downlink)
      except ValueError:
        params[p] = None  # gone, or damaged
    member, last = yield from startup.claim_member(newest.commit.run_id, *who)
    return source, params, member, last

  def _joined(self, found: Any) -> None:
    arrays = None
    if isinstance(found, resumption.Resumption):
      arrays = self._compute.resumed_arrays(self.learner, found)
      self._enter(arrays, found.newest, found.member, found.event)
      return
    if found is not None:
      source, params, member, last = found
      arrays = self._compute.learner_arrays(self.learner, source, params)
    if arrays is None:  # no run yet, or retention was faster
      self.heap.after(RETRY_NS, self.guard(self.start))
      return
    position = self._compute.position(self.learner)
    commit, restored = source.newest.commit, None
    if source.checkpoint:
      restored = position["incarnation"], position["step"]
    more = {"samples": self._samples(), "borrowed": source.borrowed}
    joined = startup.joined(member, last, commit, position, **more)
    origin = {"restored": restored, "donor": source.donor}
    self._enter(arrays, source.newest, member, joined, **origin)

  def _enter(
    self,
    arrays: Any,
    newest: startup.Newest,
    member: Member,
    first: Joined | Resumed,
    **origin: Any,
  ) -> None:
    """Begins the life; `origin` is for the tape's header."""
    self._member = member
    header = self._header(tape.learner_actor(self.learner), member.incarnation)
    writer = TellingTape(self, dataclasses.replace(header, **origin))
    plane = LearnerPlane(
      arrays=arrays,
      rules=self.rules,
      learner=self.learner,
      incarnation=member.incarnation,
      newest=(newest.digest, newest.commit),
      tape=writer,
      now_ns=lambda: 0,
      save_checkpoint=self._compute.saver(self.learner),
      anchored=isinstance(first, Joined) and not first.borrowed,
    )
    self.actor = Actor(
      start=self._machine.start,
      step=self._machine.step,
      check=invariants.check_learner,
      rules=self.rules,
      plane=plane,
      tape=writer,
    )
    self.deliver(first)
    self._beat_later()
    self._look_past_later()
    self.flush_every(seconds_to_ns(self._config.live.tape_flush_s))

  # --- Process --------------------------------------------------------------

  def wake_ns(self, now_ns: int) -> int | None:
    """See `Process`."""
    return self._machine.wake_ns(self.actor.state, now_ns)

  def tick(self) -> Any:
    """See `Process`."""
    return Tick(0)

  def watched(self) -> dict[str, Callable[[], Job]]:
    """The commit of the next round."""
    t = self._machine.watched(self.actor.state, self.rules)
    return {} if t is None else {keys.commit(t): lambda: self._poll(t)}

  def compute_ns(self) -> int:
    """An inner step."""
    return self._step_ns()

  def resize(self, samples: int) -> None:
    """Its island can take so many samples per inner step now; 0: all."""
    if self.actor is not None:
      self.deliver(Resized(0, samples))

  def stop(self, reason: str) -> None:
    """Asks the life to end at the next boundary."""
    if self.actor is None:
      self.end(reason)
    else:
      self.deliver(StopRequested(0, reason))

  # --- What runs beside -----------------------------------------------------

  def farewell(self) -> Job:
    """Says good-bye too, so that nobody waits for this learner."""
    yield from super().farewell()
    if not self.actor.state.stopping.startswith(learner_machine.SUPERSEDED):
      yield from self._write_member(left=True)

  def _poll(self, t: int) -> Job:
    if self._looking or self._awaits() != t:
      return None
    self._looking = True
    try:
      return (yield from self.actor.plane.poll(t))
    finally:
      self._looking = False

  def _awaits(self) -> int | None:
    return self._machine.watched(self.actor.state, self.rules)

  def _beat_later(self) -> None:
    every_ns = seconds_to_ns(self._config.live.heartbeat_s)
    self.heap.after(every_ns, self.guard(self._beat))

  def _beat(self) -> None:
    self.run(self._patient(self._heartbeat()), self._beaten)

  def _heartbeat(self) -> Job:
    own = self._member.incarnation
    newer = yield from startup.newer_life(self.learner, own)
    if newer is not None:
      by = f"{learner_machine.SUPERSEDED} by life {newer.incarnation}"
      return (StopRequested(0, by),)
    yield from self._write_member(left=False)
    return (yield from self.actor.plane.poll_transfers())

  def _write_member(self, *, left: bool) -> Job:
    state = self.actor.state
    self._member = startup.next_beat(self._member, state, left=left)
    key = keys.member(self.learner, self._member.incarnation)
    yield Call("put", (key, messages.encode(self._member)))

  def _beaten(self, events: tuple[Any, ...] | None) -> None:
    for event in events or ():
      self.deliver(event)
    self._beat_later()

  def _look_past_later(self) -> None:
    self.heap.after(SELDOM_NS, self.guard(self._look_past))

  def _look_past(self) -> None:
    t = self._awaits()
    if t is not None and not self._looking:
      self.run(self._patient(self._past(t)), self.deliver)
    self._look_past_later()

  def _past(self, t: int) -> Job:
    """Goes on from the newest commit if round t's is gone for good."""
    self._looking = True
    try:
      item = yield Call("get", (keys.commit(t),))
      if item is not None and item.value != SWEPT:
        return None
      return (yield from self.actor.plane.catch_up(t))
    finally:
      self._looking = False
