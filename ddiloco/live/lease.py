"""Leases: one syncer at a time merges for a shard. They only save work."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection

from ddiloco.config import ConfigError, LiveConfig
from ddiloco.engine import startup
from ddiloco.engine.ports import Exchange, ExchangeError, Item
from ddiloco.live import workplace
from ddiloco.live.driver import run_job
from ddiloco.live.log import logger
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import Lease

_NOBODY = 0  # the process of a lease that was given back
_LOOKS = 20  # at somebody else's lease, while it lasts


class LeaseTaken(ConfigError):
  """Another syncer is at work."""


class HeldLease:
  """A claimed lease, renewed by a thread of its own until it is released.

  From the claim on: loading and compiling may take longer than a lease lasts.
  """

  def __init__(
    self,
    exchange: Exchange,
    shard: int,
    lease: Lease,
    generation: bytes,
    every_s: float,
  ):
    self._exchange, self._lease = exchange, lease
    self.shard, self._key = shard, keys.lease(shard)
    self._generation, self._every_s = generation, every_s
    self._released = threading.Event()
    self._lost: Callable[[], None] = lambda: None
    self.lost = False
    self._thread = threading.Thread(
      target=self._renew, name="lease", daemon=True
    )
    self._thread.start()

  @property
  def epoch(self) -> int:
    """The life that the lease gives its holder."""
    return self._lease.epoch

  def when_lost(self, action: Callable[[], None]) -> None:
    """What to do once somebody else has taken over; at once, if they have."""
    self._lost = action
    if self.lost:
      action()

  def release(self) -> None:
    """Gives the lease back; it stays, so that no life repeats its epoch."""
    self._released.set()
    self._thread.join()
    free = Lease(self.epoch, self._lease.nonce, self._lease.host, _NOBODY, 0)
    try:
      self._exchange.compare_and_swap(
        self._key, messages.encode(free), self._generation
      )
    except ExchangeError as error:
      logger.warning("the lease stays until it expires: %s", error)

  def _renew(self) -> None:
    old = self._lease
    while not self._released.wait(self._every_s):
      beat = self._lease.beat + 1
      self._lease = Lease(old.epoch, old.nonce, old.host, old.pid, beat)
      try:
        generation = self._exchange.compare_and_swap(
          self._key, messages.encode(self._lease), self._generation
        )
      except ExchangeError as error:
        logger.warning("the lease was not renewed: %s", error)
        continue
      if generation is None and not self._is_ours():
        self.lost = True
        self._lost()
        return
      self._generation = generation or self._generation

  def _is_ours(self) -> bool:
    """Whether it is, after all: a renewal reported as failed had succeeded."""
    try:
      item = self._exchange.get(self._key)
    except ExchangeError as error:
      logger.warning("the lease cannot be read: %s", error)
      return True  # until somebody can be seen to have it
    if item is None:
      return False
    lease = _read(item)
    if lease is not None and lease.nonce != self._lease.nonce:
      return False
    self._generation = item.generation  # garbage is nobody's: written over
    return True


def take_lease(
  exchange: Exchange,
  live: LiveConfig,
  interrupt: threading.Event,
  *,
  shards: int = 1,
  wanted: Collection[int] | None = None,
  standby: bool = False,
  over: Callable[[], bool] = lambda: False,
) -> HeldLease | None:
  """Claims a shard's lease, waiting out a holder that may be dead.

  Only this machine's monotonic clock is asked, and only for how long the lease
  was seen not to change. Taking it too early costs work, never a commit.

  Args:
    exchange: where it lies.
    live: how long it lasts.
    interrupt: ends the wait.
    shards: how many the syncer has.
    wanted: those that will do; None: any.
    standby: waits for a holder that is alive too, and for a store that is away.
    over: looked at now and then; true ends the wait.

  Returns:
    None if the wait was ended.

  Raises:
    LeaseTaken: the holder is alive.
    ExchangeError: the store cannot be read.
  """
  watches: list[_Watch] = []
  wanted = range(shards) if wanted is None else wanted
  while not interrupt.is_set() and not over():
    try:
      watches = watches or [_Watch(exchange, live, shard) for shard in wanted]
      for watch in watches:
        if watch.is_free() and (claim := _claim(exchange, watch, shards)):
          return HeldLease(exchange, watch.shard, *claim, live.lease_s / 2)
      interrupt.wait(live.lease_s / _LOOKS)
      renewed = [watch.look() for watch in watches]
    except ExchangeError as error:
      if not standby:
        raise
      logger.warning("the standby looks again: %s", error)
      watches = []  # the holders could not renew them either
      continue
    if None not in renewed and not standby:
      other = renewed[0]
      which = f" for shard {watches[0].shard}" if shards > 1 else ""
      raise LeaseTaken(
        f"a syncer is at work{which} in {exchange.url}: process {other.pid} on "
        f"{other.host}, epoch {other.epoch}. Stop that one first, or start "
        "this one with --standby to wait for its end; else use another workdir "
        "or --exchange."
      )
  return None


def _claim(exchange: Exchange, watch: "_Watch", shards: int) -> tuple | None:
  return run_job(
    startup.claim_lease(
      uuid.uuid4().hex,
      workplace.host(),
      os.getpid(),
      watch.seen,
      watch.shard,
      shards,
    ),
    exchange,
  )


class _Watch:
  """Somebody's lease, and for how long it has not changed."""

  def __init__(self, exchange: Exchange, live: LiveConfig, shard: int):
    self._exchange, self._lease_s = exchange, live.lease_s
    self.shard, self._key = shard, keys.lease(shard)
    self.seen: Item | None = exchange.get(self._key)
    self._since_s = time.monotonic()

  def look(self) -> Lease | None:
    """Its new content, if its holder has renewed it since the last look."""
    before, self.seen = self.seen, self._exchange.get(self._key)
    if before == self.seen or before is None or self.seen is None:
      return None
    self._since_s = time.monotonic()
    return _read(self.seen)

  def is_free(self) -> bool:
    """Whether the holder is gone, has been silent too long, or is dead."""
    if self.seen is None:
      return True
    lease = _read(self.seen)
    if lease is not None and lease.pid == _NOBODY:
      return True
    here = lease is not None and lease.host == workplace.host()
    if here and not _alive(lease.pid):
      return True
    return time.monotonic() - self._since_s > self._lease_s


def _read(item: Item) -> Lease | None:
  """None: it is garbage, which its holder will write over if there is one."""
  try:
    return messages.decode(Lease, item.value)
  except wire.WireError:
    return None


def _alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True
