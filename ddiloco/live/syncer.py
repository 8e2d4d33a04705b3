"""A syncer's process: starts or resumes a run and merges until it ends."""

import pathlib
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from ddiloco.config import Config
from ddiloco.engine import startup
from ddiloco.engine.actor import Actor
from ddiloco.engine.ports import ExchangeError, Job
from ddiloco.engine.sealing import RunKey
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.engine.syncer_plane import SyncerPlane
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.engine.telemetry import SyncerTelemetry
from ddiloco.engine.version import code_version
from ddiloco.live import setup as setup_lib
from ddiloco.live import workplace
from ddiloco.live.driver import Driver, Pace, run_job, stop_by_signal
from ddiloco.live.lease import LeaseTaken, take_lease
from ddiloco.live.log import logger
from ddiloco.live.monitor import Monitor
from ddiloco.live.workdir import check_exchange
from ddiloco.protocol import invariants, status, tape
from ddiloco.protocol import syncer as machine
from ddiloco.protocol.syncer_types import (
  Opened,
  StopRequested,
  SyncerState,
  Tick,
)
from ddiloco.types import Exit

_OVERTAKEN = (machine.OVERTAKEN, machine.ANOTHER_CHAIN)
_SELDOM_S = 0.5
_QUIET_S = 10.0  # without a commit before the log says why


def run_syncer(
  config: Config,
  *,
  workdir: pathlib.Path,
  exchange: str,
  run_key: RunKey | None = None,
  standby: bool = False,
  shard: int | None = None,
) -> Exit:
  """Runs a shard of the syncer until the run, or this process, is to end.

  A standby waits for a lease, and again once it has lost it. Without `shard`
  it takes that of any, and a syncer that is none the first.
  """
  interrupt = threading.Event()
  signal.signal(signal.SIGTERM, lambda number, frame: interrupt.set())
  signal.signal(signal.SIGINT, lambda number, frame: interrupt.set())
  setup = setup_lib.open_setup(
    config,
    None,
    workdir=workdir,
    exchange=exchange,
    interrupt=interrupt,
    run_key=run_key,
  )
  check = getattr(setup.program, "check", None)
  if check is not None:
    check()
  check_exchange(setup.exchange, config.live)
  # Before the lease is touched: who is of another config leaves no trace.
  newest = setup.run(startup.find_newest(setup.schedule()))
  if newest is not None:
    startup.check_genesis(newest.genesis, config, setup.layout)
  if standby:
    _prepare(setup)
  try:
    if shard is None and not standby:
      shard = 0
    return _lives(setup, standby, shard)
  finally:
    setup.exchange.close()


def _prepare(setup: setup_lib.Setup) -> None:
  """What can be done before the lease is there."""
  arrays = SyncerArrays.from_config(setup.config, setup.layout, setup.codec)
  arrays.initialise(setup_lib.host_leaves(setup.program.params(setup.state)))
  arrays.warm_up()
  logger.info("the standby waits for the lease")


def _lives(setup: setup_lib.Setup, standby: bool, shard: int | None) -> Exit:
  """One life after the other, until one of them is not to be followed."""
  reason = ""
  while True:
    life = _Life(setup)
    try:
      driver = life.open(standby=standby, shard=shard)
    except LeaseTaken:
      if not reason:
        raise
      return _exit_code(reason)
    if driver is None:
      return Exit.STOPPED if setup.interrupt.is_set() else Exit.OK
    reason = _live(setup, driver, life)
    # Who overtook may have been the last breath of a syncer that has lost its
    # lease; if it has not, the next life finds the lease taken.
    lost = standby and reason == machine.LEASE_LOST
    if reason not in _OVERTAKEN and not lost:
      return _exit_code(reason)
    logger.warning("life %d of the syncer ends: %s", life.opened.epoch, reason)


def _live(setup: setup_lib.Setup, driver: Driver, life: "_Life") -> str:
  """Runs a life; returns why it ended."""
  stop_by_signal(driver, setup.interrupt)
  if setup.interrupt.is_set():
    driver.request_stop("asked to stop while starting")
  state = driver.run(life.opened)
  life.close()
  return state.stopping or machine.COMPLETED


def _exit_code(reason: str) -> Exit:
  if reason == machine.COMPLETED:
    return Exit.OK
  if reason in (machine.LEASE_LOST, *_OVERTAKEN):
    logger.error("the syncer stops: %s", reason)
    return Exit.SUPERSEDED
  logger.info("the syncer stops: %s", reason)
  return Exit.STOPPED


