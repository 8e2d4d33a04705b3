"""Deaths of learners and syncers, and what goes on afterwards."""

import itertools

import jax
import numpy as np
import pytest

from ddiloco.engine.ports import ExchangeError
from ddiloco.protocol import keys, learner_types, syncer, wire
from ddiloco.protocol.retention import SWEPT
from tests.engine.identity_test import assert_equal
from tests.engine.memory import Killed
from tests.engine.regression import (
  Regression,
  free_config,
  make_config,
  make_world,
)

ROUNDS = 15
MOMENTUM = {"learning_rate": 0.7, "momentum": 0.9}


def exact_world(**groups):
  """Two learners whose every bit is fixed by when commits are applied."""
  groups = {
    "sync": {"apply": "at_overlap"},
    "outer": MOMENTUM,
    "stop": {"rounds": ROUNDS},
  } | groups
  return make_world(make_config(2, 4, 4, 2, **groups))


def free_world(**groups):
  groups = {"outer": MOMENTUM, "stop": {"rounds": 40}} | groups
  return make_world(free_config(2, **groups))


@pytest.fixture(scope="module")
def undisturbed():
  return exact_world().run()


def assert_one_history(world):
  """Every commit names the one before; none was ever made twice."""
  rounds = [commit.round for commit in world.commits]
  assert rounds == sorted(set(rounds))
  data = [world.exchange.history[key] for key in world.exchange.commits]
  for before, commit in zip(data, world.commits[1:], strict=False):
    assert commit.previous == wire.sha256(before)
  counted = [
    (c.round, item.learner) for c in world.commits for item in c.counted
  ]
  assert len(counted) == len(set(counted))


def assert_same_run(world, other):
  assert_one_history(world)
  assert world.exchange.commits == other.exchange.commits
  for t in [commit.round for commit in other.commits]:
    assert_equal(world.params_at(t), other.params_at(t))
    assert world.outer_at(t) == other.outer_at(t)


# --- Learners ---------------------------------------------------------------


@pytest.mark.parametrize("make", [exact_world, free_world])
@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_learner_comes_back_from_the_newest_commits(make, says_goodbye):
  world = make()
  world.run_to_round(7)
  old = world.learners[1]
  old.beat(left=says_goodbye)
  old.kill()
  new = world.join(1)
  committed = world.params_at(world.committed)
  assert_equal(new.anchors, committed)
  # The first step has been dispatched: from the committed parameters, with a
  # fresh inner optimizer, on the samples that come next.
  program = Regression(1)
  state = program.init()
  treedef = jax.tree.structure(program.params(state))
  params = jax.tree.map(jax.numpy.asarray, treedef.unflatten(committed))
  batch = program.batch(old.state.next_sample, program.samples_per_step)
  state, _ = program.step(program.with_params(state, params), batch, 0)
  assert_equal(new.params, [np.array(x) for x in jax.tree.leaves(state[0])])
  assert new.state.incarnation == old.state.incarnation + 1
  assert new.state.step == 0
  for view in new.state.fragments:
    assert (view.steps, view.tokens, view.anchor) == (0, 0, view.seen)
  world.run()
  assert_one_history(world)
  lives = [
    item.incarnation
    for commit in world.commits
    for item in commit.counted
    if item.learner == 1
  ]
  assert lives == sorted(lives) and set(lives) == {1, 2}


def test_the_schedule_goes_on_from_the_runs_clock_after_a_return():
  world = free_world()
  world.run_to_round(9)
  world.learners[1].kill()
  world.join(1)
  clocks = world.programs[1].clocks
  assert clocks[-1] == world.commit(world.committed).tokens
  assert clocks[-1] > 0


def dies_with_an_answer_pending():
  """Learner 1 has answered a round that learner 0 has not, and is reborn."""
  world = exact_world()
  world.run_to_round(6)
  t = world.committed + 1
  world.step(1)
  assert (t, 1, 1) in answered(world)
  assert (t, 0, 1) not in answered(world) and world.committed < t
  world.learners[1].kill()
  return world, t, world.join(1)


def answered(world):
  """(round, learner, life) of every answer in the exchange."""
  names = world.exchange.names(keys.ANSWERS)
  parts = [name.removeprefix(keys.ANSWERS).split(".") for name in names]
  return {tuple(map(int, p[:3])) for p in parts if p[-1] == "header"}


def test_the_old_lifes_answer_counts_if_the_round_closes_first():
  world, t, reborn = dies_with_an_answer_pending()
  world.step(0)
  assert world.committed >= t
  lives = [(c.learner, c.incarnation) for c in world.commit(t).counted]
  assert lives == [(0, 1), (1, 1)]
  seen = [e for e, _ in reborn.log if isinstance(e, learner_types.CommitSeen)]
  assert (seen[0].round, seen[0].counted_attempt) == (t, 0)
  assert_one_history(world.run())


