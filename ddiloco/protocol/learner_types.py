"""State, events and commands of the learner's machine.

Times are `now_ns` of the learner's own monotonic clock; durations are ns.
"""

from ddiloco.protocol.fields import record
from ddiloco.protocol.messages import Contribution
from ddiloco.types import Refusal


@record
class FragmentView:
  """One fragment as this learner has it."""

  anchor: int  # the version last applied
  seen: int  # the newest version known to be committed
  epoch: int  # of the seen version: part of its object's key
  steps: int  # own steps since the anchor was applied (c_steps)
  tokens: int  # c_tokens
  answered_step: int  # own step of the last first answer for it, or 0
  # A peer's parameters: offering what they are away from its anchor would
  # count the peer's work twice. Until the next commit overwrites them.
  borrowed: bool = False


@record
class OpenAnswer:
  """An answer whose round is not committed yet."""

  round: int
  attempts: int
  last_step: int  # own step (or timer tick) of the newest attempt
  writing: bool  # the newest attempt is on its way to the store
  contributions: tuple[Contribution, ...]  # of the newest attempt


@record
class LearnerState:
  """Everything the learner's decisions depend on."""

  learner: int
  incarnation: int
  base: int  # the newest commit this life joined at
  step: int  # own inner steps of this life
  stepping: bool
  tokens: int  # of this life
  next_sample: int
  samples: int  # that the island takes per inner step at most; 0: all
  seen: int  # the newest commit seen
  run_tokens: int  # of the whole run, as that commit says
  fragments: tuple[FragmentView, ...]
  fetching: tuple[int, ...]  # rounds on their way
  fetched: tuple[int, ...]  # rounds here, not applied yet
  answers: tuple[OpenAnswer, ...]
  writes: int  # answers on their way to the store
  paced_step: int  # own step of the last first answer, or the start
  came_late: bool  # the last decided answer was not counted
  step_ns: int  # moving average; 0 before the first step
  fastest_ns: int  # the fastest learner's, as the newest commit says
  fetch_ns: int  # moving average of commit seen to fetched
  seen_ns: tuple[tuple[int, int], ...]  # (round, when) of the fetching ones
  step_started_ns: int
  waiting_since_ns: int  # 0: not held by `wait`
  diverged: int  # answers in a row that were not finite
  asked: tuple["TransferAsked", ...]  # that wait for a step boundary
  giving: tuple[str, ...]  # transfers on their way to the store, by nonce
  marked: bool  # the newest commit seen asks for a snapshot not taken yet
  stopping: str  # the reason, once asked to stop
  done: bool


# --- Events -----------------------------------------------------------------


@record
class Joined:
  """A life starts: parameters and anchors come from the newest commits."""

  now_ns: int
  learner: int
  incarnation: int
  seen: int
  run_tokens: int
  versions: tuple[tuple[int, int], ...]  # (version, epoch) per fragment
  next_sample: int
  samples: int = 0  # as in `Resized`
  borrowed: bool = False  # parameters are a peer's own, not the commit's


@record
class Resumed:
  """A life starts in a restored run, as its learner's snapshot has it."""

  now_ns: int
  incarnation: int
  run_tokens: int
  versions: tuple[tuple[int, int], ...]  # (version, epoch) per fragment
  state: LearnerState

  @property
  def learner(self) -> int:
    """Whose life it is."""
    return self.state.learner


@record
class StepDone:
  """The inner step is computed."""

  now_ns: int
  step: int
  tokens: int
  samples: int
  loss: float  # nats per token; for the record, decides nothing
  exchange_ns: int  # own-thread time for applies and encodes before the step


@record
class CommitSeen:
  """The commit of the next round is there."""

  now_ns: int
  round: int
  epoch: int
  counted_attempt: int  # of this life's answer; 0: not counted
  run_tokens: int
  step_ns: int = 0  # of the fastest learner; 0: unknown


@record
class CaughtUp:
  """The next commits are gone already: go on from the newest one.

  After a stall longer than retention. Which of the answers since were
  counted only the syncer's tape tells now.
  """

  now_ns: int
  round: int
  versions: tuple[tuple[int, int], ...]  # (version, epoch) per fragment
  run_tokens: int


@record
class Fetched:
  """A round's fragments are on the island, verified."""

  now_ns: int
  round: int


@record
class FetchFailed:
  """They are not: gone, damaged, or the store did not answer."""

  now_ns: int
  round: int
  reason: str


@record
class AnswerWritten:
  """The answer's header is in the exchange."""

  now_ns: int
  round: int
  attempt: int


@record
class AnswerFailed:
  """It is not: the store did not answer, or the learner's own guard did.

  `refusal` says what its outer gradient would have been refused for.
  """

  now_ns: int
  round: int
  attempt: int
  reason: str
  refusal: Refusal | None = None


@record
class Tick:
  """The time the machine asked to be woken at."""

  now_ns: int


@record
class Resized:
  """The island has other devices at work now."""

  now_ns: int
  samples: int  # that it takes per inner step at most; 0: all


@record
class TransferAsked:
  """A learner that starts asks for this one's state."""

  now_ns: int
  recipient: int
  nonce: str  # names the transfer
  seen: int  # the commit that the state must have seen


@record
class TransferEnded:
  """It is in the exchange, or could not be written."""

  now_ns: int
  nonce: str


@record
class StopRequested:
  """Somebody wants this life to end: a signal, or a newer life."""

  now_ns: int
  reason: str


Event = (
  Joined
  | Resumed
  | StepDone
  | CommitSeen
  | CaughtUp
  | Fetched
  | FetchFailed
  | AnswerWritten
  | AnswerFailed
  | Tick
  | Resized
  | TransferAsked
  | TransferEnded
  | StopRequested
)

# --- Commands ---------------------------------------------------------------


@record
class Step:
  """Dispatch the next inner step."""

  step: int
  first_sample: int
  seen: int  # the global step, one of the schedule's clocks
  run_tokens: int  # the other one
  samples: int = 0  # to take; 0: as many as the program does


@record
class Fetch:
  """Bring a round's fragments (those it last committed) to the island."""

  round: int
  epoch: int
  fragments: tuple[int, ...]


@record
class ApplyFragments:
  """Overwrite parameters and anchors with a fetched round's fragments."""

  round: int
  fragments: tuple[int, ...]


@record
class Encode:
  """Encode the outer gradients of a round and publish the answer."""

  round: int
  attempt: int
  contributions: tuple[Contribution, ...]
  step_ns: int
  fetch_ns: int
  life_steps: int
  life_tokens: int
  vector_clock: tuple[tuple[str, int], ...]


@record
class Settle:
  """A round is decided: the residual of that attempt (0: none) holds."""

  round: int
  attempt: int


@record
class Checkpoint:
  """Save the program's state and the position in the data."""

  step: int
  seen: int
  next_sample: int


@record
class Give:
  """Copy the program's state as it is now, and publish it for a peer."""

  recipient: int
  nonce: str
  step: int
  seen: int


@record
class Snapshot:
  """Record the learner as it is now, for the snapshot of a round."""

  round: int
  state: LearnerState


@record
class Stop:
  """This life is over."""

  reason: str


Command = (
  Step
  | Fetch
  | ApplyFragments
  | Encode
  | Settle
  | Checkpoint
  | Give
  | Snapshot
  | Stop
)
