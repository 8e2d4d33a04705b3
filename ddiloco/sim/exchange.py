"""The exchange of the virtual world: honest at heart, hostile on request.

Every operation travels to the store, takes effect there at one instant, and
its result travels back; a failed one is tried again until its deadline, as a
live exchange does. What may go wrong on the way is drawn per operation from
`Weather`. The store itself never breaks what a real one promises: creates are
atomic, and what was acknowledged stays.
"""

import bisect
import dataclasses
import random
from collections.abc import Callable
from typing import Any

from ddiloco.engine.ports import Call, ExchangeError, Item
from ddiloco.sim.clock import Heap, spread
from ddiloco.types import MILLISECOND_NS, SECOND_NS

Reply = Callable[[Any], None]  # gets a result, or an ExchangeError to throw

_BACKOFF_MIN_NS = 50 * MILLISECOND_NS
_BACKOFF_MAX_NS = 2 * SECOND_NS
_WRITES = ("put", "put_if_absent", "compare_and_swap")


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

  @property
  def trouble(self) -> float:
    """No operation meets trouble more often."""
    share = self.lost + self.refused + self.late + self.unconfirmed
    return share + self.doubled + self.stale + self.lagging


@dataclasses.dataclass(slots=True)
class _Object:
  item: Item
  since_ns: int
  before: Item | None


@dataclasses.dataclass(slots=True)
class _Operation:
  """One request on its way: whose, until when, and how often it was tried."""

  actor: str
  call: Call
  reply: Reply
  wanted: Callable[[], bool]  # a dead caller tries no more
  deadline_ns: int
  tries: int = 0


