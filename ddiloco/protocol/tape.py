"""The tape: the ordered inputs an actor saw, and what it decided on each.

An actor's tape is a sequence of write-once segments. A segment is a framed
record (length and checksum, so that a torn one is recognised) whose body is

  {"actor", "incarnation", "segment", "header", "records": [...]}

`header` is in segment 0 only. A record is `[index, event, [command, ...]]`
with events and commands as `[class name, field, ...]`; a commit is recorded
by its digest, its content being in the records before. Records are in the
exchange no later than any answer or commit that depends on them.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ddiloco.protocol import learner_types, messages, syncer_types, wire
from ddiloco.types import Refusal

SYNCER = "syncer"
_SEGMENT_KEYS = {"actor", "incarnation", "segment", "header", "records"}


def learner_actor(learner: int) -> str:
  """The name of a learner's tape."""
  return f"learner-{learner}"


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
  """What replaying the tape bit for bit depends on."""

  run_id: str
  actor: str
  incarnation: int
  seed: int
  config: str  # canonical JSON of the config this life ran with
  config_sha256: str
  code_version: str
  backend: str
  devices: int
  processes: int
  threads: int
  cpu_features: str
  libraries: tuple[tuple[str, str], ...]
  started_unix_ns: int  # to lay the actors' clocks beside each other
  started_ns: int  # the same instant on the actor's own clock
  # (life, step) of the checkpoint a learner went on from; None: it was fresh.
  restored: tuple[int, int] | None = None
  # (learner, life, step) of the peer whose state it went on from, or None.
  donor: tuple[int, int, int] | None = None
  pid: int = 0  # of its process; 0: simulated


@dataclasses.dataclass(frozen=True, slots=True)
class CommitDigest:
  """`WriteCommit`, as the tape keeps it."""

  round: int
  sha256: str


def recorded(command: Any) -> Any:
  """A command as the tape keeps it."""
  if isinstance(command, syncer_types.WriteCommit):
    digest = wire.sha256(messages.encode(command.commit))
    return CommitDigest(command.commit.round, digest)
  return command


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """One input, and the commands the machine gave on it."""

  index: int
  event: Any
  commands: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
  """A piece of a tape."""

  actor: str
  incarnation: int
  segment: int
  header: Header | None
  records: tuple[Record, ...]


def encode_segment(
  actor: str,
  incarnation: int,
  segment: int,
  header: Header | None,
  records: Iterable[Record],
) -> bytes:
  """The bytes of a segment."""
  return wire.frame(
    "tape",
    {
      "actor": actor,
      "incarnation": incarnation,
      "segment": segment,
      "header": None if header is None else wire.to_plain(header),
      "records": [
        [
          record.index,
          wire.pack(record.event),
          [wire.pack(recorded(command)) for command in record.commands],
        ]
        for record in records
      ],
    },
  )


def decode_segment(data: bytes) -> Segment:
  """A segment from its bytes; `WireError` says what is wrong with them."""
  plain = wire.unframe("tape", data)
  try:
    if plain.keys() != _SEGMENT_KEYS:
      raise KeyError(*sorted(plain.keys() ^ _SEGMENT_KEYS))
    actor, header = plain["actor"], plain["header"]
    events, commands = _SYNCER if actor == SYNCER else _LEARNER
    return Segment(
      actor=wire.from_plain(str, actor),
      incarnation=wire.from_plain(int, plain["incarnation"]),
      segment=wire.from_plain(int, plain["segment"]),
      header=None if header is None else wire.from_plain(Header, header),
      records=tuple(
        Record(
          wire.from_plain(int, index),
          wire.unpack(events, event),
          tuple(wire.unpack(commands, command) for command in given),
        )
        for index, event, given in plain["records"]
      ),
    )
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    if isinstance(error, wire.WireError):
      raise
    raise wire.WireError(Refusal.MALFORMED, f"tape: {error!r}") from error


def join(segments: Iterable[Segment]) -> tuple[Header, tuple[Record, ...]]:
  """One life's whole tape from its segments; they must follow each other."""
  header, records = None, []
  for number, segment in enumerate(segments):
    if segment.segment != number:
      raise wire.WireError(
        Refusal.MISSING_PART,
        f"tape of {segment.actor}, life {segment.incarnation}: segment "
        f"{number} is missing",
      )
    header = header or segment.header
    if header is None:
      break
    if (segment.actor, segment.incarnation) != (
      header.actor,
      header.incarnation,
    ):
      raise wire.WireError(
        Refusal.MALFORMED,
        f"segment {number} of {header.actor}, life {header.incarnation}, "
        f"names {segment.actor}, life {segment.incarnation}",
      )
    records.extend(segment.records)
  if header is None:
    raise wire.WireError(Refusal.MISSING_PART, "a tape without its header")
  for index, record in enumerate(records):
    if record.index != index:
      raise wire.WireError(
        Refusal.MALFORMED,
        f"tape of {header.actor}, life {header.incarnation}: record "
        f"{record.index} stands at {index}",
      )
  return header, tuple(records)


def _by_name(union: Any) -> dict[str, type]:
  return {cls.__name__: cls for cls in union.__args__} | {
    CommitDigest.__name__: CommitDigest
  }


_LEARNER = _by_name(learner_types.Event), _by_name(learner_types.Command)
_SYNCER = _by_name(syncer_types.Event), _by_name(syncer_types.Command)
