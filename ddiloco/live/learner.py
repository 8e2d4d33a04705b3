"""The learner's process: joins a run, trains and answers until it ends."""

import os
import pathlib
import signal
import threading
import time
import uuid
from typing import Any, NamedTuple

from ddiloco.config import Config, learner_value, seconds_to_ns
from ddiloco.engine import recovery, resumption, startup
from ddiloco.engine.actor import Actor
from ddiloco.engine.learner_arrays import LearnerArrays, travelling
from ddiloco.engine.learner_bytes import LearnerBytes
from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.engine.ports import ExchangeError
from ddiloco.engine.sealing import RunKey
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.engine.telemetry import LearnerTelemetry
from ddiloco.live import setup as setup_lib
from ddiloco.live import workplace
from ddiloco.live.checkpoint import Checkpoints, Restored
from ddiloco.live.driver import Driver, Pace, run_job, stop_by_signal
from ddiloco.live.log import logger
from ddiloco.protocol import invariants, keys, messages, tape
from ddiloco.protocol import learner as machine
from ddiloco.protocol.learner_types import (
  Joined,
  Resumed,
  StopRequested,
  Tick,
)
from ddiloco.protocol.rules import Rules
from ddiloco.types import Exit

_CATCH_UP_AFTER_S = 1.0  # without the next commit; then look past it


def run_learner(
  config: Config,
  learner: int,
  *,
  workdir: pathlib.Path,
  exchange: str,
  run_key: RunKey | None = None,
) -> Exit:
  """Runs one life of a learner to its end."""
  interrupt = threading.Event()
  signals: list[int] = []

  def remember(number, frame):
    signals.append(number)
    interrupt.set()

  signal.signal(signal.SIGTERM, remember)
  signal.signal(signal.SIGINT, remember)
  setup = setup_lib.open_setup(
    config,
    learner,
    workdir=workdir,
    exchange=exchange,
    interrupt=interrupt,
    run_key=run_key,
  )
  newest = setup_lib.wait_for_run(setup)
  startup.check_genesis(newest.genesis, config, setup.layout)
  checkpoints = Checkpoints(workdir / "checkpoints" / f"learner-{learner}")
  life = Life(setup, learner, checkpoints)
  driver = life.join()
  stop_by_signal(driver, interrupt)
  if signals:
    driver.request_stop(signal.Signals(signals[0]).name)
  state = driver.run(life.joined)
  life.leave(state)
  return _exit_code(state.stopping, learner)


def _exit_code(reason: str, learner: int) -> Exit:
  if reason == machine.COMPLETED:
    return Exit.OK
  if reason.startswith(machine.SUPERSEDED):
    logger.error("learner %d stops: %s", learner, reason)
    return Exit.SUPERSEDED
  if reason == machine.DIVERGED:
    logger.error(
      "learner %d stops: %s. Its next life goes on from the newest commit; if "
      "that diverges too, lower inner.learning_rate.",
      learner,
      reason,
    )
    return Exit.FAILED
  logger.info("learner %d stops: %s", learner, reason)
  return Exit.STOPPED


class _Entry(NamedTuple):
  """How a life enters the run."""

  arrays: LearnerArrays
  newest: startup.Newest  # the commit it joins at
  member: messages.Member
  event: Joined | Resumed
  next_sample: int
  anchored: bool  # its anchors are that commit's
  restored: tuple[int, int] | None = None  # see `tape.Header`
  donor: tuple[int, int, int] | None = None


