"""The ledger: where every processed token went (docs/protocol.md, "Ledger").

Per learner and fragment, in exact integers,

  processed = merged + pending + lost, and the lost ones by cause:

  late         its answer came after the round had closed
  refused:why  the syncer, or already the learner's guard, left its answer out
  unanswered   a newer version was applied before any answer
  overwritten  stepped after the answer that decided
  blended      the same, where learners keep a share of their own parameters
  died         no answer carried it when its life ended

A life's tape is cut into segments, each from one version of a fragment to
the next; what became of a segment's answers decides where its tokens went.
Work repeated after a restart is processed again.
"""

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from ddiloco.protocol.learner_types import (
  AnswerFailed,
  AnswerWritten,
  ApplyFragments,
  Encode,
  StepDone,
)
from ddiloco.types import Refusal

MERGED = "merged"
PENDING = "pending"
LATE = "late"
UNANSWERED = "unanswered"
OVERWRITTEN = "overwritten"
BLENDED = "blended"
DIED = "died"
REFUSED = "refused:"

AnswerKey = tuple[int, int, int, int]  # round, learner, incarnation, attempt


class End(enum.Enum):
  """What ended a segment."""

  APPLIED = enum.auto()  # the fragment's next version
  DEATH = enum.auto()  # of the life, before the end of the run
  RUN = enum.auto()  # nothing yet, or the end of the run


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
  """One attempt, and the tokens it carried for the segment's fragment."""

  round: int
  attempt: int
  tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
  """What a life stepped on one version of a fragment."""

  fragment: int
  tokens: int
  answers: tuple[Answer, ...]  # in the order they were given
  end: End


@dataclasses.dataclass(frozen=True, slots=True)
class Verdicts:
  """What became of the run's answers."""

  committed: int  # the newest round
  counted: Mapping[tuple[int, int, int], int]  # round, learner, life: attempt
  refused: Mapping[AnswerKey, Refusal]
  seen: Set[AnswerKey]  # by the syncer

  def fate(self, key: AnswerKey) -> str:
    """`MERGED`, `PENDING`, `LATE` or `refused:why`."""
    if self.counted.get(key[:3]) == key[3]:
      return MERGED
    if key[0] > self.committed:
      return PENDING
    reason = self.refused.get(key, Refusal.LATE)
    return LATE if reason is Refusal.LATE else f"{REFUSED}{reason}"


@dataclasses.dataclass(slots=True)
class Account:
  """One learner's tokens of one fragment, or sums of such accounts."""

  processed: int = 0
  merged: int = 0
  pending: int = 0
  lost: dict[str, int] = dataclasses.field(default_factory=dict)

  @property
  def balanced(self) -> bool:
    """Whether every processed token is accounted for exactly once."""
    parts = (self.merged, self.pending, *self.lost.values())
    return min(parts) >= 0 and sum(parts) == self.processed

  def book(self, tokens: int, shares: Mapping[str, int]) -> None:
    """Adds a segment and where its tokens went."""
    self.processed += tokens
    for where, share in shares.items():
      if where == MERGED:
        self.merged += share
      elif where == PENDING:
        self.pending += share
      elif share:
        self.lost[where] = self.lost.get(where, 0) + share
    assert self.balanced, (tokens, shares, self)


