"""A long run without history keeps what retention keeps, and no more."""

from ddiloco.config import from_dict
from ddiloco.protocol import keys
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.world import World

INTERVAL = 3


def run(rounds, *, history):
  config = from_dict(
    {
      "stop": {"rounds": rounds},
      "learners": {"count": 2},
      "sync": {
        "num_fragments": 3,
        "interval_steps": INTERVAL,
        "overlap_steps": 2,
      },
    }
  )
  world = World(
    config, NullCompute(config), seed=5, code_version="x", history=history
  )
  for name in ("syncer", "learner-0", "learner-1"):
    world.start(name)
  assert world.run(lambda: world.ended, events_max=100 * rounds)
  return world


def test_without_history_only_the_newest_commits_stay():
  world = run(100, history=False)
  assert len(world.commits) <= 4 * INTERVAL
  assert world.exchange.names(keys.TAPES) == []
  held = [
    name
    for name in world.exchange.names("")
    if len(world.exchange.peek(name)) > 8
  ]
  longer = run(200, history=False)
  assert len(held) <= 30
  assert len(longer.commits) <= 4 * INTERVAL
  assert len(longer.exchange._waiting) <= 2 * len(world.exchange._waiting) + 6


def test_history_changes_nothing_that_happens():
  short, whole = run(60, history=False), run(60, history=True)
  assert short.heap.now_ns == whole.heap.now_ns
  assert (short.heap.count, short.events) == (whole.heap.count, whole.events)
  assert set(short.commits.items()) < set(whole.commits.items())
  assert len(whole.commits) == 61 and whole.exchange.names(keys.TAPES)


def test_nobody_waits_for_what_is_not_watched_any_more():
  world = run(120, history=True)
  for process in world.processes.values():
    if process.alive:
      assert len(process._watching) <= len(process.watched()) + 4
  # The next commit of each learner, the next answers to the open rounds.
  assert len(world.exchange._waiting) <= 12


def test_nothing_piles_up_where_the_store_is_slower_than_every_interval():
  live = {"heartbeat_s": 0.5, "tape_flush_s": 0.2, "checkpoint_every_steps": 2}
  config = from_dict(
    {
      "stop": {"rounds": 12},
      "learners": {"count": 2},
      "sync": {"num_fragments": 3, "interval_steps": 3},
      "live": live,
      "sim": {"delay_s": 2.0},
    }
  )
  world = World(config, NullCompute(config), seed=5, code_version="x")
  for name in ("syncer", "learner-0", "learner-1"):
    world.start(name)
  assert world.run(lambda: world.ended, events_max=20_000)
  assert {process.name for process in world.processes.values()} == {
    "syncer/1",
    "learner-0/1",
    "learner-1/1",
  }
  for process in world.processes.values():
    assert sum(map(len, process._lanes.values())) <= 3
