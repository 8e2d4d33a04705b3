"""States of a small world without what decides nothing.

For `explore`: two states must be the same value if nothing that is still to
come can tell them apart. Kept out of them, or at one fixed value, are
  - times: clocks stand still, an inner step takes `STEP_NS`, and a timer of
    the syncer that is set may go off at any moment;
  - amounts: an answer carries "one step or more", and no tokens are counted;
  - digests: a commit is named by its round and its writer's epoch;
  - what was refused and why, and the order in which answers were tried.
"""

from typing import Any, NamedTuple

from ddiloco.protocol import invariants
from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  Encode,
  Fetch,
  Joined,
  LearnerState,
)
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  FragmentState,
  PartRef,
)
from ddiloco.protocol.rules import PERMILLE, Rules
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.syncer_answers import life
from ddiloco.protocol.syncer_types import (
  Check,
  Drop,
  RoundView,
  SyncerState,
  WriteCommit,
)
from ddiloco.types import Anchor, Apply, Wait

NOW_NS = 1  # 0 would mean: not yet
STEP_NS = 10
LATER_NS = 1000  # than any timer


def small_rules(
  *,
  fragments: int = 2,
  interval: int = 3,
  overlap: int = 2,
  quorum_min: int = 1,
  rounds: int = 3,
) -> Rules:
  """The rules of a run of a few rounds under the default policy."""
  schedule = Schedule(fragments, interval, overlap)
  last = 0
  for _ in range(rounds):
    last = schedule.next_round(last)
  return Rules(
    run_id="small",
    layout="",
    codec="",
    answer_bytes=(1,) * fragments,
    schedule=schedule,
    quorum_min=quorum_min,
    grace=True,
    grace_margin_permille=PERMILLE,
    wait=Wait.NEVER,
    anchor=Anchor.CURRENT,
    apply=Apply.WHEN_SEEN,
    outlier_permille=0,
    dead_after_ns=10**18,
    stop_rounds=last,
    stop_tokens=0,
    checkpoint_every_steps=0,
  )


def header(command: Encode, state: LearnerState, rules: Rules) -> AnswerHeader:
  """What a learner publishes for an answer."""
  one = [replace(c, steps=1, tokens=1) for c in command.contributions]
  return AnswerHeader(
    run_id=rules.run_id,
    round=command.round,
    learner=state.learner,
    incarnation=state.incarnation,
    attempt=command.attempt,
    contributions=tuple(one),
    layout=rules.layout,
    codec=rules.codec,
    parts=(PartRef(sum(rules.answer_bytes[c.fragment] for c in one), ""),),
    step_ns=command.step_ns,
    fetch_ns=command.fetch_ns,
    life_steps=1,
    life_tokens=1,
    vector_clock=(),
    metrics=(),
    mac="",
  )


def key_of(of: AnswerHeader | Check | Drop) -> tuple[int, int, int, int]:
  """Where an answer lies."""
  return of.round, of.learner, of.incarnation, of.attempt


def fragment_state(t: int, epoch: int) -> FragmentState:
  """A fragment's version, by its name alone."""
  return FragmentState(t, epoch, 0, "", 0, "")


def digest(commit: Commit) -> str:
  """A commit's name: nobody writes two of them."""
  return f"{commit.round}.{commit.epoch}"


def first_commit(rules: Rules, epoch: int) -> Commit:
  """The commit that starts the run."""
  fragments = (fragment_state(0, epoch),) * rules.schedule.num_fragments
  return Commit(
    run_id=rules.run_id,
    round=0,
    epoch=epoch,
    previous="",
    counted=(),
    refused=(),
    fragments=fragments,
    tokens=0,
    progress=(),
    vector_clock=(),
    genesis=None,
  )


def forget_in_learner(state: LearnerState) -> LearnerState:
  """The learner's state without what decides nothing."""
  return replace(
    state,
    tokens=0,
    next_sample=0,
    fragments=tuple(
      replace(view, steps=min(view.steps, 1), tokens=min(view.steps, 1))
      for view in state.fragments
    ),
    seen_ns=tuple((t, NOW_NS) for t, _ in state.seen_ns),
    step_started_ns=NOW_NS,
  )


