"""What a living actor does about an exchange that is away, refuses, or is lost.

Away: what the life is worth nothing without (`Call.vital`) is tried until the
exchange is back or the life ends; all else fails, and its job says what then.
Refusing, or lost: the life ends at once, and writes nothing more.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from ddiloco.engine.ports import (
  Call,
  DamagedRun,
  Exchange,
  ExchangeError,
  ExchangeRefused,
)
from ddiloco.live.log import logger
from ddiloco.protocol import keys

_PAUSE_S = 0.2  # the exchange has backed off already
_SAY_EVERY_S = 10.0
_WATCH_EVERY_S = 5.0


class SteadyExchange:
  """The exchange of one life: the port `Exchange`, and `perform`."""

  def __init__(
    self,
    exchange: Exchange,
    *,
    ended: threading.Event,
    fail: Callable[[Exception], None],
  ):
    """Takes the event that the life ends by, and what ends it."""
    self._exchange, self._ended, self._fail = exchange, ended, fail
    self._lost: ExchangeRefused | None = None
    self._said_s = 0.0

  def __getattr__(self, name: str) -> Any:
    """An operation of the exchange; a refusal ends the life."""
    operation = getattr(self._exchange, name)
    if not callable(operation):
      return operation

    def guarded(*args: Any, **options: Any) -> Any:
      if self._lost is not None:
        raise self._lost
      try:
        return operation(*args, **options)
      except ExchangeRefused as error:
        self._fail(error)
        raise

    return guarded

  def perform(self, call: Call) -> Any:
    """A request of a job; a vital one does not fail because of an outage."""
    begin_s = time.monotonic()
    tried_again = False
    while True:
      try:
        answer = call.on(self)
      except ExchangeRefused:
        raise
      except ExchangeError as error:
        # A life that is asked to stop ends within the pause.
        if not call.vital or self._ended.wait(_PAUSE_S):
          raise
        tried_again = True
        self._say(begin_s, error)
      else:
        if tried_again:
          logger.info(
            "the exchange is back: %s went through after %.0f s",
            call.method,
            time.monotonic() - begin_s,
          )
        return answer

  def _say(self, begin_s: float, error: ExchangeError) -> None:
    now_s = time.monotonic()
    if now_s - self._said_s >= _SAY_EVERY_S:
      self._said_s = now_s
      logger.warning(
        "the exchange has been away for %.0f s, and is tried until it is back: "
        "%s",
        now_s - begin_s,
        error,
      )

  def watch(self) -> None:
    """Looks now and then whether the run is still there; raises if not.

    Readers find nothing in an exchange that was emptied, as in one where
    nothing has happened yet; and writers would fill it with ruins.
    """
    while not self._ended.wait(_WATCH_EVERY_S):
      try:
        first = self._exchange.get(keys.commit(0))
      except ExchangeRefused as error:
        self._fail(error)
        return
      except ExchangeError:
        continue
      if first is None:
        reason = (
          f"the run is gone from {getattr(self._exchange, 'url', 'its store')}"
          f" ({keys.commit(0)} is missing). Was the exchange deleted, emptied "
          "or replaced? Bring it back and start again, or use a new --workdir."
        )
        self._lost = ExchangeRefused(reason)
        raise DamagedRun(reason)
