"""Drives real learners and syncers in one process, one event at a time.

No threads and no clock: inner steps end in a scripted order, every job runs
to its end at once, everybody looks for news after every transition, and time
is a number that grows with each inner step. Timers go off when their time has
come, or when nothing else can happen.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import join
from ddiloco.config import Config
from ddiloco.engine import downlink as downlink_lib
from ddiloco.engine import startup
from ddiloco.engine.actor import Actor
from ddiloco.engine.downlink import make_downlink
from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.engine.learner_plane import LearnerPlane
from ddiloco.engine.loading import Model, lay_out
from ddiloco.engine.ports import Item, Job
from ddiloco.engine.records import read_params
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
from ddiloco.protocol.schedule import make_schedule
from ddiloco.types import MILLISECOND_NS
from tests.engine.memory import MemoryExchange, run_job
from tests.engine.nodes import Learner, Node, Syncer

STEP_NS = 100 * MILLISECOND_NS
RUN_ID = "run"
_MOVES_MAX = 20_000

make_codec = functools.cache(codecs.make_codec)


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
    self.layout = lay_out(config, self._first_params)
    self.codec = make_codec(
      codec.up,
      block_size=codec.block_size,
      error_feedback=codec.error_feedback and codec.up != "f32",
    )
    self.schedule = make_schedule(sync)
    self.rules = make_rules(
      config,
      run_id=RUN_ID,
      layout=self.layout.digest,
      answer_bytes=tuple(
        codecs.payload_bytes(self.codec, self.layout.shapes(p))
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
      self.run_job(plane.load(newest.commit, newest.digest))
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
      if tensor is None:  # frozen
        continue
      leaves[i] = jax.device_put(tensor, leaves[i].sharding, may_alias=False)
    state = program.with_params(state, jax.tree.unflatten(treedef, leaves))
    claim = startup.claim_member(RUN_ID, m, f"{m}", "host", 1)
    member, last = self.run_job(claim)
    next_sample = last.next_sample if last else 0
    writer = self._tape(tape.learner_actor(m), member.incarnation)
    plane = LearnerPlane(
      arrays=LearnerArrays(
        self.config, Model(program, state, self.layout, self.codec), state
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
    fragments = []
    downlink = make_downlink(self.config, self.layout)
    for p, ref in enumerate(self.commit(t).fragments):
      job = downlink_lib.read_params(p, ref, downlink)
      data = downlink_lib.read_now(job, self.exchange.history.get)
      shapes = self.layout.shapes(p)
      fragments.append(read_params(data, ref, shapes))
    return join(self.layout, fragments)

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
    return self.exchange.get(keys.lease(0))

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
      arrays=arrays,
      rules=self.rules,
      epoch=epoch,
      tape=writer,
      snapshot=self.config.snapshot,
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
