"""Outer optimizers against their recursions in float64; states as bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.algo import outer
from ddiloco.config import ConfigError, OuterConfig

_SHAPES = ((), (5,), (3, 4))
_DELAYED = {"name": "delayed_nesterov", "momentum": 0.9, "momentum_delay": 3}
_CONFIGS = {
  "plain": {},
  "nesterov": {"momentum": 0.9},
  "heavy ball": {"momentum": 0.9, "nesterov": False},
  "adam": {"name": "adam"},
  "delayed": _DELAYED,
  "delayed, used": _DELAYED | {"momentum_activation": 0.2},
  "restarts": {"momentum": 0.9, "restart_every": 3},
  "adam, restarts": {"name": "adam", "restart_every": 2},
  "delayed, restarts": _DELAYED | {"restart_every": 6},
  "warm-up": {"momentum": 0.3, "warmup": 4},
  "cosine": {"warmup": 2, "schedule": "cosine", "decay": 7},
  "linear": {"momentum": 0.9, "schedule": "linear", "decay": 6},
  "rounds": {"clock": "round", "schedule": "linear", "decay": 40},
  "all": _DELAYED
  | {"restart_every": 3, "warmup": 2, "schedule": "cosine", "decay": 8},
}


def _random(seed):
  rng = np.random.default_rng(seed)
  return tuple(rng.normal(size=s).astype(np.float32) for s in _SHAPES)


def _step(**options):
  return outer.OuterStep(outer.make_outer(OuterConfig(**options)), _SHAPES)


def _bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _round(n):
  """Of a fragment's n-th merge: rounds and merges are different clocks."""
  return 3 + 5 * n


