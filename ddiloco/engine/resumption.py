"""How a learner of a restored run goes on where its snapshot was taken."""

from typing import Any, NamedTuple

from ddiloco.engine import snapshots, startup
from ddiloco.engine.ports import Call, Job
from ddiloco.engine.startup import Newest
from ddiloco.protocol import keys
from ddiloco.protocol.learner_types import Resumed
from ddiloco.protocol.messages import Member
from ddiloco.protocol.snapshots import LearnerSnapshot


class Resumption(NamedTuple):
  """What a life has that goes on with a snapshot."""

  newest: Newest  # the commit of the snapshot, not the run's newest
  member: Member  # the life claimed
  header: LearnerSnapshot
  data: bytes  # see `LearnerBytes`

  @property
  def event(self) -> Resumed:
    """The life's first."""
    commit = self.newest.commit
    return Resumed(
      now_ns=0,
      incarnation=self.member.incarnation,
      run_tokens=commit.tokens,
      versions=tuple((ref.version, ref.epoch) for ref in commit.fragments),
      state=self.header.state,
    )


def resume(
  newest: Newest, learner: int, nonce: str, host: str, pid: int, layout: Any
) -> Job:
  """A `Resumption`, or why this life is not to be one; "": no reason to be.

  The life after the one that the snapshot has is this one, once: its work up
  to there is counted as that life's in the restored run's first commit.
  """
  origin = newest.genesis.origin
  if origin is None:
    return ""
  lives = keys.newest_lives((yield Call("list", (keys.MEMBERS,))))
  try:
    header = yield from _find(learner, lives.get(learner, 0))
    if header is None:
      return ""
    snapshots.check_learner(header, layout)
    data = yield from snapshots.read_learner(keys.ORIGIN, header)
    at = yield from startup.commit_at(origin.round, newest)
    if at is None:
      raise ValueError(f"the run is beyond round {origin.round} already")
  except ValueError as error:
    header, why = None, f"its snapshot cannot be used: {error}"
  life = newest.commit.run_id, learner, nonce, host, pid
  member, _ = yield from startup.claim_member(*life)
  if header is None:
    return why  # nobody goes on with the life just claimed
  if member.incarnation != header.state.incarnation + 1:
    return "another process has gone on with its snapshot"
  return Resumption(at, member, header, data)


def _find(learner: int, life: int) -> Job:
  """The record of a life in the snapshot the run was restored from."""
  manifest = yield from snapshots.read_manifest(keys.ORIGIN)
  for header in manifest.learners:
    state = header.state
    if (state.learner, state.incarnation) == (learner, life):
      return header
  return None