class LifeTape:
  """Cuts one life's tape into segments, record by record."""

  def __init__(
    self,
    learner: int,
    incarnation: int,
    num_fragments: int,
    *,
    blended: bool = False,
  ):
    self._overwritten = BLENDED if blended else OVERWRITTEN
    self.learner, self.incarnation = learner, incarnation
    self.tokens = 0
    self._base = [0] * num_fragments  # self.tokens at the last apply
    self._answers: list[list[Answer]] = [[] for _ in range(num_fragments)]
    self._closed: list[Segment] = []
    self._written: set[tuple[int, int]] = set()
    self._failed: dict[tuple[int, int], Refusal | None] = {}

  def record(self, event: Any, commands: Iterable[Any]) -> None:
    """Takes the next record of the tape."""
    match event:
      case StepDone():
        self.tokens += event.tokens
      case AnswerWritten():
        self._written.add((event.round, event.attempt))
      case AnswerFailed():
        self._failed[event.round, event.attempt] = event.refusal
    for command in commands:
      match command:
        case ApplyFragments():
          for p in command.fragments:
            self._closed.append(self._segment(p, End.APPLIED))
            self._base[p], self._answers[p] = self.tokens, []
        case Encode():
          for item in command.contributions:
            answer = Answer(command.round, command.attempt, item.tokens)
            self._answers[item.fragment].append(answer)

  def segments(self, *, died: bool) -> Iterator[Segment]:
    """Every segment so far; `died`: the life ended before the run did."""
    yield from self._closed
    for p in range(len(self._base)):
      yield self._segment(p, End.DEATH if died else End.RUN)

  def shares(self, segment: Segment, verdicts: Verdicts) -> dict[str, int]:
    """Where a segment's tokens went; the shares sum to its tokens."""
    tokens = segment.tokens
    answers = [
      (min(answer.tokens, tokens), self._fate(answer, verdicts))
      for answer in segment.answers
      if self._reached(answer, segment.end, verdicts)
    ]
    rest_goes = {
      End.APPLIED: self._overwritten if answers else UNANSWERED,
      End.DEATH: DIED,
      End.RUN: PENDING,
    }[segment.end]
    shares: dict[str, int] = {}
    counted = [carried for carried, fate in answers if fate == MERGED]
    # A later counted answer contains the earlier ones.
    told = shares[MERGED] = max(counted, default=0)
    if answers and segment.end is not End.RUN:
      carried, fate = answers[-1]
      if carried > told and (fate == PENDING or not counted):
        shares[fate] = carried - told
        told = carried
    shares[rest_goes] = shares.get(rest_goes, 0) + tokens - told
    return shares

  def answer_fates(self, verdicts: Verdicts, *, died: bool) -> dict[int, str]:
    """What became of each round this life answered, by round."""
    fates: dict[int, str] = {}
    for segment in self.segments(died=died):
      for answer in segment.answers:
        fate = self._fate(answer, verdicts)
        if not self._reached(answer, segment.end, verdicts):
          fate = UNANSWERED
        # The newest attempt speaks for the round, unless one was counted.
        if fates.get(answer.round) != MERGED:
          fates[answer.round] = fate
    return fates

  def fragments_counted(self, verdicts: Verdicts) -> frozenset[int]:
    """The fragments for which an answer of this life was counted."""
    return frozenset(
      segment.fragment
      for segment in self.segments(died=False)
      for answer in segment.answers
      if verdicts.fate(self._key(answer)) == MERGED
    )

  def _segment(self, p: int, end: End) -> Segment:
    open_tokens = self.tokens - self._base[p]
    return Segment(p, open_tokens, tuple(self._answers[p]), end)

  def _key(self, answer: Answer) -> AnswerKey:
    return answer.round, self.learner, self.incarnation, answer.attempt

  def _fate(self, answer: Answer, verdicts: Verdicts) -> str:
    refusal = self._failed.get((answer.round, answer.attempt))
    if refusal is not None:
      return f"{REFUSED}{refusal}"
    return verdicts.fate(self._key(answer))

  def _reached(self, answer: Answer, end: End, verdicts: Verdicts) -> bool:
    """Whether an answer was there to be counted, or kept back for cause."""
    key, attempt = self._key(answer), (answer.round, answer.attempt)
    if key in verdicts.seen or verdicts.fate(key) == MERGED:
      return True
    if attempt in self._failed:
      return self._failed[attempt] is not None
    # One still on its way dies with its life, and counts as tried otherwise.
    return attempt in self._written or end is not End.DEATH


def total(accounts: Iterable[Account]) -> Account:
  """The sum of some accounts."""
  sum_ = Account()
  for account in accounts:
    shares = {MERGED: account.merged, PENDING: account.pending, **account.lost}
    sum_.book(account.processed, shares)
  return sum_


def headline(account: Account, num_fragments: int) -> Account:
  """A sum over fragments in tokens: divided by P, the remainder to pending."""
  merged = account.merged // num_fragments
  lost = {cause: n // num_fragments for cause, n in account.lost.items()}
  processed, rest = divmod(account.processed, num_fragments)
  assert rest == 0, "each step's tokens are processed for every fragment"
  pending = processed - merged - sum(lost.values())
  result = Account(processed, merged, pending, lost)
  assert result.balanced, result
  return result
