"""The driver: order within lanes, errors, stops, timers and its clock."""

import dataclasses
import threading
import time
from typing import Any

import jax.numpy as jnp
import pytest

from ddiloco.engine.actor import Actor, Lane, Plane, Work
from ddiloco.engine.ports import (
  Call,
  DamagedRun,
  ExchangeError,
  ExchangeRefused,
  Ready,
)
from ddiloco.live import steady
from ddiloco.live.driver import Driver, Pace, run_job
from ddiloco.protocol import keys
from ddiloco.types import SECOND_NS

DEADLINE_S = 60.0  # Far above what anything here takes.


@dataclasses.dataclass(frozen=True)
class Note:
  """The one kind of event; the machine's state is the tuple of those seen."""

  now_ns: int
  what: str
  value: Any = None


@dataclasses.dataclass(frozen=True)
class State:
  notes: tuple[Note, ...] = ()
  done: bool = False

  @property
  def seen(self):
    return [note.what for note in self.notes]


class Store(dict):
  """An exchange as far as these jobs need one."""

  def put(self, key, value, *, durable=False):
    self[key] = value


class Tape:
  """Remembers what was recorded and how often it was asked to write."""

  def __init__(self):
    self.recorded, self.written, self.flushes = [], [], 0
    self.fails = 0

  def record(self, event, commands):
    self.recorded.append(event.what)

  def flush(self):
    self.flushes += 1
    if self.fails:
      self.fails -= 1
      raise ExchangeError("the store is away")
    while self.recorded:
      what = self.recorded.pop(0)
      self.written.append(what)
      yield Call("put", (f"tape/{len(self.written)}", what))


class Jobs(Plane):
  """Performs commands that are the work itself."""

  def perform(self, command):
    return command


def make_driver(script, *, until, tape=None, store=None, **options):
  """A driver whose machine maps what it sees to work by `script`."""

  def step(state, event, rules):
    notes = (*state.notes, event)
    done = event.what in until
    return State(notes, done), [] if done else script(event)

  actor = Actor(
    start=lambda event, rules: step(State(), event, rules),
    step=step,
    check=lambda *args: None,
    rules=None,
    plane=Jobs(),
    tape=tape or Tape(),
  )
  defaults = {
    "wake_ns": lambda state, now_ns: None,
    "tick": lambda now_ns: Note(now_ns, "tick"),
    "stop": lambda now_ns, reason: Note(now_ns, "stop", reason),
    "flush_every_s": 3600.0,
  }
  store = Store() if store is None else store
  return Driver(actor, store, **defaults | options)


def job(what, *, before=None, after=None):
  """A job that writes under its name and then reports so."""
  if before is not None:
    assert before.wait(DEADLINE_S)
  yield Call("put", (what, b""))
  if after is not None:
    after.set()
  return Note(0, what)


@pytest.mark.parametrize(
  "lane", [Lane.COMPUTE, Lane.ORDERED, Lane.CHECKPOINT], ids=str
)
def test_jobs_of_a_lane_keep_their_order(lane):
  names = [str(i) for i in range(20)]
  gate, store = threading.Event(), Store()

  def script(event):
    if event.what != "go":
      return []
    works = [Work(lane, job(name)) for name in names]
    # The first one waits: nothing may overtake it.
    return [Work(lane, job("first", before=gate)), *works, None]

  driver = make_driver(script, until={names[-1]}, store=store)
  driver.background("late", gate.set)
  state = driver.run(Note(0, "go"))
  assert list(store)[:21] == ["first", *names]
  assert [what for what in state.seen if what != "go"] == ["first", *names]


def test_the_parallel_lane_runs_jobs_beside_each_other():
  gate = threading.Event()

  def script(event):
    if event.what != "go":
      return []
    return [
      Work(Lane.PARALLEL, job("waits", before=gate)),
      Work(Lane.PARALLEL, job("frees", after=gate)),
    ]

  state = make_driver(script, until={"waits"}).run(Note(0, "go"))
  assert set(state.seen) == {"go", "waits", "frees"}


