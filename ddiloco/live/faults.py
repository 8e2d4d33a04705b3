"""Performs the fault script on live processes, and proves that it did."""

import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any

from ddiloco.live.children import Child, Journal, is_stopped, slow_down
from ddiloco.protocol import presence
from ddiloco.protocol.faults import Fault, to_json
from ddiloco.types import SECOND_NS


@dataclasses.dataclass
class _Pending:
  """One fault on its way from script to proof."""

  fault: Fault
  begun_s: float | None = None
  pid: int | None = None
  child: str = ""  # whom it hit; a syncer's place may be a standby's
  evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
  done: bool = False


class FaultRunner:
  """Called often by the supervisor; acts when a fault is due."""

  def __init__(
    self,
    faults: tuple[Fault, ...],
    children: dict[str, Child],
    journal: Journal,
    *,
    at_work: Callable[[str], str | None] = lambda actor: actor,
  ):
    """Takes who an actor of the script is at a given time."""
    self._at_work = at_work
    self._children, self._journal = children, journal
    # A resumed run does not suffer again what an earlier session proved.
    proved = [
      line["fault"] for line in journal.lines("fault") if line["took_effect"]
    ]
    self._pending = []
    for fault in faults:
      record = to_json((fault,))[0]
      if record in proved:
        proved.remove(record)
      else:
        self._pending.append(_Pending(fault))
    self._origin_s: float | None = None

  def begin(self) -> None:
    """The instant that times in the script count from."""
    if self._origin_s is None:
      self._origin_s = time.monotonic()

  def tick(self, round_: int) -> None:
    """Starts what is due and looks after what is under way."""
    for item in self._pending:
      if item.done:
        continue
      if item.begun_s is not None:
        self._go_on(item, self._children[item.child])
      elif self._due(item.fault, round_):
        child = self._at_work(item.fault.actor)
        if child is not None:  # else wait until there is somebody to hit
          item.child = child
          self._start(item, self._children[child], round_)

  def exited(self, name: str, code: int) -> None:
    """A process has ended; a kill is proved by its signal."""
    for item in self._pending:
      if item.child != name or item.begun_s is None or item.done:
        continue
      if "exit_code" in item.evidence:
        continue  # the end of the process that followed the one it hit
      item.evidence["exit_code"] = code
      if item.fault.what == "kill":
        item.evidence["took_effect"] = code == -signal.SIGKILL
        if item.fault.for_ns is None:
          self._finish(item)
      else:
        # A slow or paused one proved it before, or never will.
        item.evidence.setdefault("took_effect", item.fault.what == "stop")
        self._finish(item)

  def restart_s(self, name: str) -> float | None:
    """When a killed process is to come back, if the script says so."""
    for item in self._pending:
      kill = item.fault.what == "kill" and item.child == name
      if kill and item.begun_s is not None and not item.done:
        if item.fault.for_ns is not None:
          return item.begun_s + item.fault.for_ns / SECOND_NS
    return None

  def absent_at_first(self, name: str) -> bool:
    """Whether the script lets this learner join later."""
    return presence.absent_at_first(
      item.fault for item in self._pending if item.fault.actor == name
    )

  def leaves(self, name: str) -> bool:
    """Whether the script has told this process to leave."""
    told = [
      item
      for item in self._pending
      if item.child == name
      and item.begun_s is not None
      and item.fault.what in presence.KINDS
    ]
    newest = max(told, key=lambda item: item.begun_s, default=None)
    return newest is not None and newest.fault.what == "stop"

  @property
  def waiting(self) -> bool:
    """Whether a late joiner is still to come."""
    return any(
      item.fault.what == "start" and item.begun_s is None
      for item in self._pending
    )

  def finish(self) -> list[str]:
    """Journals what is open; returns the faults that took no effect."""
    idle = []
    for item in self._pending:
      if not item.done:
        if item.begun_s is None:
          item.evidence["why"] = "the run ended before it was due"
        self._finish(item)
      if not item.evidence.get("took_effect"):
        idle.append(f"{to_json((item.fault,))[0]}")
    return idle

  # --- The kinds ------------------------------------------------------------

  def _due(self, fault: Fault, round_: int) -> bool:
    if fault.at_round is not None:
      return round_ >= fault.at_round
    if self._origin_s is None:
      return False
    elapsed_s = time.monotonic() - self._origin_s
    return elapsed_s >= fault.at_ns / SECOND_NS

  def _start(self, item: _Pending, child: Child, round_: int) -> None:
    what = item.fault.what
    if what == "start":
      if child.running:
        return  # wait until it has left
      child.over, child.restart_s = False, time.monotonic()
    elif not child.running:
      return  # wait until there is something to hit
    item.begun_s = time.monotonic()
    item.evidence["at_round"] = round_
    if child.process is not None:
      item.pid = item.evidence["pid"] = child.process.pid
    match what:
      case "kill":
        child.send(signal.SIGKILL)
      case "stop":
        child.send(signal.SIGTERM)
      case "pause" | "slow":
        child.send(signal.SIGSTOP)

  def _go_on(self, item: _Pending, child: Child) -> None:
    match item.fault.what:
      case "kill":
        if child.running and child.process.pid != item.pid and child.ready:
          item.evidence["back_after_s"] = time.monotonic() - item.begun_s
          self._finish(item)
      case "start":
        if child.running and child.ready:
          item.evidence["pid"] = child.process.pid
          item.evidence["took_effect"] = True
          self._finish(item)
      case "pause":
        self._check_stopped(item)
        if self._over(item):
          child.send(signal.SIGCONT)
          self._finish(item)
      case "slow":
        self._check_stopped(item)
        self._duty_cycle(item, child)

  def _over(self, item: _Pending) -> bool:
    if item.fault.for_ns is None:
      return False
    elapsed_s = time.monotonic() - item.begun_s
    return elapsed_s >= item.fault.for_ns / SECOND_NS

  def _check_stopped(self, item: _Pending) -> None:
    """SIGSTOP took effect if the kernel says that the process is stopped."""
    if is_stopped(item.pid):
      item.evidence["took_effect"] = True

  def _duty_cycle(self, item: _Pending, child: Child) -> None:
    """Lets the process run one part in `factor` of the time."""
    if self._over(item) or not child.running:
      child.send(signal.SIGCONT)
      self._finish(item)
      return
    slow_down(child, item.fault.factor_permille / 1000)

  def _finish(self, item: _Pending) -> None:
    item.done = True
    took_effect = bool(item.evidence.pop("took_effect", False))
    self._journal.write(
      "fault",
      who=item.fault.actor,
      fault=to_json((item.fault,))[0],
      took_effect=took_effect,
      evidence=item.evidence,
    )
    item.evidence["took_effect"] = took_effect
