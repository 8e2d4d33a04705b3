"""A closed loop: learners, a syncer and an exchange on one event heap.

There are no arrays, and everything that takes time takes a drawn time. The
exchange does what a real one may: it is slow, it fails, what it was told may
arrive after whoever told it has died. One seed gives one history.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import learner_types, messages, syncer, syncer_types
from ddiloco.protocol.rules import Rules
from ddiloco.types import Refusal
from tests.protocol.scenario import (
  STEP_NS,
  Commands,
  Learner,
  Syncer,
  first_commit,
  make_header,
  plain_log,
)

Key = tuple[int, int, int, int]  # round, learner, incarnation, attempt
BEAT_NS = 20 * STEP_NS


class World:
  """Everything there is in a run, and the time."""

  def __init__(
    self,
    rules: Rules,
    steps_ns: tuple[int, ...],
    *,
    seed: int = 0,
    delay_ns_max: int = 0,
    jitter_permille: int = 0,
    failures_permille: int = 0,
  ):
    self.rules, self.steps_ns = rules, steps_ns
    self.random = random.Random(seed)
    self.delay_ns_max, self.jitter_permille = delay_ns_max, jitter_permille
    self.failures_permille = failures_permille
    self.now_ns = 1
    self.events = 0
    self.heap: list[tuple[int, int, Any, Callable[[], None]]] = []
    self.order = itertools.count()
    self.commits = {0: first_commit(rules)}  # ever made
    self.kept = {0}  # and not swept
    self.headers: dict[Key, messages.AnswerHeader] = {}  # ever written
    self.listed: dict[int, list[Key]] = collections.defaultdict(list)
    self.states = {(0, p) for p in range(rules.schedule.num_fragments)}
    self.logs: list[list] = []
    self.incarnations = dict.fromkeys(range(len(steps_ns)), 0)
    self.learners: dict[int, Learner] = {}
    self.resumes_ns: dict[Any, int] = {}
    self.syncer: Syncer | None = None
    self.start_syncer(epoch=1)
    for m in self.incarnations:
      self.start_learner(m)

  # --- Time -----------------------------------------------------------------

  def at(self, delay_ns: int, actor: Any, action: Callable[[], None]) -> None:
    """Plans an action; it is dropped if `actor` has died by then."""
    when_ns = self.now_ns + delay_ns
    heapq.heappush(self.heap, (when_ns, next(self.order), actor, action))

  def run(self, rounds: int, events_max: int = 100_000) -> None:
    """Goes on until commit `rounds` is made."""
    events_max += self.events
    while self.newest < rounds:
      assert self.events < events_max, f"stuck after round {self.newest}"
      self.run_one()

  def run_one(self) -> None:
    """The next thing happens."""
    self.events += 1
    self.now_ns, _, actor, action = heapq.heappop(self.heap)
    resumes_ns = self.resumes_ns.get(actor, 0)
    if resumes_ns > self.now_ns:
      self.at(resumes_ns - self.now_ns, actor, action)
    elif actor is None or self.is_alive(actor):
      action()

  def delay_ns(self) -> int:
    """How long something takes."""
    return self.random.randint(0, self.delay_ns_max)

  def fails(self) -> bool:
    """Whether something goes wrong."""
    return self.random.randrange(1000) < self.failures_permille

  @property
  def newest(self) -> int:
    """The newest commit."""
    return max(self.commits)

  # --- Life and death -------------------------------------------------------

  def is_alive(self, actor: Any) -> bool:
    """Whether an actor has neither died nor stopped."""
    if actor.state.done:
      return False
    if actor is self.syncer:
      return self.syncer_lives
    return actor in self.learners.values()

  def start_learner(self, m: int) -> None:
    """A new life of learner m joins at the newest commit."""
    self.incarnations[m] += 1
    commit = self.commits[self.newest]
    actor = Learner(
      self.rules,
      learner=m,
      incarnation=self.incarnations[m],
      seen=commit.round,
      run_tokens=commit.tokens,
      now_ns=self.now_ns,
    )
    self.learners[m] = actor
    self.logs.append(actor.log)
    self.perform_learner(actor, actor.first)
    self.beat(actor, 0)

  def pause_learner(self, m: int, duration_ns: int) -> None:
    """Whatever it is told waits until it goes on."""
    self.resumes_ns[self.learners[m]] = self.now_ns + duration_ns

  def kill_learner(self, m: int) -> None:
    """What it has sent may still arrive."""
    del self.learners[m]

  def start_syncer(self, epoch: int) -> None:
    """A new life of the syncer goes on from the newest commit."""
    self.syncer = Syncer(
      self.rules,
      commit=self.commits[self.newest],
      epoch=epoch,
      now_ns=self.now_ns,
    )
    self.logs.append(self.syncer.log)
    self.syncer_lives = True
    self.delivering: set[Key] = set()
    self.wake_ns = None
    self.perform_syncer(self.syncer, self.syncer.first)

  def restart_syncer(self) -> None:
    """The syncer dies, and its next life starts."""
    self.start_syncer(self.syncer.state.epoch + 1)

  def kill_syncer(self) -> None:
    """The syncer dies; nobody takes over."""
    self.syncer_lives = False

  def beat(self, actor: Learner, beat: int) -> None:
    """A learner's record is rewritten, and seen by the syncer."""
    life = actor.state.learner, actor.state.incarnation
    receiver = self.syncer
    self.at(
      self.delay_ns(),
      receiver,
      lambda: self.tell(receiver, "member", life[0], beat, incarnation=life[1]),
    )
    self.at(BEAT_NS, actor, lambda: self.beat(actor, beat + 1))

  def tell(self, actor: Any, event: str, *args: Any, **kwargs: Any) -> None:
    """An actor gets an event now, and its commands are carried out."""
    actor.now_ns = self.now_ns
    commands = getattr(actor, event)(*args, **kwargs)
    if isinstance(actor, Learner):
      self.perform_learner(actor, commands)
    else:
      self.perform_syncer(actor, commands)

  # --- Learners -------------------------------------------------------------

  def perform_learner(self, actor: Learner, commands: Commands) -> None:
    """Carries out a learner's commands."""
    for command in commands:
      match command:
        case learner_types.Step():
          self.at(self.step_ns(actor), actor, self.teller(actor, "step", 0))
        case learner_types.Fetch():
          self.fetch(actor, command)
        case learner_types.Encode():
          self.publish(actor, command)
    wake_ns = learner_machine.wake_ns(actor.state, self.now_ns)
    if wake_ns is not None and wake_ns != getattr(actor, "wake_ns", None):
      actor.wake_ns = wake_ns
      self.at(wake_ns - self.now_ns, actor, lambda: self.tick(actor, wake_ns))
    self.at(self.delay_ns(), actor, lambda: self.look_for_commit(actor))

  def teller(self, actor: Any, event: str, *args: Any) -> Callable[[], None]:
    """An action that tells an actor something."""
    return lambda: self.tell(actor, event, *args)

  def step_ns(self, actor: Learner) -> int:
    """How long an inner step takes."""
    mean_ns = self.steps_ns[actor.state.learner]
    jitter = self.random.randint(-self.jitter_permille, self.jitter_permille)
    return mean_ns + mean_ns * jitter // 1000

  def tick(self, actor: Learner, wake_ns: int) -> None:
    """The timer of a held learner."""
    if actor.wake_ns == wake_ns and actor.state.waiting_since_ns:
      self.tell(actor, "feed", learner_types.Tick(self.now_ns))

  def fetch(self, actor: Learner, command: learner_types.Fetch) -> None:
    """Brings a round's fragments, if they are still there."""

    def arrive() -> None:
      wanted = {(command.round, p) for p in command.fragments}
      gone = self.fails() or not wanted <= self.states
      self.tell(actor, "fetch_failed" if gone else "fetched", command.round)

    self.at(self.delay_ns(), actor, arrive)

  def publish(self, actor: Learner, command: learner_types.Encode) -> None:
    """Writes an answer, or fails to."""
    state = actor.state
    key = command.round, state.learner, state.incarnation, command.attempt
    header = make_header(self.rules, command, *key[1:3])
    failed = self.fails()

    def arrive() -> None:
      if not failed:
        assert key not in self.headers, "objects are written once"
        self.headers[key] = header
        self.listed[command.round].append(key)
      event = "write_failed" if failed else "written"
      told = self.teller(actor, event, command.round, command.attempt)
      self.at(self.delay_ns(), actor, told)
      self.look_for_answers()

    self.at(self.delay_ns(), None, arrive)

  def look_for_commit(self, actor: Learner) -> None:
    """A learner looks for the next commit."""
    t = learner_machine.watched(actor.state, self.rules)
    if t in self.kept:
      commit = self.commits[t]
      life = actor.state.learner, actor.state.incarnation
      self.tell(actor, "sees", t, commit.counted_attempt(*life), commit.tokens)
    elif self.newest > t:  # swept already
      commit = self.commits[self.newest]
      versions = tuple((f.version, f.epoch) for f in commit.fragments)
      event = learner_types.CaughtUp(
        self.now_ns, commit.round, versions, commit.tokens
      )
      self.tell(actor, "feed", event)

  # --- The syncer -----------------------------------------------------------

  def perform_syncer(self, actor: Syncer, commands: Commands) -> None:
    """Carries out the syncer's commands."""
    for command in commands:
      match command:
        case syncer_types.Check():
          self.check(actor, command)
        case syncer_types.Merge():
          self.at(
            self.delay_ns(), actor, lambda t=command.round: self.merge(actor, t)
          )
        case syncer_types.WriteCommit():
          self.create(actor, command.commit)
        case syncer_types.Sweep():
          self.kept -= set(command.commits)
          self.states -= set(command.states)
          for t in command.answers:
            self.listed.pop(t, None)
    if actor.state.done:
      if commands.stop == syncer.OVERTAKEN:
        self.at(STEP_NS, None, self.restart_syncer)
      return
    wake_ns = syncer.wake_ns(actor.state, self.now_ns, self.rules)
    if wake_ns is not None and wake_ns != self.wake_ns:
      self.wake_ns = wake_ns
      self.at(wake_ns - self.now_ns, actor, self.teller(actor, "wait", 0))
    self.look_for_answers()

  def look_for_answers(self) -> None:
    """The syncer lists the answers to its open rounds."""
    if not self.syncer_lives:
      return
    actor = self.syncer
    for view in actor.state.rounds:
      for key in self.listed[view.round]:
        if key in self.delivering:
          continue
        self.delivering.add(key)
        event = (
          syncer_types.AnswerGarbled(0, key, Refusal.MALFORMED)
          if self.fails()
          else syncer_types.AnswerSeen(0, key, self.headers[key])
        )
        told = functools.partial(self.tell_now, actor, event)
        self.at(self.delay_ns(), actor, told)

  def tell_now(self, actor: Any, event: Any) -> None:
    """An actor gets an event that was made earlier."""
    self.tell(actor, "feed", dataclasses.replace(event, now_ns=self.now_ns))

  def check(self, actor: Syncer, command: syncer_types.Check) -> None:
    """Inspects an answer's parts."""
    reason = Refusal.CHECKSUM if self.fails() else None
    self.at(
      self.delay_ns(),
      actor,
      lambda: self.tell(
        actor,
        "checked",
        command.round,
        command.learner,
        incarnation=command.incarnation,
        attempt=command.attempt,
        reason=reason,
      ),
    )

  def merge(self, actor: Syncer, t: int) -> None:
    """Stores a round's new fragments."""
    self.states |= {(t, p) for p in self.rules.schedule.fragments(t)}
    self.tell(actor, "merged", t)

  def create(self, actor: Syncer, commit: Any) -> None:
    """Creates a commit, unless there is one."""

    def arrive() -> None:
      won = self.commits.setdefault(commit.round, commit) is commit
      if won:
        self.kept.add(commit.round)
        for learner in self.learners.values():
          looks = self.looker(learner)
          self.at(self.delay_ns(), learner, looks)
      self.at(
        self.delay_ns(),
        actor,
        lambda: self.tell(actor, "committed", commit.round, won),
      )

    self.at(self.delay_ns(), None, arrive)

  def looker(self, learner: Learner) -> Callable[[], None]:
    """An action: this learner looks for the next commit."""
    return lambda: self.look_for_commit(learner)

  # --- What it all came to --------------------------------------------------

  def history(self) -> list:
    """Every input and decision of every life, as JSON values."""
    return [plain_log(log) for log in self.logs]