def test_lanes_do_not_wait_for_each_other():
  gate = threading.Event()

  def script(event):
    if event.what != "go":
      return []
    return [
      Work(Lane.COMPUTE, job("step", before=gate)),
      Work(Lane.ORDERED, job("answer", after=gate)),
    ]

  assert make_driver(script, until={"step"}).run(Note(0, "go")).seen == [
    "go",
    "answer",
    "step",
  ]


@pytest.mark.parametrize("lane", list(Lane), ids=str)
def test_what_a_job_raises_ends_the_run(lane):
  def broken():
    yield Call("put", ("k", b""))
    raise ZeroDivisionError("a bug")

  driver = make_driver(lambda event: [Work(lane, broken())], until=())
  with pytest.raises(ZeroDivisionError, match="a bug"):
    driver.run(Note(0, "go"))
  assert driver.stopped.is_set()


def test_what_a_background_thread_raises_ends_the_run():
  driver = make_driver(lambda event: [], until=())

  def loop():
    raise RuntimeError("a poller's bug")

  driver.background("poller", loop)
  with pytest.raises(RuntimeError, match="a poller's bug"):
    driver.run(Note(0, "go"))


def test_what_the_machine_raises_ends_the_run_and_frees_the_threads():
  def script(event):
    raise AssertionError("an invariant")

  driver = make_driver(script, until=())
  woken = threading.Event()

  def loop():
    driver.stopped.wait(DEADLINE_S)
    woken.set()

  driver.background("poller", loop)
  with pytest.raises(AssertionError, match="an invariant"):
    driver.run(Note(0, "go"))
  assert driver.stopped.is_set()


def test_a_stop_asked_for_before_the_start_comes_after_the_first_event():
  driver = make_driver(lambda event: [], until={"stop"})
  driver.request_stop("SIGTERM")
  state = driver.run(Note(0, "go"))
  assert state.seen == ["go", "stop"]
  assert state.notes[1].value == "SIGTERM"


def test_threads_start_after_the_first_event():
  driver = make_driver(lambda event: [], until={"polled"})
  driver.background("poller", lambda: driver.post(Note(0, "polled")))
  assert driver.run(Note(0, "go")).seen == ["go", "polled"]


def test_a_stop_lets_promised_work_finish():
  gate, store = threading.Event(), Store()

  def script(event):
    if event.what != "go":
      return []
    driver.request_stop("enough")
    return [
      Work(Lane.CHECKPOINT, job("checkpoint", before=gate)),
      Work(Lane.ORDERED, job("answer", before=gate)),
    ]

  driver = make_driver(script, until={"stop"}, store=store)

  def open_gate():
    assert driver.stopped.wait(DEADLINE_S)  # The machine is done ...
    gate.set()

  driver.background("late", open_gate)
  driver.run(Note(0, "go"))
  assert {"checkpoint", "answer"} <= set(store)  # ... and these are written.


def test_ticks_come_when_the_machine_wants_them():
  wanted = time.monotonic_ns() + SECOND_NS // 20
  driver = make_driver(
    lambda event: [], until={"tick"}, wake_ns=lambda state, now_ns: wanted
  )
  state = driver.run(Note(0, "go"))
  assert state.seen == ["go", "tick"]
  assert state.notes[1].now_ns >= wanted


def test_the_tape_is_written_on_a_timer_and_at_the_end():
  tape, store = Tape(), Store()
  driver = make_driver(
    lambda event: [], until={"end"}, tape=tape, store=store, flush_every_s=0.01
  )

  def poll():
    while "go" not in tape.written and not driver.stopped.wait(0.001):
      pass
    driver.post(Note(0, "end"))

  driver.background("poller", poll)
  driver.run(Note(0, "go"))
  assert tape.written == ["go", "end"]
  assert store == {"tape/1": "go", "tape/2": "end"}


