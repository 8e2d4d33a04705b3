"""Scripts for the machines that read like the protocol.

`Learner` and `Syncer` drive one machine each: every method is one event, its
result the commands that the machine gave, and the invariants are checked
after every transition.
"""

import dataclasses
from typing import Any

from ddiloco.protocol import (
  invariants,
  learner,
  learner_types,
  messages,
  syncer,
  syncer_types,
  wire,
)
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.tape import recorded
from ddiloco.types import MILLISECOND_NS, Anchor, Apply, Refusal, Wait

STEP_NS = 100 * MILLISECOND_NS
STEP_TOKENS = 10
STEP_SAMPLES = 2
ANSWER_BYTES = 8  # of every fragment


def make_rules(
  fragments: int = 4, interval: int = 4, overlap: int = 1, **changes: Any
) -> Rules:
  """Rules with short defaults; one fragment is due at every step."""
  rules = Rules(
    run_id="run",
    layout="layout",
    codec="codec",
    answer_bytes=(ANSWER_BYTES,) * fragments,
    schedule=Schedule(fragments, interval, overlap),
    quorum_min=1,
    grace=True,
    grace_margin_permille=900,
    wait=Wait.NEVER,
    anchor=Anchor.CURRENT,
    apply=Apply.WHEN_SEEN,
    outlier_permille=20_000,
    dead_after_ns=100 * STEP_NS,
    stop_rounds=0,
    stop_tokens=0,
    checkpoint_every_steps=0,
  )
  return dataclasses.replace(rules, **changes)


def fragment_state(version: int, epoch: int = 1) -> messages.FragmentState:
  """The record of a stored fragment."""
  return messages.FragmentState(version, epoch, 4, "params", 4, "outer")


def first_commit(rules: Rules) -> messages.Commit:
  """Commit 0 of a run by these rules."""
  return messages.Commit(
    run_id=rules.run_id,
    round=0,
    epoch=1,
    previous="",
    counted=(),
    refused=(),
    fragments=(fragment_state(0),) * rules.schedule.num_fragments,
    tokens=0,
    progress=(),
    vector_clock=(("syncer", 0),),
    genesis=messages.Genesis("{}", "digest", "{}", "0"),
  )


def make_header(
  rules: Rules, encode: learner_types.Encode, learner: int, incarnation: int
) -> messages.AnswerHeader:
  """The header that a learner's plane writes for an `Encode`."""
  size = sum(rules.answer_bytes[c.fragment] for c in encode.contributions)
  return messages.AnswerHeader(
    run_id=rules.run_id,
    round=encode.round,
    learner=learner,
    incarnation=incarnation,
    attempt=encode.attempt,
    contributions=encode.contributions,
    layout=rules.layout,
    codec=rules.codec,
    parts=(messages.PartRef(size, "part"),),
    step_ns=encode.step_ns,
    fetch_ns=encode.fetch_ns,
    life_steps=encode.life_steps,
    life_tokens=encode.life_tokens,
    vector_clock=encode.vector_clock,
    metrics=(("loss", 2.0),),
    mac="",
  )


def step_done(now_ns: int, step: int) -> learner_types.StepDone:
  """The end of an inner step."""
  return learner_types.StepDone(
    now_ns=now_ns,
    step=step,
    tokens=STEP_TOKENS,
    samples=STEP_SAMPLES,
    loss=2.0,
    exchange_ns=0,
  )


def plain_log(log: list[tuple[Any, list[Any]]]) -> list[list[Any]]:
  """A script's log as JSON values, in the form of a tape."""
  return [
    [wire.pack(event), [wire.pack(recorded(command)) for command in commands]]
    for event, commands in log
  ]