class Life:
  """One incarnation of a learner and the threads it needs."""

  def __init__(
    self, setup: setup_lib.Setup, learner: int, checkpoints: Checkpoints
  ):
    self._setup, self._learner = setup, learner
    self._checkpoints = checkpoints
    self._live = setup.config.live
    self._driver: Driver | None = None
    self._plane: LearnerPlane | None = None
    self._member: messages.Member | None = None
    self.joined: Joined | Resumed | None = None

  def join(self) -> Driver:
    """Takes the newest parameters and claims the next incarnation."""
    nonce = uuid.uuid4().hex
    entry = self._resume(nonce) or self._enter(nonce)
    self._member, commit = entry.member, entry.newest.commit
    rules = self._setup.rules(commit.run_id)
    writer = TapeWriter(
      workplace.tape_header(
        self._setup.config,
        commit.run_id,
        tape.learner_actor(self._learner),
        entry.member.incarnation,
        restored=entry.restored,
        donor=entry.donor,
      )
    )
    self._plane = LearnerPlane(
      arrays=entry.arrays,
      rules=rules,
      learner=self._learner,
      incarnation=entry.member.incarnation,
      newest=(entry.newest.digest, commit),
      tape=writer,
      now_ns=time.monotonic_ns,
      save_checkpoint=self._checkpoints.save,
      anchored=entry.anchored,
    )
    entry.arrays.warm_up(entry.next_sample)
    self.joined = entry.event
    logger.info(
      "learner %d, life %d, joins after round %d at sample %d",
      self._learner,
      entry.member.incarnation,
      commit.round,
      entry.next_sample,
    )
    return self._make_driver(rules, writer)

  def _resume(self, nonce: str) -> "_Entry | None":
    """Goes on with a snapshot, if there is one of this learner in the run."""
    setup, like = self._setup, self._setup.state
    newest = setup_lib.wait_for_run(setup)
    model = setup.model
    layout = LearnerBytes(model.program, like, model.layout, model.codec)
    who = self._learner, nonce, workplace.host(), os.getpid()
    found = setup.run(resumption.resume(newest, *who, layout))
    try:
      if isinstance(found, str):
        raise ValueError(found)
      captured = layout.unpack(like, found.header.attempts, found.data)
    except ValueError as why:
      if str(why):
        logger.warning("learner %d starts anew: %s", self._learner, why)
      return None
    logger.info(
      "goes on where the snapshot of round %d was taken, at step %d",
      found.header.round,
      found.header.state.step,
    )
    return _Entry(
      LearnerArrays.resumed(setup.config, model, captured),
      found.newest,
      found.member,
      found.event,
      found.header.state.next_sample,
      anchored=False,
    )

  def _enter(self, nonce: str) -> "_Entry":
    """Joins at the newest commit, with the best state there is."""
    setup = self._setup
    restored = self._checkpoints.restore(setup.state)
    position = restored.position if restored else {}
    source, state = self._source(restored, nonce)
    newest = source.newest
    if not source.borrowed:
      newest, params = self._newest_params(state)
      state = setup.program.with_params(state, params)
    member, last = setup.run(
      startup.claim_member(
        newest.commit.run_id,
        self._learner,
        nonce,
        workplace.host(),
        os.getpid(),
      )
    )
    joined = startup.joined(
      member, last, newest.commit, position, borrowed=source.borrowed
    )
    return _Entry(
      LearnerArrays(setup.config, setup.model, state),
      newest,
      member,
      joined,
      joined.next_sample,
      anchored=not source.borrowed,
      restored=(
        (position["incarnation"], position["step"])
        if source.checkpoint
        else None
      ),
      donor=source.donor,
    )

  def _make_driver(self, rules: Rules, writer: TapeWriter) -> Driver:
    config, plane = self._setup.config, self._plane
    telemetry = LearnerTelemetry(self._setup.workdir, self._learner, plane)
    self._driver = Driver(
      Actor(
        start=machine.start,
        step=machine.step,
        check=invariants.check_learner,
        rules=rules,
        plane=plane,
        tape=writer,
      ),
      self._setup.exchange,
      wake_ns=machine.wake_ns,
      tick=Tick,
      stop=StopRequested,
      flush_every_s=self._live.tape_flush_s,
      slowdown=learner_value(config.learners.slowdown, self._learner),
      observe=telemetry.observe,
    )
    self._driver.background("commits", self._poll_commits)
    self._driver.background("heartbeat", self._heartbeat)
    return self._driver

  def leave(self, state: Any) -> None:
    """Says good-bye, so that nobody waits for this learner."""
    try:
      if not state.stopping.startswith(machine.SUPERSEDED):
        self._write_member(left=True)
    except ExchangeError as error:
      logger.warning("could not say good-bye: %s", error)
    self._checkpoints.close()
    self._setup.exchange.close()

  def _source(
    self, restored: Restored | None, nonce: str
  ) -> tuple[recovery.Source, Any]:
    """Where the program's state comes from, and the state."""
    setup, fresh = self._setup, self._setup.state
    travel = travelling(setup.config, setup.program, fresh)
    source = setup.run(
      recovery.find_source(
        setup_lib.wait_for_run(setup),
        restored and restored.position["seen"],
        learner=self._learner,
        nonce=nonce,
        travel=travel,
        schedule=setup.schedule(),
        options=setup.config.recovery,
        heartbeat_ns=seconds_to_ns(self._live.heartbeat_s),
      )
    )
    for peer, why in source.refusals:
      logger.warning("no state from learner %d: %s", peer, why)
    if source.checkpoint:
      logger.info("goes on from its checkpoint at %s", restored.position)
      return source, restored.state
    if source.donation is not None:
      try:
        state = travel.unpack(fresh, source.donation.data)
        logger.info(
          "has the state of learner %d, life %d, step %d: %d bytes",
          *source.donor,
          len(source.donation.data),
        )
        return source, state
      except ValueError as error:
        logger.warning("no state from learner %d: %s", source.donor[0], error)
    logger.info("starts with a fresh inner optimizer")
    return recovery.Source(source.newest), fresh

  def _newest_params(self, state: Any) -> tuple[startup.Newest, Any]:
    """The newest commit and its parameters; retention may be faster once."""
    setup = self._setup
    deadline_s = time.monotonic() + self._live.start_deadline_s
    while True:
      newest = setup_lib.wait_for_run(setup)
      try:
        return newest, setup_lib.load_params(setup, newest.commit, state)
      except ValueError as error:
        if setup.interrupt.is_set() or time.monotonic() > deadline_s:
          raise
        logger.info("reading the newest commit again: %s", error)

  def _poll_commits(self) -> None:
    pace = Pace(self._live.poll_min_s, self._live.poll_max_s)
    driver, plane, found = self._driver, self._plane, None
    missing_since_s = time.monotonic()
    while not driver.stopped.is_set():
      state = driver.actor.state
      t = None if state is None else machine.watched(state, driver.actor.rules)
      if t is None or t == found:  # the machine has yet to see the last one
        driver.changed.wait(0.1)
        driver.changed.clear()
        continue
      try:
        event = run_job(plane.poll(t), driver.exchange)
        if event is None:
          waited_s = time.monotonic() - missing_since_s
          if waited_s > _CATCH_UP_AFTER_S:
            missing_since_s = time.monotonic()
            event = run_job(plane.catch_up(t), driver.exchange)
      except ExchangeError as error:
        logger.warning("learner %d trains on: %s", self._learner, error)
        event = None
      if event is not None:
        found, missing_since_s = t, time.monotonic()
        pace.found()
        driver.post(event)
      else:
        driver.stopped.wait(pace.sleep_s())

  def _heartbeat(self) -> None:
    driver, member = self._driver, self._member
    life = self._learner, member.incarnation
    # The first beat says that the first step is done: programs are compiled.
    while driver.actor.state is None or not driver.actor.state.step:
      if driver.stopped.wait(self._live.heartbeat_s / 10):
        return
    while True:
      try:
        other = run_job(startup.newer_life(*life), driver.exchange)
        if other is not None:
          driver.request_stop(
            f"{machine.SUPERSEDED} by life {other.incarnation} of learner "
            f"{self._learner} on {other.host}, process {other.pid}"
          )
          return
        self._write_member(left=False)
        for asked in run_job(self._plane.poll_transfers(), driver.exchange):
          driver.post(asked)
      except ExchangeError as error:
        logger.warning("no heartbeat for now: %s", error)
      if driver.stopped.wait(self._live.heartbeat_s):
        return

  def _write_member(self, *, left: bool) -> None:
    state = self._driver.actor.state
    self._member = startup.next_beat(self._member, state, left=left)
    key = keys.member(self._learner, self._member.incarnation)
    self._driver.exchange.put(key, messages.encode(self._member))