class _Life:
  """One epoch of the syncer and the threads it needs."""

  def __init__(self, setup: setup_lib.Setup):
    self._setup = setup
    self._live = setup.config.live
    self._driver: Driver | None = None
    self._plane: SyncerPlane | None = None
    self.opened: Opened | None = None

  def open(
    self, *, standby: bool = False, shard: int | None = None
  ) -> Driver | None:
    """Takes the lease, then creates the run or goes on with it.

    None: asked to stop, or (a standby) the run has ended meanwhile.
    """
    setup = self._setup
    self._lease = take_lease(
      setup.exchange,
      self._live,
      setup.interrupt,
      shards=setup.config.syncer.shards,
      wanted=None if shard is None else (shard,),
      standby=standby,
      over=self._watch_for_the_end() if standby else lambda: False,
    )
    if self._lease is None:
      return None
    if self._lease.shard:  # the first one makes the run
      newest = setup_lib.wait_for_run(setup)
    else:
      newest = setup.run(startup.find_newest(setup.schedule()))
    changes = {}
    if newest is not None:
      changes = startup.check_genesis(
        newest.genesis, setup.config, setup.layout
      )
    run_id = newest.commit.run_id if newest else uuid.uuid4().hex
    rules = setup.rules(run_id)
    epoch = self._lease.epoch
    writer = TapeWriter(
      workplace.tape_header(setup.config, run_id, tape.SYNCER, epoch),
      durable=True,
    )
    arrays = SyncerArrays.from_config(setup.config, setup.layout, setup.codec)
    self._plane = SyncerPlane(
      arrays=arrays,
      rules=rules,
      epoch=epoch,
      tape=writer,
      snapshot=setup.config.snapshot,
      say=logger.info,
    )
    if newest is None:
      arrays.initialise(
        setup_lib.host_leaves(setup.program.params(setup.state))
      )
      fragments = setup.run(self._plane.initialise())
      genesis = startup.make_genesis(setup.config, setup.layout, code_version())
      newest = setup.run(startup.create_run(run_id, genesis, epoch, fragments))
    else:
      setup.run(self._plane.load(newest.commit, newest.digest))
      setup_lib.log_changes(changes, setup.workdir)
    arrays.warm_up()
    self.opened = Opened(0, epoch, newest.commit, newest.digest)
    which = f", shard {self._lease.shard}" if rules.shards > 1 else ""
    logger.info(
      "syncer%s, life %d, goes on from round %d of run %s",
      which,
      epoch,
      newest.commit.round,
      run_id,
    )
    driver = self._make_driver(rules, writer)
    self._lease.when_lost(lambda: driver.request_stop(machine.LEASE_LOST))
    return driver

  def _watch_for_the_end(self) -> Callable[[], bool]:
    """Whether the run has ended; asked while somebody else merges."""
    # The leases are somebody else's affair.
    monitor = Monitor(self._setup.exchange, self._setup.schedule(), shards=0)
    rules = self._setup.rules("")

    def over() -> bool:
      monitor.poll()
      commit = monitor.view.commit
      return commit is not None and rules.ended(commit.round, commit.tokens)

    return over

  def close(self) -> None:
    """Gives the lease back."""
    self._lease.release()

  def _make_driver(self, rules, writer: TapeWriter) -> Driver:
    shard = self._lease.shard
    telemetry = SyncerTelemetry(self._setup.workdir, rules, shard)
    self._driver = Driver(
      Actor(
        start=machine.start,
        step=machine.step,
        check=invariants.check_syncer,
        rules=rules,
        plane=self._plane,
        tape=writer,
      ),
      self._setup.exchange,
      wake_ns=lambda state, now_ns: machine.wake_ns(state, now_ns, rules),
      tick=Tick,
      stop=StopRequested,
      flush_every_s=self._live.tape_flush_s,
      observe=telemetry.observe,
    )
    self._driver.background("answers", self._poll_answers)
    self._driver.background("members", self._poll_seldom)
    self._driver.background("status", self._explain_silence)
    # Beside the first rounds: the more there is to list, the longer it takes.
    self._driver.background("sweep", self._sweep)
    return self._driver

  def _sweep(self) -> None:
    self._try(self._plane.sweep_all(self.opened.commit))

  # --- What to look for -----------------------------------------------------

  def _poll_answers(self) -> None:
    driver = self._driver
    pace = Pace(self._live.poll_min_s, self._live.poll_max_s)
    found: set = set()
    while not driver.stopped.is_set():
      wanted = self._wanted()
      found &= wanted.keys()
      any_found = False
      for key, look in wanted.items():
        if key in found:  # the machine has yet to see it
          continue
        event = self._try(look(key))
        if event is not None:
          found.add(key)
          any_found = True
          driver.post(event)
      if any_found:
        pace.found()
      driver.stopped.wait(pace.sleep_s())

  def _wanted(self) -> dict[Any, Callable[[Any], Job]]:
    """What to look for, and how: answers, another shard's commit."""
    state, plane = self._driver.actor.state, self._plane
    if state is None:
      return {}
    found: dict = dict.fromkeys(machine.watched(state), plane.poll_answer)
    awaited = machine.awaited(state, self._driver.actor.rules)
    if awaited is not None:
      found[awaited] = plane.poll_commit
    return found

  def _explain_silence(self) -> None:
    driver, committed = self._driver, -1
    while not driver.stopped.wait(_QUIET_S):
      state = driver.actor.state
      if state is not None and state.committed == committed:
        now_ns = time.monotonic_ns()
        logger.warning(
          "no commit for %d s: %s",
          _QUIET_S,
          status.waiting_for(state, now_ns, driver.actor.rules),
        )
      committed = -1 if state is None else state.committed

  def _poll_seldom(self) -> None:
    """What no point read finds: new members, odd answers, other syncers."""
    driver, plane = self._driver, self._plane
    while not driver.stopped.is_set():
      jobs = self._seldom_jobs(driver.actor.state)
      for life in self._try(plane.list_members()) or ():
        jobs.append(plane.poll_member(*life))
      for job in jobs:
        event = self._try(job)
        if event is not None:
          driver.post(event)
      driver.stopped.wait(_SELDOM_S)

  def _seldom_jobs(self, state: SyncerState | None) -> list[Job]:
    if state is None or not state.rounds:
      return []
    plane = self._plane
    jobs = [plane.poll_overtaken(state.rounds[0].round)]
    for view in state.rounds:
      known = {(view.round, *life) for life in view.tried}
      listed = self._try(plane.list_answers(view.round)) or ()
      jobs += [plane.poll_answer(key) for key in listed if key not in known]
    return jobs

  def _try(self, job: Job) -> Any:
    """Runs a poller's job; a store that is away is no reason to die."""
    try:
      return run_job(job, self._driver.exchange)
    except ExchangeError as error:
      logger.warning("the syncer looks again: %s", error)
      return None
