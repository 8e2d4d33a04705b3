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
from ddiloco.protocol.syncer_views import step_ns
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

  def require(ok: bool, promise: str) -> None:
    if not ok:
      raise InvariantError(
        f"learner {after.learner}, life {after.incarnation}, step "
        f"{after.step}: {promise}. On {event} it decided {commands}."
      )

  for p, (old, new) in enumerate(
    zip(before.fragments, after.fragments, strict=True)
  ):
    require(new.anchor >= old.anchor, f"fragment {p}'s anchor only grows")
    require(new.seen >= old.seen, f"fragment {p}'s version only grows")
    require(
      new.anchor == old.anchor or new.steps == 0,
      f"applying fragment {p} resets its counters",
    )
    versions = rules.schedule.fragments(new.anchor)
    require(
      new.anchor == 0 or p in versions,
      f"fragment {p}'s versions are its own rounds",
    )
  if rules.wait is Wait.NEVER and rules.apply is not Apply.OWN:
    require(
      after.done or after.stepping,
      "under wait = never no learner is ever held",
    )
  for command in commands:
    if isinstance(command, learner_types.Encode):
      require(command.round > after.seen, "only open rounds are answered")
      require(
        command.round in rules.schedule.open_rounds(after.seen),
        "a round is open once its commits are seen",
      )
      for item in command.contributions:
        view = after.fragments[item.fragment]
        require(item.steps > 0, "an answer has at least one step")
        require(
          rules.anchor is Anchor.ANY or item.anchor == view.seen,
          "an answer is measured from the current version",
        )


def check_syncer(
  before: SyncerState,
  event: Any,
  after: SyncerState,
  commands: list[Any],
  rules: Rules,
) -> None:
  """The syncer's invariants over one transition."""

  def require(ok: bool, promise: str) -> None:
    if not ok:
      raise InvariantError(
        f"syncer, life {after.epoch}, after round {after.committed}: "
        f"{promise}. On {event} it decided {commands}."
      )

  schedule = rules.schedule
  require(
    after.committed
    in (before.committed, schedule.next_round(before.committed)),
    "commits are in order",
  )
  for p, state in enumerate(after.fragments):
    due = schedule.version_before(p, after.committed + 1)
    require(state.version == due, f"fragment {p} is at version {due}")
  quorate = {view.round for view in before.rounds if view.quorum_ns}
  for view in after.rounds:
    # Judged once: later events change what the slack is made of.
    if not view.quorum_ns or view.round in quorate:
      continue
    xi_ns = step_ns(after, event.now_ns, rules)
    slack = slack_ns(rules, xi_ns, after.xi_quorum_ns, after.xi_sync_ns)
    limit = max(0, slack * rules.grace_margin_permille // PERMILLE)
    require(
      0 <= view.grace_ns <= min(limit, xi_ns),
      f"0 <= grace <= gamma * slack = {limit} ns, and one step = {xi_ns} ns",
    )
  for command in commands:
    if isinstance(command, syncer_types.Merge):
      _check_counted(command, before, rules, require)


def _check_counted(
  command: syncer_types.Merge, before: SyncerState, rules: Rules, require: Any
) -> None:
  learners = [item.learner for item in command.counted]
  require(
    len(set(learners)) >= rules.quorum_min,
    f"a commit has at least K = {rules.quorum_min} learners",
  )
  require(learners == sorted(set(learners)), "an answer counts at most once")
  for item in command.counted:
    for part in item.contributions:
      current = before.fragments[part.fragment].version
      require(
        rules.anchor is Anchor.ANY or part.anchor == current,
        "no counted answer has an anchor other than the current version",
      )
