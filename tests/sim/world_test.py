"""Whole runs in virtual time: their end, their sameness, two syncers."""

import pytest

from ddiloco.config import from_dict
from ddiloco.protocol import faults, keys
from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.retention import SWEPT
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.world import RIVAL, World


def make_world(seed=3, rounds=40, learners=3, **groups):
  config = from_dict(
    {
      "stop": {"rounds": rounds},
      "learners": {"count": learners, "slowdown": (1.0, 1.3)},
      "sync": {"num_fragments": 3, "interval_steps": 3, "overlap_steps": 2},
      "live": {"store_deadline_s": 30.0},
    }
    | groups
  )
  world = World(
    config, NullCompute(config), seed=seed, code_version="x", logs=True
  )
  world.start("syncer")
  for i in range(learners):
    world.start(f"learner-{i}")
  return world


def finish(world, events_max=20_000):
  assert world.run(lambda: world.ended, events_max=events_max)
  world.audit.finish(world.lives, world.machines)


def committed(world, t):
  return lambda: world.committed >= t


@pytest.mark.parametrize(
  "sync",
  [
    {},
    {"quorum_min": 3, "grace": False},
    {"anchor": "any"},
    {"wait": "exact", "overlap_steps": 0},
    {"wait": "exact", "apply": "at_overlap"},
    {"anchor": "any", "apply": "own", "num_fragments": 1},
  ],
  ids=str,
)
def test_every_policy_reaches_the_end(sync):
  base = {"num_fragments": 3, "interval_steps": 3, "overlap_steps": 2}
  world = make_world(sync=base | sync)
  finish(world)
  assert world.committed >= 40
  world.run(lambda: len(world.stopped) == 4, events_max=1000)
  assert set(world.stopped.values()) == {"completed"}


def test_a_seed_gives_one_history_and_another_seed_another():
  def history(seed):
    world = make_world(seed)
    finish(world)
    events = [[repr(entry) for entry in life.log] for life in world.lives]
    return events, world.heap.now_ns, world.exchange.names("tape/")

  assert history(1) == history(1)
  assert history(1)[1] != history(2)[1]


def test_a_syncer_that_slept_through_its_round_cannot_create_it_again():
  """Its create arrives once the round is swept: the key must still be there."""
  world = make_world(rounds=120)
  runner = FaultRunner(
    world, faults.parse("at 4s clog syncer for 6s; at 4s rival syncer")
  )
  world.run(lambda: world.heap.now_ns > 9 * 10**9, events_max=20_000)
  slept = world.processes["syncer"]
  missed = slept.actor.state.rounds[0].round
  assert slept.alive and world.processes[RIVAL].alive
  assert missed < world.committed - 2 * world.rules.schedule.interval
  assert world.exchange.peek(keys.commit(missed)) == SWEPT
  finish(world)
  world.run(lambda: not slept.alive, events_max=2000)
  assert runner.outcomes[0].took_effect and not slept.alive


def test_a_start_leaves_what_another_syncer_is_about_to_commit():
  world = make_world(sim={"merge_s": 0.2})
  world.run(committed(world, 6), events_max=20_000)
  before = set(world.exchange.names(keys.STATES))

  def something_newer():
    names = world.exchange.names(keys.STATES)
    return any(keys.state_parts(name)[0] > world.committed for name in names)

  assert world.run(something_newer, events_max=20_000)
  stored = set(world.exchange.names(keys.STATES)) - before
  plane = world.processes["syncer"].actor.plane
  job = plane.sweep_all(world.commits[world.committed])
  answer = None
  while True:
    try:
      request = job.send(answer)
    except StopIteration:
      break
    assert not (request.method == "delete" and request.args[0] in stored)
    answer = request.on(_AtOnce(world.exchange))


class _AtOnce:
  """The world's store, without its delays."""

  def __init__(self, exchange):
    self._exchange = exchange

  def list(self, prefix):
    return self._exchange.names(prefix)

  def get(self, key):
    return self._exchange._get(key, False)

  def delete(self, key):
    self._exchange._delete(key)

  def compare_and_swap(self, key, value, generation):
    return self._exchange._compare_and_swap(key, value, generation, tries=1)


def test_a_run_without_its_quorum_stops_committing_but_not_training():
  world = make_world(sync={"quorum_min": 3})
  world.run(committed(world, 5), events_max=20_000)
  world.crash("learner-2", None)
  at = world.committed
  assert not world.run(committed(world, at + 6), events_max=2000)
  steps = world.processes["learner-0"].actor.state.step
  assert world.run(
    lambda: world.processes["learner-0"].actor.state.step > steps + 10,
    events_max=2000,
  )
  world.start("learner-2")
  finish(world)


@pytest.mark.parametrize("key", ["params", "commit", "answer"])
def test_the_world_notices_what_retention_must_not_do(key):
  world = make_world()
  world.run(committed(world, 10), events_max=20_000)
  ref = world.commits[world.committed].fragments[0]
  name = {
    "params": keys.params(ref.version, 0, ref.epoch),
    "commit": keys.commit(1),
    "answer": keys.answer_header(world.committed + 1, 9, 1, 1),
  }[key]
  if key == "answer":
    world.exchange.plant(name, b"an answer")
  with pytest.raises(InvariantError, match=name):
    world.exchange._delete(name)


def test_the_world_notices_a_second_commit():
  world = make_world()
  world.run(committed(world, 4), events_max=20_000)
  t = world.committed
  data = world.exchange.peek(keys.commit(t))
  with pytest.raises(InvariantError, match="is written once"):
    world.exchange.plant(keys.commit(t), data)
