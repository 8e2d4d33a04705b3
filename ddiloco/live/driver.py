"""Drives one actor in real time: an event queue, lanes of threads, a poller.

The main thread only decides and dispatches. Everything that waits (for a
device, for the store) is a job on a lane's thread and comes back as an event.
"""

import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ddiloco.engine.actor import Actor, Lane, Work
from ddiloco.engine.ports import (
  Call,
  Exchange,
  ExchangeError,
  Job,
  Pause,
  Ready,
  drive,
)
from ddiloco.live.log import logger
from ddiloco.live.steady import SteadyExchange
from ddiloco.types import SECOND_NS

_PARALLEL_THREADS = 4


def run_job(
  job: Job, exchange: Exchange, interrupt: threading.Event | None = None
) -> Any:
  """Runs a job's requests one after the other; returns its result.

  Of a `SteadyExchange`, vital ones wait for it to be back. Raises
  `KeyboardInterrupt` if the job pauses and `interrupt` is set.
  """
  interrupt = interrupt or threading.Event()
  steady = isinstance(exchange, SteadyExchange)
  perform = exchange.perform if steady else lambda call: call.on(exchange)

  def answer(request: Call | Ready | Pause) -> Any:
    match request:
      case Call():
        return perform(request)
      case Ready():
        return jax.block_until_ready(request.arrays)
      case Pause():
        if interrupt.wait(request.wait_ns / SECOND_NS):
          raise KeyboardInterrupt
        return time.monotonic_ns()

  return drive(job, answer)


