"""The records of a snapshot: what each learner was, and what it is all of.

A commit is the marker (Chandy and Lamport, 1985): global parameters and outer
states as of it; every learner as it was once it had seen that commit and none
after it; and the answers on their way then, which their learners keep until
they are decided. A snapshot is complete once its manifest is there.
"""

from typing import TypeVar

from ddiloco.protocol import wire
from ddiloco.protocol.fields import record, replace
from ddiloco.protocol.learner_types import LearnerState
from ddiloco.protocol.messages import (
  Commit,
  Contribution,
  Member,
  PartRef,
)


@record
class Attempt:
  """An answer that was not decided yet; its bytes are in the parts."""

  round: int
  attempt: int
  contributions: tuple[Contribution, ...]


@record
class LearnerSnapshot:
  """One learner at a step boundary; written after its parts."""

  run_id: str
  round: int  # the marker
  state: LearnerState
  attempts: tuple[Attempt, ...]  # ascending
  shapes: str  # digest of those of its arrays
  parts: tuple[PartRef, ...]


@record
class Manifest:
  """What a complete snapshot is; written last."""

  commit: Commit  # the marker
  digest: str  # of its record
  learners: tuple[LearnerSnapshot, ...]
  members: tuple[Member, ...]  # the newest life of everybody, as of later

  @property
  def left_out(self) -> tuple[int, ...]:
    """The learners that were at work and did not record themselves."""
    there = {item.state.learner for item in self.learners}
    absent = (m for m in self.members if m.learner not in there)
    return tuple(m.learner for m in absent if not m.left)


def restored(manifest: Manifest, run_id: str, previous: str) -> Commit:
  """The first commit of a run that goes on from a snapshot.

  The work that its learners have done counts as that of their next lives.

  Args:
    manifest: of the snapshot.
    run_id: of the new run.
    previous: digest of its commit 0.
  """
  at_work = {item.state.learner for item in manifest.learners}
  commit = manifest.commit
  return replace(
    commit,
    run_id=run_id,
    epoch=0,
    previous=previous,
    counted=(),
    refused=(),
    fragments=tuple(
      replace(ref, epoch=0, step=None) for ref in commit.fragments
    ),
    progress=tuple(
      replace(item, incarnation=item.incarnation + 1)
      if item.learner in at_work
      else item
      for item in commit.progress
    ),
  )


_Record = TypeVar("_Record", LearnerSnapshot, Manifest)
_KINDS = {LearnerSnapshot: "learner-snapshot", Manifest: "snapshot"}


def encode(record: LearnerSnapshot | Manifest) -> bytes:
  """The bytes of one of these records."""
  return wire.frame(_KINDS[type(record)], wire.to_plain(record))


def decode(cls: type[_Record], data: bytes) -> _Record:
  """A record from bytes; `WireError` says what is wrong with them."""
  return wire.from_plain(cls, wire.unframe(_KINDS[cls], data))
