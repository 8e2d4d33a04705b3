"""Who is there by a fault script: learners that join, leave and come back.

`start` and `stop` take turns. Who is made to start first is absent until then;
a syncer can only be made to stop.
"""

from collections.abc import Iterable, Sequence

from ddiloco.protocol.fault_kinds import LIMIT, Fault

KINDS = ("start", "stop")


def absent_at_first(own: Iterable[Fault]) -> bool:
  """Whether an actor is to join later.

  Args:
    own: the faults of that actor.
  """
  changes = _in_order(own)
  return bool(changes) and changes[0].what == "start"


def rounds(own: Iterable[Fault]) -> tuple[tuple[int, int], ...]:
  """The rounds an actor is there for, as [begin, end) spans, ascending."""
  changes = _in_order(own)
  found, begin = [], None if absent_at_first(changes) else 0
  for change in changes:
    if change.what == "start":
      begin = change.at_round
    elif begin is not None:
      found.append((begin, change.at_round))
      begin = None
  return (*found, *([(begin, LIMIT)] if begin is not None else []))


def contradiction(own: Sequence[Fault]) -> tuple[int, str] | None:
  """The first fault of an actor that it is not there for, and why.

  The fault is an index of `own`. A round and a time cannot be compared: only
  one start and one stop can be at different clocks, the start first.
  """
  changes = _in_order(own)
  for before, after in zip(changes, changes[1:], strict=False):
    who, at = after.actor, own.index(after)
    if before.what == after.what:
      return at, f"{who} is already made to {after.what}"
    if _comparable(before, after) and _moment(before) == _moment(after):
      return at, f"{who} is made to {before.what} and to {after.what} at once"
  for at, fault in enumerate(own):
    if fault.what not in KINDS and (why := _away(fault, changes)):
      return at, f"{fault.actor} is {why}"
  return None


def unreachable(
  faults: Iterable[Fault], learners: int, quorum: int
) -> tuple[Fault, int] | None:
  """The first start at a round that is not reached, and who is there for it.

  Args:
    faults: the script.
    learners: how many there can be.
    quorum: the learners that a round needs.
  """
  by_round: dict[int, list[Fault]] = {}
  present = learners
  for own in _of_learners(faults):
    changes = [f for f in _in_order(own) if f.at_round is not None]
    present -= bool(changes) and changes[0].what == "start"
    for change in changes:
      by_round.setdefault(change.at_round, []).append(change)
  for _, changes in sorted(by_round.items()):
    starts = [change for change in changes if change.what == "start"]
    if starts and present < quorum:
      return starts[0], present
    present += 2 * len(starts) - len(changes)
  return None


def _of_learners(faults: Iterable[Fault]) -> Iterable[list[Fault]]:
  by_learner: dict[int, list[Fault]] = {}
  for fault in faults:
    if fault.learner is not None:
      by_learner.setdefault(fault.learner, []).append(fault)
  return by_learner.values()


def _in_order(own: Iterable[Fault]) -> list[Fault]:
  changes = [fault for fault in own if fault.what in KINDS]
  if len({change.at_round is None for change in changes}) > 1:
    return sorted(changes, key=lambda change: change.what == "stop")
  return sorted(changes, key=_moment)


def _away(fault: Fault, changes: Sequence[Fault]) -> str:
  """Why an actor is not there at a fault; empty if it is, or may be."""
  known = [change for change in changes if _comparable(change, fault)]
  away = absent_at_first(known)
  for change in known:
    if change.what == "start" and _moment(change) < _moment(fault):
      away = False
    elif change.what == "stop" and _moment(change) <= _moment(fault):
      away = True
  if not away:
    return ""
  later = [
    c for c in known if c.what == "start" and _moment(c) >= _moment(fault)
  ]
  return "absent until started" if later else "stopped for good"


def _comparable(a: Fault, b: Fault) -> bool:
  return (a.at_round is None) == (b.at_round is None)


def _moment(fault: Fault) -> int:
  return fault.at_ns if fault.at_round is None else fault.at_round
