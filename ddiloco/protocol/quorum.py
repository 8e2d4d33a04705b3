"""When a round closes: quorum, pace and the adaptive grace window.

Pure functions of the counters and clocks they are given; each returns its
decision together with the reason (paper, Sec. 3.2 and Eq. 3).
"""

import enum

from ddiloco.protocol.fields import record
from ddiloco.protocol.rules import PERMILLE, Rules
from ddiloco.types import Anchor


class Why(enum.StrEnum):
  """The reason behind a decision about a round."""

  AFTER_EARLIER_ROUND = "after_earlier_round"
  QUORUM_MISSING = "quorum_missing"
  PACED = "paced"
  GRACE = "grace"
  GRACE_OVER = "grace_over"
  EVERYBODY_ANSWERED = "everybody_answered"


@record
class Verdict:
  """Whether to close, why, and when to ask again (None: on an event)."""

  close: bool
  why: Why
  at_ns: int | None = None


def slack_ns(
  rules: Rules, step_ns: int, xi_quorum_ns: int, xi_sync_ns: int
) -> int:
  """Eq. 3: tau * xi_step - (xi_quorum + xi_sync); may be negative."""
  return rules.schedule.overlap * step_ns - (xi_quorum_ns + xi_sync_ns)


def grace_ns(
  rules: Rules, step_ns: int, xi_quorum_ns: int, xi_sync_ns: int
) -> int:
  """clip(gamma * slack, 0, xi_step)."""
  if not rules.grace:
    return 0
  slack = slack_ns(rules, step_ns, xi_quorum_ns, xi_sync_ns)
  return min(max(slack * rules.grace_margin_permille // PERMILLE, 0), step_ns)


def decide(
  rules: Rules,
  *,
  now_ns: int,
  gap: int,
  earlier_closed: bool,
  last_closed_ns: int,
  valid: int,
  quorum_ns: int,
  grace_ns: int,
  step_ns: int,
  unanswered_live: int,
) -> Verdict:
  """Whether a round closes now.

  Args:
    rules: K, the anchor policy.
    now_ns: the syncer's clock.
    gap: g(t), global steps since the shard's round before.
    earlier_closed: whether that one is closed (rounds close in order).
    last_closed_ns: when it closed; 0 if this syncer has closed none.
    valid: distinct learners with a valid answer.
    quorum_ns: when the K-th of them was there; 0 if it is not.
    grace_ns: the window that starts with the quorum.
    step_ns: xi_step, the fastest live learner's step time; 0 if unknown.
    unanswered_live: live learners without a valid answer.
  """
  if not earlier_closed:
    return Verdict(False, Why.AFTER_EARLIER_ROUND)
  if valid < rules.quorum_min:
    return Verdict(False, Why.QUORUM_MISSING)
  if rules.anchor is not Anchor.ANY and last_closed_ns:
    # Without it, learners out of phase close sparse rounds for each other
    # and halve the interval H.
    paced_ns = last_closed_ns + (gap - 1) * step_ns
    if now_ns < paced_ns:
      return Verdict(False, Why.PACED, paced_ns)
  if unanswered_live == 0:
    return Verdict(True, Why.EVERYBODY_ANSWERED)
  if now_ns < quorum_ns + grace_ns:
    return Verdict(False, Why.GRACE, quorum_ns + grace_ns)
  return Verdict(True, Why.GRACE_OVER)
