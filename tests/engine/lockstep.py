"""Drives real learners and syncers in one process, one event at a time.

No threads and no clock: inner steps end in a scripted order, every job runs
to its end at once, everybody looks for news after every transition, and time
is a number that grows with each inner step. Timers go off when their time has
come, or when nothing else can happen.
"""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import make_layout
from ddiloco.config import Config
from ddiloco.engine import startup
from ddiloco.engine.actor import Actor, Lane, Work
from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.engine.ports import Call, ExchangeError, Item, Job, Ready
from ddiloco.engine.records import fragment_shapes, read_params
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.engine.syncer_plane import SyncerPlane
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import (
  invariants,
  keys,
  learner,
  learner_types,
  messages,
  syncer,
  syncer_types,
  tape,
)
from ddiloco.protocol.rules import make_rules
from ddiloco.protocol.schedule import Schedule
from ddiloco.types import MILLISECOND_NS

STEP_NS = 100 * MILLISECOND_NS
RUN_ID = "run"
_MOVES_MAX = 20_000

make_codec = functools.cache(codecs.make_codec)


class Killed(Exception):
  """Raised by a hook: the actor at work dies here."""


class MemoryExchange:
  """An exchange that keeps whatever was ever written, and watches over it.

  The hooks `before` and `after` are called with (method, key) around every
  operation; what they raise is what the caller gets.
  """

  def __init__(self):
    self.objects: dict[str, Item] = {}
    self.history: dict[str, bytes] = {}
    self.commits: list[str] = []
    self.changes = 0
    self.before = self.after = _no_hook

  def names(self, prefix: str) -> list[str]:
    return sorted(name for name in self.objects if name.startswith(prefix))

  def put(self, key: str, value: bytes, *, durable: bool = False) -> None:
    self._run("put", key, lambda: self._write(key, value))

  def put_if_absent(
    self, key: str, value: bytes, *, durable: bool = False
  ) -> bool:
    def create() -> bool:
      if key not in self.objects:
        self._write(key, value)
      return self.objects[key].value == value

    return self._run("put_if_absent", key, create)

  def compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None
  ) -> bytes | None:
    def swap() -> bytes | None:
      found = self.objects.get(key)
      if (found.generation if found else None) != generation:
        return None
      return self._write(key, value)

    return self._run("compare_and_swap", key, swap)

  def get(self, key: str) -> Item | None:
    return self._run("get", key, lambda: self.objects.get(key))

  def list(self, prefix: str) -> list[str]:
    return self._run("list", prefix, lambda: self.names(prefix))

  def delete(self, key: str) -> None:
    self._run("delete", key, lambda: self.objects.pop(key, None))

  def delete_prefix(self, prefix: str) -> None:
    def delete() -> None:
      for name in self.names(prefix):
        del self.objects[name]

    self._run("delete_prefix", prefix, delete)

  def plant(self, key: str, value: bytes) -> None:
    """Stores what no actor of this run has written."""
    self.changes += 1
    self.objects[key] = Item(value, b"%d" % self.changes)

  def _write(self, key: str, value: bytes) -> bytes:
    if not key.startswith((keys.MEMBERS, keys.LEASE)):
      assert self.history.get(key, value) == value, f"{key} is write-once"
    if key.startswith(keys.COMMITS) and key not in self.history:
      self.commits.append(key)
    self.history[key] = value
    self.plant(key, value)
    return self.objects[key].generation

  def once(
    self, when: str, method: str, pattern: str, error: Exception
  ) -> "Fault":
    """Raises `error` before or after the first such operation."""
    fault = Fault(method, pattern, error)
    setattr(self, when, fault)
    return fault

  def _run(self, method: str, key: str, operation: Callable[[], Any]) -> Any:
    self.before(method, key)
    result = operation()
    self.after(method, key)
    return result


class Fault:
  """A hook that raises an error once; keys match from their beginning."""

  def __init__(self, method: str, pattern: str, error: Exception):
    self._method, self._pattern, self._error = method, pattern, error
    self.happened = False

  def __call__(self, method: str, key: str) -> None:
    wanted = method == self._method and re.match(self._pattern, key)
    if wanted and not self.happened:
      self.happened = True
      raise self._error


