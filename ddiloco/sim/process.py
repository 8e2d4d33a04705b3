"""One life of a role in the virtual world: its clock, its jobs, its death.

What threads do in a live process, entries of the heap do here: lanes keep
their order, pollers look at what is watched, timers go off on the life's own
clock. A crash drops everything at once; what was on its way to the store
still arrives there.
"""

import collections
import random
from collections.abc import Callable
from typing import Any

from ddiloco.engine.actor import Actor, Lane, Work
from ddiloco.engine.ports import Call, DamagedRun, ExchangeError, Job, Pause
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import tape
from ddiloco.protocol.fields import replace
from ddiloco.sim.clock import Clock, Heap, spread
from ddiloco.sim.exchange import SimExchange

RETRY_NS = 200_000_000  # after an operation of a poller failed
SELDOM_NS = 1_000_000_000  # between looks at what no point read finds
Header = Callable[[str, int], tape.Header]


class Process:
  """Drives one `Actor`, or a start-up job, in virtual time.

  Subclasses say what is watched and how long things take.
  """

  def __init__(
    self,
    name: str,
    heap: Heap,
    clock: Clock,
    exchange: SimExchange,
    rng: random.Random,
    *,
    ended: Callable[["Process", str], None],
  ):
    """Takes the world it lives in; `ended` is told how it ends."""
    self.name, self.heap, self.clock = name, heap, clock
    self.who = name.partition("/")[0]  # whose life it is
    self.exchange, self.rng = exchange, rng
    self.actor: Actor | None = None
    self.alive = True
    self.paused = 0  # how many have paused it
    self.held = 0  # actions that a pause has put off
    self.failure: Exception | None = None  # what it has died of
    self.log: list[tuple[Any, tuple[Any, ...]]] = []  # if the world keeps it
    self._ended = ended
    self._deferred: list[Callable[[], None]] = []
    self._lanes: dict[Lane, collections.deque[tuple[Job, Any]]] = {
      lane: collections.deque() for lane in Lane
    }
    self._busy: set[Lane] = set()
    self._watching: dict[str, Callable[[], None]] = {}
    self._timer_ns: int | None = None
    self._flushing = False

  # --- What subclasses say --------------------------------------------------

  def wake_ns(self, now_ns: int) -> int | None:
    """When the machine wants a tick, on the life's own clock."""
    raise NotImplementedError

  def tick(self) -> Any:
    """The machine's event for it."""
    raise NotImplementedError

  def watched(self) -> dict[str, Callable[[], Job]]:
    """Keys to look for, and the job that looks."""
    raise NotImplementedError

  def compute_ns(self) -> int:
    """How long the compute lane's next job waits for its arrays."""
    raise NotImplementedError

  def transition(self, before: Any, event: Any, after: Any) -> None:
    """Called after every transition; the world counts."""

  def decided(self, event: Any, commands: tuple[Any, ...]) -> None:
    """Called with every decision, before it is performed; the world checks."""

  # --- Life and death -------------------------------------------------------

  def run(
    self, job: Job, done: Callable[[Any], None], lane: Lane = Lane.PARALLEL
  ) -> None:
    """Runs a job; `done` gets what it returns."""
    self._lanes[lane].append((job, done))
    self._start(lane)

  def guard(self, action: Callable[[], None]) -> Callable[[], None]:
    """An action of this life: dropped once it is dead, late if it is paused."""

    def guarded() -> None:
      if not self.alive:
        return
      if self.paused:
        self.held += 1
        self._deferred.append(guarded)
      else:
        action()

    return guarded

  def end(self, reason: str) -> None:
    """Dies, or leaves."""
    if self.alive:
      self.alive = False
      self._ended(self, reason)

  def pause(self) -> None:
    """Stops as SIGSTOP does."""
    self.paused += 1

  def resume(self) -> None:
    """Goes on; what came meanwhile comes now."""
    self.paused -= 1
    if self.paused:
      return
    deferred, self._deferred = self._deferred, []
    for action in deferred:
      self.heap.after(0, action)

  # --- Jobs -----------------------------------------------------------------

  def _start(self, lane: Lane) -> None:
    queue = self._lanes[lane]
    while queue and (lane is Lane.PARALLEL or lane not in self._busy):
      job, done = queue.popleft()
      self._busy.add(lane)
      self._advance(lane, job, done, None)

  def _advance(
    self, lane: Lane, job: Job, done: Callable[[Any], None], answer: Any
  ) -> None:
    try:
      if isinstance(answer, ExchangeError):
        request = job.throw(answer)
      else:
        request = job.send(answer)
    except StopIteration as stop:
      self._busy.discard(lane)
      done(stop.value)
      if self.alive:
        self._start(lane)
      return
    except (ExchangeError, DamagedRun) as error:
      self._busy.discard(lane)
      self.failure = error
      self.end(f"{type(error).__name__}: {error}")
      return
    if isinstance(request, Call):

      def reply(result: Any) -> None:
        if self.alive and not self.paused:
          self._advance(lane, job, done, result)
        else:
          self.guard(lambda: self._advance(lane, job, done, result))()

      self.exchange.submit(self.who, request, reply, wanted=lambda: self.alive)
      return
    if isinstance(request, Pause):
      wait_ns, answer = request.wait_ns, self.clock.now_ns
    else:
      wait_ns = self.compute_ns() if lane is Lane.COMPUTE else 0
      answer = _nothing
    self.heap.after(
      wait_ns, self.guard(lambda: self._advance(lane, job, done, answer()))
    )

  # --- Events ---------------------------------------------------------------

  def deliver(self, event: Any) -> None:
    """One transition of the machine, and what follows from it."""
    if event is None or not self.alive:
      return
    if isinstance(event, Work):  # goes on in another lane
      self._submit(event)
      return
    actor, before = self.actor, self.actor.state
    event = replace(event, now_ns=self.clock.now_ns())
    for work in actor.handle(event):
      self._submit(work)
    self.transition(before, event, actor.state)
    if actor.state.done:
      self._leave()
      return
    self._watch()
    self._set_timer()

  def _submit(self, work: Work) -> None:
    self.run(work.job, self.deliver, work.lane)

  def flush_every(self, interval_ns: int) -> None:
    """Sends the tape out now and then, not only with what depends on it."""

    def flush() -> None:
      if not self._flushing:  # else the store is slower than the interval
        self._flushing = True
        job = self._patient(self.actor.tape.flush())
        self.run(job, flushed, Lane.ORDERED)
      self.flush_every(interval_ns)

    def flushed(_: Any) -> None:
      self._flushing = False

    self.heap.after(interval_ns, self.guard(flush))

  def farewell(self) -> Job:
    """The last that a life does in good order: its tape goes out."""
    yield from self.actor.tape.flush()

  def _leave(self) -> None:
    self.run(
      self._patient(self.farewell()),
      lambda _: self.end(self.actor.state.stopping),
      Lane.ORDERED,
    )

  def _watch(self) -> None:
    watched = self.watched()
    for key, look in watched.items():
      if key not in self._watching:
        action = self._watching[key] = self.guard(self._look(key, look))
        self.exchange.when(key, action)
    if len(self._watching) > len(watched):
      self._forget([key for key in self._watching if key not in watched])

  def _forget(self, unwatched: list[str]) -> None:
    """Most second attempts never come; waiting for them would pile up."""
    for key in unwatched:
      if self.exchange.forget(key, self._watching[key]):
        del self._watching[key]

  def bury(self) -> None:
    """Lets go of what a dead life still waits for."""
    self._forget(list(self._watching))

  def _look(self, key: str, look: Callable[[], Job]) -> Callable[[], None]:
    def action() -> None:
      if key not in self.watched():
        self._watching.pop(key, None)
      else:
        self.run(self._patient(look()), found)

    def found(event: Any) -> None:
      self._watching.pop(key, None)
      if event is not None:
        self.deliver(event)
      else:  # a stale read, or a store that was away
        delay_ns = spread(self.rng, RETRY_NS, 0.5)
        self.heap.after(delay_ns, self.guard(self._watch))

    return action

  def _patient(self, job: Job) -> Job:
    """A poller's job: a store that is away is no reason to die."""
    try:
      return (yield from job)
    except ExchangeError:
      return None

  def clock_jumped(self) -> None:
    """Timers on the life's own clock may be due now."""
    if self.actor is not None and self.alive:
      self._timer_ns = None
      self._set_timer()

  def _set_timer(self) -> None:
    now_ns = self.clock.now_ns()
    wake_ns = self.wake_ns(now_ns)
    if wake_ns is None or wake_ns == self._timer_ns:
      return
    self._timer_ns = wake_ns

    def ring() -> None:
      if self._timer_ns != wake_ns:
        return  # set to another time since
      self._timer_ns = None
      if self.clock.now_ns() < wake_ns:
        self._set_timer()
      else:
        self.deliver(self.tick())

    self.heap.at(self.clock.true_ns(wake_ns), self.guard(ring))


def _nothing() -> None:
  """What a job is answered that waited for arrays."""


class TellingTape(TapeWriter):
  """A tape that tells its process what is recorded."""

  def __init__(self, process: Process, header: tape.Header, **options: Any):
    super().__init__(header, **options)
    self._process = process

  def record(self, event: Any, commands: tuple[Any, ...]) -> None:
    """See `TapeWriter`."""
    super().record(event, commands)
    self._process.decided(event, commands)
