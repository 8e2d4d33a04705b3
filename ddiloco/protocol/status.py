"""What a syncer is waiting for, in words for the person on call."""

from ddiloco.protocol.quorum import Why
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer import awaited, verdict_on
from ddiloco.protocol.syncer_types import SyncerState
from ddiloco.protocol.syncer_views import live
from ddiloco.types import SECOND_NS


def waiting_for(state: SyncerState, now_ns: int, rules: Rules) -> str:
  """Why the oldest open round is not committed: who is there, who is not."""
  t = awaited(state, rules)
  if t is not None:
    shard = rules.schedule.shard(t, rules.shards)
    return f"round {t} is for shard {shard} of the syncer to commit"
  if not state.rounds:
    return f"round {state.committed} is committed and nothing is open"
  view = state.rounds[0]
  if view.closed_ns:
    return f"round {view.round} is closed and being merged and stored"
  verdict = verdict_on(state, view, now_ns, rules)
  if verdict.why is not Why.QUORUM_MISSING:
    return f"round {view.round} is held open: {verdict.why}"
  valid = {a.learner for a in view.answers if a.checked}
  alive = set(live(state, now_ns, rules))
  gone = [
    f"learner {v.learner} ("
    + ("left" if v.left else f"silent for {_seconds(now_ns - v.changed_ns)} s")
    + ")"
    for v in state.learners
    if v.learner not in alive
  ]
  refused = [f"learner {r.learner}: {r.reason}" for r in view.refused]
  parts = [
    f"round {view.round} waits for {rules.quorum_min - len(valid)} more "
    f"answers (quorum {rules.quorum_min})",
    f"answered: {_names(valid)}",
    f"alive without an answer: {_names(alive - valid)}",
    f"gone: {', '.join(gone) or 'none'}",
  ]
  if refused:
    parts.append(f"refused: {', '.join(refused)}")
  return "; ".join(parts)


def _names(learners: set[int]) -> str:
  return ", ".join(f"learner {m}" for m in sorted(learners)) or "none"


def _seconds(duration_ns: int) -> int:
  return duration_ns // SECOND_NS
