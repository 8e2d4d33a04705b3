"""What must hold after every event, live and simulated (docs/protocol.md).

Programmer errors, not operating errors: a violation stops the actor with the
transition that broke it.
"""

from typing import Any

from ddiloco.protocol import learner_types, syncer_types
from ddiloco.protocol.learner_types import LearnerState
from ddiloco.protocol.quorum import slack_ns
from ddiloco.protocol.rules import PERMILLE, Rules
from ddiloco.protocol.syncer_types import SyncerState
from ddiloco.protocol.syncer_views import learner_view, live, own_gap, step_ns
from ddiloco.types import Anchor, Apply, Wait


class InvariantError(AssertionError):
  """A promise of the protocol was broken; the message says which."""


def check_learner(
  before: LearnerState,
  event: Any,
  after: LearnerState,
  commands: list[Any],
  rules: Rules,
) -> None:
  """The learner's invariants over one transition."""

  def broken(promise: str) -> InvariantError:
    return InvariantError(
      f"learner {after.learner}, life {after.incarnation}, step "
      f"{after.step}: {promise}. On {event} it decided {commands}."
    )

  for p, (old, new) in enumerate(
    zip(before.fragments, after.fragments, strict=True)
  ):
    if new.anchor < old.anchor:
      raise broken(f"fragment {p}'s anchor only grows")
    if new.seen < old.seen:
      raise broken(f"fragment {p}'s version only grows")
    if new.anchor != old.anchor and new.steps:
      raise broken(f"applying fragment {p} resets its counters")
    if new.anchor and p not in rules.schedule.fragments(new.anchor):
      raise broken(f"fragment {p}'s versions are its own rounds")
  never_held = rules.wait is Wait.NEVER and rules.apply is not Apply.OWN
  if never_held and not (after.done or after.stepping):
    raise broken("under wait = never no learner is ever held")
  for command in commands:
    if isinstance(command, learner_types.Encode):
      promise = _broken_by_answer(command, after, rules)
      if promise:
        raise broken(promise)
    elif isinstance(command, learner_types.Settle):
      counted = 0  # as far as anybody knows who has not seen the commit
      if isinstance(event, learner_types.CommitSeen):
        counted = event.counted_attempt
      if command.attempt != counted:
        raise broken(f"a residual advances only for what counts: {counted}")


def _broken_by_answer(
  command: learner_types.Encode, after: LearnerState, rules: Rules
) -> str | None:
  if command.round <= after.seen:
    return "only open rounds are answered"
  if command.round not in rules.schedule.open_rounds(after.seen):
    return "a round is open once its commits are seen"
  for item in command.contributions:
    if item.steps <= 0:
      return "an answer has at least one step"
    view = after.fragments[item.fragment]
    if view.borrowed:
      return "nobody offers what a peer has stepped"
    current = view.seen
    if rules.anchor is not Anchor.ANY and item.anchor != current:
      return "an answer is measured from the current version"
  return None


def check_syncer(
  before: SyncerState,
  event: Any,
  after: SyncerState,
  commands: list[Any],
  rules: Rules,
) -> None:
  """The syncer's invariants over one transition."""

  def broken(promise: str) -> InvariantError:
    return InvariantError(
      f"syncer, life {after.epoch}, after round {after.committed}: "
      f"{promise}. On {event} it decided {commands}."
    )

  schedule = rules.schedule
  if after.committed != before.committed:
    if after.committed != schedule.next_round(before.committed):
      raise broken("commits are in order")
  for p, state in enumerate(after.fragments):
    due = schedule.version_before(p, after.committed + 1)
    if state.version != due:
      raise broken(f"fragment {p} is at version {due}")
  quorate = {view.round for view in before.rounds if view.quorum_ns}
  for view in after.rounds:
    # Judged once: later events change what the slack is made of.
    if not view.quorum_ns or view.round in quorate:
      continue
    xi_ns = step_ns(after, event.now_ns, rules)
    slack = slack_ns(rules, xi_ns, after.xi_quorum_ns, after.xi_sync_ns)
    limit = max(0, slack * rules.grace_margin_permille // PERMILLE)
    if not 0 <= view.grace_ns <= min(limit, xi_ns):
      raise broken(
        f"0 <= grace <= gamma * slack = {limit} ns, and one step = {xi_ns} ns"
      )
  for command in commands:
    if isinstance(command, syncer_types.Merge):
      promise = _broken_by_merge(command, before, rules)
      if promise:
        raise broken(promise)
    elif isinstance(command, syncer_types.Check):
      newest = learner_view(after, command.learner)
      if newest is None or newest.incarnation != command.incarnation:
        raise broken("only the newest life of a learner is listened to")
    elif isinstance(command, syncer_types.WriteCommit):
      if not rules.owns(after.epoch, command.commit.round):
        raise broken("a shard commits the rounds that it owns")
  promise = _broken_by_closing(before, after, event.now_ns, rules)
  if promise:
    raise broken(promise)
  if after.learners is not before.learners:
    newest = {view.learner: view.incarnation for view in after.learners}
    for view in before.learners:
      if newest.get(view.learner, 0) < view.incarnation:
        raise broken(f"learner {view.learner}'s lives only grow")


def _broken_by_closing(
  before: SyncerState, after: SyncerState, now_ns: int, rules: Rules
) -> str | None:
  """Rounds close in order, a step apart, and not within their grace."""
  closed = {view.round for view in before.rounds if view.closed_ns}
  last_ns, in_order = before.last_closed_ns, True
  for view in after.rounds:
    if view.closed_ns and view.round not in closed:
      valid = {answer.learner for answer in view.answers if answer.checked}
      everybody = valid.issuperset(live(after, now_ns, rules))
      if not in_order:
        return f"round {view.round} closes after the one before it"
      if not everybody and now_ns < view.quorum_ns + view.grace_ns:
        return f"round {view.round} stays open for its grace"
      gap = own_gap(view.round, rules) - 1
      paced_ns = last_ns + gap * step_ns(after, now_ns, rules)
      if last_ns and rules.anchor is not Anchor.ANY and now_ns < paced_ns:
        return f"round {view.round} closes {gap} steps later"
      last_ns = now_ns
    in_order = in_order and view.closed_ns > 0
  return None


def _broken_by_merge(
  command: syncer_types.Merge, before: SyncerState, rules: Rules
) -> str | None:
  learners = [item.learner for item in command.counted]
  if len(set(learners)) < rules.quorum_min:
    return f"a commit has at least K = {rules.quorum_min} learners"
  if learners != sorted(set(learners)):
    return "an answer counts at most once"
  for item in command.counted:
    for part in item.contributions:
      current = before.fragments[part.fragment].version
      if rules.anchor is not Anchor.ANY and part.anchor != current:
        return "no counted answer has an anchor other than the current version"
  return None
