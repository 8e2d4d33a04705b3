"""The lease: one syncer at a time merges. It saves work, nothing more."""

import os
import threading
import time
import uuid
from collections.abc import Callable

from ddiloco.config import ConfigError, LiveConfig
from ddiloco.engine import startup
from ddiloco.engine.ports import ExchangeError, Item
from ddiloco.live import workplace
from ddiloco.live.driver import run_job
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.log import logger
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Lease

_NOBODY = 0  # the process of a lease that was given back


class HeldLease:
  """A claimed lease, renewed by a thread of its own until it is released.

  From the claim on: loading and compiling may take longer than a lease lasts.
  """

  def __init__(
    self,
    exchange: TensorStoreExchange,
    lease: Lease,
    generation: bytes,
    every_s: float,
  ):
    self._exchange, self._lease = exchange, lease
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
        keys.LEASE, messages.encode(free), self._generation
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
          keys.LEASE, messages.encode(self._lease), self._generation
        )
      except ExchangeError as error:
        logger.warning("the lease was not renewed: %s", error)
        continue
      if generation is None:
        self.lost = True
        self._lost()
        return
      self._generation = generation


def take_lease(
  exchange: TensorStoreExchange, live: LiveConfig, interrupt: threading.Event
) -> HeldLease | None:
  """Claims the lease, waiting out a holder that may be dead.

  None if interrupted; `ConfigError` if the holder is alive.
  """
  nonce, pid = uuid.uuid4().hex, os.getpid()
  seen = exchange.get(keys.LEASE)
  since_s = time.monotonic()
  while not interrupt.is_set():
    if seen is None or _is_free(seen, since_s, live):
      claim = run_job(
        startup.claim_lease(nonce, workplace.host(), pid, seen), exchange
      )
      if claim is not None:
        return HeldLease(exchange, *claim, live.heartbeat_s)
    interrupt.wait(0.1)
    now = exchange.get(keys.LEASE)
    if seen is not None and now is not None and now.value != seen.value:
      lease = messages.decode(Lease, now.value)
      raise ConfigError(
        f"a syncer is at work in {exchange.url}: process {lease.pid} on "
        f"{lease.host}, epoch {lease.epoch}. One run has one syncer; stop "
        "that one first, or use another workdir or --exchange."
      )
    seen = now
  return None


def _is_free(item: Item, since_s: float, live: LiveConfig) -> bool:
  """Whether the holder is gone, has been silent too long, or is dead."""
  lease = messages.decode(Lease, item.value)
  if lease.pid == _NOBODY:
    return True
  if lease.host == workplace.host() and not _alive(lease.pid):
    return True
  return time.monotonic() - since_s > live.dead_after_s


def _alive(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True
