"""Learners, syncer and exchange together: safety, progress, determinism."""

import collections

import pytest

from ddiloco.protocol.learner_types import CaughtUp, Encode, StepDone
from ddiloco.protocol.syncer_types import Opened
from ddiloco.types import Anchor, Apply, Wait
from tests.protocol.scenario import STEP_NS, STEP_TOKENS, make_rules
from tests.protocol.world import World

ROUNDS = 100
EXACT = {"wait": Wait.EXACT}
CONFIGS = {
  "default": (make_rules(24, 24, 2), 3),
  "sparse": (make_rules(2, 10, 2), 3),
  "dense": (make_rules(7, 3, 1), 3),
  "quorum": (make_rules(8, 8, 3, quorum_min=2), 3),
  "everybody": (make_rules(8, 8, 1, quorum_min=4), 4),
  "no grace": (make_rules(24, 24, 2, grace=False), 4),
  "one learner": (make_rules(4, 4, 1), 1),
  "any anchor": (make_rules(6, 12, 2, anchor=Anchor.ANY), 3),
  "synchronous": (make_rules(1, 1, 0, quorum_min=2, **EXACT), 2),
  "diloco": (make_rules(1, 5, 0, quorum_min=3, **EXACT), 3),
  "streaming": (
    make_rules(8, 8, 3, quorum_min=2, apply=Apply.AT_OVERLAP, **EXACT),
    2,
  ),
  "asynchronous": (
    make_rules(1, 4, 1, anchor=Anchor.ANY, apply=Apply.OWN),
    3,
  ),
}


