"""The records that cross the exchange: answers, commits, members, leases.

This file is the whole wire protocol. Sizes are bytes, times nanoseconds of
durations (two machines' clocks are never compared).
"""

import functools
from typing import Any, TypeVar

from ddiloco.protocol import wire
from ddiloco.protocol.fields import record
from ddiloco.types import Refusal

NO_LAYOUT = "{}"


@record
class PartRef:
  """One part of an answer: what must be found under its key."""

  bytes: int
  sha256: str


@record
class Contribution:
  """What an answer offers for one fragment, since its anchor was applied."""

  fragment: int
  anchor: int
  steps: int  # c_steps
  tokens: int  # c_tokens


@record
class AnswerHeader:
  """What one learner offers for one round; written after its parts."""

  run_id: str
  round: int
  learner: int
  incarnation: int
  attempt: int
  contributions: tuple[Contribution, ...]
  layout: str
  codec: str
  parts: tuple[PartRef, ...]
  step_ns: int
  fetch_ns: int
  life_steps: int
  life_tokens: int
  vector_clock: tuple[tuple[str, int], ...]
  metrics: tuple[tuple[str, float], ...]
  mac: str


@record
class Counted:
  """An answer that was merged; its weight is c_tokens^2 / c_steps."""

  learner: int
  incarnation: int
  attempt: int
  contributions: tuple[Contribution, ...]


@record
class Refused:
  """An answer that was left out, and why."""

  learner: int
  incarnation: int
  attempt: int
  reason: Refusal


@record
class StepRef:
  """The encoded step to a version: what must be found under its key."""

  bytes: int
  sha256: str
  full: bool  # whether the version's parameters are stored too


@record
class FragmentState:
  """Where a fragment's newest version is stored, and its digests.

  Those of its parameters hold whether they are stored or come of steps.
  """

  version: int
  epoch: int
  params_bytes: int
  params_sha256: str
  outer_bytes: int
  outer_sha256: str
  step: StepRef | None = None  # None: only the parameters are stored


@record
class StepLink:
  """Follows an encoded step in its object: the version it starts from."""

  run_id: str
  fragment: int
  previous: FragmentState


@record
class Progress:
  """What the syncer knows of a learner's processed work."""

  learner: int
  incarnation: int
  steps: int  # of this life
  tokens: int  # of this life
  earlier_tokens: int  # of the lives before it


@record
class Origin:
  """The snapshot that a restored run goes on from."""

  run_id: str
  round: int
  commit: str  # digest of the marker's record


@record
class Genesis:
  """What commit 0 adds: everything a run is."""

  config: str  # canonical JSON
  config_sha256: str
  layout: str  # canonical JSON; `NO_LAYOUT`: the protocol ran without arrays
  code_version: str
  origin: Origin | None = None  # None: the run began with a program's init

  @property
  def has_arrays(self) -> bool:
    """Whether there is anything trained, or only its history."""
    return self.layout != NO_LAYOUT


@record
class Commit:
  """Round t is closed: the only thing that changes global state."""

  run_id: str
  round: int
  epoch: int
  previous: str  # SHA-256 of the commit before
  counted: tuple[Counted, ...]
  refused: tuple[Refused, ...]
  fragments: tuple[FragmentState, ...]  # all P, this round's ones new
  tokens: int  # processed by the run so far, as far as answers told
  progress: tuple[Progress, ...]
  vector_clock: tuple[tuple[str, int], ...]
  genesis: Genesis | None
  step_ns: int = 0  # xi_step: of the fastest live learner; 0: unknown

  def counted_attempt(self, learner: int, incarnation: int) -> int:
    """The attempt of that life's counted answer; 0 if none was."""
    for item in self.counted:
      if (item.learner, item.incarnation) == (learner, incarnation):
        return item.attempt
    return 0


@record
class Member:
  """One life of a learner; `beat` grows with every rewrite."""

  run_id: str
  learner: int
  incarnation: int
  nonce: str
  host: str
  pid: int
  beat: int
  seen: int
  steps: int
  tokens: int
  next_sample: int
  left: bool


@record
class TransferRequest:
  """A learner that starts asks a peer for its state."""

  run_id: str
  seen: int  # the newest commit it knows of; older states are of no use


@record
class TransferHeader:
  """A peer's state at a step boundary; written after its parts."""

  run_id: str
  learner: int  # the donor
  incarnation: int
  step: int  # own inner steps of that life
  seen: int  # the newest commit it had seen
  state: str  # digest of its shapes
  parts: tuple[PartRef, ...]


@record
class Lease:
  """Who merges: saves work, decides nothing (safety is the commit's)."""

  epoch: int
  nonce: str
  host: str
  pid: int
  beat: int


_Record = TypeVar("_Record")
_CACHED_BYTES_MAX = 64 * 1024

_KINDS = {
  AnswerHeader: "answer",
  Commit: "commit",
  StepLink: "step",
  Member: "member",
  TransferRequest: "transfer-request",
  TransferHeader: "transfer",
  Lease: "lease",
}


def encode(record: Any) -> bytes:
  """The bytes of a record of one of these kinds."""
  return wire.frame(_KINDS[type(record)], wire.to_plain(record))


def decode(cls: type[_Record], data: bytes) -> _Record:
  """A record from bytes; `WireError` says what is wrong with them."""
  # Records are immutable, and in a simulation many actors read the same bytes.
  read = _decode_cached if len(data) <= _CACHED_BYTES_MAX else _decode
  return read(cls, data)


def _decode(cls: type, data: bytes) -> Any:
  return wire.from_plain(cls, wire.unframe(_KINDS[cls], data))


_decode_cached = functools.lru_cache(maxsize=32)(_decode)
