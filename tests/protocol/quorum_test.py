"""Quorum, pace and grace: decisions, their reasons and their bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.quorum import Verdict, Why, decide, grace_ns, slack_ns
from ddiloco.types import Anchor
from tests.protocol.scenario import make_rules

TIMES_NS = st.integers(0, 10**12)


@given(st.integers(0, 20), st.integers(1, 999), TIMES_NS, TIMES_NS, TIMES_NS)
def test_grace_is_within_its_bounds(tau, gamma, step, xi_quorum, xi_sync):
  rules = make_rules(1, 30, tau, grace_margin_permille=gamma)
  slack = slack_ns(rules, step, xi_quorum, xi_sync)
  grace = grace_ns(rules, step, xi_quorum, xi_sync)
  assert slack == tau * step - xi_quorum - xi_sync
  assert 0 <= grace <= max(0, gamma * slack // 1000)
  assert grace <= step
  if slack <= 0:
    assert grace == 0


@pytest.mark.parametrize(
  "xi_quorum, xi_sync, expected",
  [
    (0, 0, 100),  # 0.9 * 200, clipped at one step
    (60, 40, 90),
    (100, 99, 0),  # 0.9 * 1, rounded down
    (150, 50, 0),
    (1000, 1000, 0),
  ],
)
def test_grace_of_two_steps_overlap(xi_quorum, xi_sync, expected):
  rules = make_rules(overlap=2)
  assert grace_ns(rules, 100, xi_quorum, xi_sync) == expected


def test_no_grace_when_it_is_switched_off():
  assert grace_ns(make_rules(overlap=2, grace=False), 100, 0, 0) == 0


def verdict(rules, **changes):
  situation = {
    "now_ns": 1000,
    "gap": 1,
    "earlier_closed": True,
    "last_closed_ns": 500,
    "valid": 2,
    "quorum_ns": 900,
    "grace_ns": 50,
    "step_ns": 100,
    "unanswered_live": 1,
  }
  return decide(rules, **situation | changes)


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, Verdict(True, Why.GRACE_OVER)),
    ({"now_ns": 949}, Verdict(False, Why.GRACE, 950)),
    ({"now_ns": 950}, Verdict(True, Why.GRACE_OVER)),
    ({"grace_ns": 0, "now_ns": 900}, Verdict(True, Why.GRACE_OVER)),
    ({"grace_ns": 101}, Verdict(False, Why.GRACE, 1001)),
    (
      {"grace_ns": 101, "unanswered_live": 0},
      Verdict(True, Why.EVERYBODY_ANSWERED),
    ),
    ({"valid": 1}, Verdict(False, Why.QUORUM_MISSING)),
    (
      {"valid": 1, "unanswered_live": 0},
      Verdict(False, Why.QUORUM_MISSING),
    ),
    ({"earlier_closed": False}, Verdict(False, Why.AFTER_EARLIER_ROUND)),
    ({"gap": 7}, Verdict(False, Why.PACED, 1100)),
    ({"gap": 7, "unanswered_live": 0}, Verdict(False, Why.PACED, 1100)),
    ({"gap": 6}, Verdict(True, Why.GRACE_OVER)),
    ({"gap": 7, "last_closed_ns": 0}, Verdict(True, Why.GRACE_OVER)),
    ({"gap": 7, "step_ns": 0}, Verdict(True, Why.GRACE_OVER)),
  ],
)
def test_decisions_and_their_reasons(changes, expected):
  assert verdict(make_rules(quorum_min=2), **changes) == expected


def test_rounds_are_not_paced_with_any_anchor():
  rules = make_rules(quorum_min=2, anchor=Anchor.ANY)
  assert verdict(rules, gap=7) == Verdict(True, Why.GRACE_OVER)


@given(
  now_ns=st.integers(1, 2000),
  gap=st.integers(1, 9),
  earlier_closed=st.booleans(),
  last_closed_ns=st.integers(0, 1000),
  valid=st.integers(0, 4),
  quorum_ns=st.integers(1, 1000),
  grace=st.integers(0, 300),
  step_ns=st.integers(0, 300),
  unanswered_live=st.integers(0, 3),
)
def test_an_open_round_says_when_to_ask_again(grace, **situation):
  rules = make_rules(quorum_min=2)
  given_verdict = decide(rules, grace_ns=grace, **situation)
  if given_verdict.close:
    assert situation["earlier_closed"] and situation["valid"] >= 2
    assert given_verdict.at_ns is None
  elif given_verdict.at_ns is not None:
    # Asked then, it closes, or names a later time for another reason.
    assert given_verdict.at_ns > situation["now_ns"]
    later = {**situation, "now_ns": given_verdict.at_ns}
    again = decide(rules, grace_ns=grace, **later)
    assert again.close or again.at_ns > given_verdict.at_ns
  else:
    assert given_verdict.why in (Why.AFTER_EARLIER_ROUND, Why.QUORUM_MISSING)
