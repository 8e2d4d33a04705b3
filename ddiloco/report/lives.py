"""What the tape of one life of a learner tells."""

import array
import json
from typing import Any

import numpy as np

from ddiloco.protocol import ledger, tape
from ddiloco.protocol.learner_types import (
  AnswerFailed,
  AnswerWritten,
  ApplyFragments,
  CommitSeen,
  Encode,
  Fetch,
  Fetched,
  Joined,
  Resumed,
  Step,
  StepDone,
  Stop,
)
from ddiloco.report.tapes import TapeReader

COMPLETED = "completed"
_HUGE_LOSS = 1e30  # how a tape records a loss that is not finite


class LearnerLife:
  """One life: its steps, its answers and what it fetched. Unix ns."""

  def __init__(self, reader: TapeReader, learner: int, num_fragments: int):
    """Reads the whole tape."""
    header = reader.header
    self.learner, self.incarnation = learner, header.incarnation
    self.pid = header.pid
    self.source = _source(header)
    self.process_ns = header.started_unix_ns  # the launcher knows better
    self.exited_ns = 0  # as the launcher saw it; 0: it did not
    self.exit_code: int | None = None
    self.started_ns = header.started_unix_ns
    self.joined_ns = 0
    self.joined_round = 0
    self.last_ns = header.started_unix_ns
    self.stopped = ""  # the reason, if it stopped in good order
    sync = json.loads(header.config).get("sync", {})
    self.ledger = ledger.LifeTape(
      learner,
      header.incarnation,
      num_fragments,
      blended=bool(sync.get("blend")),
    )
    self.encodes: list[tuple[int, int, tuple[int, ...]]] = []
    self.written: set[tuple[int, int]] = set()
    self.failed: set[tuple[int, int]] = set()
    self.fetched: dict[int, list[tuple[int, ...]]] = {}  # fragments, by round
    self.counted: dict[int, int] = {}  # attempt, by round whose commit was seen
    self._fetching: dict[int, tuple[int, ...]] = {}
    self._columns = {
      name: array.array("q")
      for name in ("begin_ns", "end_ns", "tokens", "exchange_ns")
    }
    self._losses = array.array("d")
    self._with_exchange = array.array("b")
    self._dispatched_ns = 0  # 0: no step is under way
    self._exchange_work = False
    self._work_of_step = False
    clock = reader.clock
    for record in reader.records():
      self.last_ns = max(self.last_ns, clock.unix_ns(record.event.now_ns))
      self._take(record, self.last_ns)
    self._freeze()

  @property
  def steps(self) -> int:
    """Inner steps done."""
    return len(self.end_ns)

  @property
  def step_ns(self) -> np.ndarray:
    """Duration of each step, `[steps]`, without the exchange's work in it."""
    return np.maximum(self.end_ns - self.begin_ns - self.exchange_in_step, 0)

  def _take(self, record: tape.Record, now_ns: int) -> None:
    event = record.event
    self.ledger.record(event, record.commands)
    match event:
      case Joined():
        self.joined_ns, self.joined_round = now_ns, event.seen
      case Resumed():
        self.joined_ns, self.joined_round = now_ns, event.state.seen
      case StepDone() if self._dispatched_ns:
        self._step_done(event, now_ns)
      case AnswerWritten():
        self.written.add((event.round, event.attempt))
      case AnswerFailed():
        self.failed.add((event.round, event.attempt))
      case CommitSeen():
        self.counted[event.round] = event.counted_attempt
      case Fetched() if event.round in self._fetching:
        fragments = self._fetching.pop(event.round)
        self.fetched.setdefault(event.round, []).append(fragments)
    for command in record.commands:
      self._performed(command, now_ns)

  def _performed(self, command: Any, now_ns: int) -> None:
    match command:
      case Step():
        self._dispatched_ns = now_ns
        self._work_of_step, self._exchange_work = self._exchange_work, False
      case Encode():
        self._exchange_work = True
        fragments = tuple(item.fragment for item in command.contributions)
        self.encodes.append((command.round, command.attempt, fragments))
      case ApplyFragments():
        self._exchange_work = True
      case Fetch():
        self._fetching[command.round] = command.fragments
      case Stop():
        self.stopped = command.reason

  def _step_done(self, event: StepDone, now_ns: int) -> None:
    row = {
      "begin_ns": self._dispatched_ns,
      "end_ns": now_ns,
      "tokens": event.tokens,
      "exchange_ns": event.exchange_ns,
    }
    self._dispatched_ns = 0
    for name, value in row.items():
      self._columns[name].append(value)
    self._losses.append(event.loss)
    self._with_exchange.append(self._work_of_step)

  def _freeze(self) -> None:
    columns = {
      name: np.array(column, np.int64) for name, column in self._columns.items()
    }
    self.begin_ns, self.end_ns = columns["begin_ns"], columns["end_ns"]
    self.tokens, self.exchange_ns = columns["tokens"], columns["exchange_ns"]
    losses = np.array(self._losses, np.float64)
    self.losses = np.where(losses < _HUGE_LOSS, losses, np.nan)
    self.with_exchange = np.array(self._with_exchange, np.bool_)
    self.gap_ns = np.zeros_like(self.begin_ns)
    self.gap_ns[1:] = np.maximum(self.begin_ns[1:] - self.end_ns[:-1], 0)
    # Work done while the learner is held comes before work at the dispatch.
    exchange_ns = np.maximum(self.exchange_ns, 0)
    self.exchange_in_gap = np.minimum(exchange_ns, self.gap_ns)
    self.exchange_in_step = np.minimum(
      exchange_ns - self.exchange_in_gap, self.end_ns - self.begin_ns
    )
    del self._columns, self._losses, self._with_exchange


def _source(header: tape.Header) -> str:
  """What a life went on from, beside the newest commit."""
  if header.donor is not None:
    return f"with the state of learner {header.donor[0]}"
  if header.restored is not None:
    return "from its checkpoint"
  return "with a fresh inner optimizer"