class _Reference:
  """Parameters of one fragment in float64, straight from the equations."""

  def __init__(self, config, params):
    self.config = config
    self.params = [np.asarray(x, np.float64) for x in params]
    self.merges = 0
    self._restart()

  def _restart(self):
    self.age = 0
    self.m = [np.zeros(s) for s in _SHAPES]
    self.v = [np.zeros(s) for s in _SHAPES]
    self.sum = [np.zeros(s) for s in _SHAPES]

  def step(self, merged, round_):
    c = self.config
    if c.restart_every and self.merges % c.restart_every == 0:
      self._restart()
    self.merges += 1
    self.age += 1
    rate = c.learning_rate * self._fraction(
      self.merges if c.clock == "merges" else round_
    )
    update = getattr(self, "_" + c.name)
    for i, d in enumerate(merged):
      self.params[i] -= rate * update(i, np.asarray(d, np.float64))

  def _fraction(self, clock):
    c = self.config
    if clock < c.warmup:
      return clock / c.warmup
    if c.schedule == "constant":
      return 1.0
    done = min((clock - c.warmup) / (c.decay - c.warmup), 1.0)
    left = {"linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}
    return c.final_fraction + (1 - c.final_fraction) * left[c.schedule]

  def _sgd(self, i, d):
    mu = self.config.momentum
    self.m[i] = mu * self.m[i] + d
    return d + mu * self.m[i] if self.config.nesterov else self.m[i]

  def _adam(self, i, d):
    c, n = self.config, self.age
    self.m[i] = c.b1 * self.m[i] + (1 - c.b1) * d
    self.v[i] = c.b2 * self.v[i] + (1 - c.b2) * d * d
    mean = self.m[i] / (1 - c.b1**n)
    return mean / (np.sqrt(self.v[i] / (1 - c.b2**n)) + c.eps)

  def _delayed_nesterov(self, i, d):
    mu, n = self.config.momentum, self.config.momentum_delay
    c = self.config.momentum_activation
    self.sum[i] = self.sum[i] + d
    share = c
    if self.age % n == 0:
      self.m[i] = mu * self.m[i] + self.sum[i] / n
      self.sum[i] = np.zeros(_SHAPES[i])
      share = 1 - c * n + c
    return share * mu * self.m[i] + d / n


@pytest.mark.parametrize("name", _CONFIGS)
def test_steps_follow_the_equations(name):
  config = OuterConfig(**_CONFIGS[name])
  step = outer.OuterStep(outer.make_outer(config), _SHAPES)
  params = _random(0)
  state, reference = step.init(params), _Reference(config, params)
  for n in range(1, 12):
    merged = _random(n)
    params, state = step.apply(params, state, merged, _round(n))
    reference.step(merged, _round(n))
    for a, b in zip(params, reference.params, strict=True):
      assert a.dtype == np.float32
      np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_full_step_along_the_outer_gradient_is_the_learner(nesterov):
  anchor, learner = _random(0), _random(1)
  gradient = tuple(a - b for a, b in zip(anchor, learner, strict=True))
  step = _step(learning_rate=1.0, nesterov=nesterov)
  params, _ = step.apply(anchor, step.init(anchor), gradient, 1)
  for a, b in zip(params, learner, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_the_default_is_plain_optax():
  config = OuterConfig(momentum=0.9)
  ours = outer.OuterStep(outer.make_outer(config), _SHAPES)
  theirs = outer.OuterStep(optax.sgd(0.7, 0.9, nesterov=True), _SHAPES)
  params = _random(0)
  pairs = [(params, ours.init(params)), (params, theirs.init(params))]
  for n in range(1, 5):
    pairs = [
      step.apply(*pair, _random(n), n)
      for step, pair in zip((ours, theirs), pairs, strict=True)
    ]
  assert _bits(pairs[0]) == _bits(pairs[1])


@settings(max_examples=10)
@given(
  delay=st.integers(1, 6),
  share=st.floats(0, 1),
  momentum=st.floats(0, 0.95),
  seed=st.integers(0, 1000),
)
def test_delayed_momentum_is_spread_over_its_merges(
  delay, share, momentum, seed
):
  """However it is spread, N merges of one gradient move N times one N-th."""
  tx = outer.scale_by_delayed_nesterov(momentum, delay, share / delay)
  gradient = _random(seed)
  state, kept, rates = tx.init(gradient), 0.0, []
  for _ in range(3 * delay):
    updates, state = tx.update(gradient, state)
    rates.append(float(updates[0]) / float(gradient[0]))
  for k in range(3):
    old, kept = kept, momentum * kept + 1.0
    c = share / delay
    spread = (delay - 1) * c * old + (1 - c * delay + c) * kept
    expected = 1.0 + momentum * spread
    assert sum(rates[k * delay : (k + 1) * delay]) == pytest.approx(
      expected, rel=1e-4
    )


def test_delay_one_is_nesterov():
  tx = optax.chain(
    outer.scale_by_delayed_nesterov(0.9, 1), optax.scale_by_learning_rate(0.7)
  )
  delayed, nesterov = outer.OuterStep(tx, _SHAPES), _step(momentum=0.9)
  params = other = _random(0)
  state, other_state = delayed.init(params), nesterov.init(params)
  for n in range(1, 6):
    params, state = delayed.apply(params, state, _random(n), n)
    other, other_state = nesterov.apply(other, other_state, _random(n), n)
  for a, b in zip(params, other, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  "options, clock, fraction",
  [
    ({}, 1, 1.0),
    ({"warmup": 4}, 1, 0.25),
    ({"warmup": 4}, 4, 1.0),
    ({"warmup": 4}, 10**9, 1.0),
    ({"schedule": "linear", "decay": 10}, 5, 0.55),
    ({"schedule": "linear", "decay": 10}, 10, 0.1),
    ({"schedule": "linear", "decay": 10, "warmup": 2}, 6, 0.55),
    ({"schedule": "cosine", "decay": 10, "warmup": 2}, 1, 0.5),
    ({"schedule": "cosine", "decay": 10, "warmup": 2}, 6, 0.55),
    ({"schedule": "cosine", "decay": 10, "warmup": 2}, 4, 0.8682),
    ({"schedule": "cosine", "decay": 10, "final_fraction": 0.0}, 11, 0.0),
  ],
)
def test_rate_fraction(options, clock, fraction):
  rate = outer.rate_fraction(OuterConfig(**options), jnp.int32(clock))
  assert float(rate) == pytest.approx(fraction, abs=1e-4)


def test_nothing_is_overwritten():
  step = _step(momentum=0.9)
  params = tuple(map(jnp.array, _random(0)))
  merged = tuple(map(jnp.array, _random(1)))
  state = step.init(params)
  before = _bits((params, state, merged))
  step.apply(params, state, merged, 1)
  assert _bits((params, state, merged)) == before


@pytest.mark.parametrize("name", _CONFIGS)
def test_state_survives_as_bytes_and_never_recompiles(name):
  traces = []
  tx = outer.make_outer(OuterConfig(**_CONFIGS[name]))

  def update(updates, state, params=None, **extra):
    traces.append(1)
    return tx.update(updates, state, params, **extra)

  counted = optax.GradientTransformationExtraArgs(tx.init, update)
  step = outer.OuterStep(counted, _SHAPES)
  params = _random(0)
  state = step.init(params)
  for n in range(1, 8):
    data = outer.state_to_bytes(state)
    again = outer.state_from_bytes(step.template, data)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert _bits(again) == _bits(state)
    expected = step.apply(params, state, _random(n), _round(n))
    params, state = step.apply(params, again, _random(n), _round(n))
    assert _bits((params, state)) == _bits(expected)
  assert len(traces) == 1  # where shapes were checked


def test_no_momentum_needs_no_state():
  step = _step()
  assert outer.state_to_bytes(step.init(_random(0))) == b""


@pytest.mark.parametrize("change", [-4, 4])
def test_state_of_another_size_is_refused(change):
  step = _step(momentum=0.9)
  data = outer.state_to_bytes(step.init(_random(0)))
  assert len(data) == 4 * (1 + 5 + 12)
  with pytest.raises(ValueError, match=f"^{72 + change} bytes .* 72:"):
    outer.state_from_bytes(step.template, bytes(72 + change))


def _own(init, update=None):
  def steps(updates, state, params=None):
    del params
    return update(updates, state) if update else (updates, state)

  return optax.GradientTransformation(lambda params: init(), steps)


@pytest.mark.parametrize(
  "tx, words",
  [
    (
      _own(lambda: jnp.zeros(2), lambda u, s: (u, s[:1])),
      r"a state .*\(2,\).* into .*\(1,\)",
    ),
    (
      _own(lambda: jnp.int32(0), lambda u, s: (u, s + 0.5)),
      "int32.*into.*float32",
    ),
    (_own(lambda: jax.random.key(0)), "cannot be stored"),
  ],
)
def test_transformations_that_cannot_be_stored_are_refused(tx, words):
  with pytest.raises(ConfigError, match=words):
    outer.OuterStep(tx, _SHAPES)


def test_own_transformations_get_parameters_round_and_wrappers():
  seen = []

  def update(updates, state, params=None, *, round, **extra):
    seen.append(round)
    return jax.tree.map(lambda u, p: p - u, updates, params), state

  own = optax.GradientTransformationExtraArgs(
    lambda params: jax.tree.map(jnp.asarray, params), update
  )
  config = OuterConfig(name="mine:make", warmup=2)
  step = outer.OuterStep(outer.make_outer(config, own), _SHAPES)
  params, merged = _random(0), _random(1)
  state = step.init(params)
  assert _bits(state)[:3] == _bits(params)  # not zeros
  new, _ = step.apply(params, state, merged, 7)
  for p, d, n in zip(params, merged, new, strict=True):
    np.testing.assert_allclose(n, p + 0.5 * (p - d), rtol=0, atol=1e-6)
  assert seen
