"""The outer step against its recursion, and its state as bytes."""

import jax
import numpy as np
import optax
import pytest

from ddiloco.algo import outer

_SHAPES = ((), (5,), (3, 4))


def _random(seed):
  rng = np.random.default_rng(seed)
  return tuple(rng.normal(size=s).astype(np.float32) for s in _SHAPES)


def _step(learning_rate=0.7, momentum=0.9, nesterov=True):
  tx = outer.make_outer(
    learning_rate=learning_rate, momentum=momentum, nesterov=nesterov
  )
  return outer.OuterStep(tx, _SHAPES)


def _bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_full_step_along_the_outer_gradient_is_the_learner(nesterov):
  anchor, learner = _random(0), _random(1)
  gradient = tuple(a - b for a, b in zip(anchor, learner, strict=True))
  step = _step(1.0, 0.0, nesterov)
  params, _ = step.apply(anchor, step.init(), gradient)
  for a, b in zip(params, learner, strict=True):
    assert a.dtype == np.float32
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.9])
def test_steps_follow_the_recursion(mu, nesterov):
  eta = 0.7
  step = _step(eta, mu, nesterov)
  params, state = _random(0), step.init()
  theta = [np.asarray(x, np.float64) for x in params]
  buffer = [np.zeros(s) for s in _SHAPES]
  for seed in range(1, 8):
    merged = _random(seed)
    params, state = step.apply(params, state, merged)
    for i, d in enumerate(merged):
      buffer[i] = mu * buffer[i] + d
      theta[i] -= eta * (d + mu * buffer[i] if nesterov else buffer[i])
  for a, b in zip(params, theta, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_nothing_is_overwritten():
  step = _step()
  params = tuple(map(jax.numpy.array, _random(0)))
  merged = tuple(map(jax.numpy.array, _random(1)))
  state = step.init()
  before = _bits((params, state, merged))
  step.apply(params, state, merged)
  assert _bits((params, state, merged)) == before


@pytest.mark.parametrize(
  "tx",
  [
    outer.make_outer(learning_rate=0.7, momentum=0.9, nesterov=True),
    outer.make_outer(learning_rate=0.7, momentum=0.0, nesterov=True),
    optax.adam(1e-3),
  ],
  ids=["nesterov", "plain", "adam"],
)
def test_state_survives_as_bytes(tx):
  step = outer.OuterStep(tx, _SHAPES)
  params, state = _random(0), step.init()
  for seed in range(1, 4):
    params, state = step.apply(params, state, _random(seed))
  data = outer.state_to_bytes(state)
  again = outer.state_from_bytes(step.init(), data)
  assert jax.tree.structure(again) == jax.tree.structure(state)
  assert _bits(again) == _bits(state)
  expected = step.apply(params, state, _random(9))
  assert _bits(step.apply(params, again, _random(9))) == _bits(expected)


def test_no_momentum_needs_no_state():
  assert outer.state_to_bytes(_step(momentum=0.0).init()) == b""


@pytest.mark.parametrize("change", [-4, 4])
def test_state_of_another_size_is_refused(change):
  state = _step().init()
  data = outer.state_to_bytes(state)
  assert len(data) == 4 * (1 + 5 + 12)
  with pytest.raises(ValueError, match=f"^{72 + change} bytes .* 72:"):
    outer.state_from_bytes(state, bytes(72 + change))


def test_repeated_steps_compile_once():
  traces = []
  sgd = outer.make_outer(learning_rate=0.7, momentum=0.9, nesterov=True)

  def update(updates, state, params=None):
    traces.append(1)
    return sgd.update(updates, state, params)

  step = outer.OuterStep(
    optax.GradientTransformation(sgd.init, update), _SHAPES
  )
  params, state = _random(0), step.init()
  for seed in range(1, 4):
    params, state = step.apply(params, state, _random(seed))
    state = outer.state_from_bytes(state, outer.state_to_bytes(state))
  assert len(traces) == 1


@pytest.mark.parametrize(
  "options, words",
  [
    ({"name": "adam"}, "'adam': choose sgd"),
    ({"learning_rate": 0.0}, "learning rate 0.0"),
    ({"learning_rate": float("nan")}, "learning rate nan"),
    ({"learning_rate": float("inf")}, "learning rate inf"),
    ({"momentum": 1.0}, "momentum 1.0"),
    ({"momentum": -0.1}, "momentum -0.1"),
  ],
)
def test_wrong_options_are_refused(options, words):
  good = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
  with pytest.raises(ValueError, match=words):
    outer.make_outer(**(good | options))