def test_the_new_lifes_answer_supersedes_the_old_ones():
  world, t, _ = dies_with_an_answer_pending()
  world.step(1)
  world.step(0)
  assert world.committed >= t
  lives = [(c.learner, c.incarnation) for c in world.commit(t).counted]
  assert lives == [(0, 1), (1, 2)]
  assert (t, 1, 1, 1, "superseded") in world.refusals
  assert_one_history(world.run())


def test_nobody_waits_for_a_dead_learner_by_default():
  world = free_world(sync={"grace": True})
  world.run_to_round(5)
  world.learners[1].kill()
  steps = world.learners[0].state.step
  world.run_to_round(20)
  # One fragment is due at each step, so a lone learner closes a round a step.
  assert world.learners[0].state.step - steps <= 16
  assert all(c.counted[0].learner == 0 for c in world.commits[-10:])


def test_a_half_written_answer_is_no_answer():
  """Its parts came, its header never will; the sweep takes them."""
  world = free_world()
  world.run_to_round(5)
  die = Killed("between the parts and the header")
  fault = world.exchange.once("after", "put", "answer/", die)
  world.run_until(lambda: fault.happened)
  dead = [m for m, node in world.learners.items() if node.dead]
  assert len(dead) == 1
  left = [n for n in world.exchange.names(keys.ANSWERS) if "part" in n]
  half = [
    n
    for n in left
    if n.replace("part-0", "header") not in world.exchange.objects
  ]
  assert len(half) == 1
  world.join(dead[0])
  world.run()
  assert half[0] not in world.exchange.objects
  assert_one_history(world)


# --- Syncers ----------------------------------------------------------------

LEFT = (keys.STATES, keys.ANSWERS, keys.COMMITS)
# Where a syncer can die in round 7: (before or after, method, key).
POINTS = {
  "before anything is stored": ("before", "put", keys.states(7, 3)),
  "between parameters and state": ("after", "put", keys.states(7, 3)),
  "merge stored": ("before", "put_if_absent", keys.commit(7)),
  "commit written": ("after", "put_if_absent", keys.commit(7)),
  "before the sweep": ("before", "delete_prefix", keys.answers(7)),
  "in the sweep": ("after", "delete_prefix", keys.answers(7)),
}


@pytest.mark.parametrize("point", POINTS)
def test_the_next_syncer_goes_on(point, undisturbed):
  world = exact_world()
  when, method, prefix = POINTS[point]
  fault = world.exchange.once(when, method, prefix, Killed(point))
  world.run_until(lambda: fault.happened)
  assert [node.dead for node in world.syncers] == [True]
  written = keys.commit(7) in world.exchange.history
  assert written == (point not in list(POINTS)[:3])
  second = world.start_syncer()
  assert second.state.committed == (7 if written else 6)
  assert second.state.epoch == 2
  assert_same_run(world.run(), undisturbed)
  # Nothing is left of the first life.
  kept = [undisturbed.exchange.names(prefix) for prefix in LEFT]
  assert [len(world.exchange.names(prefix)) for prefix in LEFT] == [
    len(names) for names in kept
  ]


def test_learners_train_on_while_there_is_no_syncer():
  world = free_world()
  world.run_to_round(6)
  world.syncers[0].kill()
  before = [node.state.step for node in world.learners.values()]
  for _ in range(20):
    world.step()
  after = [node.state.step for node in world.learners.values()]
  assert [b - a for a, b in zip(before, after, strict=True)] == [10, 10]
  assert world.committed == 6
  world.start_syncer()
  assert_one_history(world.run())
  assert world.committed == 40


@pytest.mark.parametrize("loser", [0, 1])
def test_of_two_syncers_one_wins_and_the_other_stops(loser, undisturbed):
  world = exact_world()
  world.run_to_round(5)
  world.start_syncer()
  held, other = world.syncers[loser], world.syncers[1 - loser]
  held.hold = frozenset({"_commit"})
  world.run_until(lambda: world.committed > 5)
  held.hold = frozenset()
  assert_same_run(world.run(), undisturbed)
  assert held.state.stopping == syncer.OVERTAKEN
  assert other.state.stopping == syncer.COMPLETED
  epochs = [commit.epoch for commit in world.commits[6:]]
  assert set(epochs) == {other.state.epoch}