class SimExchange:
  """A key-value store in virtual time, shared by all actors of a world."""

  def __init__(self, heap: Heap, rng: random.Random):
    self._heap, self._rng = heap, rng
    self._objects: dict[str, _Object] = {}
    self._rooms: dict[str, list[str]] = {}  # sorted keys, by their folder
    self._generation = 0
    self._waiting: dict[str, list[Callable[[], None]]] = {}
    self._clogged: dict[str, list[_Operation]] = {}
    self.weather = Weather()
    self.deadline_ns = 0  # within which failed operations are tried again
    self.outage = False  # every operation fails
    self.full = False  # every write fails
    # Prefixes of what is written for nobody. If there are any, memory is
    # short, and a stale read of what was rewritten finds nothing.
    self.unkept: tuple[str, ...] = ()
    self.cut_off: set[str] = set()  # actors whose operations never arrive
    self.effects: dict[str, int] = {}  # how often each trouble happened
    self.hits: dict[tuple[str, str], int] = {}  # (trouble, actor): how often
    # A write as it is asked for, before anything befalls it.
    self.on_submit: Callable[[str, Call], Call] = lambda actor, call: call
    self.on_create: Callable[[str, bytes], None] = lambda key, value: None
    self.on_write: Callable[[str, bytes], None] = lambda key, value: None
    self.on_delete: Callable[[str], None] = lambda key: None

  # --- Operations in time ---------------------------------------------------

  def submit(
    self,
    actor: str,
    call: Call,
    reply: Reply,
    wanted: Callable[[], bool] = lambda: True,
  ) -> None:
    """Performs an operation for an actor; `reply` is called later, once."""
    if call.method in _WRITES:
      call = self.on_submit(actor, call)
    deadline_ns = self._heap.now_ns + self.deadline_ns
    self._try(_Operation(actor, call, reply, wanted, deadline_ns))

  def _try(self, operation: _Operation) -> None:
    weather, heap = self.weather, self._heap
    actor, call = operation.actor, operation.call
    if not operation.wanted():
      return
    operation.tries += 1
    if actor in self._clogged:
      self._hit("clog", actor)
      self._clogged[actor].append(operation)
      return
    trouble = self._draw(call)
    if self.outage or actor in self.cut_off:
      trouble = "lost"
      self._hit("outage" if self.outage else "partition", actor)
    elif trouble:
      self._note(trouble)
    if trouble == "lost":
      error = ExchangeError(f"{call.method} {call.args[0]}: no answer")
      heap.after(weather.timeout_ns, lambda: self._end(operation, error))
      return
    there_ns, back_ns = self._delay_ns(), self._delay_ns()
    if trouble == "late":
      there_ns *= self._rng.randint(2, 50)

    def arrive() -> None:
      result = self._arrive(operation, trouble)
      heap.after(back_ns, lambda: self._end(operation, result))

    heap.after(there_ns, arrive)
    if trouble == "doubled":
      again_ns = there_ns * self._rng.randint(1, 20)
      heap.after(again_ns, lambda: self._arrive(operation, ""))

  def _end(self, operation: _Operation, result: Any) -> None:
    """The result is back: hand it over, or try again after an error."""
    if isinstance(result, ExchangeError):
      wait_ns = min(_BACKOFF_MIN_NS << min(operation.tries, 9), _BACKOFF_MAX_NS)
      wait_ns = spread(self._rng, wait_ns, 0.5)
      if self._heap.now_ns + wait_ns < operation.deadline_ns:
        self._heap.after(wait_ns, lambda: self._try(operation))
        return
    operation.reply(result)

  def when(self, key: str, action: Callable[[], None]) -> None:
    """Runs `action` once, some time after `key` is there."""
    if key in self._objects:
      self._heap.after(self._delay_ns(), action)
    else:
      self._waiting.setdefault(key, []).append(action)

  def forget(self, key: str, action: Callable[[], None]) -> bool:
    """Takes a `when` back; False if its key has been seen already."""
    waiting = self._waiting.get(key, [])
    if action not in waiting:
      return False
    waiting.remove(action)
    if not waiting:
      del self._waiting[key]
    return True

  def clog(self, actor: str) -> None:
    """Holds back whatever the actor asks for."""
    self._clogged.setdefault(actor, [])

  def unclog(self, actor: str) -> None:
    """Lets what was held back go on, in its order."""
    for operation in self._clogged.pop(actor, ()):
      operation.tries -= 1
      self._heap.after(0, lambda operation=operation: self._try(operation))

  def heal(self) -> None:
    """Ends all trouble; what is under way meets no new one."""
    delay_ns, spread_ = self.weather.delay_ns, self.weather.spread
    self.weather = Weather(delay_ns=delay_ns, spread=spread_)
    self.outage = self.full = False
    self.cut_off.clear()
    for actor in sorted(self._clogged):
      self.unclog(actor)

  def peek(self, key: str) -> bytes | None:
    """What the world itself sees; no actor does this."""
    found = self._objects.get(key)
    return None if found is None else found.item.value

  def names(self, prefix: str) -> list[str]:
    """The keys that start with `prefix`, sorted."""
    found = []
    for folder, room in self._rooms.items():
      if prefix.startswith(folder):
        begin = bisect.bisect_left(room, prefix)
        found += room[begin : bisect.bisect_left(room, prefix + "\x7f", begin)]
      elif folder.startswith(prefix):
        found += room
    return sorted(found)  # nothing to do, unless there were several folders

  def plant(self, key: str, value: bytes) -> None:
    """Puts an object that no actor wrote."""
    self._write(key, value)

  # --- The store ------------------------------------------------------------

  def _arrive(self, operation: _Operation, trouble: str) -> Any:
    call, tries = operation.call, operation.tries
    method, key = call.method, call.args[0]
    full = self.full and method in _WRITES
    if full:
      self._hit("full", operation.actor)
    if full or trouble == "refused":
      if method == "put" and self._rng.random() < self.weather.torn:
        self._tear(*call.args)
      return ExchangeError(f"{method} {key}: refused")
    match method:
      case "get":
        result = self._get(key, trouble == "stale")
      case "list":
        result = self._list(key, trouble == "lagging")
      case "compare_and_swap":
        result = self._compare_and_swap(*call.args, tries=tries)
      case _:
        result = getattr(self, f"_{method}")(*call.args)
    if trouble == "unconfirmed":
      return ExchangeError(f"{method} {key}: no confirmation")
    return result

  def _tear(self, key: str, value: bytes) -> None:
    """Writes a part; what is there whole already stays (a doubled request)."""
    end = self._rng.randrange(len(value) + 1)
    found = self._objects.get(key)
    if found is None or found.item.value != value:
      self._note("torn")
      self._write(key, value[:end])

  def _put(self, key: str, value: bytes) -> None:
    self._write(key, value)

  def _put_if_absent(self, key: str, value: bytes) -> bool:
    if key not in self._objects:
      self.on_create(key, value)
      self._write(key, value)
    return self._objects[key].item.value == value

  def _compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None, *, tries: int
  ) -> bytes | None:
    found = self._objects.get(key)
    if (found.item.generation if found else None) == generation:
      self._write(key, value)
      return self._objects[key].item.generation
    if tries > 1 and found and found.item.value == value:
      return found.item.generation  # an earlier try of the same operation
    return None

  def _get(self, key: str, stale: bool) -> Item | None:
    found = self._objects.get(key)
    if found is None:
      return None
    return found.before if stale else found.item

  def _list(self, prefix: str, lags: bool) -> list[str]:
    names = self.names(prefix)
    if not lags:
      return names
    limit_ns = self._heap.now_ns - self.weather.lag_ns
    return [key for key in names if self._objects[key].since_ns <= limit_ns]

  def _delete(self, key: str) -> None:
    if key in self._objects:
      self.on_delete(key)
      del self._objects[key]
      room = self._rooms[key.rpartition("/")[0]]
      del room[bisect.bisect_left(room, key)]

  def _delete_prefix(self, prefix: str) -> None:
    for key in self.names(prefix):
      self._delete(key)

  def _write(self, key: str, value: bytes) -> None:
    self.on_write(key, value)
    if key.startswith(self.unkept):
      return
    self._generation += 1
    item = Item(value, b"%d" % self._generation)
    found = self._objects.get(key)
    if found is None:
      self._objects[key] = _Object(item, self._heap.now_ns, None)
      bisect.insort(self._rooms.setdefault(key.rpartition("/")[0], []), key)
    else:
      found.item, found.before = item, None if self.unkept else found.item
    for action in self._waiting.pop(key, ()):
      self._heap.after(self._delay_ns(), action)

  # --- Chance ---------------------------------------------------------------

  def _draw(self, call: Call) -> str:
    """The trouble this operation meets; mostly none."""
    weather, chance = self.weather, self._rng.random()
    if chance >= weather.trouble:
      return ""
    writes = call.method not in ("get", "list")
    for name, share, applies in (
      ("lost", weather.lost, True),
      ("refused", weather.refused, True),
      ("late", weather.late, True),
      ("unconfirmed", weather.unconfirmed, writes),
      ("doubled", weather.doubled, writes),
      ("stale", weather.stale, call.method == "get"),
      ("lagging", weather.lagging, call.method == "list"),
    ):
      if not applies:
        continue
      if chance < share:
        return name
      chance -= share
    return ""

  def _delay_ns(self) -> int:
    return spread(self._rng, self.weather.delay_ns, self.weather.spread)

  def _hit(self, trouble: str, actor: str) -> None:
    self._note(trouble)
    self.hits[trouble, actor] = self.hits.get((trouble, actor), 0) + 1

  def _note(self, trouble: str) -> None:
    self.effects[trouble] = self.effects.get(trouble, 0) + 1
