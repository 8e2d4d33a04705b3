"""Weights, rules, and the merge against a float64 reference."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.algo import codecs, merge
from tests import reference

_SHAPES = ((), (1,), (7, 5), (7, 5), (2, 3, 4))
_RULES = ("rda", "rda", "rda", "average", "rda")
_SCOPES = ("tensor", "row", "fragment")


@functools.cache
def _merger(name="f32", shapes=_SHAPES, rules=_RULES, scope="tensor"):
  return merge.Merger(codecs.make_codec(name), shapes, rules, scope)


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


def _assert_close(actual, expected, size, rtol=1e-5):
  """Per tensor, relative to the size of what went in."""
  for a, e in zip(actual, expected, strict=True):
    assert a.dtype == np.float32
    np.testing.assert_allclose(a, e, rtol=0, atol=rtol * size)


@pytest.mark.parametrize(
  "name, scope",
  [(name, "tensor") for name in ("f32", "bf16", "int8", "int4")]
  + [(name, scope) for name in ("f32", "int4") for scope in _SCOPES[1:]],
)
@settings(max_examples=10)
@given(
  counters=st.lists(
    st.tuples(st.integers(1, 10**9), st.integers(1, 10**4)),
    min_size=1,
    max_size=9,
  ),
  seed=st.integers(0, 2**32 - 1),
  exponent=st.sampled_from([-25, -4, 0, 25]),
)
def test_merge_agrees_with_float64(name, scope, counters, seed, exponent):
  codec = _codec(name)
  weights = merge.token_weights(counters)
  answers = _random(len(counters), seed=seed, scale=10.0**exponent)
  payloads = [codec.encode((), a)[0] for a in answers]
  decoded = [codec.decode(p, _SHAPES) for p in payloads]
  merged = _merger(name, scope=scope).merge(payloads, weights)
  expected = reference.merge(decoded, weights, _RULES, scope)
  # Signs of a scalar that all but cancel have no direction worth comparing.
  skip = {
    i
    for i in (0, 1)
    if scope != "fragment"
    and abs(np.dot(weights, [np.sign(a[i].item()) for a in decoded])) <= 1e-4
  }
  keep = [i for i in range(len(_SHAPES)) if i not in skip]
  _assert_close(
    [merged[i] for i in keep],
    [expected[i] for i in keep],
    size=10.0**exponent * 10,
  )


@pytest.mark.parametrize("scope", _SCOPES)
@settings(max_examples=10)
@given(st.permutations(range(5)))
def test_order_matters_only_to_rounding(scope, order):
  answers = _random(5, seed=3)
  weights = merge.token_weights([(10 + i, 3) for i in range(5)])
  merger = _merger(scope=scope)
  merged = merger.merge(answers, weights)
  again = merger.merge(answers, weights)
  assert [np.asarray(x).tobytes() for x in merged] == [
    np.asarray(x).tobytes() for x in again
  ]
  permuted = merger.merge(
    [answers[i] for i in order], [weights[i] for i in order]
  )
  _assert_close(permuted, merged, size=1.0, rtol=1e-5)


def _norms(tensors, scope):
  """Of the vectors of RDA, broadcastable to the tensors; none is a scalar."""
  tensors = [np.asarray(x, np.float64) for x in tensors]
  if scope == "fragment":
    joint = math.sqrt(sum(np.sum(x * x) for x in tensors))
    return [joint] * len(tensors)
  axis = -1 if scope == "row" else None
  return [np.linalg.norm(x, axis=axis, keepdims=True) for x in tensors]


@pytest.mark.parametrize("scope", _SCOPES)
@settings(max_examples=20)
@given(
  num_answers=st.integers(1, 16),
  radius=st.floats(1e-3, 1e3),
  seed=st.integers(0, 2**32 - 1),
  steps=st.lists(st.integers(1, 50), min_size=16, max_size=16),
)
def test_equal_norms_stay_for_any_number_of_answers(
  scope, num_answers, radius, seed, steps
):
  shapes = ((5, 40), (30,), (2, 3, 20))
  answers = [
    tuple(
      (radius * x / norm).astype(np.float32)
      for x, norm in zip(answer, _norms(answer, scope), strict=True)
    )
    for answer in _random(num_answers, shapes, seed=seed)
  ]
  weights = merge.token_weights([(100, n) for n in steps[:num_answers]])
  merger = _merger("f32", shapes, ("rda",) * 3, scope)
  for norm in _norms(merger.merge(answers, weights), scope):
    np.testing.assert_allclose(norm, radius, rtol=1e-5)


@pytest.mark.parametrize("num_answers", range(1, 17, 3))
def test_averages_of_many_shrink(num_answers):
  shapes = ((10_000,),)
  answers = _random(num_answers, shapes, seed=num_answers)
  weights = merge.token_weights([(8, 2)] * num_answers)
  (average,) = _merger("f32", shapes, ("average",)).merge(answers, weights)
  # Random directions in so many dimensions are all but orthogonal.
  expected = 100 / math.sqrt(num_answers)
  assert np.linalg.norm(average) == pytest.approx(expected, rel=0.1)


def test_a_fragment_of_one_tensor_and_a_tensor_of_one_row_are_tensors():
  for shape, scope in (((7, 5), "fragment"), ((35,), "row"), ((), "row")):
    answers = _random(3, (shape,))
    merged, expected = (
      _merger("f32", (shape,), ("rda",), s).merge(answers, [0.5, 0.25, 0.25])
      for s in (scope, "tensor")
    )
    _assert_close(merged, expected, size=1.0, rtol=1e-6)


def test_scopes_differ():
  answers = _random(3)
  merged = [_merger(scope=s).merge(answers, [0.5, 0.25, 0.25]) for s in _SCOPES]
  for i, rule in enumerate(_RULES):
    same = [np.array_equal(m[i], merged[0][i]) for m in merged[1:]]
    # A tensor that is a row, and averages, do not know of scopes.
    assert same == ([True, True] if rule == "average" else [i < 2, False])


@pytest.mark.parametrize(
  "name, scope",
  [(name, "tensor") for name in ("f32", "bf16", "int8", "int4")]
  + [("int4", scope) for scope in _SCOPES[1:]],
)
def test_one_answer_is_its_own_merge(name, scope):
  codec = _codec(name)
  payload, _ = codec.encode((), _random(1)[0])
  merged = _merger(name, scope=scope).merge([payload], [1.0])
  for a, e in zip(merged, codec.decode(payload, _SHAPES), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


@pytest.mark.parametrize("scope", _SCOPES)
def test_equal_answers_merge_to_themselves(scope):
  answer = _random(1)[0]
  merged = _merger(scope=scope).merge(
    [answer] * 7, merge.token_weights([(5, 2)] * 7)
  )
  _assert_close(merged, answer, size=1.0, rtol=1e-6)


@pytest.mark.parametrize("scope", _SCOPES)
def test_zero_answers_have_no_direction(scope):
  zeros = tuple(np.zeros(s, np.float32) for s in _SHAPES)
  merger = _merger(scope=scope)
  merged = merger.merge([zeros, zeros], [0.5, 0.5])
  assert all(not np.asarray(a).any() for a in merged)
  answer = _random(1)[0]
  merged = merger.merge([answer, zeros], [0.25, 0.75])
  # Radius and average take the weight in; the direction does not.
  _assert_close(merged, [0.25 * x for x in answer], size=1.0, rtol=1e-6)


def test_a_zero_row_is_zero_alone():
  answers = [x for (x,) in _random(2, ((3, 4),))]
  for answer in answers:
    answer[1] = 0
  (merged,) = _merger("f32", ((3, 4),), ("rda",), "row").merge(
    [(x,) for x in answers], [0.5, 0.5]
  )
  assert not np.any(merged[1])
  assert np.all(np.linalg.norm(merged, axis=1)[[0, 2]] > 0)


@pytest.mark.parametrize("scope", _SCOPES)
def test_directions_that_cancel_are_not_blown_up(scope):
  shapes = ((9, 9), (4,))
  answer = _random(1, shapes)[0]

  def opposite(by):
    x = -answer[0]
    x[:, 0] += by
    return (x, -answer[1])

  def norm_of(other):
    merger = _merger("f32", shapes, ("rda", "rda"), scope)
    return np.linalg.norm(merger.merge([answer, other], [0.5, 0.5])[0])

  radius = np.linalg.norm(answer[0])
  assert norm_of(opposite(0)) == 0
  assert norm_of(opposite(1e-7)) < 1e-6 * radius
  # A direction that is short but real is kept at full length.
  assert norm_of(opposite(0.01)) == pytest.approx(radius, rel=0.1)


@pytest.mark.parametrize("scope", _SCOPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e25, 1e36])
@pytest.mark.parametrize("num_answers", [1, 3])
def test_norms_of_extreme_values(scale, num_answers, scope):
  answers = _random(num_answers, scale=scale)
  weights = merge.token_weights([(1, 1)] * num_answers)
  merged = _merger(scope=scope).merge(answers, weights)
  expected = reference.merge(answers, weights, _RULES, scope)
  _assert_close(merged, expected, size=10 * scale)


def test_tensors_of_unlike_size_share_a_direction():
  """Squares of either alone would leave the range of f32."""
  shapes = ((3, 3), (5,))
  answers = [
    (np.float32(1e25) * a, np.float32(1e-30) * b) for a, b in _random(3, shapes)
  ]
  weights = [0.5, 0.25, 0.25]
  rules = ("rda", "rda")
  merged = _merger("f32", shapes, rules, "fragment").merge(answers, weights)
  expected = reference.merge(answers, weights, rules, "fragment")
  _assert_close(merged[:1], expected[:1], size=1e26)
  assert np.all(np.isfinite(merged[1]))


@pytest.mark.parametrize("scope", _SCOPES)
def test_answers_and_their_number_never_recompile(scope):
  traces = []
  codec = _codec("int4")

  def decode(payload, shapes):
    traces.append(len(traces))
    return codec.decode(payload, shapes)

  codec_ = codec._replace(decode=decode)
  merger = merge.Merger(codec_, _SHAPES, _RULES, scope)
  for num_answers in (1, 3):
    payloads = [codec.encode((), a)[0] for a in _random(num_answers)]
    merger.merge(payloads, merge.token_weights([(9, 2)] * num_answers))
  before = len(traces)
  # One answer; each of several; of a fragment's vector, its norm.
  joint = _RULES.count("rda") if scope == "fragment" else 0
  assert before == 2 * len(_SHAPES) + joint
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
  with pytest.raises(ValueError, match="1 rules for 5 tensors"):
    merge.Merger(codec, _SHAPES, ("rda",))
  with pytest.raises(ValueError, match="'mean'"):
    merge.Merger(codec, ((1,),), ("mean",))
  with pytest.raises(ValueError, match="'axis': choose one of tensor, row"):
    merge.Merger(codec, ((1,),), ("rda",), "axis")
  answers = _random(2)
  with pytest.raises(ValueError, match="sum to 2.0"):
    _merger().merge(answers, [1.0, 1.0])
  with pytest.raises(ValueError, match="sum to 0"):
    _merger().merge([], [])
  for weights in ([1.0], [0.5, 0.25, 0.25]):
    with pytest.raises(ValueError):
      _merger().merge(answers, weights)