def _no_hook(method: str, key: str) -> None:
  """What happens around an operation unless a test says otherwise."""


def run_job(job: Job, exchange: MemoryExchange) -> Any:
  """Runs a job's requests one after the other; returns its result."""
  try:
    request = next(job)
    while True:
      try:
        match request:
          case Call():
            answer = request.on(exchange)
          case Ready():
            answer = jax.block_until_ready(request.arrays)
      except ExchangeError as error:
        request = job.throw(error)
      else:
        request = job.send(answer)
  except StopIteration as stop:
    return stop.value


class Node:
  """An actor, the jobs it has to do and the timer it has set.

  Jobs whose generator has a name in `hold` stay where they are.
  """

  events: Any

  def __init__(self, world: "Lockstep", actor: Actor, first: Any):
    self.world, self.actor, self.plane = world, actor, actor.plane
    self.jobs: collections.deque[Work] = collections.deque()
    self.hold: frozenset[str] = frozenset()
    self.log: list[tuple[Any, tuple[Any, ...]]] = []
    self.dead = False
    self.blind = False  # sees nothing of what others write
    self.timer_ns: int | None = None
    self._nothing_new_at = -1  # in changes of the exchange
    actor.tape.record, record = self._record, actor.tape.record
    self._keep = record
    self.handle(first)

  @property
  def state(self) -> Any:
    return self.actor.state

  @property
  def running(self) -> bool:
    return not self.dead and not self.state.done

  def handle(self, event: Any) -> None:
    event = dataclasses.replace(event, now_ns=self.world.now_ns)
    self.jobs.extend(self.actor.handle(event))
    self.timer_ns = self.wake_ns()
    self._nothing_new_at = -1

  def stop(self) -> None:
    self.handle(self.events.StopRequested(0, "asked to"))

  def kill(self) -> None:
    """The process is gone: nothing it had begun goes on."""
    self.dead = True
    self.jobs.clear()

  def turn(self) -> bool:
    """Does one thing; False if there is nothing to do."""
    try:
      if (work := self._next_job()) is not None:
        event = run_job(work.job, self.world.exchange)
      elif self.running and self.timer_ns and self._timer_is_due():
        event = self.events.Tick(0)
      elif not self.running or (event := self._look()) is None:
        return False
      if event is not None:
        self.handle(event)
    except Killed:
      self.kill()
    return True

  def flush(self) -> None:
    run_job(self.actor.tape.flush(), self.world.exchange)

  def tape_keys(self) -> list[str]:
    name, life = self.actor.tape._actor, self.actor.tape._incarnation
    return self.world.exchange.names(keys.tape(name, life, 0)[:-9])

  def poll(self) -> Any:
    raise NotImplementedError

  def wake_ns(self) -> int | None:
    raise NotImplementedError

  def _look(self) -> Any:
    """Polls, unless nothing has changed since it found nothing."""
    changes = self.world.exchange.changes
    if self.blind or self._nothing_new_at == changes:
      return None
    if (event := self.poll()) is None:
      self._nothing_new_at = changes
    return event

  def _timer_is_due(self) -> bool:
    return self.timer_ns <= self.world.now_ns

  def _next_job(self) -> Work | None:
    for work in self.jobs:
      if work.job.__name__ not in self.hold:
        self.jobs.remove(work)
        return work
    return None

  def _record(self, event: Any, commands: tuple[Any, ...]) -> None:
    self.log.append((event, commands))
    self._keep(event, commands)


