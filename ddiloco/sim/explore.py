"""Every interleaving of a small world, visited once.

Where the swarm draws some histories of a large world, this walks through all
histories of a small one: the real machines of a syncer and a few learners,
around a store that is a set of objects. What may happen next in a state is
any of these:
  - an inner step ends;
  - an answer becomes visible, and its writer is told so;
  - the syncer sees an answer, a new life, or another syncer's commit; an
    answer is checked; a commit is created; a timer goes off;
  - a learner sees the next commit, or has its fragments fetched;
  - anybody crashes, and anybody dead starts again from the newest commit (a
    start from an older one is this start, earlier). What a dead life had on
    its way to the store arrives at any time, or never.
Every learner makes `steps_max` steps at most, and none ever notices: it may
always be slower than everybody else. The store loses nothing, merges and
sweeps take no time, and all answers are sound. Which states count as the
same: see `small_world`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.learner_types import CommitSeen
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer import OVERTAKEN
from ddiloco.protocol.syncer_types import (
  AnswerSeen,
  MemberSeen,
  StopRequested,
  SyncerState,
  Tick,
)
from ddiloco.protocol.syncer_views import learner_view, round_view
from ddiloco.sim import small_world
from ddiloco.sim.small_steps import Happenings, World, steps
from ddiloco.sim.small_world import LATER_NS, NOW_NS

_Choice = tuple[Any, ...]  # a function of `Happenings`, a world, about whom

# Of a world: the one before it, and which of its choices it was.
_Origins = dict[World, tuple[World, int] | None]


class Result(NamedTuple):
  """How large the world was."""

  states: int
  transitions: int
  depth: int  # of the state that is the furthest from the start
  ended: int  # states in which the last round is committed


def explore(
  rules: Rules,
  *,
  learners: int = 2,
  crashes: int = 1,
  steps_max: int = 3,
  machines: dict[str, Any] | None = None,
) -> Result:
  """Visits every state; an `InvariantError` tells a shortest way to it.

  Args:
    rules: of the run; see `small_world.small_rules`.
    learners: how many.
    crashes: how many there may be, each of anybody at any time.
    steps_max: inner steps of one learner, all its lives together.
    machines: replaces a role's machine, by `learner` or `syncer` (mutants).
  """
  explorer = _Explorer(rules, machines or {})
  first = explorer.happen.first(learners, crashes, steps_max)
  came_from: _Origins = {first: None}
  level, depth, transitions, ended = [first], 0, 0, 0
  while level:
    following = []
    for world in level:
      ended += explorer.ended(world)
      for index, choice in enumerate(explorer.choices(world)):
        try:
          after = explorer.after(choice)
        except AssertionError as error:
          way = explorer.way(came_from, world, index)
          raise InvariantError(f"{error}\nThe way there:\n{way}") from error
        transitions += 1
        if after not in came_from:
          came_from[after] = world, index
          following.append(after)
    level = following
    depth += bool(level)
  return Result(len(came_from), transitions, depth, ended)


class _Explorer:
  """What may happen next in a world."""

  def __init__(self, rules: Rules, machines: dict[str, Any]):
    self._rules = rules
    self._numbers = small_world.Numbers()
    self._values = self._numbers.values
    self.happen = Happenings(rules, self._numbers, machines)

  def ended(self, world: World) -> bool:
    """Whether the last round is committed."""
    commit = self.happen.newest(world)
    return self._rules.ended(commit.round, commit.tokens)

  def after(self, choice: _Choice) -> World:
    """The world after one of its choices."""
    happen, *args = choice
    return self.happen.forget(happen(*args))

  def way(self, came_from: _Origins, world: World, index: int) -> str:
    """What has happened from the first world to this choice, line by line."""
    lines: list[str] = []
    step = world, index
    while step is not None:
      world, index = step
      happen, _, *about = list(self.choices(world))[index]
      if happen in (self.happen.publish, self.happen.create):
        about = [self._values[number] for number in about]
      lines.insert(0, " ".join([happen.__name__, *map(str, about)]))
      step = came_from[world]
    return "\n".join(lines)

  def choices(self, world: World) -> Iterator[_Choice]:
    """Everything that may happen next: a function, a world, about whom."""
    yield from self._syncer_choices(world)
    for m in range(len(world.learners)):
      yield from self._learner_choices(world, m)
    for number in sorted(world.pending):
      kind, *about = self._values[number]
      rest = world._replace(pending=world.pending - {number})
      yield getattr(self.happen, kind), rest, *about

  def _learner_choices(self, world: World, m: int) -> Iterator[_Choice]:
    state, happen = self._values[world.learners[m]], self.happen
    if state is None:
      yield happen.start_learner, world, m
      return
    if world.crashes:
      yield happen.crash_learner, world, m
    if not steps(state):
      return
    yield happen.step_learner, world, m
    t = happen.actors.learner.watched(state, self._rules)
    commit = self._commit(world, t)
    if commit is not None:
      event = CommitSeen(
        now_ns=NOW_NS,
        round=t,
        epoch=commit.epoch,
        counted_attempt=commit.counted_attempt(m, state.incarnation),
        run_tokens=0,
      )
      yield happen.tell_learner, world, m, event

  def _syncer_choices(self, world: World) -> Iterator[_Choice]:
    state, happen = self._values[world.syncer], self.happen
    if state is None or state.done:
      if not self.ended(world):
        yield happen.start_syncer, world
      return
    for event in self._news(world, state):
      yield happen.tell_syncer, world, event
    if happen.actors.syncer.wake_ns(state, NOW_NS, self._rules) is not None:
      yield happen.tell_syncer, world, Tick(LATER_NS)
      first = self._numbers.of(small_world.only_first_timer(state))
      yield happen.tell_syncer, world._replace(syncer=first), Tick(LATER_NS)
    if world.crashes:
      yield happen.crash_syncer, world

  def _news(self, world: World, state: SyncerState) -> Iterator[Any]:
    """What the syncer has not seen yet."""
    for number in sorted(world.headers):
      header = self._values[number]
      key = small_world.key_of(header)
      view = round_view(state, header.round)
      if view and not view.closed_ns and key[1:] not in view.tried:
        yield AnswerSeen(NOW_NS, key, header)
    for m, n in enumerate(world.lives):
      known = learner_view(state, m)
      if known is None or known.incarnation < n:
        yield MemberSeen(NOW_NS, m, n, 0, False)
    commit = self._commit(world, state.rounds[0].round)
    if commit is not None and commit.epoch != state.epoch:
      yield StopRequested(NOW_NS, OVERTAKEN)

  def _commit(self, world: World, t: int | None) -> Commit | None:
    for number in world.commits:
      if self._values[number].round == t:
        return self._values[number]
    return None
