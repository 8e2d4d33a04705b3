"""Signs, and runs that must equal plain training (wait = exact, tau = 0)."""

import jax
import numpy as np
import pytest

from tests.engine.regression import Regression, make_config, make_world

STEPS = 100
# (P, H): P = H, fewer fragments than steps, and two fragments at each step.
SHAPES = [(1, 1), (1, 4), (3, 3), (6, 3)]


def plain_training(program, steps):
  """The parameters after some steps, and the loss of each step."""
  state, losses = program.init(), []
  size = program.samples_per_step
  for i in range(steps):
    batch = program.batch(i * size, size)
    state, metrics = program.step(state, batch, 0)
    losses.append(float(metrics["loss"]))
  return [np.array(x) for x in jax.tree.leaves(program.params(state))], losses


def distance(ours, theirs):
  """The largest difference, relative to the largest value."""
  largest = max(np.max(np.abs(x)) for x in theirs)
  pairs = zip(ours, theirs, strict=True)
  return max(np.max(np.abs(x - y)) for x, y in pairs) / largest


def assert_equal(ours, theirs):
  for mine, other in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(mine, other, strict=True)


def exact_run(*programs, fragments=1, interval=1, rounds=STEPS, **groups):
  config = make_config(
    len(programs), fragments, interval, 0, stop={"rounds": rounds}, **groups
  )
  return make_world(config, *programs).run()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("fragments, interval", SHAPES)
def test_one_learner_with_outer_rate_one_is_plain_training(
  fragments, interval, optimizer
):
  """Anchor - (anchor - params) is params but for its rounding."""
  world = exact_run(
    Regression(0, optimizer=optimizer), fragments=fragments, interval=interval
  )
  plain, _ = plain_training(Regression(0, optimizer=optimizer), STEPS)
  # A fragment that is not due at the last step has its newest version only.
  node = world.learners[0]
  assert node.state.step == STEPS
  assert distance(node.params, plain) < 1e-5


def test_plain_training_is_followed_round_by_round():
  world = exact_run(Regression(0), rounds=20)
  for t in range(1, 21):
    plain, _ = plain_training(Regression(0), t)
    assert distance(world.params_at(t), plain) < 1e-5


@pytest.mark.parametrize("rule", ["average", "rda"])
@pytest.mark.parametrize("fragments, interval", SHAPES)
def test_two_learners_on_the_same_batches_are_one(fragments, interval, rule):
  shape = {"fragments": fragments, "interval": interval, "rounds": 12}
  merge = {"merge": {"rule": rule, "embedding_rule": "average"}}
  one = exact_run(Regression(0), **shape, **merge)
  two = exact_run(Regression(0), Regression(0), **shape, **merge)
  assert [len(c.counted) for c in two.commits[1:]] == [2] * len(one.commits[1:])
  if rule == "average":
    # Bit for bit: both weights are 0.5, and x/2 + x/2 is x in floating point.
    assert_equal(two.params_at(12), one.params_at(12))
  else:
    assert distance(two.params_at(12), one.params_at(12)) < 1e-5


def test_any_number_of_learners_on_the_same_batches_is_one():
  one, many = (
    exact_run(
      *(Regression(0) for _ in range(count)),
      rounds=15,
      fragments=3,
      interval=3,
    )
    for count in (1, 5)
  )
  assert distance(many.params_at(15), one.params_at(15)) < 1e-5


def test_the_outer_step_moves_towards_the_learners():
  """Descending along anchor - params ends between the two, not beyond."""
  programs = [Regression(0), Regression(1)]
  world = exact_run(
    *programs, interval=5, rounds=5, outer={"learning_rate": 0.5}
  )
  before, after = world.params_at(0), world.params_at(5)
  ends = [plain_training(Regression(m), 5)[0] for m in (0, 1)]
  for i, tensor in enumerate(after):
    middle = (ends[0][i] + ends[1][i]) / 2
    np.testing.assert_allclose(tensor, (before[i] + middle) / 2, atol=1e-6)


def test_learning_rate_scales_the_outer_step():
  half, whole = (
    exact_run(Regression(0), rounds=1, outer={"learning_rate": rate})
    for rate in (0.5, 1.0)
  )
  start = whole.params_at(0)
  for i, tensor in enumerate(half.params_at(1)):
    expected = (start[i] + whole.params_at(1)[i]) / 2
    np.testing.assert_allclose(tensor, expected, atol=1e-7)


@pytest.mark.parametrize(
  "codec, rule",
  [("f32", "average"), ("f32", "rda"), ("int4", "rda")],
)
def test_the_loss_falls(codec, rule):
  world = make_world(
    make_config(
      fragments=3,
      interval=6,
      overlap=2,
      stop={"rounds": 60},
      codec={"up": codec},
      merge={"rule": rule},
      outer={"learning_rate": 0.7, "momentum": 0.3},
    ),
    *(Regression(m, optimizer="sgd") for m in range(2)),
  ).run()
  heldout = Regression(99)
  losses = [heldout.loss(world.params_at(t)) for t in (0, 20, 40, 60)]
  assert losses == sorted(losses, reverse=True)
  assert losses[-1] < 0.6 * losses[0]
