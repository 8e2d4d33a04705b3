"""What a learner that starts goes on from, beside the newest commit.

Its own checkpoint if that is fresh enough; else the state of a healthy peer,
which it asks for through the exchange; else nothing (`RecoveryConfig`).
"""

import functools
from typing import Any, NamedTuple

from ddiloco.config import RecoveryConfig
from ddiloco.engine import startup
from ddiloco.engine.parts import check_sizes, read_parts, write_parts
from ddiloco.engine.ports import Call, ExchangeError, Job, Pause
from ddiloco.engine.startup import Newest
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import Member, TransferHeader, TransferRequest
from ddiloco.protocol.schedule import Schedule
from ddiloco.types import SECOND_NS

_LOOK_EVERY_NS = SECOND_NS // 20
_SILENT_BEATS = 3  # without a sign of life, and the next peer is asked


class Donation(NamedTuple):
  """A peer's state, verified against its header and nothing else."""

  header: TransferHeader
  data: bytes


class Wanted(NamedTuple):
  """Which state a learner that starts asks for."""

  run_id: str
  learner: int
  nonce: str  # of the life that asks
  seen: int  # the newest commit it knows of
  state: str  # digest of the state's shapes
  num_bytes: int


class Source(NamedTuple):
  """What a life goes on from."""

  newest: Newest  # the commit it joins at
  checkpoint: bool = False  # its own is fresh enough
  donation: Donation | None = None  # the state of a peer
  borrowed: bool = False  # parameters are the peer's too, as of that commit
  refusals: tuple[tuple[int, str], ...] = ()  # (peer, why it gave nothing)

  @property
  def donor(self) -> tuple[int, int, int] | None:
    """(learner, life, step) of the peer, for the tape."""
    if self.donation is None:
      return None
    header = self.donation.header
    return header.learner, header.incarnation, header.step


def find_source(
  newest: Newest,
  seen: int | None,
  *,
  learner: int,
  nonce: str,
  travel: Any,
  schedule: Schedule,
  options: RecoveryConfig,
  heartbeat_ns: int,
) -> Job:
  """Decides, and asks peers if need be: a `Source`.

  Args:
    newest: the run's newest commit.
    seen: the commit that the own checkpoint had seen; None: there is none.
    learner: who starts.
    nonce: of the life that starts.
    travel: the `StateBytes` of its state.
    schedule: of rounds.
    options: of the config.
    heartbeat_ns: how often members show that they live.
  """
  t = newest.commit.round
  if seen is not None and t - seen < options.checkpoint_rounds_max:
    return Source(newest, checkpoint=True)
  if t < schedule.interval or not options.donors_max:
    return Source(newest)
  wanted = Wanted(
    newest.commit.run_id, learner, nonce, t, travel.digest, travel.num_bytes
  )
  yield from _forget_earlier(learner)
  donation, refusals = yield from _ask_peers(wanted, options, heartbeat_ns)
  if donation is not None and options.params == "peer":
    at = yield from startup.commit_at(donation.header.seen, newest)
    if at is not None:
      return Source(at, donation=donation, borrowed=True, refusals=refusals)
    gone = (donation.header.learner, "the commit it had seen is gone")
    donation, refusals = None, (*refusals, gone)
  # Asking takes a while, and versions do not wait.
  newer = yield from startup.find_newest(schedule)
  if newer is None or newer.commit.round < t:
    newer = newest  # the read lags behind what this learner has seen already
  return Source(newer, donation=donation, refusals=refusals)


def _ask_peers(
  wanted: Wanted, options: RecoveryConfig, heartbeat_ns: int
) -> Job:
  """Asks one after the other: a donation, and why others gave none."""
  refusals: list[tuple[int, str]] = []
  for member in (yield from _peers(wanted))[: options.donors_max]:
    try:
      found = yield from _ask(wanted, member, options, heartbeat_ns)
    except ExchangeError as error:
      found = str(error)
    prefix = keys.transfer(member.learner, wanted.learner, wanted.nonce)
    try:
      yield Call("delete_prefix", (prefix,))
    except ExchangeError:
      pass  # the learner's next life looks for it
    if isinstance(found, Donation):
      return found, tuple(refusals)
    refusals.append((member.learner, found))
  return None, tuple(refusals)


