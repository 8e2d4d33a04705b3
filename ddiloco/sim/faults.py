"""Performs a fault script on a world, and proves that it did.

What each kind does is said in `protocol.fault_kinds`. A fault that finds its
actor dead waits until there is something to hit, as in a live run.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ddiloco.engine.ports import Call
from ddiloco.protocol import keys, messages, presence, wire
from ddiloco.protocol.fault_kinds import Fault
from ddiloco.protocol.messages import AnswerHeader, PartRef
from ddiloco.sim.world import RESTART_NS, RIVAL, SYNCER, World
from ddiloco.types import MILLISECOND_NS, Anchor

_AGAIN_NS = 50 * MILLISECOND_NS  # until looking for the actor again
_NEEDS_DEATH = ("start",)
_NEEDS_LIFE = ("kill", "pause", "stop", "jump", "shrink")


@dataclasses.dataclass(eq=False)
class Outcome:
  """One fault on its way from script to proof. The world's time."""

  fault: Fault
  began_ns: int | None = None
  began_round: int | None = None
  ended_ns: int | None = None
  took_effect: bool = False
  evidence: dict[str, Any] = dataclasses.field(default_factory=dict)


class FaultRunner:
  """Acts when a fault is due; create it before the world's actors start."""

  def __init__(self, world: World, faults: Iterable[Fault]):
    """Times in the script count from now."""
    self._world = world
    self.outcomes = [Outcome(fault) for fault in faults]
    self._ends: dict[Outcome, Callable[[], None]] = {}
    self._spoils: dict[str, list[Outcome]] = {}
    self._spoilt: dict[str, tuple[Outcome, PartRef | None]] = {}
    self._over = False
    world.audit.on_commit = self._committed
    world.exchange.on_submit = self._submitted
    self._written = world.exchange.on_write
    world.exchange.on_write = self._wrote
    for item in self.outcomes:
      if item.fault.at_ns is not None:
        world.heap.after(item.fault.at_ns, self._later(item))

  def absent_at_first(self, who: str) -> bool:
    """Whether the script lets this learner join later."""
    return presence.absent_at_first(
      item.fault for item in self.outcomes if _who(item.fault) == who
    )

  @property
  def waiting(self) -> bool:
    """Whether a late joiner is still to come."""
    return any(
      item.fault.what == "start" and item.began_ns is None
      for item in self.outcomes
    )

  @property
  def under_way(self) -> list[Fault]:
    """The faults that have begun and will end."""
    return [item.fault for item in self._ends]

  def heal(self) -> None:
    """Ends what is under way; nothing new begins."""
    self._over = True
    self._spoils.clear()
    for item in list(self._ends):
      self._end(item)

  @property
  def idle(self) -> list[Fault]:
    """The faults that have taken no effect."""
    return [item.fault for item in self.outcomes if not item.took_effect]

  # --- When -----------------------------------------------------------------

  def _committed(self, t: int) -> None:
    for item in self.outcomes:
      at_round = item.fault.at_round
      if item.began_ns is None and at_round is not None and t >= at_round:
        item.began_round = t
        self._world.heap.after(0, self._later(item))

  def _later(self, item: Outcome) -> Callable[[], None]:
    return lambda: self._begin(item)

  def _begin(self, item: Outcome) -> None:
    world, fault = self._world, item.fault
    if self._over or item.began_ns is not None:
      return
    who = _who(fault)
    process = world.processes.get(who)
    alive = process is not None and process.alive
    if fault.what in (_NEEDS_DEATH if alive else _NEEDS_LIFE):
      world.heap.after(_AGAIN_NS, self._later(item))
      return
    item.began_ns, item.began_round = world.heap.now_ns, world.committed
    end = getattr(self, f"_{fault.what}")(item, who)
    if end is None:
      return
    self._ends[item] = end
    if fault.for_ns is not None:
      world.heap.after(fault.for_ns, lambda: self._end(item))

  def _end(self, item: Outcome) -> None:
    end = self._ends.pop(item, None)
    if end is not None:
      end()
      item.ended_ns = self._world.heap.now_ns

  # --- The kinds: each begins, and returns what ends it ---------------------

  def _kill(self, item: Outcome, who: str) -> None:
    restart_ns = item.fault.for_ns or RESTART_NS
    item.evidence["life"] = self._world.processes[who].name
    self._world.crash(who, restart_ns)
    item.took_effect = True

  def _pause(self, item: Outcome, who: str) -> Callable[[], None]:
    process = self._world.processes[who]
    process.pause()
    before = process.held

    def end() -> None:
      process.resume()
      self._prove(item, "held_actions", process.held - before)

    return end

  def _slow(self, item: Outcome, who: str) -> Callable[[], None]:
    world = self._world
    before = world.slowed.get(who, 0)
    world.slow_permille[who] = item.fault.factor_permille

    def end() -> None:
      world.slow_permille.pop(who, None)
      self._prove(item, "slow_steps", world.slowed.get(who, 0) - before)

    return end

  def _shrink(self, item: Outcome, who: str) -> Callable[[], None] | None:
    world = self._world
    if world.lost_slices.get(who, 0) == world.config.elastic.slices:
      item.evidence["why"] = "there was no slice left to lose"
      return None
    world.resize(who, 1)
    process = world.processes[who]
    item.evidence["slices_left"] = (
      world.config.elastic.slices - world.lost_slices[who]
    )
    item.took_effect = process.alive
    return lambda: world.resize(who, -1)

  def _stop(self, item: Outcome, who: str) -> None:
    self._world.processes[who].stop("stopped")
    item.took_effect = True

  def _start(self, item: Outcome, who: str) -> None:
    self._world.start(who)
    item.took_effect = True

  def _partition(self, item: Outcome, who: str) -> Callable[[], None]:
    exchange = self._world.exchange
    exchange.cut_off.add(who)
    count = self._counter("partition", who)

    def end() -> None:
      exchange.cut_off.discard(who)
      self._prove(item, "operations", count())

    return end

  def _clog(self, item: Outcome, who: str) -> Callable[[], None]:
    exchange = self._world.exchange
    exchange.clog(who)
    count = self._counter("clog", who)

    def end() -> None:
      exchange.unclog(who)
      self._prove(item, "operations", count())

    return end

  def _outage(self, item: Outcome, who: str) -> Callable[[], None]:
    return self._exchange_flag(item, "outage")

  def _full(self, item: Outcome, who: str) -> Callable[[], None]:
    return self._exchange_flag(item, "full")

  def _exchange_flag(self, item: Outcome, name: str) -> Callable[[], None]:
    exchange = self._world.exchange
    setattr(exchange, name, True)
    count = self._counter(name, None)

    def end() -> None:
      setattr(exchange, name, False)
      self._prove(item, "operations", count())

    return end

  def _jump(self, item: Outcome, who: str) -> None:
    process = self._world.processes[who]
    before_ns = process.clock.now_ns()
    process.clock.jump(item.fault.for_ns)
    process.clock_jumped()
    self._prove(item, "jumped_ns", process.clock.now_ns() - before_ns)

  def _rival(self, item: Outcome, who: str) -> Callable[[], None]:
    world = self._world
    rival = who.replace(SYNCER, RIVAL)
    world.start(rival)
    process = world.processes[rival]

    def end() -> None:
      self._prove(item, "opened", int(process.actor is not None))
      if world.processes[rival] is process:
        world.crash(rival, None)

    return end

  def _nan(self, item: Outcome, who: str) -> None:
    self._spoils.setdefault(who, []).append(item)

  _outlier = _layout = _outdated = _nan

  # --- Proof ----------------------------------------------------------------

  def _prove(self, item: Outcome, what: str, count: int) -> None:
    item.evidence[what] = count
    item.took_effect = count > 0

  def _counter(self, trouble: str, who: str | None) -> Callable[[], int]:
    """Counts how often a trouble has hit an actor (None: any) from now on."""
    hits = self._world.exchange.hits

    def total() -> int:
      return sum(
        count
        for (name, actor), count in hits.items()
        if name == trouble and who in (None, actor)
      )

    before = total()
    return lambda: total() - before

  # --- Answers that are not what they should be -----------------------------

  def _submitted(self, who: str, call: Call) -> Call:
    """Spoils the next answer of whoever the script says."""
    key = call.args[0]
    answer, _, what = key.rpartition(".")
    if what == "header" and answer in self._spoilt:
      item, part_ref = self._spoilt[answer]
      header = messages.decode(AnswerHeader, call.args[1])
      header = dataclasses.replace(header, parts=(part_ref,))
      return call._replace(args=(key, self._spoil_header(item, header)))
    if self._spoils.get(who) and keys.answer_round(key) and what != "header":
      item = self._spoils[who][0]
      part = self._spoil_part(item, key, call.args[1])
      self._spoilt[answer] = item, PartRef(len(part), wire.sha256(part))
      return call._replace(args=(key, part))
    return call

  def _spoil_header(self, item: Outcome, header: AnswerHeader) -> bytes:
    match item.fault.what:
      case "layout":
        header = dataclasses.replace(header, layout="another")
      case "outdated":
        before = self._world.rules.schedule.version_before
        older = tuple(
          dataclasses.replace(part, anchor=before(part.fragment, part.anchor))
          for part in header.contributions
        )
        if older == header.contributions:  # none is older than the first
          answer = (header.learner, header.incarnation, header.attempt)
          key = keys.answer_header(header.round, *answer)
          del self._spoilt[key.removesuffix(".header")]
        header = dataclasses.replace(header, contributions=older)
    return messages.encode(header)

  def _spoil_part(self, item: Outcome, key: str, part: bytes) -> bytes:
    match item.fault.what:
      case "nan":
        return b"\xff" * len(part)  # no number in any codec
      case "outlier":
        due = self._world.rules.schedule.fragments(keys.answer_round(key))
        factor = item.fault.factor_permille / 1000
        return self._world.compute.scaled(part, due, factor)
    return part

  def _wrote(self, key: str, value: bytes) -> None:
    """A spoilt answer is there once its header is."""
    self._written(key, value)
    answer = key.removesuffix(".header")
    if answer == key or answer not in self._spoilt or not _whole(value):
      return
    item, _ = self._spoilt.pop(answer)
    if self._never_counted(item):
      self._world.audit.spoilt.add(key)
    if not item.took_effect:
      item.took_effect = True
      item.evidence["answer"] = key
      for pending in self._spoils.values():
        if item in pending:
          pending.remove(item)

  def _never_counted(self, item: Outcome) -> bool:
    match item.fault.what:
      case "outlier":  # accepted if everybody's are like that
        return False
      case "outdated":
        return self._world.rules.anchor is not Anchor.ANY
    return True


def _whole(header: bytes) -> bool:
  try:
    messages.decode(AnswerHeader, header)
  except wire.WireError:
    return False  # torn
  return True


def _who(fault: Fault) -> str:
  """The world's name of the actor."""
  return fault.actor.replace(" ", "-")