def test_a_tape_that_cannot_be_written_waits_for_the_next_flush():
  tape = Tape()
  tape.fails = 2
  driver = make_driver(
    lambda event: [], until={"end"}, tape=tape, flush_every_s=0.01
  )

  def poll():
    while not tape.written and not driver.stopped.wait(0.001):
      pass
    driver.post(Note(0, "end"))

  driver.background("poller", poll)
  driver.run(Note(0, "go"))
  assert tape.written == ["go", "end"] and tape.flushes >= 4


def test_the_machines_clock_never_runs_backwards():
  driver = make_driver(lambda event: [], until={"9"})

  def poll():
    early_ns = time.monotonic_ns() - SECOND_NS  # A thread that was suspended.
    for i in range(10):
      driver._events.put((early_ns - i, Note(0, str(i))))

  driver.background("poller", poll)
  times = [note.now_ns for note in driver.run(Note(0, "go")).notes]
  assert times == sorted(times) and times[0] > 0


def test_every_transition_is_observed_and_announced():
  observed = []

  def observe(event, state, busy_ns):
    observed.append((event.what, len(state.notes), busy_ns >= 0))

  def script(event):
    assert not driver.changed.is_set() or event.what != "go"
    return [Work(Lane.PARALLEL, job("end"))] if event.what == "go" else []

  driver = make_driver(script, until={"end"}, observe=observe)
  driver.run(Note(0, "go"))
  assert observed == [("go", 1, True), ("end", 2, True)]
  assert driver.changed.is_set()


@pytest.mark.parametrize("slowdown, waits", [(1.0, 0), (3.0, 1)])
def test_only_compute_is_slowed_down(monkeypatch, slowdown, waits):
  def script(event):
    if event.what != "go":
      return []
    return [Work(lane, job(str(lane))) for lane in Lane]

  driver = make_driver(script, until=(), slowdown=slowdown)
  driver._threads.clear()  # of those, one waits as well
  waited = []
  wait = driver.stopped.wait
  monkeypatch.setattr(
    driver.stopped, "wait", lambda s=None: waited.append(s) or wait(0)
  )
  left = set(map(str, Lane))

  def observe(event, state, busy_ns):
    left.discard(event.what)
    if not left:
      driver.post(StopIteration())

  driver._observe = observe
  with pytest.raises(StopIteration):
    driver.run(Note(0, "go"))
  assert len(waited) == waits and all(s > 0 for s in waited)


def test_run_job_answers_requests_and_throws_errors_into_the_job():
  class Away(Store):
    def put(self, key, value, *, durable=False):
      raise ExchangeError("away")

  def patient():
    array = yield Ready(jnp.arange(3))
    try:
      yield Call("put", ("k", b""))
    except ExchangeError as error:
      return int(array.sum()), str(error)

  assert run_job(patient(), Away()) == (3, "away")

  def plain():
    yield Call("put", ("k", b"v"), durable=True)

  store = Store()
  assert run_job(plain(), store) is None and store == {"k": b"v"}
  with pytest.raises(ExchangeError):
    run_job(plain(), Away())


# An exchange that is away, refuses, or has lost the run.


class Flaky(Store):
  """Fails a number of times, and counts."""

  def __init__(self, fails, error=ExchangeError):
    super().__init__()
    self.fails, self.error, self.tries = fails, error, 0

  def put(self, key, value, *, durable=False):
    self.tries += 1
    if self.tries <= self.fails:
      raise self.error("away")
    self[key] = value


def write(what, *, vital):
  try:
    yield Call("put", (what, b""), vital=vital)
  except ExchangeRefused:
    raise
  except ExchangeError:
    return Note(0, f"no {what}")
  return Note(0, what)


@pytest.fixture
def no_pauses(monkeypatch):
  monkeypatch.setattr(steady, "_PAUSE_S", 0.001)
  monkeypatch.setattr(steady, "_WATCH_EVERY_S", 0.001)