def _peers(wanted: Wanted) -> Job:
  """Who may be at work, those that have seen most first."""
  members = []
  lives = keys.newest_lives((yield Call("list", (keys.MEMBERS,))))
  for learner, incarnation in lives.items():
    member = yield from _member(learner, incarnation)
    if learner == wanted.learner or member is None:
      continue
    if member.run_id == wanted.run_id and member.steps and not member.left:
      members.append(member)
  return sorted(members, key=lambda m: (-m.seen, m.learner))


def _member(learner: int, incarnation: int) -> Job:
  item = yield Call("get", (keys.member(learner, incarnation),))
  return startup.read_member(item)


def _ask(
  wanted: Wanted, donor: Member, options: RecoveryConfig, heartbeat_ns: int
) -> Job:
  """A `Donation`, or why there is none."""
  ends = donor.learner, wanted.learner, wanted.nonce
  request = TransferRequest(wanted.run_id, wanted.seen)
  yield Call("put", (keys.transfer_request(*ends), messages.encode(request)))
  begun_ns = beat_ns = looked_ns = yield Pause(0)
  timeout_ns = round(options.donor_timeout_s * SECOND_NS)
  while True:
    item = yield Call("get", (keys.transfer_header(*ends),))
    if item is not None:
      return (yield from _take(wanted, donor, item.value))
    now_ns = yield Pause(_LOOK_EVERY_NS)
    if now_ns - begun_ns > timeout_ns:
      return f"it gave nothing in {options.donor_timeout_s} s"
    if now_ns - looked_ns >= heartbeat_ns:
      looked_ns = now_ns
      newer = yield from _member(donor.learner, donor.incarnation)
      if newer is not None and newer.left:
        return "it left meanwhile"
      if newer is not None and newer.beat != donor.beat:
        donor, beat_ns = newer, now_ns
      elif now_ns - beat_ns > _SILENT_BEATS * heartbeat_ns:
        return "it shows no sign of life"


def _take(wanted: Wanted, donor: Member, data: bytes) -> Job:
  try:
    header = messages.decode(TransferHeader, data)
  except wire.WireError as error:
    return f"its record cannot be read: {error}"
  fault = _fault(wanted, donor, header)
  if fault:
    return fault
  ends = donor.learner, wanted.learner, wanted.nonce
  name = functools.partial(keys.transfer_part, *ends)
  try:
    return Donation(header, (yield from read_parts(name, header.parts)))
  except ValueError as error:
    return str(error)


def _fault(wanted: Wanted, donor: Member, header: TransferHeader) -> str:
  """What is wrong with a header; empty if nothing is."""
  if (header.run_id, header.learner) != (wanted.run_id, donor.learner):
    return "its record is another's"
  if header.seen < wanted.seen:
    return f"it had seen round {header.seen}, not {wanted.seen}"
  if header.state != wanted.state:
    return "its state has other shapes than this program's"
  try:
    check_sizes(header.parts, wanted.num_bytes)
  except ValueError as error:
    return str(error)
  return ""


def _forget_earlier(learner: int) -> Job:
  """Deletes what earlier lives of this learner asked for and never took."""
  for name in (yield Call("list", (keys.TRANSFERS,))):
    ends = keys.transfer_ends(name)
    if ends is not None and ends[1] == learner:
      yield Call("delete_prefix", (keys.transfer(*ends),))


# --- The donor's side --------------------------------------------------------


def publish(header: dict[str, Any], ends: tuple, data: bytes) -> Job:
  """Writes a state that was asked for; its record comes last."""
  name = functools.partial(keys.transfer_part, *ends)
  parts = yield from write_parts(name, data)
  record = TransferHeader(**header, parts=parts)
  yield Call("put", (keys.transfer_header(*ends), messages.encode(record)))