class Commands(list):
  """The commands of one transition, and what tests ask about them."""

  def of(self, cls: type) -> list[Any]:
    """Those of one class."""
    return [command for command in self if isinstance(command, cls)]

  @property
  def names(self) -> list[str]:
    """Their class names, in order."""
    return [type(command).__name__ for command in self]

  @property
  def answers(self) -> list[tuple[int, int]]:
    """(round, attempt) of each answer."""
    return [(c.round, c.attempt) for c in self.of(learner_types.Encode)]

  @property
  def applies(self) -> list[tuple[int, tuple[int, ...]]]:
    """(round, fragments) of each apply."""
    found = self.of(learner_types.ApplyFragments)
    return [(c.round, c.fragments) for c in found]

  @property
  def fetches(self) -> list[int]:
    """The round of each fetch."""
    return [c.round for c in self.of(learner_types.Fetch)]

  @property
  def steps(self) -> list[int]:
    """The own step of each dispatched inner step; one at most."""
    return [c.step for c in self.of(learner_types.Step)]

  @property
  def merges(self) -> list[tuple[int, tuple[int, ...]]]:
    """(round, learners) of each merge."""
    found = self.of(syncer_types.Merge)
    return [(c.round, tuple(a.learner for a in c.counted)) for c in found]

  @property
  def commit(self) -> messages.Commit | None:
    """The commit to write, if any."""
    found = self.of(syncer_types.WriteCommit)
    return found[0].commit if found else None

  @property
  def stop(self) -> str | None:
    """The reason of a `Stop`, if any."""
    found = self.of(learner_types.Stop) + self.of(syncer_types.Stop)
    return found[0].reason if found else None


class Learner:
  """One life of a learner, on a clock that its steps move."""

  def __init__(
    self,
    rules: Rules,
    *,
    learner: int = 0,
    incarnation: int = 1,
    seen: int = 0,
    run_tokens: int = 0,
    now_ns: int = 0,
  ):
    self.rules, self.now_ns = rules, now_ns
    schedule = rules.schedule
    event = learner_types.Joined(
      now_ns=now_ns,
      learner=learner,
      incarnation=incarnation,
      seen=seen,
      run_tokens=run_tokens,
      versions=tuple(
        (schedule.version_before(p, seen + 1), 1)
        for p in range(schedule.num_fragments)
      ),
      next_sample=0,
    )
    self.state, commands = _start_learner(event, rules)
    self.log = [(event, commands)]
    self.first = commands

  def feed(self, event: Any) -> Commands:
    """Any event."""
    before = self.state
    self.state, commands = learner.step(before, event, self.rules)
    invariants.check_learner(before, event, self.state, commands, self.rules)
    self.log.append((event, commands))
    return Commands(commands)

  def step(self, elapsed_ns: int = STEP_NS) -> Commands:
    """The inner step under way ends."""
    self.now_ns += elapsed_ns
    return self.feed(step_done(self.now_ns, self.state.step + 1))

  def sees(self, t: int, attempt: int = 0, run_tokens: int = 0) -> Commands:
    """Commit t is there; `attempt` of this life's answer is counted."""
    return self.feed(
      learner_types.CommitSeen(self.now_ns, t, 1, attempt, run_tokens)
    )

  def fetched(self, t: int) -> Commands:
    """The fragments of round t are on the island."""
    return self.feed(learner_types.Fetched(self.now_ns, t))

  def fetch_failed(self, t: int) -> Commands:
    """They are not."""
    return self.feed(learner_types.FetchFailed(self.now_ns, t, "gone"))

  def gets(self, t: int, attempt: int = 0) -> Commands:
    """Commit t is there, and so are its fragments."""
    seen = self.sees(t, attempt)
    return Commands(seen + self.fetched(t))

  def written(self, t: int, attempt: int = 1) -> Commands:
    """An answer's header is in the exchange."""
    return self.feed(learner_types.AnswerWritten(self.now_ns, t, attempt))

  def write_failed(self, t: int, attempt: int = 1) -> Commands:
    """It is not."""
    return self.feed(
      learner_types.AnswerFailed(self.now_ns, t, attempt, "no answer")
    )

  def tick(self) -> Commands:
    """The timer that the machine asked for."""
    self.now_ns = learner.wake_ns(self.state, self.now_ns)
    return self.feed(learner_types.Tick(self.now_ns))

  def stop(self, reason: str = "signal") -> Commands:
    """Somebody wants this life to end."""
    return self.feed(learner_types.StopRequested(self.now_ns, reason))

  def fragment(self, p: int) -> learner_types.FragmentView:
    """One fragment as this learner has it."""
    return self.state.fragments[p]


def _start_learner(event: Any, rules: Rules) -> tuple[Any, Commands]:
  state, commands = learner.start(event, rules)
  return state, Commands(commands)


