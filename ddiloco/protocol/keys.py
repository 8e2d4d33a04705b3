"""Where each object of a run lives in the exchange.

Names are flat: on a file system, deleting a round's answers then leaves no
empty directory behind. Everything is write-once but `members/` and `lease/`.
"""

import re
from collections.abc import Iterable

COMMITS = "commit/"
ANSWERS = "answer/"
STATES = "state/"
MEMBERS = "members/"
LEASES = "lease/"
TAPES = "tape/"
TRANSFERS = "transfer/"
SNAPSHOTS = "snapshot/"
ORIGIN = "origin/"  # the snapshot that a restored run has started from
_MANIFEST = "complete"
_COMMIT = re.compile(r"commit/([0-9]{9})")
_ANSWER = re.compile(r"answer/([0-9]{9})\.")
_HEADER = re.compile(r"answer/(\d+)\.(\d+)\.(\d+)\.(\d+)\.header")
_STATE = re.compile(r"state/([0-9]{9})\.([0-9]+)\.[0-9]+\.(params|outer|step)")
_REQUEST = re.compile(r"transfer/([0-9]{1,6})\.([0-9]{1,6})\.([^.]+)\.request")
_EPOCH = re.compile(
  r"tape/syncer\.([0-9]+)/[0-9]+|state/[0-9]{9}\.[0-9]+\.([0-9]+)\.[a-z]+"
)
_SNAPSHOT = re.compile(r"snapshot/([0-9]{9})\.(.+)")
_MEMBER = re.compile(r"members/([0-9]{1,6})\.([0-9]{1,9})")


def commit(t: int) -> str:
  """The record that closes round t."""
  return f"{COMMITS}{t:09d}"


def commit_round(key: str) -> int | None:
  """The round of a commit's key; None if it is none."""
  match = _COMMIT.fullmatch(key)
  return int(match[1]) if match else None


def answers(t: int) -> str:
  """The prefix of every answer to round t."""
  return f"{ANSWERS}{t:09d}."


def answer_round(key: str) -> int | None:
  """The round of any of an answer's keys; None if it is none."""
  match = _ANSWER.match(key)
  return int(match[1]) if match else None


def answer_header(t: int, learner: int, incarnation: int, attempt: int) -> str:
  """The record that makes an answer visible; written last."""
  return f"{answers(t)}{learner}.{incarnation}.{attempt}.header"


def answer_of_header(key: str) -> tuple[int, int, int, int] | None:
  """(round, learner, incarnation, attempt) of a header, or None."""
  match = _HEADER.fullmatch(key)
  if match is None or answer_header(*map(int, match.groups())) != key:
    return None
  return tuple(map(int, match.groups()))


def answer_part(
  t: int, learner: int, incarnation: int, attempt: int, part: int
) -> str:
  """The encoded outer gradient one process of the island holds."""
  return f"{answers(t)}{learner}.{incarnation}.{attempt}.part-{part}"


def states(version: int, fragment: int) -> str:
  """The prefix of everything stored for one version of a fragment."""
  return f"{STATES}{version:09d}.{fragment}."


def params(version: int, fragment: int, epoch: int) -> str:
  """The f32 parameters of one version, as that syncer wrote them."""
  return f"{states(version, fragment)}{epoch}.params"


def outer_state(version: int, fragment: int, epoch: int) -> str:
  """The outer optimizer's state that belongs to them."""
  return f"{states(version, fragment)}{epoch}.outer"


def step(version: int, fragment: int, epoch: int) -> str:
  """The encoded step from the version before to this one."""
  return f"{states(version, fragment)}{epoch}.step"


def state_parts(key: str) -> tuple[int, int, str] | None:
  """The (version, fragment, kind) of such an object; None if it is none.

  The kind is params, outer or step.
  """
  match = _STATE.fullmatch(key)
  return (int(match[1]), int(match[2]), match[3]) if match else None


def member(learner: int, incarnation: int) -> str:
  """One life of a learner: claimed by creating it, then its heartbeat."""
  return f"{MEMBERS}{learner}.{incarnation}"


def member_life(key: str) -> tuple[int, int] | None:
  """The (learner, incarnation) of a member's key; None if it is none."""
  match = _MEMBER.fullmatch(key)
  return (int(match[1]), int(match[2])) if match else None


def newest_lives(names: Iterable[str]) -> dict[int, int]:
  """The newest life of every learner that members' keys name, ascending."""
  lives = sorted(life for name in names if (life := member_life(name)))
  return dict(lives)  # of a learner's, the last one stays


def transfers(donor: int) -> str:
  """The prefix of everything that one learner is asked for and gives."""
  return f"{TRANSFERS}{donor}."


def transfer(donor: int, recipient: int, nonce: str) -> str:
  """The prefix of one transfer between learners."""
  return f"{transfers(donor)}{recipient}.{nonce}."


def transfer_request(donor: int, recipient: int, nonce: str) -> str:
  """The recipient's record, which asks for it."""
  return f"{transfer(donor, recipient, nonce)}request"


def transfer_header(donor: int, recipient: int, nonce: str) -> str:
  """The donor's record, written after the parts."""
  return f"{transfer(donor, recipient, nonce)}header"


def transfer_part(donor: int, recipient: int, nonce: str, part: int) -> str:
  """Some of the donor's state."""
  return f"{transfer(donor, recipient, nonce)}part-{part}"


def transfer_ends(key: str) -> tuple[int, int, str] | None:
  """The (donor, recipient, nonce) of a request's key; None if it is none."""
  match = _REQUEST.fullmatch(key)
  return (int(match[1]), int(match[2]), match[3]) if match else None


def snapshot(t: int) -> str:
  """The prefix of the snapshot whose marker is the commit of round t."""
  return f"{SNAPSHOTS}{t:09d}."


def snapshot_round(key: str) -> tuple[int, bool] | None:
  """Of a snapshot's object: its round, and whether it is the manifest."""
  match = _SNAPSHOT.fullmatch(key)
  return (int(match[1]), match[2] == _MANIFEST) if match else None


def manifest(prefix: str) -> str:
  """The record that makes a snapshot complete; `prefix` may be `ORIGIN`."""
  return f"{prefix}{_MANIFEST}"


def snapshot_params(prefix: str, p: int) -> str:
  """A fragment's f32 parameters as of a snapshot."""
  return f"{prefix}{p}.params"


def snapshot_outer(prefix: str, p: int) -> str:
  """The outer optimizer's state that belongs to them."""
  return f"{prefix}{p}.outer"


def snapshot_header(prefix: str, learner: int, incarnation: int) -> str:
  """A learner's record in a snapshot."""
  return f"{prefix}learner-{learner}.{incarnation}.header"


def snapshot_part(
  prefix: str, learner: int, incarnation: int, part: int
) -> str:
  """Some of a learner's arrays in a snapshot."""
  return f"{prefix}learner-{learner}.{incarnation}.part-{part}"


def lease(shard: int) -> str:
  """Who is at work for one of the syncer's shards."""
  return f"{LEASES}{shard}"


def tape(actor: str, incarnation: int, segment: int) -> str:
  """One segment of an actor's tape; actors are `syncer`, `learner-<i>`."""
  return f"{TAPES}{actor}.{incarnation}/{segment:09d}"


def syncer_tapes() -> str:
  """The prefix of the tapes of all lives of the syncer."""
  return f"{TAPES}syncer."


def epoch(key: str) -> int | None:
  """The life of the syncer that wrote a tape or a version; None: neither."""
  match = _EPOCH.fullmatch(key)
  return int(match[1] or match[2]) if match else None