def test_everybody_dies_and_the_run_resumes():
  world = free_world()
  world.run_to_round(9)
  for node in list(world.lives):
    node.kill()
  committed = world.committed
  params, outer = world.params_at(committed), world.outer_at(committed)
  world.start_syncer()
  for m in world.learners:
    assert_equal(world.join(m).anchors, params)
  assert world.outer_at(committed) == outer
  world.run()
  assert world.committed == 40
  assert_one_history(world)


def test_a_finished_run_ends_whoever_starts_again():
  world = exact_world().run()
  assert world.start_syncer().state.done
  node = world.join(0)
  assert node.state.done and node.state.stopping == "completed"
  assert world.committed == ROUNDS


# --- Error feedback ----------------------------------------------------------


def residual(node, p):
  return np.concatenate([np.ravel(x) for x in node.plane.arrays._residuals[p]])


def test_what_int4_left_out_is_kept_only_if_the_answer_counts():
  world = free_world(codec={"up": "int4"})
  world.run_to_round(9)
  t = world.committed + 1
  (p,) = world.schedule.fragments(t)
  before = [residual(world.learners[m], p) for m in (0, 1)]
  # The round closes with one answer, but its commit has to wait ...
  world.syncers[0].hold = frozenset({"_merge"})
  world.run_until(lambda: {(t, 0, 1), (t, 1, 1)} <= answered(world))
  for m in (0, 1):
    np.testing.assert_array_equal(residual(world.learners[m], p), before[m])
  # ... and names that one.
  world.syncers[0].hold = frozenset()
  world.settle()
  (item,) = world.commit(t).counted
  late = 1 - item.learner
  lucky = residual(world.learners[item.learner], p)
  assert np.any(lucky != before[item.learner]) and np.any(lucky)
  np.testing.assert_array_equal(residual(world.learners[late], p), before[late])


def test_a_new_life_owes_nothing():
  world = free_world(codec={"up": "int4"})
  world.run_to_round(12)
  old = world.learners[0]
  assert any(np.any(residual(old, p)) for p in range(3))
  old.kill()
  new = world.join(0)
  assert not any(np.any(residual(new, p)) for p in range(3))


# --- The store --------------------------------------------------------------


@pytest.mark.parametrize("make", [exact_world, free_world])
@pytest.mark.parametrize("what", ["part", "header"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_that_could_not_be_written_does_not_stop_a_run(
  make, what, when
):
  """Also if the write has succeeded and its reply is lost."""
  world = make()
  world.run_to_round(4)
  down = ExchangeError("the store is down")
  first = rf"answer/\d+\.1\.1\.1\.{what}"
  fault = world.exchange.once(when, "put", first, down)
  world.run()
  assert fault.happened
  kinds = [type(event) for event, _ in world.learners[1].log]
  assert kinds.count(learner_types.AnswerFailed) == 1
  assert_one_history(world)


def test_a_learner_behind_retention_goes_on_from_the_newest_commit():
  world = free_world()
  world.run_to_round(3)
  behind = world.learners[1]
  behind.blind = True
  world.run_to_round(20)
  missed = world.schedule.next_round(behind.state.seen)
  assert world.exchange.objects[keys.commit(missed)].value == SWEPT
  behind.blind = False
  world.settle()
  seen = [e for e, _ in behind.log if isinstance(e, learner_types.CaughtUp)]
  assert [event.round for event in seen] == [world.committed]
  caught_up = world.committed
  world.step(1)  # asks for what it missed
  world.step(1)  # and applies it
  assert_equal(behind.anchors, world.params_at(caught_up))
  world.run()
  late = [c.counted for c in world.commits if c.round > caught_up]
  assert any(item.learner == 1 for item in itertools.chain(*late))
  assert_one_history(world)


def test_a_fetch_slower_than_the_next_commits_does_no_harm():
  """The objects are gone by then; a newer version has taken their place."""
  world = make_world(free_config(2, 1, 2, stop={"rounds": 12}))
  world.run_to_round(2)
  slow = world.learners[1]
  slow.hold = frozenset({"_fetch"})
  world.run_to_round(7)
  assert len(slow.state.fetching) >= 3
  slow.hold = frozenset()
  world.step(1)
  assert_equal(slow.anchors, world.params_at(slow.state.seen))
  world.run()


def test_a_check_slower_than_its_round_does_no_harm():
  world = free_world()
  world.run_to_round(2)
  node = world.syncers[0]
  world.run_until(lambda: world.committed == 4)
  # The first answer of the next round is left unchecked, another closes it.
  node.hold = frozenset({"_check"})
  world.run_until(lambda: len(node.jobs) == 2)
  first = node.jobs.popleft()
  node.hold = frozenset()
  world.run_to_round(8)
  node.jobs.append(first)
  assert_one_history(world.run())
  assert world.committed == 40