def forget_in_syncer(state: SyncerState) -> SyncerState:
  """The syncer's state without what decides nothing."""
  return replace(
    state,
    started_ns=NOW_NS,
    tokens=0,
    rounds=tuple(_forget_in_round(view) for view in state.rounds),
    learners=tuple(
      replace(view, changed_ns=NOW_NS, steps=0, tokens=0, earlier_tokens=0)
      for view in state.learners
    ),
    norms=((),) * len(state.norms),
    last_closed_ns=min(state.last_closed_ns, NOW_NS),
    xi_sync_ns=0,
    xi_quorum_ns=0,
  )


def _forget_in_round(view: RoundView) -> RoundView:
  answers = [replace(a, arrived_ns=NOW_NS) for a in view.answers]
  return replace(
    view,
    opened_ns=NOW_NS,
    answers=tuple(sorted(answers, key=life)),
    refused=(),
    tried=tuple(sorted(view.tried)),
    first_ns=min(view.first_ns, NOW_NS),
    quorum_ns=min(view.quorum_ns, NOW_NS),
    closed_ns=min(view.closed_ns, NOW_NS),
  )


def only_first_timer(state: SyncerState) -> SyncerState:
  """The same, but later rounds had their quorum so late that theirs run on."""
  waiting = [v.round for v in state.rounds if v.quorum_ns and not v.closed_ns]
  return replace(
    state,
    rounds=tuple(
      replace(view, quorum_ns=LATER_NS) if view.round in waiting[1:] else view
      for view in state.rounds
    ),
  )


class Numbers:
  """Numbers for values, which are compared and hashed a million times."""

  def __init__(self):
    self._numbers: dict[Any, int] = {}
    self.values: list[Any] = []  # by number

  def of(self, value: Any) -> int:
    """The number of a value; equal values have the same."""
    number = self._numbers.setdefault(value, len(self.values))
    if number == len(self.values):
      self.values.append(value)
    return number


class Transition(NamedTuple):
  """A machine's transition: who it is then, and what it asks for."""

  actor: int
  operations: frozenset[int]  # (kind, about …) of what is under way then
  commands: tuple[Any, ...]


class Actors:
  """The machines between numbered states; each transition is made once."""

  def __init__(self, rules: Rules, numbers: Numbers, machines: dict[str, Any]):
    """Takes what replaces a role's machine, by `learner` or `syncer`."""
    self._rules, self._numbers = rules, numbers
    self.learner = machines.get("learner", learner_machine)
    self.syncer = machines.get("syncer", syncer_machine)
    self._known: dict[tuple[int, Any], Transition] = {}

  def step(self, actor: int, event: Any) -> Transition:
    """What an actor makes of an event; that of `None` is a start."""
    found = self._known.get((actor, event))
    if found is None:
      found = self._known[actor, event] = self._make(actor, event)
    return found

  def _make(self, actor: int, event: Any) -> Transition:
    before, rules = self._numbers.values[actor], self._rules
    learner = isinstance(event, Joined) or isinstance(before, LearnerState)
    machine = self.learner if learner else self.syncer
    if before is None:
      state, commands = machine.start(event, rules)
    else:
      state, commands = machine.step(before, event, rules)
      check = invariants.check_learner if learner else invariants.check_syncer
      check(before, event, state, commands, rules)
    started = [self._operation(command, state) for command in commands]
    operations = [self._numbers.of(x) for x in started if x is not None]
    forget = forget_in_learner if learner else forget_in_syncer
    actor = self._numbers.of(forget(state))
    return Transition(actor, frozenset(operations), tuple(commands))

  def _operation(self, command: Any, state: Any) -> tuple[Any, ...] | None:
    """What a command sets off; None if it is done at once."""
    match command:
      case Encode():
        return "publish", self._numbers.of(header(command, state, self._rules))
      case Fetch():
        where = (command.round, command.epoch, command.fragments)
        return "fetch", state.learner, *where
      case Check():
        return "check", *key_of(command)
      case WriteCommit():
        return "create", self._numbers.of(replace(command.commit, refused=()))
    return None
