"""That every complete snapshot of a world is a consistent cut through it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco.engine.snapshots import complete_rounds, part_name
from ddiloco.protocol import keys, snapshots, wire
from ddiloco.protocol.learner_types import Encode, Joined, Resumed, Snapshot
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.snapshots import LearnerSnapshot, Manifest

Require = Callable[[Any, str], None]


def check_snapshots(
  lives: Sequence[Any],
  commits: Mapping[int, Commit],
  exchange: Any,
  require: Require,
) -> None:
  """Requires that what lies there is what its learners were.

  Args:
    lives: with their `log`.
    commits: all there are.
    exchange: tells `names(prefix)`, and what is there by `peek(name)`.
    require: is given a truth and the promise that it is one.
  """
  learners = {
    (life.log[0][0].learner, life.log[0][0].incarnation): life
    for life in lives
    if isinstance(life.log[0][0], Joined | Resumed)
  }
  for t in complete_rounds(exchange.names(keys.SNAPSHOTS)):
    prefix = keys.snapshot(t)
    try:
      data = exchange.peek(keys.manifest(prefix))
      manifest = snapshots.decode(Manifest, data)
    except wire.WireError:
      continue  # torn, so there is none
    require(
      manifest.commit == commits.get(t), f"the marker of {prefix} is commit {t}"
    )
    for p, ref in enumerate(manifest.commit.fragments):
      for key, digest in (
        (keys.snapshot_params(prefix, p), ref.params_sha256),
        (keys.snapshot_outer(prefix, p), ref.outer_sha256),
      ):
        found = exchange.peek(key)
        whole = found is not None and wire.sha256(found) == digest
        require(whole, f"{key} is what commit {t} names")
    for header in manifest.learners:
      for number, part in enumerate(header.parts):
        key = part_name(prefix, header)(number)
        found = exchange.peek(key)
        whole = found is not None and wire.sha256(found) == part.sha256
        require(whole, f"{key} is whole")
      life = header.state.learner, header.state.incarnation
      _check_cut(header, learners[life].log, require)


def _check_cut(header: LearnerSnapshot, log: Any, require: Require) -> None:
  """No trace of a later commit, and every answer that one may count."""
  t, offered = header.round, set()
  for _, commands in log:
    for command in commands:
      if isinstance(command, Snapshot) and command.round == t:
        has = {(item.round, item.attempt) for item in header.attempts}
        who = f"learner {header.state.learner} in the snapshot of {t}"
        require(has == offered, f"{who} has the answers {offered}: {has}")
        require(header.state == command.state, f"{who} is as it was")
        require(header.state.seen == t, f"{who} had seen commit {t} last")
        return
      if isinstance(command, Encode) and command.round > t:
        offered.add((command.round, command.attempt))
  require(False, f"learner {header.state.learner} recorded itself at {t}")
