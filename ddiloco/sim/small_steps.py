"""What the world is like after something has happened in it; for `explore`.

Every state is a value: what happens gives a new one. A store that loses
nothing, and the machines' commands carried out on it: answers and commits are
under way until they arrive, checks take their time, merges and sweeps happen
at once.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.learner_types import (
  AnswerWritten,
  Fetched,
  FetchFailed,
  Joined,
  LearnerState,
  Settle,
  StepDone,
)
from ddiloco.protocol.messages import AnswerHeader, Commit
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_answers import life
from ddiloco.protocol.syncer_types import (
  AnswerChecked,
  Committed,
  Drop,
  MemberSeen,
  Merge,
  Merged,
  Opened,
  Sweep,
)
from ddiloco.sim import small_world
from ddiloco.sim.small_world import NOW_NS, STEP_NS
from ddiloco.types import Anchor

_RESTING = "resting"  # a learner in a step that takes for ever
_Key = tuple[int, int, int, int]  # round, learner, incarnation, attempt


class World(NamedTuple):
  """One state; actors, headers, commits and operations are numbers."""

  syncer: int
  held: frozenset[_Key]  # answers inspected, ready to be merged
  learners: tuple[int, ...]
  commits: tuple[int, ...]  # ascending; those somebody may still read
  headers: frozenset[int]  # answers to rounds that are not committed
  objects: frozenset[tuple[int, int, int]]  # (version, fragment, epoch)
  pending: frozenset[int]  # operations under way
  lives: tuple[int, ...]  # the newest of every learner
  steps_left: tuple[int, ...]  # of every learner, all its lives together
  epoch: int  # the newest of the syncer
  crashes: int  # how many more there may be


class Happenings:
  """Everything that can happen to a world, each as a function of it."""

  def __init__(
    self, rules: Rules, numbers: small_world.Numbers, machines: dict[str, Any]
  ):
    """Takes what replaces a role's machine, by `learner` or `syncer`."""
    self._rules, self._values = rules, numbers.values
    self.actors = small_world.Actors(rules, numbers, machines)
    self._number = numbers.of
    self._sets: dict[frozenset[Any], frozenset[Any]] = {}
    self._down, self._resting = numbers.of(None), numbers.of(_RESTING)

  def first(self, learners: int, crashes: int, steps_max: int) -> World:
    """Everybody has just started, and the syncer knows it."""
    rules = self._rules
    commit = small_world.first_commit(rules, 1)
    world = World(
      syncer=self._down,
      held=frozenset(),
      learners=(self._down,) * learners,
      commits=(self._number(commit),),
      headers=frozenset(),
      objects=frozenset((0, p, 1) for p in range(rules.schedule.num_fragments)),
      pending=frozenset(),
      lives=(0,) * learners,
      steps_left=(steps_max,) * learners,
      epoch=0,
      crashes=crashes,
    )
    world = self.start_syncer(world)
    for m in range(learners):
      world = self.start_learner(world, m)
      world = self.tell_syncer(world, MemberSeen(NOW_NS, m, 1, 0, False))
    return world

  # --- Lives ----------------------------------------------------------------

  def start_learner(self, world: World, m: int) -> World:
    """A new life joins at the newest commit."""
    commit = self.newest(world)
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
    return self.tell_learner(world, m, event)

  def step_learner(self, world: World, m: int) -> World:
    """An inner step ends."""
    state = self._values[world.learners[m]]
    left = _changed(world.steps_left, m, world.steps_left[m] - 1)
    event = StepDone(NOW_NS + STEP_NS, state.step + 1, 1, 0, 0.0, 0)
    return self.tell_learner(world._replace(steps_left=left), m, event)

  def crash_learner(self, world: World, m: int) -> World:
    """A life ends; what it was writing may still arrive."""
    return world._replace(
      learners=_changed(world.learners, m, self._down),
      crashes=world.crashes - 1,
    )

  def start_syncer(self, world: World) -> World:
    """A new life goes on from the newest commit."""
    epoch, commit = world.epoch + 1, self.newest(world)
    keep = set()
    for p, ref in enumerate(commit.fragments):
      before = self._rules.schedule.version_before(p, ref.version)
      keep |= {(ref.version, p), (before, p)}
    world = self._without_syncer(world)._replace(
      # As the plane's `sweep_all` does.
      objects=frozenset(
        (version, p, n)
        for version, p, n in world.objects
        if version > commit.round or (version, p) in keep
      ),
      epoch=epoch,
    )
    digest = small_world.digest(commit)
    return self.tell_syncer(world, Opened(NOW_NS, epoch, commit, digest))

  def crash_syncer(self, world: World) -> World:
    """A life ends; the commit it was creating may still arrive."""
    return self._without_syncer(world)._replace(crashes=world.crashes - 1)

  def _without_syncer(self, world: World) -> World:
    return world._replace(
      syncer=self._down,
      held=frozenset(),
      pending=frozenset(
        [x for x in world.pending if self._values[x][0] != "check"]
      ),
    )

  # --- Operations under way: each named by its kind -------------------------

  def publish(self, world: World, number: int) -> World:
    """An answer becomes visible, and its writer knows."""
    header = self._values[number]
    world = world._replace(headers=world.headers | {number})
    if not self._writes(world, header):
      return world
    event = AnswerWritten(NOW_NS, header.round, header.attempt)
    return self.tell_learner(world, header.learner, event)

  def fetch(
    self, world: World, m: int, t: int, epoch: int, fragments: tuple[int, ...]
  ) -> World:
    """A round's fragments are fetched, or found to be gone."""
    if all((t, p, epoch) in world.objects for p in fragments):
      return self.tell_learner(world, m, Fetched(NOW_NS, t))
    return self.tell_learner(world, m, FetchFailed(NOW_NS, t, "gone"))

  def check(self, world: World, *key: int) -> World:
    """An answer is found to be sound."""
    norms = (1,) * len(self._rules.schedule.fragments(key[0]))
    world = world._replace(held=world.held | {key})
    return self.tell_syncer(world, AnswerChecked(NOW_NS, *key, None, norms))

  def _merge(self, world: World, command: Merge) -> World:
    t, epoch = command.round, world.epoch
    for item in command.counted:
      _require((t, *life(item)) in world.held, f"{item} of {t} is held")
    due = self._rules.schedule.fragments(t)
    stored = {(t, p, epoch) for p in due}
    world = world._replace(objects=world.objects | stored)
    state = small_world.fragment_state(t, epoch)
    return self.tell_syncer(world, Merged(NOW_NS, t, (state,) * len(due)))

  def create(self, world: World, number: int) -> World:
    """The create of a commit takes effect, or comes too late."""
    commit = self._values[number]
    won = commit.round > self.newest(world).round
    if won:
      self._check_commit(world, commit)
      world = world._replace(commits=(*world.commits, number))
    if not self._writes(world, commit):
      return world
    digest = small_world.digest(commit)
    event = Committed(NOW_NS, commit.round, won, digest)
    return self.tell_syncer(world, event)

  # --- Machines and their commands ------------------------------------------

  def tell_learner(self, world: World, m: int, event: Any) -> World:
    """The machine's transition, and what it asks for."""
    done = self.actors.step(world.learners[m], event)
    for command in done.commands:
      if isinstance(command, Settle):
        _require(
          command == Settle(event.round, event.counted_attempt),
          f"learner {m} settles what commit {event.round} counts: {command}",
        )
    actor = done.actor if world.steps_left[m] else self._resting
    return world._replace(
      learners=_changed(world.learners, m, actor),
      pending=world.pending | done.operations,
    )

  def tell_syncer(self, world: World, event: Any) -> World:
    """The machine's transition, and what it asks for."""
    done = self.actors.step(world.syncer, event)
    world = world._replace(
      syncer=done.actor, pending=world.pending | done.operations
    )
    for command in done.commands:
      match command:
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

  def _check_commit(self, world: World, commit: Commit) -> None:
    """Called with a commit that is about to be there."""
    t, rules, newest = commit.round, self._rules, self.newest(world)
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
    headers = [self._values[number] for number in world.headers]
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

  def newest(self, world: World) -> Commit:
    """The newest commit there is."""
    return self._values[world.commits[-1]]

  def _writes(self, world: World, record: AnswerHeader | Commit) -> bool:
    """Whether the life that writes a record is still there."""
    if isinstance(record, Commit):
      state = self._values[world.syncer]
      return state is not None and state.epoch == record.epoch
    state = self._values[world.learners[record.learner]]
    return steps(state) and state.incarnation == record.incarnation

  def forget(self, world: World) -> World:
    """The world without what nobody will look at again."""
    values, newest = self._values, self.newest(world).round
    # One that lives may not know of the newest commit yet.
    syncer = values[world.syncer]
    closed = newest if syncer is None else syncer.committed
    oldest = closed
    for number in world.learners:
      if steps(values[number]):
        oldest = min(oldest, values[number].seen)
    commits = [x for x in world.commits if values[x].round > oldest]
    headers = [x for x in world.headers if values[x].round > closed]
    pending = [x for x in world.pending if self._matters(world, x, newest)]
    held = [key for key in world.held if key[0] > closed]
    return world._replace(
      held=self._shared(held),
      commits=tuple(commits) or world.commits[-1:],
      headers=self._shared(headers),
      objects=self._shared(world.objects),
      pending=self._shared(pending),
    )

  def _shared(self, items: Iterable[Any]) -> frozenset[Any]:
    """One object for all equal sets: there are few of them, in many worlds."""
    items = frozenset(items)
    return self._sets.setdefault(items, items)

  def _matters(self, world: World, operation: int, newest: int) -> bool:
    """Whether an operation still changes anything."""
    kind, about, *_ = self._values[operation]
    if kind == "check":
      return about > self._values[world.syncer].committed
    if kind == "fetch":
      return steps(self._values[world.learners[about]])
    record = self._values[about]
    return record.round > newest or self._writes(world, record)


def steps(learner: Any) -> bool:
  """Whether a learner is there and goes on stepping."""
  return isinstance(learner, LearnerState) and not learner.done


def _changed(
  numbers: tuple[int, ...], index: int, number: int
) -> tuple[int, ...]:
  return (*numbers[:index], number, *numbers[index + 1 :])


def _require(ok: bool, promise: str) -> None:
  if not ok:
    raise InvariantError(f"small world: {promise}")
