"""State, events and commands of the syncer's machine.

Times are `now_ns` of the syncer's own monotonic clock. Norms are integers of
1e-9 so that no float decides control flow.
"""

from ddiloco.protocol.fields import record
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  Contribution,
  Counted,
  FragmentState,
  Refused,
)
from ddiloco.types import Refusal


@record
class LearnerView:
  """One learner as the syncer knows it; of its newest life."""

  learner: int
  incarnation: int
  beat: int
  changed_ns: int  # when any of its objects last changed
  left: bool
  step_ns: int
  fetch_ns: int
  steps: int
  tokens: int
  earlier_tokens: int


@record
class Answer:
  """One attempt of a learner at an open round."""

  learner: int
  incarnation: int
  attempt: int
  contributions: tuple[Contribution, ...]
  arrived_ns: int
  checked: bool  # fetched, checksums right, finite, no outlier


@record
class RoundView:
  """An uncommitted round. A time of 0 means: not yet."""

  round: int
  opened_ns: int
  answers: tuple[Answer, ...]  # by learner; newest checked or in check
  refused: tuple[Refused, ...]
  tried: tuple[tuple[int, int, int], ...]  # (learner, incarnation, attempt)
  first_ns: int  # arrival of the first valid answer
  quorum_ns: int  # when the K-th was checked
  grace_ns: int
  closed_ns: int
  merged: tuple[FragmentState, ...]
  committing: bool


@record
class SyncerState:
  """Everything the syncer's decisions depend on."""

  epoch: int
  started_ns: int
  committed: int
  previous: str  # SHA-256 of the newest commit
  tokens: int
  fragments: tuple[FragmentState, ...]
  rounds: tuple[RoundView, ...]  # open, ascending
  learners: tuple[LearnerView, ...]  # ascending
  norms: tuple[tuple[int, ...], ...]  # recent, per fragment
  last_closed_ns: int
  xi_quorum_ns: int
  xi_sync_ns: int
  stopping: str
  done: bool
  followed_ns: int = 0  # when another shard's commit was last seen


# --- Events -----------------------------------------------------------------


@record
class Opened:
  """A life starts from the newest commit."""

  now_ns: int
  epoch: int
  commit: Commit
  digest: str


@record
class AnswerSeen:
  """An answer's header is there and is a well-formed record."""

  now_ns: int
  key: tuple[int, int, int, int]  # where it lay: round, learner, life, attempt
  header: AnswerHeader


@record
class AnswerGarbled:
  """An object lies where a header should, and is none."""

  now_ns: int
  key: tuple[int, int, int, int]
  reason: Refusal


@record
class AnswerChecked:
  """An answer's parts were fetched and inspected; `reason` None: valid."""

  now_ns: int
  round: int
  learner: int
  incarnation: int
  attempt: int
  reason: Refusal | None
  norms: tuple[int, ...]  # per fragment of the round, in 1e-9


@record
class MemberSeen:
  """A member's record is new or has changed."""

  now_ns: int
  learner: int
  incarnation: int
  beat: int
  left: bool


@record
class Merged:
  """A round's new fragments are in the exchange."""

  now_ns: int
  round: int
  fragments: tuple[FragmentState, ...]


@record
class Committed:
  """The create of a commit has an outcome."""

  now_ns: int
  round: int
  won: bool
  digest: str


@record
class Followed:
  """Another shard has committed the round after the newest one."""

  now_ns: int
  commit: Commit
  digest: str


@record
class Tick:
  """The time the machine asked to be woken at."""

  now_ns: int


@record
class StopRequested:
  """Somebody wants this life to end: a signal, or a lost lease."""

  now_ns: int
  reason: str


Event = (
  Opened
  | AnswerSeen
  | AnswerGarbled
  | AnswerChecked
  | MemberSeen
  | Merged
  | Committed
  | Followed
  | Tick
  | StopRequested
)

# --- Commands ---------------------------------------------------------------


@record
class Check:
  """Fetch an answer's parts, verify and inspect them."""

  round: int
  learner: int
  incarnation: int
  attempt: int


@record
class Merge:
  """Merge these answers, take the outer step, store the new fragments."""

  round: int
  counted: tuple[Counted, ...]


@record
class Drop:
  """An answer held for merging is not wanted any more."""

  round: int
  learner: int
  incarnation: int
  attempt: int


@record
class WriteCommit:
  """Create the commit of a round."""

  commit: Commit


@record
class Sweep:
  """Delete what retention no longer keeps."""

  commits: tuple[int, ...]
  states: tuple[tuple[int, int], ...]  # (version, fragment)
  answers: tuple[int, ...]  # rounds


@record
class Snapshot:
  """Record the run as of the commit of a round."""

  round: int
  learners: tuple[tuple[int, int], ...]  # (learner, life) of the live ones


@record
class Stop:
  """This life is over."""

  reason: str


Command = Check | Merge | Drop | WriteCommit | Sweep | Snapshot | Stop
