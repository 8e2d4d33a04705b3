"""A learner's arrays as bytes, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.engine.learner_bytes import LearnerBytes, part_of
from ddiloco.engine.loading import Model, lay_out, make_codec
from ddiloco.protocol.learner_types import Encode, Settle, Step
from ddiloco.protocol.messages import Contribution
from tests.engine.regression import Regression, free_config


def make_learner(**codec):
  """A learner after three steps, with two open answers, one offered twice."""
  config = free_config(2, 3, 3, codec={"up": "int4"} | codec)
  program = Regression(0)
  state = program.init()
  layout = lay_out(config, program.params(state))
  model = Model(program, state, layout, make_codec(config), 0)
  arrays = LearnerArrays(config, model, jax.tree.map(jnp.copy, state))
  step(arrays, 1)
  encode(arrays, 1, 1, 1)
  arrays.settle(Settle(1, 1))  # its residual holds
  step(arrays, 2)
  encode(arrays, 2, 1, 2)
  step(arrays, 3)
  encode(arrays, 2, 2, 2)
  encode(arrays, 3, 1, 0)
  return config, model, arrays


def step(arrays, number):
  arrays.finish(arrays.step(Step(number, 4 * number, 0, 0)))


def encode(arrays, t, attempt, p):
  contributions = (Contribution(p, 0, attempt, 12 * attempt),)
  return arrays.encode(
    Encode(t, attempt, contributions, 0, 0, attempt, 12 * attempt, ())
  )


def layout_of(model):
  return LearnerBytes(model.program, model.state, model.layout, model.codec)


def equal(a, b):
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
  "codec", [{}, {"up": "f32"}, {"error_feedback": False}], ids=str
)
def test_what_is_packed_is_unpacked(codec):
  _, model, arrays = make_learner(**codec)
  captured = arrays.capture()
  layout = layout_of(model)
  attempts = captured.attempts
  assert [(a.round, a.attempt) for a in attempts] == [(2, 1), (2, 2), (3, 1)]
  data = layout.pack(captured)
  assert len(data) == layout.num_bytes(attempts)
  again = layout.unpack(model.state, attempts, data)
  assert equal(again.state, captured.state)
  assert equal(again.anchors, captured.anchors)
  assert equal(again.residuals, captured.residuals)
  feedback = codec in ({},)
  assert bool(jax.tree.leaves(again.residuals)) == feedback
  for key, item in captured.encoded.items():
    assert again.encoded[key].contributions == item.contributions
    assert equal(again.encoded[key].norms, item.norms)
    assert equal(again.encoded[key].residuals, item.residuals)
    assert part_of(again.encoded[key]) == part_of(item)


def test_steps_after_a_capture_change_nothing_of_it():
  _, model, arrays = make_learner()
  captured, layout = arrays.capture(), layout_of(model)
  before = layout.pack(captured)
  step(arrays, 4)
  arrays.settle(Settle(2, 2))
  encode(arrays, 4, 1, 1)
  assert layout.pack(captured) == before
  assert layout.pack(arrays.capture()) != before


def test_a_resumed_learner_computes_the_same():
  config, model, arrays = make_learner()
  captured, layout = arrays.capture(), layout_of(model)
  data = layout.pack(captured)
  read = layout.unpack(model.state, captured.attempts, data)
  resumed = LearnerArrays.resumed(config, model, read)
  for one in (arrays, resumed):
    one.settle(Settle(2, 2))
    step(one, 4)
  ours, theirs = encode(arrays, 5, 1, 2), encode(resumed, 5, 1, 2)
  assert arrays.part(ours) == resumed.part(theirs)
  assert arrays.norms(ours) == resumed.norms(theirs)
  # An attempt with the counters of the one before has its bytes.
  assert resumed.part(encode(resumed, 3, 2, 0)) != part_of(
    captured.encoded[3, 1]
  )
  again = Encode(3, 3, resumed._encoded[3, 2].contributions, 0, 0, 1, 1, ())
  assert resumed.part(resumed.encode(again)) == part_of(resumed._encoded[3, 2])


def test_bytes_of_another_learner_are_refused():
  _, model, arrays = make_learner()
  captured, layout = arrays.capture(), layout_of(model)
  data, attempts = layout.pack(captured), captured.attempts
  with pytest.raises(ValueError, match="bytes of a learner's arrays, not"):
    layout.unpack(model.state, attempts[:-1], data)
  with pytest.raises(ValueError, match="bytes of a learner's arrays, not"):
    layout.unpack(model.state, attempts, data[:-1])


def test_what_is_not_finite_is_refused():
  _, model, arrays = make_learner()
  captured = arrays.capture()
  spoilt = captured._replace(
    state=jax.tree.map(
      lambda x: x * np.nan if x.dtype == np.float32 else x, captured.state
    )
  )
  layout = layout_of(model)
  with pytest.raises(ValueError, match="not finite"):
    layout.unpack(model.state, captured.attempts, layout.pack(spoilt))


def test_other_codecs_and_layouts_have_other_digests():
  digests = {
    layout_of(make_learner(**codec)[1]).digest
    for codec in ({}, {"up": "f32"}, {"up": "int8"})
  }
  assert len(digests) == 3
