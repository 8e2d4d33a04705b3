"""Every interleaving of a small world, visited once.

Where the swarm draws some histories of a large world, this walks through all
histories of a small one: the real machines of a syncer and a few learners,
around a store that is a set of objects. What may happen next in a state is
any of these:
  - an inner step ends (a life takes `steps_max` at most: it may always be
    slower than everybody else);
  - an answer becomes visible; later, its writer is told so;
  - the syncer sees an answer, a new life, or another syncer's commit; an
    answer is checked, a round merged, a commit created; a timer goes off;
  - a learner sees the next commit, or has its fragments fetched;
  - anybody crashes, and anybody dead starts again from the newest commit (a
    start from an older one is this start, earlier). What a dead life had on
    its way to the store arrives at any time, or never.
The store loses nothing and sweeps at once; all answers are sound. Which
states count as the same: see `small_world`.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.learner_types import (
  AnswerWritten,
  CommitSeen,
  Fetched,
  FetchFailed,
  Joined,
  LearnerState,
  Settle,
  StepDone,
)
from ddiloco.protocol.messages import AnswerHeader, Commit
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer import OVERTAKEN
from ddiloco.protocol.syncer_answers import life
from ddiloco.protocol.syncer_types import (
  AnswerChecked,
  AnswerSeen,
  Check,
  Committed,
  Drop,
  MemberSeen,
  Merge,
  Merged,
  Opened,
  StopRequested,
  Sweep,
  Tick,
)
from ddiloco.protocol.syncer_views import learner_view, round_view
from ddiloco.sim import small_world
from ddiloco.sim.small_world import LATER_NS, NOW_NS, STEP_NS
from ddiloco.types import Anchor

_RESTING = "resting"  # a learner in a step that takes for ever
_Key = tuple[int, int, int, int]  # round, learner, incarnation, attempt


class Result(NamedTuple):
  """How large the world was."""

  states: int
  transitions: int
  depth: int  # of the state that is the furthest from the start
  ended: int  # states in which the last round is committed


class _World(NamedTuple):
  """One state; actors, headers, commits and operations are numbers."""

  syncer: int
  held: frozenset[_Key]  # answers inspected, ready to be merged
  learners: tuple[int, ...]
  commits: tuple[int, ...]  # ascending; those somebody may still read
  headers: frozenset[int]  # answers to rounds that are not committed
  objects: frozenset[tuple[int, int, int]]  # (version, fragment, epoch)
  pending: frozenset[int]  # operations under way
  lives: tuple[int, ...]  # the newest of every learner
  steps: tuple[int, ...]  # how many more every learner makes
  epoch: int  # the newest of the syncer
  crashes: int  # how many more there may be


def explore(
  rules: Rules,
  *,
  learners: int = 2,
  crashes: int = 1,
  steps_max: int = 4,
  machines: dict[str, Any] | None = None,
) -> Result:
  """Visits every state; an `InvariantError` tells the shortest way to it.

  Args:
    rules: of the run; see `small_world.small_rules`.
    learners: how many.
    crashes: how many there may be, each of anybody at any time.
    steps_max: inner steps of one life.
    machines: replaces a role's machine, by `learner` or `syncer` (mutants).
  """
  explorer = _Explorer(rules, steps_max, machines or {})
  first = explorer.first(learners, crashes)
  came_from: dict[_World, tuple[_World, str] | None] = {first: None}
  level, depth, transitions, ended = [first], 0, 0, 0
  while level:
    following = []
    for world in level:
      ended += explorer.ended(world)
      try:
        for what, after in explorer.steps(world):
          transitions += 1
          if after not in came_from:
            came_from[after] = world, what
            following.append(after)
      except AssertionError as error:
        way = " > ".join([*_way(came_from, world), explorer.trying])
        raise InvariantError(f"{error}\nThe way there: {way}") from error
    level = following
    depth += bool(level)
  return Result(len(came_from), transitions, depth, ended)


def _way(came_from: dict[_World, Any], world: _World) -> list[str]:
  way = []
  while came_from[world] is not None:
    world, what = came_from[world]
    way.append(what)
  return way[::-1]


_Choice = tuple[str, Callable[..., _World], tuple[Any, ...]]


class _Explorer:
  """What may happen next, and what the world is like then."""

  def __init__(self, rules: Rules, steps_max: int, machines: dict[str, Any]):
    self._rules, self._steps_max = rules, steps_max
    self._numbers = small_world.Numbers()
    self._actors = small_world.Actors(rules, self._numbers, machines)
    self._down = self._numbers.of(None)
    self._resting = self._numbers.of(_RESTING)
    self.trying = ""  # what is being carried out

  def first(self, learners: int, crashes: int) -> _World:
    """Everybody has just started, and the syncer knows it."""
    rules = self._rules
    commit = small_world.first_commit(rules, 1)
    world = _World(
      syncer=self._down,
      held=frozenset(),
      learners=(self._down,) * learners,
      commits=(self._numbers.of(commit),),
      headers=frozenset(),
      objects=frozenset((0, p, 1) for p in range(rules.schedule.num_fragments)),
      pending=frozenset(),
      lives=(0,) * learners,
      steps=(self._steps_max,) * learners,
      epoch=0,
      crashes=crashes,
    )
    world = self._start_syncer(world)
    for m in range(learners):
      world = self._start_learner(world, m)
      world = self._tell_syncer(world, MemberSeen(NOW_NS, m, 1, 0, False))
    return world

  def ended(self, world: _World) -> bool:
    """Whether the last round is committed."""
    commit = self._newest(world)
    return self._rules.ended(commit.round, commit.tokens)

  def steps(self, world: _World) -> Iterator[tuple[str, _World]]:
    """Everything that may happen next, and the world after it."""
    choices = list(self._syncer_choices(world))
    for m in range(len(world.learners)):
      choices += self._learner_choices(world, m)
    for number in sorted(world.pending):
      kind, *about = self._numbers[number]
      rest = world._replace(pending=world.pending - {number})
      choices.append((kind, getattr(self, f"_{kind}"), (rest, *about)))
    for kind, happen, args in choices:
      self.trying = " ".join([kind, *map(str, args[1:])])
      yield self.trying, self._forget(happen(*args))

  # --- What may happen ------------------------------------------------------

  def _learner_choices(self, world: _World, m: int) -> Iterator[_Choice]:
    state = self._numbers[world.learners[m]]
    if state is None:
      yield "start learner", self._start_learner, (world, m)
      return
    if world.crashes:
      yield "crash learner", self._crash_learner, (world, m)
    if not _steps(state):
      return
    yield "step learner", self._step_learner, (world, m)
    t = self._actors.learner.watched(state, self._rules)
    commit = self._commit(world, t)
    if commit is not None:
      event = CommitSeen(
        now_ns=NOW_NS,
        round=t,
        epoch=commit.epoch,
        counted_attempt=commit.counted_attempt(m, state.incarnation),
        run_tokens=0,
      )
      yield "learner", self._tell_learner, (world, m, event)

  def _syncer_choices(self, world: _World) -> Iterator[_Choice]:
    state = self._numbers[world.syncer]
    if state is None or state.done:
      if not self.ended(world):
        yield "start syncer", self._start_syncer, (world,)
      return
    events = []
    for number in sorted(world.headers):
      header = self._numbers[number]
      key = small_world.key_of(header)
      view = round_view(state, header.round)
      if view and not view.closed_ns and key[1:] not in view.tried:
        events.append(AnswerSeen(NOW_NS, key, header))
    for m, n in enumerate(world.lives):
      known = learner_view(state, m)
      if known is None or known.incarnation < n:
        events.append(MemberSeen(NOW_NS, m, n, 0, False))
    commit = self._commit(world, state.rounds[0].round)
    if commit is not None and commit.epoch != state.epoch:
      events.append(StopRequested(NOW_NS, OVERTAKEN))
    if self._actors.syncer.wake_ns(state, NOW_NS, self._rules) is not None:
      first = self._numbers.of(small_world.only_first_timer(state))
      tick = world._replace(syncer=first), Tick(LATER_NS)
      yield "syncer", self._tell_syncer, tick
      events.append(Tick(LATER_NS))
    for event in events:
      yield "syncer", self._tell_syncer, (world, event)
    if world.crashes:
      yield "crash syncer", self._crash_syncer, (world,)

  # --- Lives ----------------------------------------------------------------

  def _start_learner(self, world: _World, m: int) -> _World:
    commit = self._newest(world)
    n = world.lives[m] + 1
    event = Joined(
      now_ns=NOW_NS,
      learner=m,
      incarnation=n,
      seen=commit.round,
      run_tokens=0,
      versions=tuple((ref.version, ref.epoch) for ref in commit.fragments),
      next_sample=0,
    )
    world = world._replace(lives=_changed(world.lives, m, n))
    return self._tell_learner(world, m, event)

  def _step_learner(self, world: _World, m: int) -> _World:
    state = self._numbers[world.learners[m]]
    steps = _changed(world.steps, m, world.steps[m] - 1)
    event = StepDone(NOW_NS + STEP_NS, state.step + 1, 1, 0, 0.0, 0)
    return self._tell_learner(world._replace(steps=steps), m, event)

  def _crash_learner(self, world: _World, m: int) -> _World:
    return world._replace(
      learners=_changed(world.learners, m, self._down),
      crashes=world.crashes - 1,
    )

  def _start_syncer(self, world: _World) -> _World:
    epoch, commit = world.epoch + 1, self._newest(world)
    keep = set()
    for p, ref in enumerate(commit.fragments):
      before = self._rules.schedule.version_before(p, ref.version)
      keep |= {(ref.version, p), (before, p)}
    world = world._replace(
      syncer=self._down,
      held=frozenset(),
      # As the plane's `sweep_all` does.
      objects=frozenset(
        (version, p, n)
        for version, p, n in world.objects
        if version > commit.round or (version, p) in keep
      ),
      epoch=epoch,
    )
    digest = small_world.digest(commit)
    return self._tell_syncer(world, Opened(NOW_NS, epoch, commit, digest))

  def _crash_syncer(self, world: _World) -> _World:
    return world._replace(
      syncer=self._down,
      held=frozenset(),
      crashes=world.crashes - 1,
    )

  # --- Operations under way: each named by its kind -------------------------

  def _publish(self, world: _World, number: int) -> _World:
    header = self._numbers[number]
    world = world._replace(headers=world.headers | {number})
    if not self._writes(world, header):
      return world
    told = ("told", header.learner, header.round, header.attempt)
    return world._replace(pending=world.pending | {self._numbers.of(told)})

  def _told(self, world: _World, m: int, t: int, attempt: int) -> _World:
    return self._tell_learner(world, m, AnswerWritten(NOW_NS, t, attempt))

  def _fetch(
    self, world: _World, m: int, t: int, epoch: int, fragments: tuple[int, ...]
  ) -> _World:
    if all((t, p, epoch) in world.objects for p in fragments):
      return self._tell_learner(world, m, Fetched(NOW_NS, t))
    return self._tell_learner(world, m, FetchFailed(NOW_NS, t, "gone"))

  def _check(self, world: _World, key: _Key) -> _World:
    norms = (1,) * len(self._rules.schedule.fragments(key[0]))
    world = world._replace(held=world.held | {key})
    return self._tell_syncer(world, AnswerChecked(NOW_NS, *key, None, norms))

  def _merge(self, world: _World, command: Merge) -> _World:
    t, epoch = command.round, world.epoch
    for item in command.counted:
      _require((t, *life(item)) in world.held, f"{item} of {t} is held")
    due = self._rules.schedule.fragments(t)
    stored = {(t, p, epoch) for p in due}
    world = world._replace(objects=world.objects | stored)
    state = small_world.fragment_state(t, epoch)
    return self._tell_syncer(world, Merged(NOW_NS, t, (state,) * len(due)))

  def _create(self, world: _World, number: int) -> _World:
    commit = self._numbers[number]
    won = commit.round > self._newest(world).round
    if won:
      self._check_commit(world, commit)
      world = world._replace(commits=(*world.commits, number))
    if not self._writes(world, commit):
      return world
    digest = small_world.digest(commit)
    event = Committed(NOW_NS, commit.round, won, digest)
    return self._tell_syncer(world, event)

  # --- Machines and their commands ------------------------------------------

  def _tell_learner(self, world: _World, m: int, event: Any) -> _World:
    done = self._actors.step(world.learners[m], event)
    for command in done.commands:
      if isinstance(command, Settle):
        _require(
          command == Settle(event.round, event.counted_attempt),
          f"learner {m} settles what commit {event.round} counts: {command}",
        )
    actor = done.actor if world.steps[m] else self._resting
    return world._replace(
      learners=_changed(world.learners, m, actor),
      pending=world.pending | done.operations,
    )

  def _tell_syncer(self, world: _World, event: Any) -> _World:
    done = self._actors.step(world.syncer, event)
    world = world._replace(
      syncer=done.actor, pending=world.pending | done.operations
    )
    for command in done.commands:
      match command:
        case Check():
          world = self._check(world, small_world.key_of(command))
        case Drop():
          key = small_world.key_of(command)
          world = world._replace(held=world.held - {key})
        case Merge():
          world = self._merge(world, command)
        case Sweep():
          objects = [o for o in world.objects if o[:2] not in command.states]
          world = world._replace(objects=frozenset(objects))
    return world

  # --- What must hold for the whole -----------------------------------------

  def _check_commit(self, world: _World, commit: Commit) -> None:
    """Called with a commit that is about to be there."""
    t, rules, newest = commit.round, self._rules, self._newest(world)
    _require(
      t == rules.schedule.next_round(newest.round)
      and commit.previous == small_world.digest(newest),
      f"commit {t} follows commit {newest.round}",
    )
    learners = {item.learner for item in commit.counted}
    _require(
      len(learners) == len(commit.counted) >= rules.quorum_min,
      f"commit {t} has at least K = {rules.quorum_min} distinct learners",
    )
    headers = [self._numbers[number] for number in world.headers]
    offered = {small_world.key_of(x): x.contributions for x in headers}
    for item in commit.counted:
      key = (t, *life(item))
      _require(
        offered.get(key) == item.contributions,
        f"commit {t} counts what {key} offers",
      )
      for part in item.contributions:
        current = rules.schedule.version_before(part.fragment, t)
        _require(
          part.anchor == current or rules.anchor is Anchor.ANY,
          f"{key} is measured from version {current} of {part.fragment}",
        )
    for p, ref in enumerate(commit.fragments):
      _require(
        ref.version == rules.schedule.version_before(p, t + 1)
        and (ref.version, p, ref.epoch) in world.objects,
        f"commit {t} names the newest version of fragment {p}, and it exists",
      )

  # --- Small things ---------------------------------------------------------

  def _newest(self, world: _World) -> Commit:
    return self._numbers[world.commits[-1]]

  def _commit(self, world: _World, t: int | None) -> Commit | None:
    for number in world.commits:
      if self._numbers[number].round == t:
        return self._numbers[number]
    return None

  def _writes(self, world: _World, record: AnswerHeader | Commit) -> bool:
    """Whether the life that writes a record is still there."""
    if isinstance(record, Commit):
      state = self._numbers[world.syncer]
      return state is not None and state.epoch == record.epoch
    state = self._numbers[world.learners[record.learner]]
    return _steps(state) and state.incarnation == record.incarnation

  def _forget(self, world: _World) -> _World:
    """Leaves out what nobody will look at again."""
    newest = self._newest(world).round
    syncer = self._numbers[world.syncer]
    # One that lives may not know of it yet.
    closed = newest if syncer is None else syncer.committed
    states = [self._numbers[number] for number in world.learners]
    oldest = min([x.seen for x in states if _steps(x)], default=newest)
    commits = [x for x in world.commits if self._numbers[x].round > oldest]
    return world._replace(
      held=frozenset([key for key in world.held if key[0] > closed]),
      commits=tuple(commits) or world.commits[-1:],
      headers=frozenset(
        [x for x in world.headers if self._numbers[x].round > closed]
      ),
      pending=frozenset(
        [x for x in world.pending if self._matters(world, x, newest)]
      ),
    )

  def _matters(self, world: _World, operation: int, newest: int) -> bool:
    """Whether an operation still changes anything."""
    kind, about, *_ = self._numbers[operation]
    if kind in ("fetch", "told"):
      return _steps(self._numbers[world.learners[about]])
    record = self._numbers[about]
    return record.round > newest or self._writes(world, record)


def _steps(learner: Any) -> bool:
  return isinstance(learner, LearnerState) and not learner.done


def _changed(
  numbers: tuple[int, ...], index: int, number: int
) -> tuple[int, ...]:
  return (*numbers[:index], number, *numbers[index + 1 :])


def _require(ok: bool, promise: str) -> None:
  if not ok:
    raise InvariantError(f"small world: {promise}")
