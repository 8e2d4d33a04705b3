"""K = M under wait = exact equals the synchronous loop of the equations."""

from itertools import cycle

import jax
import numpy as np
import pytest

from ddiloco.protocol import keys
from tests import reference
from tests.engine.identity_test import assert_equal, distance
from tests.engine.regression import (
  Regression,
  free_config,
  make_config,
  make_world,
)

ROUNDS = 12
BATCHES = (4, 2, 6)  # unequal, so that the weights matter
SGD = {"learning_rate": 0.7, "momentum": 0.9}
# When a commit is applied, for tau = 0, 1, 2. The syncer of these runs is
# quick, so "as soon as it is seen" is one boundary after the answers; where
# commits are looked for only once `wait` asks for them, it is t + max(tau, 1).
DELAYS = {
  ("when_seen", False): (0, 1, 1),
  ("when_seen", True): (0, 1, 2),
  ("at_overlap", False): (0, 1, 2),
}
SHAPES = [(1, 4), (3, 3), (4, 6), (6, 4), (6, 3)]  # (P, H)


def programs():
  return [Regression(m, batch_size=size) for m, size in enumerate(BATCHES)]


def run(
  fragments, interval, overlap, *, seen_late=False, script=None, **groups
):
  """A run of three unequal learners to its end."""
  groups = {"stop": {"rounds": ROUNDS}, "outer": SGD} | groups
  config = make_config(3, fragments, interval, overlap, **groups)
  return make_world(
    config, *programs(), commits_seen_late=seen_late, script=script
  ).run()


def synchronous(world, delay):
  """The reference's history for the same recipe."""
  config, layout = world.config, world.layout
  embedding = config.merge.embedding_pattern
  recipe = reference.Recipe(
    fragments=[layout.fragment(p) for p in range(layout.num_fragments)],
    interval=config.sync.interval_steps,
    delay=delay,
    rules=[
      config.merge.embedding_rule if embedding in t.path else config.merge.rule
      for t in layout.tensors
    ],
    learning_rate=config.outer.learning_rate,
    momentum=config.outer.momentum,
    blend=config.sync.blend,
    eager=config.sync.eager,
    scope=config.merge.rda_scope,
  )
  return reference.train(programs(), recipe, world.committed)


def assert_follows(world, history):
  """Parameters and momenta agree after each round, to rounding."""
  assert [c.round for c in world.commits[1:]] == history.rounds
  for t, params in zip(history.rounds, history.params, strict=True):
    assert distance(world.params_at(t), params) < 2e-6, t
  last = world.commits[-1].round
  for p, data in enumerate(world.outer_at(last)):
    ours = np.frombuffer(data, np.float32)
    theirs = [history.momenta[-1][i].ravel() for i in world.layout.fragment(p)]
    np.testing.assert_allclose(ours, np.concatenate(theirs), atol=2e-6)


@pytest.mark.parametrize("rule", ["average", "rda"])
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("apply, seen_late", DELAYS)
def test_follows_the_equations(apply, seen_late, overlap, rule):
  world = run(
    4,
    6,
    overlap,
    seen_late=seen_late,
    sync={"apply": apply},
    merge={"rule": rule},
  )
  delay = DELAYS[apply, seen_late][overlap]
  assert_follows(world, synchronous(world, delay))


@pytest.mark.parametrize("fragments, interval", SHAPES)
def test_follows_them_for_any_schedule(fragments, interval):
  world = run(
    fragments, interval, 2, sync={"apply": "at_overlap"}, merge={"rule": "rda"}
  )
  assert_follows(world, synchronous(world, 2))


@pytest.mark.parametrize("rate, momentum", [(0.3, 0.5), (0.7, 0.9)])
@pytest.mark.parametrize(
  "option", [{"blend": 0.5}, {"eager": True}, {"blend": 0.3, "eager": True}]
)
def test_streaming_options_follow_them(option, rate, momentum):
  sync = {"apply": "at_overlap"} | option
  outer = {"learning_rate": rate, "momentum": momentum}
  world = run(3, 6, 2, sync=sync, outer=outer)
  assert_follows(world, synchronous(world, 2))
  plain = run(3, 6, 2, sync={"apply": "at_overlap"}, outer=outer)
  last = plain.params_at(ROUNDS)
  assert distance(world.params_at(world.committed), last) > 2e-5


def test_data_parallel_is_plain_training():
  """One learner, P = H = 1, tau = 0: each round is one inner step."""
  config = make_config(1, 1, 1, 0, stop={"rounds": ROUNDS})
  world = make_world(config, Regression(0)).run()
  program = Regression(0)
  state, size = program.init(), program.samples_per_step
  for t in range(ROUNDS):
    state, _ = program.step(state, program.batch(t * size, size), 0)
    ours = world.params_at(t + 1)
    assert distance(ours, jax.tree.leaves(program.params(state))) < 2e-6, t


