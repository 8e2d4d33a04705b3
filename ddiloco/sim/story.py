"""The last that every actor of a world saw, to understand a violation by."""

import collections
from typing import Any

from ddiloco.sim.process import Process
from ddiloco.sim.world import World
from ddiloco.types import SECOND_NS

_KEPT = 8  # last events of every actor
_SHOWN = 400  # characters of one of them


class Story:
  """Told every event; tells the last ones."""

  def __init__(self, world: World):
    self._world = world
    self._recent: dict[str, collections.deque] = {}

  def saw(self, process: Process, event: Any) -> None:
    """An actor has taken in an event."""
    world = self._world
    recent = self._recent.setdefault(
      process.name, collections.deque(maxlen=_KEPT)
    )
    recent.append((world.events, world.heap.now_ns, event))

  def text(self) -> str:
    """The last events of every life, and where everybody stands."""
    lines = ["last events, by (number, seconds):"]
    for name in sorted(self._recent):
      lines.append(f"  {name}")
      for number, now_ns, event in self._recent[name]:
        shown = str(event)[:_SHOWN]
        lines.append(f"    {number:6} {now_ns / SECOND_NS:10.4f} {shown}")
    for process in self._world.processes.values():
      state = process.actor and process.actor.state
      life = "alive" if process.alive else "dead"
      lines.append(f"  {process.name} is {life}: {state}")
    return "\n".join(lines)
