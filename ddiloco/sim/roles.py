"""The two roles as lives in the virtual world."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ddiloco.config import Config, seconds_to_ns
from ddiloco.engine import startup
from ddiloco.engine.actor import Actor
from ddiloco.engine.downlink import read_params
from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.engine.ports import Call, Job
from ddiloco.engine.syncer_plane import SyncerPlane
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import invariants, keys, messages, tape
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.learner_types import Joined, Resized, StopRequested, Tick
from ddiloco.protocol.messages import Genesis, Lease, Member
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import Opened
from ddiloco.protocol.syncer_types import StopRequested as StopSyncer
from ddiloco.protocol.syncer_types import Tick as SyncerTick
from ddiloco.sim.process import RETRY_NS, Process

SELDOM_NS = 1_000_000_000
SUPERSEDED = "superseded"
LEASE_LOST = "the lease was taken over"
Header = Callable[[str, int], tape.Header]


class _Tape(TapeWriter):
  """A tape that tells its process what is recorded."""

  def __init__(self, process: Process, header: tape.Header, **options: Any):
    super().__init__(header, **options)
    self._process = process

  def record(self, event: Any, commands: tuple[Any, ...]) -> None:
    super().record(event, commands)
    self._process.decided(event, commands)


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
    params = {}
    for p, ref in enumerate(newest.commit.fragments):
      try:
        params[p] = yield from read_params(p, ref, self._compute.downlink)
      except ValueError:
        params[p] = None  # gone, or damaged
    member, last = yield from startup.claim_member(
      newest.commit.run_id, self.learner, self.name, "sim", 0
    )
    return newest, params, member, last

  def _joined(self, found: Any) -> None:
    arrays = None
    if found is not None:
      newest, params, member, last = found
      arrays = self._compute.learner_arrays(self.learner, newest, params)
    if arrays is None:  # no run yet, or retention was faster
      self.heap.after(RETRY_NS, self.guard(self.start))
      return
    self._member = member
    position = self._compute.position(self.learner)
    header = self._header(tape.learner_actor(self.learner), member.incarnation)
    restored = self._compute.restored(self.learner)
    writer = _Tape(self, dataclasses.replace(header, restored=restored))
    commit = newest.commit
    plane = LearnerPlane(
      arrays=arrays,
      rules=self.rules,
      learner=self.learner,
      incarnation=member.incarnation,
      newest=(newest.digest, commit),
      tape=writer,
      now_ns=lambda: 0,
      save_checkpoint=self._compute.saver(self.learner),
    )
    self.actor = Actor(
      start=self._machine.start,
      step=self._machine.step,
      check=invariants.check_learner,
      rules=self.rules,
      plane=plane,
      tape=writer,
    )
    self.deliver(
      Joined(
        now_ns=0,
        learner=self.learner,
        incarnation=member.incarnation,
        seen=commit.round,
        run_tokens=commit.tokens,
        versions=tuple((ref.version, ref.epoch) for ref in commit.fragments),
        next_sample=max(position, last.next_sample if last else 0),
        samples=self._samples(),
      )
    )
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
    if not self.actor.state.stopping.startswith(SUPERSEDED):
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
    incarnation = self._member.incarnation
    newer = yield Call("get", (keys.member(self.learner, incarnation + 1),))
    if newer is not None:
      return StopRequested(0, f"{SUPERSEDED} by life {incarnation + 1}")
    yield from self._write_member(left=False)
    return None

  def _write_member(self, *, left: bool) -> Job:
    state = self.actor.state
    self._member = dataclasses.replace(
      self._member,
      beat=self._member.beat + 1,
      seen=state.seen,
      steps=state.step,
      tokens=state.tokens,
      next_sample=state.next_sample,
      left=left,
    )
    key = keys.member(self.learner, self._member.incarnation)
    yield Call("put", (key, messages.encode(self._member)))

  def _beaten(self, event: Any) -> None:
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
    machine: Any = syncer_machine,
    **kwargs: Any,
  ):
    super().__init__(*args, **kwargs)
    self.rules = rules
    self._config, self._compute = config, compute
    self._genesis, self._header = genesis, header
    self._merge_ns, self._machine = merge_ns, machine
    self._wanted: tuple = ()
    self._looks: dict[str, Callable[[], Job]] = {}
    self._lease: Lease | None = None
    self._generation: bytes | None = None
    self._renewing = False

  def start(self) -> None:
    """Takes the lease, then creates the run or goes on with it."""
    self.run(self._patient(self._open()), self._opened)

  def _open(self) -> Job:
    held = yield Call("get", (keys.LEASE,))
    claim = yield from startup.claim_lease(self.name, "sim", 0, held)
    if claim is None:
      return None
    self._lease, self._generation = claim
    epoch = self._lease.epoch
    writer = _Tape(self, self._header(tape.SYNCER, epoch), durable=True)
    plane = SyncerPlane(
      arrays=self._compute.syncer_arrays(),
      rules=self.rules,
      epoch=epoch,
      tape=writer,
    )
    newest = yield from startup.find_newest(self.rules.schedule)
    if newest is None:
      fragments = yield from plane.initialise()
      newest = yield from startup.create_run(
        self.rules.run_id, self._genesis, epoch, fragments
      )
    else:
      yield from plane.load(newest.commit)
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
    return SyncerTick(0)

  def watched(self) -> dict[str, Callable[[], Job]]:
    """The next answers of everybody known."""
    wanted = self._machine.watched(self.actor.state)
    if wanted != self._wanted:  # most transitions change nothing here
      poll, self._wanted = self.actor.plane.poll_answer, wanted
      self._looks = {
        keys.answer_header(*key): lambda key=key: poll(key) for key in wanted
      }
    return self._looks

  def compute_ns(self) -> int:
    """A merge."""
    return self._merge_ns()

  def stop(self, reason: str) -> None:
    """Asks the life to end once no commit is under way."""
    if self.actor is None:
      self.end(reason)
    else:
      self.deliver(StopSyncer(0, reason))

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
        (keys.LEASE, messages.encode(lease), self._generation),
      )
    finally:
      self._renewing = False
    if generation is None:
      return StopSyncer(0, LEASE_LOST)
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
