"""That every token of a world is accounted for exactly once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.protocol import ledger
from ddiloco.protocol.learner_types import Joined, Resumed
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import AnswerSeen
from ddiloco.types import Anchor


def check_ledger(
  lives: Sequence[Any],
  commits: Mapping[int, Commit],
  rules: Rules,
  require: Callable[[Any, str], None],
) -> None:
  """Requires that all learners' ledgers balance, and agree with commits.

  Args:
    lives: with their `log`, and `told`, what of it is on the tape.
    commits: all there are.
    rules: the run's.
    require: is given a truth and the promise that it is one.
  """
  verdicts = _verdicts(lives, commits)
  accounts = []
  for life in lives:
    joined = life.log[0][0]
    if not isinstance(joined, Joined | Resumed):
      continue
    fragments = rules.schedule.num_fragments
    cut = ledger.LifeTape(
      joined.learner,
      joined.incarnation,
      fragments,
      blended=rules.blended,
    )
    died = not life.alive and not life.actor.state.done
    for event, commands in life.told if died else life.log:
      cut.record(event, commands)
    account = ledger.Account()
    for segment in cut.segments(died=died):
      account.book(segment.tokens, cut.shares(segment, verdicts))
    require(
      account.balanced and account.processed == fragments * cut.tokens,
      f"the ledger of {life.name} balances: {account}",
    )
    # What a restored learner has brought along was processed elsewhere.
    exact = isinstance(joined, Joined) and rules.anchor is not Anchor.ANY
    merged = _merged(commits, joined.learner, joined.incarnation)
    require(
      account.merged == merged or not exact,
      f"{life.name} has {merged} tokens merged, its ledger {account.merged}",
    )
    accounts.append(account)
  total = ledger.total(accounts)
  headline = ledger.headline(total, rules.schedule.num_fragments)
  require(total.balanced and headline.balanced, "the ledger balances")


def _merged(
  commits: Mapping[int, Commit], learner: int, incarnation: int
) -> int:
  return sum(
    part.tokens
    for commit in commits.values()
    for item in commit.counted
    if (item.learner, item.incarnation) == (learner, incarnation)
    for part in item.contributions
  )


def _verdicts(
  lives: Sequence[Any], commits: Mapping[int, Commit]
) -> ledger.Verdicts:
  counted, refused = {}, {}
  for t, commit in commits.items():
    for item in commit.counted:
      counted[t, item.learner, item.incarnation] = item.attempt
    for item in commit.refused:
      key = (t, item.learner, item.incarnation, item.attempt)
      refused[key] = item.reason
  seen = {
    event.key
    for life in lives
    for event, _ in life.log
    if isinstance(event, AnswerSeen)
  }
  return ledger.Verdicts(max(commits), counted, refused, seen)