def steps_ns(count):
  """Speeds that are alike, but not equal."""
  return tuple(STEP_NS + 7 * STEP_NS * m // 100 for m in range(count))


def make_world(name, seed=0, **changes):
  rules, count = CONFIGS[name]
  hazards = {
    "delay_ns_max": STEP_NS // 3,
    "jitter_permille": 50,
    "failures_permille": 0,
  }
  return World(rules, steps_ns(count), seed=seed, **hazards | changes)


def check_commits(world):
  """What one may count on from the commits alone."""
  rules, schedule = world.rules, world.rules.schedule
  rounds = sorted(world.commits)
  committed = collections.defaultdict(list)
  for before, t in zip(rounds, rounds[1:], strict=False):
    commit, previous = world.commits[t], world.commits[before]
    assert t == schedule.next_round(before)
    assert commit.previous == f"digest-{before}"
    assert commit.tokens >= previous.tokens
    for p, state in enumerate(commit.fragments):
      assert state.version == schedule.version_before(p, t + 1)
    learners = [item.learner for item in commit.counted]
    assert learners == sorted(set(learners))
    assert len(learners) >= rules.quorum_min
    for item in commit.counted:
      key = t, item.learner, item.incarnation, item.attempt
      assert item.contributions == world.headers[key].contributions
      for part in item.contributions:
        expected = schedule.version_before(part.fragment, t)
        assert rules.anchor is Anchor.ANY or part.anchor == expected
    for p in schedule.fragments(t):
      committed[p].append(t)
  for p, own in committed.items():
    gaps = {later - t for t, later in zip(own, own[1:], strict=False)}
    assert gaps <= {schedule.interval}, f"fragment {p} is due once in H"


def check_tokens(world):
  """No token is counted twice, and none that nobody has processed."""
  counted = collections.Counter()
  for commit in world.commits.values():
    for item in commit.counted:
      for part in item.contributions:
        life = item.learner, item.incarnation, part.fragment
        counted[life] += part.tokens
  processed = collections.Counter()
  for log in world.logs:
    joined = log[0][0]
    if not isinstance(joined, Opened):
      steps = sum(isinstance(event, StepDone) for event, _ in log)
      life = joined.learner, joined.incarnation
      processed[life] = steps * STEP_TOKENS
  for (m, n, _), tokens in counted.items():
    assert tokens <= processed[m, n]
  total = sum(processed.values())
  assert world.commits[world.newest].tokens <= total


def check_retention(world):
  """The exchange stays within the bound that retention states."""
  schedule = world.rules.schedule
  newest = {
    (schedule.version_before(p, world.newest + 1), p)
    for p in range(schedule.num_fragments)
  }
  older = {(schedule.version_before(p, v), p) for v, p in newest}
  assert newest | older <= world.states
  extra = world.states - newest - older
  # The round committed last is swept a moment later; those in flight follow.
  in_flight = max(schedule.overlap, 1) + 1
  most = max(len(schedule.fragments(t)) for t in range(1, 50))
  assert len(extra) <= most * in_flight
  since = world.newest - 2 * schedule.interval
  # Commit 0, and the one that is swept next.
  assert len(world.kept) <= sum(t > since for t in world.commits) + 2


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_and_keeps_its_promises(name):
  world = make_world(name)
  world.run(ROUNDS)
  check_commits(world)
  check_retention(world)
  if world.rules.anchor is Anchor.CURRENT:
    check_tokens(world)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_store_that_fails_does_not_stop_a_run(name):
  world = make_world(name, seed=1, failures_permille=100)
  world.run(ROUNDS)
  check_commits(world)
  refused = [r for c in world.commits.values() for r in c.refused]
  assert refused, "the failures took place"
  attempts = [
    item.attempt for c in world.commits.values() for item in c.counted
  ]
  assert max(attempts) > 1 or world.rules.quorum_min == 1


@pytest.mark.parametrize(
  "name", ["default", "sparse", "quorum", "everybody", "diloco", "streaming"]
)
@pytest.mark.parametrize("seed", range(3))
def test_deaths_do_not_stop_a_run(name, seed):
  world = make_world(name, seed=seed, failures_permille=20)
  count = len(world.steps_ns)
  for t in range(10, ROUNDS, 10):
    world.run(t)
    m = world.random.randrange(count)
    if t % 30 == 0:
      world.restart_syncer()
    elif m in world.learners:
      world.kill_learner(m)
      away_ns = world.random.randint(0, 30 * STEP_NS)
      world.at(away_ns, None, lambda m=m: world.start_learner(m))
  world.run(ROUNDS)
  check_commits(world)
  check_tokens(world)
  assert sum(world.incarnations.values()) > count
  assert world.syncer.state.epoch > 3


def test_learners_step_on_without_a_syncer():
  world = make_world("default")
  world.run(20)
  steps = {m: actor.state.step for m, actor in world.learners.items()}
  world.kill_syncer()
  for _ in range(2000):
    world.run_one()
  for m, actor in world.learners.items():
    assert actor.state.step > steps[m] + 100
  world.restart_syncer()
  world.run(60)
  check_commits(world)


@pytest.mark.parametrize("name", ["default", "sparse", "dense", "asynchronous"])
def test_a_learner_that_slept_longer_than_retention_contributes_again(name):
  world = make_world(name)
  world.run(30)
  world.pause_learner(0, 100 * STEP_NS)
  world.run(220)
  check_commits(world)
  events = [event for event, _ in world.learners[0].log]
  caught_up = [e.round for e in events if isinstance(e, CaughtUp)]
  assert len(caught_up) == 1, "the commits it missed were gone"
  assert any(
    item.learner == 0
    for t, commit in world.commits.items()
    if t > caught_up[0]
    for item in commit.counted
  )


@pytest.mark.parametrize("name", ["default", "streaming", "asynchronous"])
def test_one_seed_gives_one_history(name):
  def history(seed):
    world = make_world(name, seed=seed, failures_permille=50)
    world.run(60)
    return world.history()

  assert history(3) == history(3)
  assert history(3) != history(4)


def fragments_of(world, learner):
  """The fragments that a learner's counted answers were about."""
  return {
    part.fragment
    for commit in world.commits.values()
    for item in commit.counted
    if item.learner == learner
    for part in item.contributions
  }


@pytest.mark.parametrize("grace", [True, False])
@pytest.mark.parametrize("tau", [1, 2, 3])
@pytest.mark.parametrize("slower", [2, 3, 4])
def test_a_learner_n_times_slower_reaches_its_share(slower, tau, grace):
  rules = make_rules(24, 24, tau, grace=grace)
  world = World(rules, (STEP_NS, slower * STEP_NS))
  world.run(6 * 24)
  assert len(fragments_of(world, 0) | fragments_of(world, 1)) == 24
  assert len(fragments_of(world, 1)) >= 24 // slower


def test_a_little_jitter_lets_a_slow_learner_reach_every_fragment():
  rules = make_rules(12, 12, 2)
  world = World(rules, (STEP_NS, 2 * STEP_NS), jitter_permille=50)
  world.run(16 * 12)
  assert fragments_of(world, 1) == set(range(12))


def test_exact_answers_are_measured_after_their_own_step():
  world = make_world("streaming")
  world.run(ROUNDS)
  for log in world.logs:
    for _, commands in log:
      for command in commands:
        if isinstance(command, Encode):
          assert command.life_steps == command.round