def test_vital_requests_outlast_an_outage_and_keep_their_order(
  no_pauses, caplog
):
  store = Flaky(20)

  def script(event):
    if event.what != "go":
      return []
    return [Work(Lane.ORDERED, write(name, vital=True)) for name in "abc"]

  driver = make_driver(script, until={"c"}, store=store)
  driver._threads.clear()
  with caplog.at_level("INFO", "ddiloco"):
    assert driver.run(Note(0, "go")).seen == ["go", "a", "b", "c"]
  assert list(store)[:3] == ["a", "b", "c"]
  said = [record.message for record in caplog.records]
  assert sum("the exchange has been away" in line for line in said) == 1
  assert sum("the exchange is back: put" in line for line in said) == 1


def test_other_requests_fail_as_their_jobs_say(no_pauses):
  store = Flaky(1)

  def script(event):
    done = event.what != "go"
    return [] if done else [Work(Lane.ORDERED, write("a", vital=False))]

  driver = make_driver(script, until={"no a"}, store=store)
  driver._threads.clear()
  assert driver.run(Note(0, "go")).seen == ["go", "no a"]
  assert "a" not in store


def test_a_life_that_is_asked_to_stop_leaves_a_store_that_is_away(no_pauses):
  store = Flaky(10**9)

  def script(event):
    if event.what != "go":
      return []
    return [Work(Lane.ORDERED, write("a", vital=True))]

  driver = make_driver(script, until={"stop"}, store=store)
  driver._threads.clear()

  def stop():
    while store.tries < 5 and not driver.stopped.wait(0.001):
      pass
    driver.request_stop("SIGTERM")

  driver.background("stop", stop)
  state = driver.run(Note(0, "go"))
  assert state.done and state.seen == ["go", "stop"] and "a" not in store


@pytest.mark.parametrize("vital", [False, True])
def test_a_refusal_ends_the_life_whatever_its_job_says(no_pauses, vital):
  store = Flaky(10**9, ExchangeRefused)

  def patient():
    try:
      yield Call("put", ("a", b""), vital=vital)
    except ExchangeError:
      return Note(0, "trains on")

  def script(event):
    return [Work(Lane.ORDERED, patient())] if event.what == "go" else []

  driver = make_driver(script, until=(), store=store)
  driver._threads.clear()
  with pytest.raises(ExchangeRefused, match="away"):
    driver.run(Note(0, "go"))


def test_a_run_that_is_gone_ends_the_life_and_nothing_more_is_written(
  no_pauses,
):
  class Emptied(Store):
    def __init__(self):
      super().__init__()
      self.looks = 0

    def get(self, key):
      assert key == keys.commit(0)
      self.looks += 1
      return b"there" if self.looks < 3 else None

  store, tape = Emptied(), Tape()
  driver = make_driver(lambda event: [], until=(), store=store, tape=tape)
  with pytest.raises(DamagedRun, match="is missing.*a new --workdir"):
    driver.run(Note(0, "go"))
  assert store.looks == 3 and store == {} and tape.flushes > 0


def test_a_store_that_is_away_has_not_lost_the_run(no_pauses):
  class Away(Store):
    looks = 0

    def get(self, key):
      self.looks += 1
      if self.looks < 4:
        raise ExchangeError("away")
      driver.post(Note(0, "end"))
      return b"there"

  driver = make_driver(lambda event: [], until={"end"}, store=Away())
  assert driver.run(Note(0, "go")).done


def test_pace_follows_what_it_waits_for(monkeypatch):
  now_s = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
  pace = Pace(0.002, 0.05)
  assert pace.sleep_s() == 0.002  # at least the minimum
  now_s[0] += 0.2
  assert pace.sleep_s() == pytest.approx(0.02)  # a tenth of the wait
  now_s[0] += 60
  assert pace.sleep_s() == 0.05  # at most the maximum
  pace.found()
  assert pace.sleep_s() == 0.002