class Learner(Node):
  """One life of a learner; its inner step ends when the script says so."""

  events = learner_types

  @property
  def stepping(self) -> bool:
    return self.running and any(w.lane is Lane.COMPUTE for w in self.jobs)

  def finish_step(self) -> None:
    work = next(w for w in self.jobs if w.lane is Lane.COMPUTE)
    self.jobs.remove(work)
    self.handle(run_job(work.job, self.world.exchange))

  def poll(self) -> Any:
    t = learner.watched(self.state, self.actor.rules)
    held = self.state.waiting_since_ns > 0
    if self.world.commits_seen_late and not held:
      return None
    try:
      event = run_job(self.plane.poll(t), self.world.exchange)
      return event or run_job(self.plane.catch_up(t), self.world.exchange)
    except ExchangeError:
      return None

  def wake_ns(self) -> int | None:
    return learner.wake_ns(self.state, self.world.now_ns)

  def beat(self, *, left: bool = False) -> None:
    """Rewrites the record of this life; with `left`, says good-bye."""
    state = self.state
    key = keys.member(state.learner, state.incarnation)
    item = self.world.exchange.objects[key]
    member = messages.decode(messages.Member, item.value)
    member = dataclasses.replace(
      member,
      beat=member.beat + 1,
      seen=state.seen,
      steps=state.step,
      tokens=state.tokens,
      next_sample=state.next_sample,
      left=left,
    )
    self.world.exchange.put(key, messages.encode(member))

  @property
  def params(self) -> list[np.ndarray]:
    """Copies: the next step donates the arrays."""
    arrays = self.plane.arrays
    leaves = jax.tree.leaves(arrays._program.params(arrays._state))
    return [np.array(leaf) for leaf in leaves]

  @property
  def anchors(self) -> list[np.ndarray]:
    return [np.array(anchor) for anchor in self.plane.arrays._anchors]

  def _next_job(self) -> Work | None:
    for work in self.jobs:
      if work.lane is Lane.COMPUTE or work.job.__name__ in self.hold:
        continue
      self.jobs.remove(work)
      return work
    return None


class Syncer(Node):
  """One life of the syncer."""

  events = syncer_types

  def poll(self) -> Any:
    exchange, plane = self.world.exchange, self.plane
    for life in run_job(plane.list_members(), exchange):
      if (event := run_job(plane.poll_member(*life), exchange)) is not None:
        return event
    t = self.world.schedule.next_round(self.state.committed)
    overtaken = () if self.state.stopping else (plane.poll_overtaken(t),)
    for job in (
      *map(plane.poll_answer, syncer.watched(self.state)),
      *overtaken,
      *map(plane.poll_answer, self._unexpected()),
    ):
      if (event := run_job(job, exchange)) is not None:
        return event
    return None

  def _unexpected(self) -> Iterator[tuple[int, int, int, int]]:
    """Answers of other attempts than those watched for."""
    for view in self.state.rounds:
      if not view.closed_ns:
        job = self.plane.list_answers(view.round)
        for key in run_job(job, self.world.exchange):
          if key[1:] not in view.tried:
            yield key

  def wake_ns(self) -> int | None:
    now_ns, rules = self.world.now_ns, self.actor.rules
    return syncer.wake_ns(self.state, now_ns, rules)


