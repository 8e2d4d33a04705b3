"""Actors one event at a time: their jobs, their timers, what they look for.

`world` is the `Lockstep` that a node lives in: its exchange, clock and rules.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ddiloco.algo.fragments import join
from ddiloco.engine.actor import Actor, Lane, Work
from ddiloco.engine.ports import ExchangeError
from ddiloco.protocol import (
  keys,
  learner,
  learner_types,
  messages,
  syncer,
  syncer_types,
)
from tests.engine.memory import Killed, run_job


class Node:
  """An actor, the jobs it has to do and the timer it has set.

  Jobs whose generator has a name in `hold` stay where they are.
  """

  events: Any

  def __init__(self, world: Any, actor: Actor, first: Any):
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
      if isinstance(event, Work):
        self.jobs.append(event)
      elif event is not None:
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
    arrays = self.plane.arrays
    anchors = join(arrays._layout, jax.device_get(arrays._anchors))
    return [anchor for anchor in anchors if anchor is not None]

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