class Driver:
  """The clock, the queue and the threads of one live actor."""

  def __init__(
    self,
    actor: Actor,
    exchange: Exchange,
    *,
    wake_ns: Callable[[Any, int], int | None],
    tick: Callable[[int], Any],
    stop: Callable[[int, str], Any],
    flush_every_s: float,
    slowdown: float = 1.0,
    observe: Callable[[Any, Any, int], None] | None = None,
  ):
    """Takes the actor and how its machine's timer and stop events are made.

    Args:
      actor: not started yet.
      exchange: what jobs call.
      wake_ns: when the machine wants a tick, given its state and the clock.
      tick: builds that event.
      stop: builds the event of a request to stop, with its reason.
      flush_every_s: how old a tape record gets before it is written.
      slowdown: compute jobs take this many times as long (emulation).
      observe: called as (event, state, busy_ns) after every transition.
    """
    self.stopped = threading.Event()
    self.actor = actor
    self.exchange = SteadyExchange(exchange, ended=self.stopped, fail=self.post)
    self._wake_ns, self._tick, self._stop = wake_ns, tick, stop
    self._flush_every_ns = round(flush_every_s * SECOND_NS)
    self._slowdown = slowdown
    self._observe = observe or (lambda event, state, busy_ns: None)
    self._events: queue.SimpleQueue = queue.SimpleQueue()
    self._lanes = {
      lane: ThreadPoolExecutor(
        _PARALLEL_THREADS if lane is Lane.PARALLEL else 1,
        thread_name_prefix=lane,
      )
      for lane in Lane
    }
    self._threads: list[threading.Thread] = []
    self._flushing = False  # a flush is on its way, or waits for its turn
    self.background("watch", self.exchange.watch)
    self.changed = threading.Event()  # set after every transition
    self._now_ns = 0

  def post(self, event: Any) -> None:
    """Queues an event (or an exception to raise), stamped with the time."""
    self._events.put((time.monotonic_ns(), event))

  def request_stop(self, reason: str) -> None:
    """Asks the machine to end this life. Safe in a signal handler."""
    self.post(self._stop(0, reason))

  def background(self, name: str, loop: Callable[[], None]) -> None:
    """Runs `loop` in a thread; what it raises ends the run."""

    def body():
      try:
        loop()
      except Exception as error:  # noqa: BLE001 - re-raised by the main thread
        self.post(error)

    thread = threading.Thread(target=body, name=name, daemon=True)
    self._threads.append(thread)

  def run(self, first: Any) -> Any:
    """Handles events until the machine stops; returns its final state."""
    last_flush_ns = time.monotonic_ns()
    try:
      # Before whatever is queued: a stop may have been asked for already.
      self._handle(last_flush_ns, first)
      for thread in self._threads:
        thread.start()
      while not self.actor.state.done:
        stamp_ns, event = self._next_event(last_flush_ns)
        if isinstance(event, Exception):
          raise event
        if event is not None:
          self._handle(stamp_ns, event)
        if time.monotonic_ns() - last_flush_ns > self._flush_every_ns:
          last_flush_ns = time.monotonic_ns()
          self._submit_flush()
      return self.actor.state
    finally:
      self.stopped.set()
      self.changed.set()
      self._drain()

  def _next_event(self, last_flush_ns: int) -> tuple[int, Any]:
    now_ns = time.monotonic_ns()
    deadline_ns = last_flush_ns + self._flush_every_ns
    wake_ns = self._wake_ns(self.actor.state, now_ns)
    if wake_ns is not None:
      deadline_ns = min(deadline_ns, wake_ns)
    try:
      wait_s = max(deadline_ns - now_ns, 0) / SECOND_NS
      return self._events.get(timeout=wait_s + 1e-4)
    except queue.Empty:
      now_ns = time.monotonic_ns()
      if wake_ns is not None and now_ns >= wake_ns:
        return now_ns, self._tick(0)
      return now_ns, None

  def _handle(self, stamp_ns: int, event: Any) -> None:
    # Threads stamp their events before they queue them; the machine's clock
    # must not run backwards all the same.
    self._now_ns = max(self._now_ns, stamp_ns)
    event = dataclasses.replace(event, now_ns=self._now_ns)
    begin_ns = time.monotonic_ns()
    for work in self.actor.handle(event):
      self._submit(work)
    busy_ns = time.monotonic_ns() - begin_ns
    self.changed.set()
    self._observe(event, self.actor.state, busy_ns)

  def _submit(self, work: Work) -> None:
    self._lanes[work.lane].submit(self._run, work)

  def _run(self, work: Work) -> None:
    begin = time.monotonic()
    try:
      event = run_job(work.job, self.exchange, self.stopped)
      if work.lane is Lane.COMPUTE and self._slowdown > 1:
        elapsed_s = time.monotonic() - begin
        self.stopped.wait((self._slowdown - 1) * elapsed_s)
    except KeyboardInterrupt:
      return  # the life has ended, and what pauses waits for others
    except Exception as error:  # noqa: BLE001 - re-raised by the main thread
      event = error
    if isinstance(event, Work):  # goes on in another lane
      self._submit(event)
    elif event is not None:
      self.post(event)

  def _submit_flush(self) -> None:
    if not self._flushing:  # else they pile up where the store is slow
      self._flushing = True
      self._submit(Work(Lane.ORDERED, self._flush()))

  def _flush(self) -> Job:
    self._flushing = False  # before it looks: what comes next needs a flush
    try:
      yield from self.actor.tape.flush()
    except ExchangeError as error:
      logger.warning("the tape is kept in memory for now: %s", error)

  def _drain(self) -> None:
    """Lets what was promised finish: answers, commits, checkpoints, tape."""
    self._submit(Work(Lane.ORDERED, self._flush()))
    for lane in (Lane.ORDERED, Lane.CHECKPOINT, Lane.PARALLEL):
      self._lanes[lane].shutdown(wait=True)
    self._lanes[Lane.COMPUTE].shutdown(wait=False, cancel_futures=True)


def stop_by_signal(driver: Driver, interrupt: threading.Event) -> None:
  """SIGTERM and SIGINT end the life in good order from here on."""

  def stop(number: int, frame: object) -> None:
    interrupt.set()
    driver.request_stop(signal.Signals(number).name)

  signal.signal(signal.SIGTERM, stop)
  signal.signal(signal.SIGINT, stop)


class Pace:
  """How long a poller sleeps: a tenth of what it has waited already.

  Latency stays within a tenth of the event's own period, and an idle poller
  costs next to nothing.
  """

  def __init__(self, min_s: float, max_s: float):
    self._min_s, self._max_s = min_s, max_s
    self._last_s = time.monotonic()

  def found(self) -> None:
    """Something was there: look closely for what follows."""
    self._last_s = time.monotonic()

  def sleep_s(self) -> float:
    """The next sleep, in seconds."""
    waited_s = time.monotonic() - self._last_s
    return min(max(waited_s / 10, self._min_s), self._max_s)
