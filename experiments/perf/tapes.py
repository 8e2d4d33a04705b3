"""Reads measurements from the tapes of a run on this machine.

All actors of one machine share the monotonic clock, so times of different
tapes may be compared here.
"""

import pathlib
from typing import Any

from ddiloco.live.workdir import exchange_url, open_exchange
from ddiloco.protocol import tape

Records = tuple[tape.Record, ...]


def read(workdir: pathlib.Path, actor: str) -> dict[int, Records]:
  """All lives of an actor: incarnation -> records."""
  exchange = open_exchange(exchange_url(workdir, ""))
  segments: dict[int, list[tape.Segment]] = {}
  for name in exchange.list(f"tape/{actor}."):
    segment = tape.decode_segment(exchange.get(name).value)
    segments.setdefault(segment.incarnation, []).append(segment)
  return {life: tape.join(parts)[1] for life, parts in segments.items()}


def events(records: Records, kind: str) -> list[Any]:
  """The events of one class, in order."""
  return [r.event for r in records if type(r.event).__name__ == kind]


def commands(records: Records, kind: str) -> list[Any]:
  """The commands of one class, in order."""
  return [c for r in records for c in r.commands if type(c).__name__ == kind]


def gaps_ms(found: list[Any]) -> list[float]:
  """Times between neighbouring events."""
  pairs = zip(found, found[1:], strict=False)
  return [(b.now_ns - a.now_ns) / 1e6 for a, b in pairs]
