"""The exchange of the virtual world: honest at heart, hostile on request.

Every operation travels to the store, takes effect there at one instant, and
its result travels back. What may go wrong on the way is drawn per operation
from `Weather`. The store itself never breaks what a real one promises:
creates are atomic, and what was acknowledged stays.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from ddiloco.engine.ports import Call, ExchangeError, Item
from ddiloco.sim.clock import Heap, spread

Reply = Callable[[Any], None]  # gets a result, or an ExchangeError to throw


@dataclasses.dataclass(frozen=True, slots=True)
class Weather:
  """Chances of each trouble per operation; times in ns."""

  delay_ns: int = 2_000_000  # one way, on average
  spread: float = 0.5  # of the delay
  late: float = 0.0  # the effect comes up to 50 delays later
  lost: float = 0.0  # never arrives; an error after the time-out
  refused: float = 0.0  # arrives, is turned down, says so
  unconfirmed: float = 0.0  # takes effect; the caller gets an error
  doubled: float = 0.0  # takes effect twice
  stale: float = 0.0  # a read shows what was there before the last write
  torn: float = 0.0  # a refused put leaves part of the object behind
  lagging: float = 0.0  # a listing lacks what is newer than the lag
  lag_ns: int = 1_000_000_000
  timeout_ns: int = 1_000_000_000


@dataclasses.dataclass(slots=True)
class _Object:
  item: Item
  since_ns: int
  before: Item | None


class SimExchange:
  """A key-value store in virtual time, shared by all actors of a world."""

  def __init__(self, heap: Heap, rng: random.Random):
    self._heap, self._rng = heap, rng
    self._objects: dict[str, _Object] = {}
    self._generation = 0
    self._waiting: dict[str, list[Callable[[], None]]] = {}
    self.weather = Weather()
    self.outage = False  # every operation fails
    self.full = False  # every write fails
    self.cut_off: set[str] = set()  # actors whose operations never arrive
    self.effects: dict[str, int] = {}  # how often each trouble happened
    self.on_create: Callable[[str, bytes], None] = lambda key, value: None

  # --- Operations in time ---------------------------------------------------

  def submit(self, actor: str, call: Call, reply: Reply) -> None:
    """Performs an operation for an actor; `reply` is called later, once."""
    weather, heap = self.weather, self._heap
    if self.outage or actor in self.cut_off:
      self._note("outage" if self.outage else "partition")
      error = ExchangeError(f"{call.method} {call.args[0]}: no answer")
      heap.after(weather.timeout_ns, lambda: reply(error))
      return
    trouble = self._draw(call)
    if trouble == "lost":
      error = ExchangeError(f"{call.method} {call.args[0]}: timed out")
      heap.after(weather.timeout_ns, lambda: reply(error))
      return
    there_ns, back_ns = self._delay_ns(), self._delay_ns()
    if trouble == "late":
      there_ns *= self._rng.randint(2, 50)

    def arrive() -> None:
      heap.after(back_ns, _bound(reply, self._arrive(call, trouble)))

    heap.after(there_ns, arrive)
    if trouble == "doubled":
      heap.after(
        there_ns * self._rng.randint(1, 20), lambda: self._arrive(call, "")
      )

  def when(self, key: str, action: Callable[[], None]) -> None:
    """Runs `action` once, some time after `key` is there."""
    if key in self._objects:
      self._heap.after(self._delay_ns(), action)
    else:
      self._waiting.setdefault(key, []).append(action)

  def peek(self, key: str) -> bytes | None:
    """What the world itself sees; no actor does this."""
    found = self._objects.get(key)
    return None if found is None else found.item.value

  def names(self, prefix: str) -> list[str]:
    """The keys that start with `prefix`, sorted."""
    return sorted(key for key in self._objects if key.startswith(prefix))

  def plant(self, key: str, value: bytes) -> None:
    """Puts an object that no actor wrote."""
    self._write(key, value)

  # --- The store ------------------------------------------------------------

  def _arrive(self, call: Call, trouble: str) -> Any:
    method, key = call.method, call.args[0]
    writes = method in ("put", "put_if_absent", "compare_and_swap")
    if trouble == "refused" or (self.full and writes):
      if self.full and writes:
        self._note("full")
      if method == "put" and self._rng.random() < self.weather.torn:
        self._note("torn")
        value = call.args[1]
        self._write(key, value[: self._rng.randrange(len(value) + 1)])
      return ExchangeError(f"{method} {key}: refused")
    result = getattr(self, f"_{method}")(*call.args, trouble == "stale")
    if trouble == "unconfirmed":
      return ExchangeError(f"{method} {key}: no confirmation")
    return result

  def _put(self, key: str, value: bytes, stale: bool) -> None:
    del stale
    self._write(key, value)

  def _put_if_absent(self, key: str, value: bytes, stale: bool) -> bool:
    del stale
    if key not in self._objects:
      self.on_create(key, value)
      self._write(key, value)
    return self._objects[key].item.value == value

  def _compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None, stale: bool
  ) -> bytes | None:
    del stale
    found = self._objects.get(key)
    if (found.item.generation if found else None) != generation:
      return None
    self._write(key, value)
    return self._objects[key].item.generation

  def _get(self, key: str, stale: bool) -> Item | None:
    found = self._objects.get(key)
    if found is None:
      return None
    return found.before if stale else found.item

  def _list(self, prefix: str, lags: bool) -> list[str]:
    limit_ns = self._heap.now_ns - (self.weather.lag_ns if lags else 0)
    return [
      key
      for key in self.names(prefix)
      if self._objects[key].since_ns <= limit_ns
    ]

  def _delete(self, key: str, stale: bool) -> None:
    del stale
    self._objects.pop(key, None)

  def _delete_prefix(self, prefix: str, stale: bool) -> None:
    del stale
    for key in self.names(prefix):
      del self._objects[key]

  def _write(self, key: str, value: bytes) -> None:
    self._generation += 1
    found = self._objects.get(key)
    self._objects[key] = _Object(
      Item(value, b"%d" % self._generation),
      self._heap.now_ns if found is None else found.since_ns,
      None if found is None else found.item,
    )
    for action in self._waiting.pop(key, ()):
      self._heap.after(self._delay_ns(), action)

  # --- Chance ---------------------------------------------------------------

  def _draw(self, call: Call) -> str:
    """The trouble this operation meets; mostly none."""
    weather, chance = self.weather, self._rng.random()
    writes = call.method not in ("get", "list")
    for name, share, applies in (
      ("lost", weather.lost, True),
      ("refused", weather.refused, True),
      ("late", weather.late, True),
      ("unconfirmed", weather.unconfirmed, writes),
      ("doubled", weather.doubled, writes),
      ("stale", weather.stale, call.method == "get"),
      ("stale", weather.lagging, call.method == "list"),
    ):
      if not applies:
        continue
      if chance < share:
        self._note(
          "lagging" if call.method == "list" and name == "stale" else name
        )
        return name
      chance -= share
    return ""

  def _delay_ns(self) -> int:
    return spread(self._rng, self.weather.delay_ns, self.weather.spread)

  def _note(self, trouble: str) -> None:
    self.effects[trouble] = self.effects.get(trouble, 0) + 1


def _bound(reply: Reply, result: Any) -> Callable[[], None]:
  return lambda: reply(result)
