"""Writes an actor's tape to the exchange, segment by segment."""

import collections
from typing import Any

from ddiloco.engine.ports import Call, Job
from ddiloco.protocol import keys, tape


class TapeWriter:
  """Collects records; `flush` is part of a job of the ordered lane.

  A segment whose write failed is offered again, unchanged, by the next
  flush: its key is write-once, and the failed write may have succeeded.
  """

  def __init__(self, header: tape.Header, *, durable: bool = False):
    self._header: tape.Header | None = header
    self._actor, self._incarnation = header.actor, header.incarnation
    self._durable = durable
    self._records: collections.deque[tape.Record] = collections.deque()
    self._index = 0
    self._segment = 0
    self._unwritten: bytes | None = None

  def record(self, event: Any, commands: tuple[Any, ...]) -> None:
    """Appends one input and what was decided on it."""
    self._records.append(tape.Record(self._index, event, commands))
    self._index += 1

  @property
  def empty(self) -> bool:
    """Whether everything recorded is in the exchange."""
    return not self._records and self._unwritten is None

  def flush(self, *, vital: bool = False) -> Job:
    """Writes everything recorded before this was started."""
    if self._unwritten is not None:
      yield from self._write(vital)
    records = [self._records.popleft() for _ in range(len(self._records))]
    if not records:
      return None
    self._unwritten = tape.encode_segment(
      self._actor, self._incarnation, self._segment, self._header, records
    )
    self._header = None
    yield from self._write(vital)
    return None

  def _write(self, vital: bool) -> Job:
    key = keys.tape(self._actor, self._incarnation, self._segment)
    yield Call("put", (key, self._unwritten), self._durable, vital)
    self._unwritten = None
    self._segment += 1
