"""Weights, rules, and the merge against a float64 reference."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.algo import codecs, merge

_SHAPES = ((), (1,), (7, 5), (7, 5))
_RULES = ("rda", "rda", "rda", "average")


@functools.cache
def _merger(name="f32", shapes=_SHAPES, rules=_RULES):
  return merge.Merger(codecs.make_codec(name), shapes, rules)


@functools.cache
def _codec(name):
  codec = codecs.make_codec(name)
  return codec._replace(
    encode=jax.jit(codec.encode),
    decode=jax.jit(codec.decode, static_argnums=1),
  )


def _random(num_answers, shapes=_SHAPES, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  return [
    tuple((scale * rng.normal(size=s)).astype(np.float32) for s in shapes)
    for _ in range(num_answers)
  ]


def _phi(x):
  norm = np.linalg.norm(x.reshape(-1))
  return x / norm if norm else x


def _reference(answers, weights, rules):
  """The definition, in float64."""
  merged = []
  for vectors, rule in zip(zip(*answers, strict=True), rules, strict=True):
    vectors = [np.asarray(v, np.float64) for v in vectors]
    pairs = list(zip(weights, vectors, strict=True))
    if rule == "average":
      merged.append(sum(w * v for w, v in pairs))
    else:
      radius = sum(w * np.linalg.norm(v.reshape(-1)) for w, v in pairs)
      merged.append(radius * _phi(sum(w * _phi(v) for w, v in pairs)))
  return merged


def _assert_close(actual, expected, size, rtol=1e-5):
  """Per tensor, relative to the size of what went in."""
  for a, e in zip(actual, expected, strict=True):
    assert a.dtype == np.float32
    np.testing.assert_allclose(a, e, rtol=0, atol=rtol * size)


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
@settings(max_examples=20)
@given(
  counters=st.lists(
    st.tuples(st.integers(1, 10**9), st.integers(1, 10**4)),
    min_size=1,
    max_size=9,
  ),
  seed=st.integers(0, 2**32 - 1),
  exponent=st.sampled_from([-25, -4, 0, 25]),
)
def test_merge_agrees_with_float64(name, counters, seed, exponent):
  codec = _codec(name)
  weights = merge.token_weights(counters)
  answers = _random(len(counters), seed=seed, scale=10.0**exponent)
  payloads = [codec.encode((), a)[0] for a in answers]
  decoded = [codec.decode(p, _SHAPES) for p in payloads]
  merged = _merger(name).merge(payloads, weights)
  expected = _reference(decoded, weights, _RULES)
  # Signs of a scalar that all but cancel have no direction worth comparing.
  signs = [
    sum(w * np.sign(a[i].item()) for w, a in zip(weights, decoded, strict=True))
    for i in (0, 1)
  ]
  keep = [abs(s) > 1e-4 for s in signs] + [True, True]
  pick = [i for i, k in enumerate(keep) if k]
  _assert_close(
    [merged[i] for i in pick],
    [expected[i] for i in pick],
    size=10.0**exponent * 10,
  )


@given(st.permutations(range(5)))
def test_order_matters_only_to_rounding(order):
  answers = _random(5, seed=3)
  weights = merge.token_weights([(10 + i, 3) for i in range(5)])
  merged = _merger().merge(answers, weights)
  permuted = _merger().merge(
    [answers[i] for i in order], [weights[i] for i in order]
  )
  _assert_close(permuted, merged, size=1.0, rtol=1e-5)


@pytest.mark.parametrize("num_answers", range(1, 17))
def test_equal_norms_stay_and_averages_of_many_shrink(num_answers):
  shapes = ((10_000,), (10_000,))
  radius = 3.0
  answers = [
    tuple(radius * _phi(v) for v in answer)
    for answer in _random(num_answers, shapes, seed=num_answers)
  ]
  weights = merge.token_weights([(8, 2)] * num_answers)
  rda, average = _merger("f32", shapes, ("rda", "average")).merge(
    answers, weights
  )
  assert np.linalg.norm(rda) == pytest.approx(radius, rel=1e-5)
  # Random directions in so many dimensions are all but orthogonal.
  expected = radius / math.sqrt(num_answers)
  assert np.linalg.norm(average) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
def test_one_answer_is_its_own_merge(name):
  codec = _codec(name)
  payload, _ = codec.encode((), _random(1)[0])
  merged = _merger(name).merge([payload], [1.0])
  for a, e in zip(merged, codec.decode(payload, _SHAPES), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def test_equal_answers_merge_to_themselves():
  answer = _random(1)[0]
  merged = _merger().merge([answer] * 7, merge.token_weights([(5, 2)] * 7))
  _assert_close(merged, answer, size=1.0, rtol=1e-6)


def test_zero_answers_have_no_direction():
  zeros = tuple(np.zeros(s, np.float32) for s in _SHAPES)
  merged = _merger().merge([zeros, zeros], [0.5, 0.5])
  assert all(not np.asarray(a).any() for a in merged)
  answer = _random(1)[0]
  merged = _merger().merge([answer, zeros], [0.25, 0.75])
  # Radius and average take the weight in; the direction does not.
  _assert_close(merged, [0.25 * x for x in answer], size=1.0, rtol=1e-6)


def test_directions_that_cancel_are_not_blown_up():
  answer = _random(1, ((9, 9),))[0]
  nearly = -answer[0].copy()
  nearly[0, 0] *= 1 + 1e-7
  merger = _merger("f32", ((9, 9),), ("rda",))
  exact = merger.merge([answer, (-answer[0],)], [0.5, 0.5])[0]
  noise = merger.merge([answer, (nearly,)], [0.5, 0.5])[0]
  radius = np.linalg.norm(answer[0])
  assert np.linalg.norm(exact) == 0
  assert np.linalg.norm(noise) < 1e-6 * radius
  # A direction that is short but real is kept at full length.
  really = -answer[0].copy()
  really[0, 0] += 0.01
  real = merger.merge([answer, (really,)], [0.5, 0.5])[0]
  assert np.linalg.norm(real) == pytest.approx(radius, rel=0.01)


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e25, 1e36])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_norms_of_extreme_values(scale, num_answers):
  answers = _random(num_answers, scale=scale)
  weights = merge.token_weights([(1, 1)] * num_answers)
  merged = _merger().merge(answers, weights)
  expected = _reference(answers, weights, _RULES)
  _assert_close(merged, expected, size=10 * scale)


def test_answers_and_their_number_never_recompile():
  traces = []
  codec = codecs.make_codec("int4")

  def decode(payload, shapes):
    traces.append(len(traces))
    return codec.decode(payload, shapes)

  merger = merge.Merger(codec._replace(decode=decode), _SHAPES, _RULES)
  for num_answers in (1, 3):
    payloads = [codec.encode((), a)[0] for a in _random(num_answers)]
    merger.merge(payloads, merge.token_weights([(9, 2)] * num_answers))
  before = len(traces)
  assert before == 2 * len(_SHAPES)  # One answer; each of several.
  for num_answers in (2, 1, 5, 4):
    payloads = [
      codecs.from_bytes(codec, _SHAPES, codecs.to_bytes(codec.encode((), a)[0]))
      for a in _random(num_answers, seed=1)
    ]
    counters = [(9 + i, 2) for i in range(num_answers)]
    merger.merge(iter(payloads), merge.token_weights(counters))
  assert len(traces) == before


def test_answers_are_not_overwritten():
  answers = _random(3)
  before = [tuple(x.copy() for x in a) for a in answers]
  payloads = [tuple(jax.numpy.array(x) for x in a) for a in answers]
  _merger().merge(payloads, [0.5, 0.25, 0.25])
  for payload, expected in zip(payloads, before, strict=True):
    for a, e in zip(payload, expected, strict=True):
      np.testing.assert_array_equal(a, e)


def test_weights_are_exact_for_equal_answers():
  for num_answers in range(1, 50):
    weights = merge.token_weights([(12345, 7)] * num_answers)
    assert weights == (1 / num_answers,) * num_answers


def test_weights_are_quadratic_in_batch_and_linear_in_steps():
  batch, steps = 64, 10
  base = (batch * steps, steps)
  half_batch = (batch // 2 * steps, steps)
  half_steps = (batch * steps // 2, steps // 2)
  assert merge.token_weights([base, half_batch]) == (4 / 5, 1 / 5)
  assert merge.token_weights([base, half_steps]) == (2 / 3, 1 / 3)


@given(
  st.lists(st.tuples(st.integers(1, 10**15), st.integers(1, 10**6)), min_size=1)
)
def test_weights_sum_to_one(counters):
  assert math.fsum(merge.token_weights(counters)) == pytest.approx(
    1.0, rel=1e-12
  )


@pytest.mark.parametrize(
  "counters", [[], [(0, 1)], [(5, 0)], [(5, 1), (-5, 1)], [(5, -1)]]
)
def test_answers_without_work_have_no_weight(counters):
  with pytest.raises(ValueError):
    merge.token_weights(counters)


def test_rules_follow_the_pattern():
  paths = ["embed/w", "blocks/0/k", "head/embed_out"]
  rules = merge.merge_rules(paths, "rda", "average", "embed")
  assert rules == ("average", "rda", "average")
  assert merge.merge_rules(paths, "rda", "average", "^nothing$") == (
    ("rda",) * 3
  )


@pytest.mark.parametrize(
  "arguments, words",
  [
    (("median", "average", "x"), "'median'.*average, rda"),
    (("rda", "median", "x"), "'median'.*average, rda"),
    (("rda", "average", "(x"), "pattern '\\(x'"),
  ],
)
def test_wrong_rules_are_refused(arguments, words):
  with pytest.raises(ValueError, match=words):
    merge.merge_rules(["a"], *arguments)


def test_merger_checks_what_it_is_given():
  codec = codecs.make_codec("f32")
  with pytest.raises(ValueError, match="1 rules for 4 tensors"):
    merge.Merger(codec, _SHAPES, ("rda",))
  with pytest.raises(ValueError, match="'mean'"):
    merge.Merger(codec, ((1,),), ("mean",))
  answers = _random(2)
  with pytest.raises(ValueError, match="sum to 2.0"):
    _merger().merge(answers, [1.0, 1.0])
  with pytest.raises(ValueError, match="sum to 0"):
    _merger().merge([], [])
  for weights in ([1.0], [0.5, 0.25, 0.25]):
    with pytest.raises(ValueError):
      _merger().merge(answers, weights)
