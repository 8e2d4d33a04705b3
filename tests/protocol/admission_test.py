"""Each single defect of an answer gives its own reason to leave it out."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import admission
from ddiloco.protocol.messages import Contribution, PartRef
from ddiloco.types import Anchor, Refusal
from tests.protocol.scenario import (
  ANSWER_BYTES,
  Syncer,
  fragment_state,
  make_rules,
)

RULES = make_rules(6, 3, 1)  # two fragments a round
SYNCER = Syncer(RULES)
HEADER = SYNCER.header(1, learner=2)  # fragments 2 and 3
KEY = (1, 2, 1, 1)
FRAGMENTS = SYNCER.state.fragments
FIRST, SECOND = HEADER.contributions
change = dataclasses.replace


def reason(header, *, key=KEY, rules=RULES, fragments=FRAGMENTS):
  return admission.check_header(header, key, rules, fragments)


def with_first(**changes):
  return change(HEADER, contributions=(change(FIRST, **changes), SECOND))


def test_a_sound_answer_is_admitted():
  assert reason(HEADER) is None


@pytest.mark.parametrize(
  "header, expected",
  [
    (change(HEADER, run_id="other"), Refusal.FOREIGN_RUN),
    (change(HEADER, round=4), Refusal.MALFORMED),
    (change(HEADER, learner=1), Refusal.MALFORMED),
    (change(HEADER, incarnation=2), Refusal.MALFORMED),
    (change(HEADER, attempt=2), Refusal.MALFORMED),
    (change(HEADER, step_ns=-1), Refusal.MALFORMED),
    (change(HEADER, fetch_ns=-1), Refusal.MALFORMED),
    (change(HEADER, layout="other"), Refusal.LAYOUT),
    (change(HEADER, codec="other"), Refusal.CODEC),
    (change(HEADER, contributions=()), Refusal.LAYOUT),
    (change(HEADER, contributions=(FIRST,)), Refusal.LAYOUT),
    (change(HEADER, contributions=(SECOND, FIRST)), Refusal.LAYOUT),
    (change(HEADER, contributions=(FIRST, FIRST)), Refusal.LAYOUT),
    (with_first(fragment=1), Refusal.LAYOUT),
    (with_first(fragment=-4), Refusal.LAYOUT),
    (change(HEADER, parts=()), Refusal.SIZE),
    (change(HEADER, parts=(PartRef(ANSWER_BYTES, ""),)), Refusal.SIZE),
    (
      change(HEADER, parts=(PartRef(99, ""), PartRef(-99 + 16, ""))),
      Refusal.SIZE,
    ),
    (with_first(steps=0), Refusal.COUNTERS),
    (with_first(steps=-1), Refusal.COUNTERS),
    (with_first(tokens=0), Refusal.COUNTERS),
    (with_first(anchor=-1), Refusal.COUNTERS),
    (with_first(steps=9), Refusal.COUNTERS),
    (with_first(tokens=81), Refusal.COUNTERS),
    (change(HEADER, life_steps=3), Refusal.COUNTERS),
    (change(HEADER, life_tokens=39), Refusal.COUNTERS),
    (with_first(anchor=2), Refusal.STALE_ANCHOR),
  ],
)
def test_one_defect_one_reason(header, expected):
  assert reason(header) is expected


def test_parts_may_be_several():
  parts = (PartRef(0, "a"), PartRef(ANSWER_BYTES, "b"))
  assert reason(change(HEADER, parts=(*parts, parts[1]))) is None
  many = (PartRef(0, "a"),) * (admission.PARTS_MAX - 2)
  assert reason(change(HEADER, parts=(*parts, parts[1], *many[1:]))) is None
  assert reason(change(HEADER, parts=(*parts, parts[1], *many))) is Refusal.SIZE


def test_no_parts_where_nothing_is_due_to_travel():
  rules = make_rules(1, 1, 0, answer_bytes=(0,))
  header = Syncer(rules).header(1, parts=())
  found = admission.check_header(header, (1, 0, 1, 1), rules, FRAGMENTS[:1])
  assert found is None


@pytest.mark.parametrize(
  "anchor, policy, expected",
  [
    (1, Anchor.CURRENT, Refusal.STALE_ANCHOR),
    (4, Anchor.CURRENT, None),
    (7, Anchor.CURRENT, Refusal.STALE_ANCHOR),
    (1, Anchor.ANY, None),
    (4, Anchor.ANY, None),
    (7, Anchor.ANY, Refusal.STALE_ANCHOR),
  ],
)
def test_anchors(anchor, policy, expected):
  fragments = (fragment_state(4),) * 6
  header = change(
    HEADER,
    contributions=tuple(Contribution(p, anchor, 1, 1) for p in (2, 3)),
  )
  rules = change(RULES, anchor=policy)
  assert reason(header, rules=rules, fragments=fragments) is expected


# --- Outliers ---------------------------------------------------------------


def test_no_norm_is_an_outlier_before_enough_are_known():
  few = (1, 1, 1, 1)
  assert not admission.is_outlier(10**9, few, RULES)
  assert admission.is_outlier(10**9, (*few, 1), RULES)


def test_an_outlier_is_above_the_factor_times_the_median():
  recent = (1, 1, 100, 100, 10**6)
  assert not admission.is_outlier(2000, recent, RULES)
  assert admission.is_outlier(2001, recent, RULES)
  assert not admission.is_outlier(0, recent, RULES)


def test_norms_of_zero_tell_no_scale():
  """A warm-up from zero, or an expert that was never chosen."""
  zeros = (0,) * 9
  assert not admission.is_outlier(10**9, zeros, RULES)
  few = (*zeros, *(1,) * (admission.NORMS_NEEDED - 1))
  assert not admission.is_outlier(10**9, few, RULES)
  assert admission.is_outlier(10**9, (*few, 1), RULES)


def test_outliers_can_be_switched_off():
  rules = change(RULES, outlier_permille=0)
  assert not admission.is_outlier(10**9, (1,) * 9, rules)


@given(
  st.lists(st.integers(1, 10**6), max_size=40),
  st.integers(2, 10**12),
)
def test_a_lasting_change_of_scale_is_accepted(history, scale):
  recent = ()
  for norm in history:
    recent = admission.remember_norm(recent, norm)
  assert len(recent) <= admission.NORMS_KEPT
  refused = 0
  while admission.is_outlier(scale, recent, RULES):
    recent = admission.remember_norm(recent, scale)
    refused += 1
  assert refused <= admission.NORMS_KEPT // 2 + 1