class Lockstep:
  """A run: an exchange, one program per learner, and who is alive.

  With `commits_seen_late` learners look for commits only while they are held.
  """

  def __init__(
    self,
    config: Config,
    programs: Sequence[Any],
    *,
    exchange: MemoryExchange | None = None,
    script: Iterable[int] | None = None,
    commits_seen_late: bool = False,
  ):
    self.config, self.programs = config, list(programs)
    self.exchange = exchange or MemoryExchange()
    self.commits_seen_late = commits_seen_late
    self.now_ns = 1
    self.learners: dict[int, Learner] = {}  # the newest life of each
    self.syncers: list[Syncer] = []
    self.lives: list[Node] = []
    sync, codec = config.sync, config.codec
    self._first_params = programs[0].params(programs[0].init())
    self.layout = make_layout(
      self._first_params, sync.num_fragments, sync.fragmentation
    )
    self.codec = make_codec(
      codec.up,
      block_size=codec.block_size,
      error_feedback=codec.error_feedback and codec.up != "f32",
    )
    self.schedule = Schedule(
      sync.num_fragments, sync.interval_steps, sync.overlap_steps
    )
    self.rules = make_rules(
      config,
      run_id=RUN_ID,
      layout=self.layout.digest,
      answer_bytes=tuple(
        codecs.payload_bytes(self.codec, fragment_shapes(self.layout, p))
        for p in range(sync.num_fragments)
      ),
    )
    everybody = itertools.cycle(range(len(programs)))
    self._script: Iterator[int] = iter(everybody if script is None else script)

  # --- Who takes part -------------------------------------------------------

  def start(self) -> "Lockstep":
    """The syncer, then every learner."""
    self.start_syncer()
    for m in range(len(self.programs)):
      self.join(m)
    return self

  def start_syncer(self) -> Syncer:
    """A new life that creates the run or goes on with it."""
    claim = startup.claim_lease("nonce", "host", 1, self._lease())
    epoch = self.run_job(claim)[0].epoch
    newest = self.run_job(startup.find_newest(self.schedule))
    writer = self._tape(tape.SYNCER, epoch)
    plane = self._syncer_plane(epoch, writer)
    if newest is None:
      leaves = jax.tree.leaves(self._first_params)
      plane.arrays.initialise([np.array(x) for x in leaves])
      states = self.run_job(plane.initialise())
      genesis = startup.make_genesis(self.config, self.layout, "version")
      job = startup.create_run(RUN_ID, genesis, epoch, states)
      newest = self.run_job(job)
    else:
      self.run_job(plane.load(newest.commit))
    self.run_job(plane.sweep_all(newest.commit))
    plane.arrays.warm_up()
    opened = syncer_types.Opened(0, epoch, newest.commit, newest.digest)
    check = invariants.check_syncer
    node = Syncer(self, self._actor(syncer, check, plane, writer), opened)
    self.syncers.append(node)
    self.lives.append(node)
    return node

  def join(self, m: int) -> Learner:
    """A new life of learner m, from the newest commit."""
    program = self.programs[m]
    newest = self.run_job(startup.find_newest(self.schedule))
    commit = newest.commit
    state = program.init()
    leaves, treedef = jax.tree.flatten(program.params(state))
    for i, tensor in enumerate(self.params_at(commit.round)):
      leaves[i] = jax.device_put(tensor, leaves[i].sharding, may_alias=False)
    state = program.with_params(state, jax.tree.unflatten(treedef, leaves))
    claim = startup.claim_member(RUN_ID, m, f"{m}", "host", 1)
    member, last = self.run_job(claim)
    next_sample = last.next_sample if last else 0
    writer = self._tape(tape.learner_actor(m), member.incarnation)
    plane = LearnerPlane(
      arrays=LearnerArrays(
        program,
        state,
        self.layout,
        self.codec,
        schedule_clock=self.config.inner.clock,
      ),
      rules=self.rules,
      learner=m,
      incarnation=member.incarnation,
      newest=(newest.digest, commit),
      tape=writer,
      now_ns=lambda: self.now_ns,
      save_checkpoint=None,
    )
    plane.arrays.warm_up(next_sample)
    joined = learner_types.Joined(
      now_ns=0,
      learner=m,
      incarnation=member.incarnation,
      seen=commit.round,
      run_tokens=commit.tokens,
      versions=tuple((ref.version, ref.epoch) for ref in commit.fragments),
      next_sample=next_sample,
    )
    check = invariants.check_learner
    node = Learner(self, self._actor(learner, check, plane, writer), joined)
    self.learners[m] = node
    self.lives.append(node)
    return node

  def run_job(self, job: Job) -> Any:
    return run_job(job, self.exchange)

  # --- What happens ---------------------------------------------------------

  def settle(self) -> None:
    """Everything that does not take an inner step or time."""
    for _ in range(_MOVES_MAX):
      if not any(node.turn() for node in self.lives):
        return
    raise AssertionError("the actors keep each other busy without stepping")

  def step(self, m: int | None = None) -> None:
    """Ends an inner step, of learner m or of whose turn it is.

    Without any, time passes until the next timer.
    """
    self.settle()
    node = self._whose_turn() if m is None else self.learners[m]
    if node is None:
      timer_ns = self._next_timer_ns()
      assert timer_ns, f"nothing can happen after round {self.committed}"
      self.now_ns = max(self.now_ns, timer_ns)
    else:
      stepping = sum(node.stepping for node in self.learners.values())
      end_ns = self.now_ns + STEP_NS // stepping
      while (timer_ns := self._next_timer_ns()) and timer_ns <= end_ns:
        self.now_ns = max(self.now_ns, timer_ns)
        self.settle()
      self.now_ns = end_ns
      node.finish_step()
    self.settle()

  def _next_timer_ns(self) -> int | None:
    timers = [n.timer_ns for n in self.lives if n.running and n.timer_ns]
    return min(timers, default=None)

  def run_until(self, condition: Callable[[], bool], moves: int = 3000) -> None:
    """Steps until the condition holds; an error if it never does."""
    self.settle()
    for _ in range(moves):
      if condition():
        return
      self.step()
    raise AssertionError(f"not after {moves} steps; at round {self.committed}")

  def run_to_round(self, t: int) -> None:
    """Steps until round t is committed."""
    self.run_until(lambda: self.committed >= t)

  def run(self) -> "Lockstep":
    """Steps until everybody alive has stopped, and writes the tapes."""
    self.run_until(lambda: not any(node.running for node in self.lives))
    for node in self.lives:
      if not node.dead:
        node.flush()
    return self

  def _whose_turn(self) -> Learner | None:
    if not any(node.stepping for node in self.learners.values()):
      return None
    return next(
      self.learners[m]
      for m in self._script
      if m in self.learners and self.learners[m].stepping
    )

  # --- What has happened ----------------------------------------------------

  @property
  def committed(self) -> int:
    """The newest round."""
    return max(map(keys.commit_round, self.exchange.commits))

  @property
  def commits(self) -> list[messages.Commit]:
    """Every commit ever made, in order."""
    return [
      self.commit(keys.commit_round(key)) for key in self.exchange.commits
    ]

  def commit(self, t: int) -> messages.Commit:
    """The commit of round t."""
    data = self.exchange.history[keys.commit(t)]
    return messages.decode(messages.Commit, data)

  def params_at(self, t: int) -> list[np.ndarray]:
    """The global parameters after round t, in the layout's order."""
    leaves: list[Any] = [None] * len(self.layout.tensors)
    for p, ref in enumerate(self.commit(t).fragments):
      data = self.exchange.history[keys.params(ref.version, p, ref.epoch)]
      tensors = read_params(data, ref, fragment_shapes(self.layout, p))
      for i, tensor in zip(self.layout.fragment(p), tensors, strict=True):
        leaves[i] = tensor
    return leaves

  def outer_at(self, t: int) -> list[bytes]:
    """Every fragment's outer optimizer state after round t."""
    return [
      self.exchange.history[keys.outer_state(ref.version, p, ref.epoch)]
      for p, ref in enumerate(self.commit(t).fragments)
    ]

  @property
  def refusals(self) -> list[tuple[int, int, int, int, str]]:
    """(round, learner, life, attempt, why) of all answers left out."""
    return [
      (c.round, r.learner, r.incarnation, r.attempt, str(r.reason))
      for c in self.commits
      for r in c.refused
    ]

  # --- Parts ----------------------------------------------------------------

  def _lease(self) -> Item | None:
    return self.exchange.get(keys.LEASE)

  def _actor(self, machine, check, plane, writer: TapeWriter) -> Actor:
    return Actor(
      start=machine.start,
      step=machine.step,
      check=check,
      rules=self.rules,
      plane=plane,
      tape=writer,
    )

  def _syncer_plane(self, epoch: int, writer: TapeWriter) -> SyncerPlane:
    arrays = SyncerArrays.from_config(self.config, self.layout, self.codec)
    return SyncerPlane(
      arrays=arrays, rules=self.rules, epoch=epoch, tape=writer
    )

  def _tape(self, actor: str, incarnation: int) -> TapeWriter:
    return TapeWriter(
      tape.Header(
        run_id=RUN_ID,
        actor=actor,
        incarnation=incarnation,
        seed=self.config.seed,
        config="{}",
        config_sha256=self.config.digest,
        code_version="version",
        backend="cpu",
        devices=1,
        processes=1,
        threads=2,
        cpu_features="",
        libraries=(),
        started_unix_ns=0,
        started_ns=self.now_ns,
      )
    )