class Syncer:
  """One life of a syncer, on a clock that the script moves."""

  def __init__(
    self,
    rules: Rules,
    *,
    commit: messages.Commit | None = None,
    epoch: int = 1,
    now_ns: int = STEP_NS,
  ):
    self.rules, self.now_ns = rules, now_ns
    commit = commit or first_commit(rules)
    event = syncer_types.Opened(now_ns, epoch, commit, f"digest-{commit.round}")
    self.state, commands = syncer.start(event, rules)
    self.first = Commands(commands)
    self.log = [(event, commands)]

  def feed(self, event: Any) -> Commands:
    """Any event."""
    before = self.state
    self.state, commands = syncer.step(before, event, self.rules)
    invariants.check_syncer(before, event, self.state, commands, self.rules)
    self.log.append((event, commands))
    return Commands(commands)

  def header(
    self,
    t: int,
    learner: int = 0,
    *,
    incarnation: int = 1,
    attempt: int = 1,
    steps: int = 4,
    life_steps: int = 8,
    step_ns: int = STEP_NS,
    **changes: Any,
  ) -> messages.AnswerHeader:
    """A valid answer's header."""
    encode = learner_types.Encode(
      round=t,
      attempt=attempt,
      contributions=tuple(
        messages.Contribution(
          p, self.state.fragments[p].version, steps, steps * STEP_TOKENS
        )
        for p in self.rules.schedule.fragments(t)
      ),
      step_ns=step_ns,
      fetch_ns=0,
      life_steps=life_steps,
      life_tokens=life_steps * STEP_TOKENS,
      vector_clock=((f"learner-{learner}", life_steps), ("syncer", 0)),
    )
    header = make_header(self.rules, encode, learner, incarnation)
    return dataclasses.replace(header, **changes)

  def offers(self, t: int, learner: int = 0, **header: Any) -> Commands:
    """An answer's header is found where it belongs."""
    record = self.header(t, learner, **header)
    key = t, learner, record.incarnation, record.attempt
    return self.feed(syncer_types.AnswerSeen(self.now_ns, key, record))

  def checked(
    self,
    t: int,
    learner: int = 0,
    *,
    incarnation: int = 1,
    attempt: int = 1,
    reason: Refusal | None = None,
    norm: int = 1000,
  ) -> Commands:
    """An answer's parts were inspected."""
    norms = (norm,) * len(self.rules.schedule.fragments(t))
    return self.feed(
      syncer_types.AnswerChecked(
        self.now_ns,
        t,
        learner,
        incarnation,
        attempt,
        reason,
        () if reason else norms,
      )
    )

  def answers(self, t: int, learner: int = 0, **header: Any) -> Commands:
    """A learner's answer is found, and valid."""
    self.offers(t, learner, **header)
    life = {k: header[k] for k in ("incarnation", "attempt") if k in header}
    return self.checked(t, learner, **life)

  def member(
    self, learner: int, beat: int = 1, *, incarnation: int = 1, left=False
  ) -> Commands:
    """A learner's record is new or has changed."""
    return self.feed(
      syncer_types.MemberSeen(self.now_ns, learner, incarnation, beat, left)
    )

  def merged(self, t: int) -> Commands:
    """Round t's new fragments are stored."""
    due = self.rules.schedule.fragments(t)
    states = (fragment_state(t, self.state.epoch),) * len(due)
    return self.feed(syncer_types.Merged(self.now_ns, t, states))

  def committed(self, t: int, won: bool = True) -> Commands:
    """The create of commit t has an outcome."""
    return self.feed(syncer_types.Committed(self.now_ns, t, won, f"digest-{t}"))

  def finish(self, t: int) -> messages.Commit:
    """A closed round is merged and committed."""
    commit = self.merged(t).commit
    self.committed(t)
    return commit

  def wait(self, duration_ns: int) -> Commands:
    """Time passes; the machine is woken."""
    self.now_ns += duration_ns
    return self.feed(syncer_types.Tick(self.now_ns))

  def wake_in_ns(self) -> int | None:
    """How long until the machine wants to be woken."""
    wake_ns = syncer.wake_ns(self.state, self.now_ns, self.rules)
    return None if wake_ns is None else wake_ns - self.now_ns

  def round(self, t: int) -> syncer_types.RoundView | None:
    """An uncommitted round."""
    return next((r for r in self.state.rounds if r.round == t), None)

  def refusals(self, t: int) -> list[tuple[int, Refusal]]:
    """(learner, reason) of each answer left out of round t."""
    return [(r.learner, r.reason) for r in self.round(t).refused]
