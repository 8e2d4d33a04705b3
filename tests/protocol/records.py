"""Strategies for the records of the wire."""

from hypothesis import strategies as st

from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  Contribution,
  Counted,
  FragmentState,
  Genesis,
  Lease,
  Member,
  PartRef,
  Progress,
  Refused,
  StepRef,
)
from ddiloco.types import Refusal

_INTS = st.integers(-(2**70), 2**70)
_TEXTS = st.text(max_size=8)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def _tuples(strategy, size=3):
  return st.lists(strategy, max_size=size).map(tuple)


_CLOCKS = _tuples(st.tuples(_TEXTS, _INTS))
_CONTRIBUTIONS = _tuples(
  st.builds(
    Contribution, fragment=_INTS, anchor=_INTS, steps=_INTS, tokens=_INTS
  )
)
HEADERS = st.builds(
  AnswerHeader,
  run_id=_TEXTS,
  round=_INTS,
  learner=_INTS,
  incarnation=_INTS,
  attempt=_INTS,
  contributions=_CONTRIBUTIONS,
  layout=_TEXTS,
  codec=_TEXTS,
  parts=_tuples(st.builds(PartRef, bytes=_INTS, sha256=_TEXTS)),
  step_ns=_INTS,
  fetch_ns=_INTS,
  life_steps=_INTS,
  life_tokens=_INTS,
  vector_clock=_CLOCKS,
  metrics=_tuples(st.tuples(_TEXTS, _FLOATS)),
  mac=_TEXTS,
)
COMMITS = st.builds(
  Commit,
  run_id=_TEXTS,
  round=_INTS,
  epoch=_INTS,
  previous=_TEXTS,
  counted=_tuples(
    st.builds(
      Counted,
      learner=_INTS,
      incarnation=_INTS,
      attempt=_INTS,
      contributions=_CONTRIBUTIONS,
    )
  ),
  refused=_tuples(
    st.builds(
      Refused,
      learner=_INTS,
      incarnation=_INTS,
      attempt=_INTS,
      reason=st.sampled_from(Refusal),
    )
  ),
  fragments=_tuples(
    st.builds(
      FragmentState,
      version=_INTS,
      epoch=_INTS,
      params_bytes=_INTS,
      params_sha256=_TEXTS,
      outer_bytes=_INTS,
      outer_sha256=_TEXTS,
      step=st.none()
      | st.builds(StepRef, bytes=_INTS, sha256=_TEXTS, full=st.booleans()),
    )
  ),
  tokens=_INTS,
  progress=_tuples(
    st.builds(
      Progress,
      learner=_INTS,
      incarnation=_INTS,
      steps=_INTS,
      tokens=_INTS,
      earlier_tokens=_INTS,
    )
  ),
  vector_clock=_CLOCKS,
  genesis=st.none()
  | st.builds(
    Genesis,
    config=_TEXTS,
    config_sha256=_TEXTS,
    layout=_TEXTS,
    code_version=_TEXTS,
  ),
)
MEMBERS = st.builds(
  Member,
  run_id=_TEXTS,
  learner=_INTS,
  incarnation=_INTS,
  nonce=_TEXTS,
  host=_TEXTS,
  pid=_INTS,
  beat=_INTS,
  seen=_INTS,
  steps=_INTS,
  tokens=_INTS,
  next_sample=_INTS,
  left=st.booleans(),
)
LEASES = st.builds(
  Lease, epoch=_INTS, nonce=_TEXTS, host=_TEXTS, pid=_INTS, beat=_INTS
)
