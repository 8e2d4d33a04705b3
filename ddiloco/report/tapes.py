"""Reads tapes one record at a time, as far as they can be read.

A life that was killed leaves a tape that ends; storage may damage or lose a
segment. Neither stops a report: it reads up to there and says so.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Protocol

from ddiloco.protocol import tape, wire

_PREFIX = "tape/"
_KEY = re.compile(r"tape/(syncer|learner-(\d{1,6}))\.(\d{1,9})/(\d{9})")


class Stored(Protocol):
  """An object in the exchange."""

  value: bytes


class Exchange(Protocol):
  """What a report needs of an exchange: to read it."""

  def get(self, key: str) -> Stored | None:
    """Reads an object; None if there is none."""

  def list(self, prefix: str) -> list[str]:
    """The keys that start with `prefix`."""


@dataclasses.dataclass(frozen=True, slots=True)
class LifeKeys:
  """Where one life's tape lies."""

  learner: int | None  # None: the syncer
  incarnation: int
  segments: dict[int, str]

  @property
  def name(self) -> str:
    """How messages call this life."""
    who = "syncer" if self.learner is None else f"learner-{self.learner}"
    return f"{who}, life {self.incarnation}"


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
  """One life's monotonic clock beside everybody's: Unix time, in ns."""

  offset_ns: int

  def unix_ns(self, now_ns: int) -> int:
    """When `now_ns` of this life was."""
    return now_ns + self.offset_ns


def find_lives(exchange: Exchange) -> list[LifeKeys]:
  """The tapes in an exchange: the syncer's lives, then the learners'."""
  found: dict[tuple[int, int], LifeKeys] = {}
  for key in exchange.list(_PREFIX):
    match = _KEY.fullmatch(key)
    if match is None:
      continue
    learner = None if match[2] is None else int(match[2])
    order = (-1 if learner is None else learner, int(match[3]))
    life = found.setdefault(order, LifeKeys(learner, order[1], {}))
    life.segments[int(match[4])] = key
  return [found[order] for order in sorted(found)]


class TapeReader:
  """One life's tape: its header, then its records in order."""

  def __init__(self, exchange: Exchange, life: LifeKeys, warnings: list[str]):
    """Reads the first segment; `header` is None if that is unreadable."""
    self._exchange, self._life, self._warnings = exchange, life, warnings
    self._first = self._segment(0)
    self.header = self._first.header if self._first else None
    if self._first and self.header is None:
      self._warn(0, "has no header; nothing of it is read")

  @property
  def clock(self) -> Clock:
    """From this life's clock to Unix time."""
    assert self.header is not None
    return Clock(self.header.started_unix_ns - self.header.started_ns)

  def records(self) -> Iterator[tape.Record]:
    """The records up to the first damage. To be called once."""
    segment, self._first = self._first, None
    index = number = 0
    while segment is not None:
      for record in segment.records:
        if record.index != index:
          self._warn(
            number,
            f"holds record {record.index} where {index} is due; read up to "
            "there",
          )
          return
        yield record
        index += 1
      number += 1
      if number > max(self._life.segments):
        return
      segment = self._segment(number)

  def _segment(self, number: int) -> tape.Segment | None:
    key = self._life.segments.get(number)
    item: Any = None if key is None else self._exchange.get(key)
    if item is None:
      self._warn(number, "is missing; read up to there")
      return None
    try:
      segment = tape.decode_segment(item.value)
    except wire.WireError as error:
      self._warn(number, f"is damaged: {error}; read up to there")
      return None
    life = self._life
    if (segment.incarnation, segment.segment) != (life.incarnation, number):
      self._warn(
        number,
        f"is segment {segment.segment} of {segment.actor}, life "
        f"{segment.incarnation}; read up to there",
      )
      return None
    return segment

  def _warn(self, number: int, what: str) -> None:
    self._warnings.append(f"tape of {self._life.name}: segment {number} {what}")
