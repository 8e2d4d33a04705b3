"""Takes, finds and reads snapshots in an exchange (`protocol.snapshots`)."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddiloco.engine.parts import (
  Name,
  check_object,
  check_sizes,
  read_parts,
  write_parts,
)
from ddiloco.engine.ports import Call, ExchangeError, Job, Pause
from ddiloco.protocol import keys, snapshots, wire
from ddiloco.protocol.messages import Commit, FragmentState
from ddiloco.protocol.snapshots import LearnerSnapshot, Manifest
from ddiloco.types import SECOND_NS

_LOOK_EVERY_NS = SECOND_NS // 2
Life = tuple[int, int]  # learner, incarnation


# --- Taking one -------------------------------------------------------------


def write_learner(record: dict[str, Any], data: bytes) -> Job:
  """Writes a learner's arrays, then its record."""
  state = record["state"]
  life = state.learner, state.incarnation
  prefix = keys.snapshot(record["round"])
  name = functools.partial(keys.snapshot_part, prefix, *life)
  parts = yield from write_parts(name, data, durable=True)
  header = snapshots.encode(LearnerSnapshot(**record, parts=parts))
  key = keys.snapshot_header(prefix, *life)
  yield Call("put", (key, header), durable=True)


def write_fragments(prefix: str, fragments: Mapping[int, Job]) -> Job:
  """Writes fragments' parameters and outer states, each got when it is due."""
  for p, get in fragments.items():
    params, outer = yield from get
    for name, data in (
      (keys.snapshot_params(prefix, p), params),
      (keys.snapshot_outer(prefix, p), outer),
    ):
      yield Call("put", (name, data), durable=True)


def gather(commit: Commit, lives: Iterable[Life], patience_ns: int) -> Job:
  """The records of these lives, of those that live on and write one in time."""
  missing, found = list(lives), []
  prefix = keys.snapshot(commit.round)
  begun_ns = now_ns = yield Pause(0)
  while missing:
    for life in tuple(missing):
      item = yield Call("get", (keys.snapshot_header(prefix, *life),))
      header = item and _learner(item.value, commit, life)
      if header:
        missing.remove(life)
        found.append(header)
    newest = keys.newest_lives((yield Call("list", (keys.MEMBERS,))))
    missing = [life for life in missing if newest.get(life[0]) == life[1]]
    if not missing or now_ns - begun_ns > patience_ns:
      break
    now_ns = yield Pause(_LOOK_EVERY_NS)
  return tuple(sorted(found, key=lambda header: header.state.learner))


def _learner(data: bytes, commit: Commit, life: Life) -> LearnerSnapshot | None:
  """A learner's record; None if it is not that one's."""
  try:
    header = snapshots.decode(LearnerSnapshot, data)
  except wire.WireError:
    return None
  found = header.run_id, header.round, header.state.seen
  if found != (commit.run_id, commit.round, commit.round):
    return None
  own = (header.state.learner, header.state.incarnation) == life
  return header if own else None


def finish(manifest: Manifest, keep: int) -> Job:
  """Makes a snapshot complete; deletes all but the newest ones."""
  t = manifest.commit.round
  key = keys.manifest(keys.snapshot(t))
  yield Call("put", (key, snapshots.encode(manifest)), durable=True)
  names = yield Call("list", (keys.SNAPSHOTS,))
  kept = (yield from whole_rounds(names))[-keep:]
  found = filter(None, map(keys.snapshot_round, names))
  for u in sorted({u for u, _ in found}):
    if u < t and u not in kept:
      # What is no longer whole must not look so.
      yield Call("delete", (keys.manifest(keys.snapshot(u)),))
      yield Call("delete_prefix", (keys.snapshot(u),))


# --- Reading one ------------------------------------------------------------


def complete_rounds(names: Iterable[str]) -> list[int]:
  """The rounds whose snapshots have a manifest among these keys, ascending."""
  found = filter(None, map(keys.snapshot_round, names))
  return sorted(t for t, complete in found if complete)


def whole_rounds(names: Iterable[str]) -> Job:
  """The rounds whose manifests can be read too: a write of one may be torn."""
  found = []
  for t in complete_rounds(names):
    try:
      yield from read_manifest(keys.snapshot(t))
    except ValueError:
      continue
    found.append(t)
  return found


def read_manifest(prefix: str) -> Job:
  """What a snapshot is; `ValueError` if there is none, or none readable."""
  item = yield Call("get", (keys.manifest(prefix),))
  if item is None:
    raise ValueError("there is no complete snapshot")
  return snapshots.decode(Manifest, item.value)


def read_fragment(prefix: str, p: int, ref: FragmentState) -> Job:
  """A fragment's (parameters, outer state); `ValueError` if one is damaged."""
  found = []
  for key, what, size, digest in (
    (
      keys.snapshot_params(prefix, p),
      "parameters",
      ref.params_bytes,
      ref.params_sha256,
    ),
    (
      keys.snapshot_outer(prefix, p),
      "numbers of the outer optimizer",
      ref.outer_bytes,
      ref.outer_sha256,
    ),
  ):
    item = yield Call("get", (key,))
    what = f"{what} of fragment {p} in the snapshot"
    check_object(item and item.value, size, digest, what)
    found.append(item.value)
  return tuple(found)


def read_learner(prefix: str, header: LearnerSnapshot) -> Job:
  """A learner's arrays as bytes; `ValueError` if they are damaged."""
  return (yield from read_parts(part_name(prefix, header), header.parts))


def check_learner(header: LearnerSnapshot, layout: Any) -> None:
  """`ValueError` unless its arrays are those of a `LearnerBytes`."""
  if header.shapes != layout.digest:
    raise ValueError("its arrays have other shapes than this program's")
  fragments = range(layout.num_fragments)
  named = [c.fragment for item in header.attempts for c in item.contributions]
  if len(header.state.fragments) != len(fragments) or any(
    p not in fragments for p in named
  ):
    raise ValueError(f"it is not of {len(fragments)} fragments, as this run is")
  check_sizes(header.parts, layout.num_bytes(header.attempts))


def part_name(prefix: str, header: LearnerSnapshot) -> Name:
  """Where the parts of a learner's arrays are."""
  life = header.state.learner, header.state.incarnation
  return functools.partial(keys.snapshot_part, prefix, *life)


# --- The syncer's part ------------------------------------------------------


def write_rest(
  commit: Commit,
  digest: str,
  fragments: Mapping[int, Job],
  lives: Sequence[Life],
  members: Job,
  *,
  patience_ns: int,
  keep: int,
) -> Job:
  """All but the learners' parts, for which it waits; the manifest, or why not.

  Args:
    commit: the marker.
    digest: of its record.
    fragments: what gets (parameters, outer state) of each, in this order.
    lives: the learners that were at work then.
    members: finds everybody's newest record.
    patience_ns: how long to wait for learners.
    keep: how many complete snapshots stay.
  """
  try:
    prefix = keys.snapshot(commit.round)
    if (yield Call("get", (keys.manifest(prefix),))) is not None:
      return "there is one already"  # another life of the syncer was faster
    yield from write_fragments(prefix, fragments)
    learners = yield from gather(commit, lives, patience_ns)
    everybody = yield from members
    manifest = Manifest(commit, digest, learners, everybody)
    yield from finish(manifest, keep)
  except (ExchangeError, ValueError) as error:
    return str(error)
  return manifest