def test_a_wrong_delay_is_noticed():
  world = run(4, 6, 2, sync={"apply": "at_overlap"})
  history = synchronous(world, 1)
  last = history.params[-1]
  assert distance(world.params_at(world.committed), last) > 1e-4


def test_a_wrong_weight_is_noticed():
  world = run(3, 3, 1)
  for t in (1, 2, 3):
    for item in world.commit(t).counted:
      # A fragment's first round comes after fewer steps than H.
      steps = item.contributions[0].steps
      size = BATCHES[item.learner] * 3
      assert item.contributions[0].tokens == steps * size
  unweighted = [Regression(m) for m in range(3)]
  recipe = reference.Recipe(
    [world.layout.fragment(p) for p in range(3)],
    3,
    1,
    ["average"] * 6,
    0.7,
    0.9,
  )
  history = reference.train(unweighted, recipe, 6)
  assert distance(world.params_at(6), history.params[-1]) > 1e-4


@pytest.mark.parametrize(
  "rule, scope",
  [
    ("average", "tensor"),
    ("rda", "tensor"),
    ("rda", "row"),
    ("rda", "fragment"),
  ],
)
def test_every_commit_is_what_its_answers_make(rule, scope):
  """Without lock step: unequal speeds, batches and numbers of steps."""
  config = free_config(
    3,
    3,
    3,
    sync={"quorum_min": 2},
    merge={"rule": rule, "embedding_rule": rule, "rda_scope": scope},
    outer={"learning_rate": 0.7},
    stop={"rounds": 30},
  )
  world = make_world(config, *programs(), script=cycle((0, 1, 0, 0, 2))).run()
  unequal = 0
  for t in range(1, 31):
    (p,) = world.schedule.fragments(t)
    parts = [item.contributions[0] for item in world.commit(t).counted]
    unequal += len({part.steps for part in parts}) > 1
    answers = [answer(world, t, item) for item in world.commit(t).counted]
    before, after = world.params_at(t - 1), world.params_at(t)
    merged = reference.merge(
      answers,
      [part.tokens * part.tokens / part.steps for part in parts],
      [rule] * len(answers[0]),
      scope,
    )
    for i, gradient in zip(world.layout.fragment(p), merged, strict=True):
      expected = before[i] - 0.7 * gradient
      np.testing.assert_allclose(after[i], expected, atol=1e-6)
    others = set(range(6)) - set(world.layout.fragment(p))
    assert_equal([after[i] for i in others], [before[i] for i in others])
  assert unequal > 10


def answer(world, t, item):
  """The tensors of a counted answer, which is f32."""
  key = keys.answer_part(t, item.learner, item.incarnation, item.attempt, 0)
  values = np.frombuffer(world.exchange.history[key], np.float32)
  (part,) = item.contributions
  tensors = world.layout.fragment(part.fragment)
  shapes = [world.layout.tensors[i].shape for i in tensors]
  ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
  pieces = np.split(values, ends[:-1])
  return [x.reshape(s) for x, s in zip(pieces, shapes, strict=True)]


@pytest.mark.parametrize(
  "overlap, script",
  [
    (0, (0, 1, 1, 2)),
    (0, (2, 2, 0, 1)),
    (2, (2, 1, 0)),
    (2, (0, 1, 2, 2, 1, 0)),
    (2, (0, 0, 0, 1, 2, 2)),  # held for long: attempts repeat the first one
    (1, (2, 2, 2, 2, 0, 1)),
  ],
)
def test_the_order_of_steps_changes_no_bit(overlap, script):
  """At t + tau, what a learner computes does not depend on when it does."""
  ours, theirs = (
    run(
      3, 3, overlap, sync={"apply": "at_overlap"}, script=order and cycle(order)
    )
    for order in (None, script)
  )
  assert theirs.committed == ours.committed == ROUNDS
  for t in range(ROUNDS + 1):
    assert_equal(ours.params_at(t), theirs.params_at(t))


@pytest.mark.parametrize(
  "codec, tolerance", [("bf16", 3e-3), ("int8", 3e-3), ("int4", 3e-2)]
)
def test_compressed_answers_stay_close(codec, tolerance):
  world = run(3, 3, 1, codec={"up": codec})
  last = synchronous(world, 1).params[-1]
  found = distance(world.params_at(world.committed), last)
  assert 0 < found < tolerance


def test_error_feedback_keeps_what_a_codec_leaves_out():
  """Without it, int4 rounds the same small values away round after round."""
  off = {}
  for feedback in (False, True):
    codec = {"up": "int4", "error_feedback": feedback}
    world = run(3, 3, 1, codec=codec, outer={"momentum": 0.0})
    last = synchronous(world, 1).params[-1]
    off[feedback] = distance(world.params_at(world.committed), last)
  assert off[True] < off[False]
