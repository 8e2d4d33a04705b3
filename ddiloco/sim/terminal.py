"""How a simulation tells how far it is, and is asked to stop."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

_SHOW_EVERY_S = 5.0  # where lines are shown, not a terminal


@contextlib.contextmanager
def interruptible(stop: Callable[[str], None]) -> Iterator[None]:
  """Calls `stop` with the reason at SIGINT or SIGTERM, instead of dying."""

  def handle(number: int, frame: object) -> None:
    stop(f"{signal.Signals(number).name} received")

  before = {
    number: signal.signal(number, handle)
    for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


class Progress:
  """How far something is: one line on a terminal, lines elsewhere."""

  def __init__(self, line: Callable[[], str]):
    """Shows `line()`, after the seconds since now, whenever that is due."""
    self._line = line
    self._console = Console(stderr=True)
    self._status = None
    if self._console.is_terminal:
      self._status = self._console.status("starting")
    self._every_s = 0.25 if self._status else _SHOW_EVERY_S
    self._begun_s = self._shown_s = time.monotonic()

  def __enter__(self) -> "Progress":
    if self._status is not None:
      self._status.start()
    return self

  def __exit__(self, *error: object) -> None:
    if self._status is not None:
      self._status.stop()

  def due(self) -> bool:
    """Whether it is time to show something."""
    return time.monotonic() - self._shown_s >= self._every_s

  def update(self) -> None:
    """Shows how far it is, if that is due."""
    if not self.due():
      return
    self._shown_s = time.monotonic()
    line = f"{self._shown_s - self._begun_s:.0f} s: {self._line()}"
    if self._status is not None:
      self._status.update(line)
    else:
      self.say(line)

  def say(self, text: str) -> None:
    """A line that stays."""
    if self._status is not None:
      self._console.print(text, markup=False, highlight=False)
    else:
      print(text, file=sys.stderr, flush=True)
