"""How actors enter a run: find its newest commit, claim a life."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddiloco import config as config_lib
from ddiloco.algo.fragments import Layout
from ddiloco.engine.ports import Call, DamagedRun, Item, Job
from ddiloco.engine.records import read_commit
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import Joined, LearnerState
from ddiloco.protocol.messages import Commit, Genesis, Lease, Member
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.schedule import Schedule


class Newest(NamedTuple):
  """A run's newest commit, with its digest, and commit 0's genesis."""

  commit: Commit
  digest: str
  genesis: Genesis


def find_first() -> Job:
  """Commit 0 as its own newest, or None if the exchange holds no run yet."""
  item = yield Call("get", (keys.commit(0),))
  if item is None:
    return None
  commit = read_commit(item.value, 0, None)
  if commit.genesis is None:
    raise DamagedRun("commit 0 says nothing about its run: not a ddiloco run")
  return Newest(commit, wire.sha256(item.value), commit.genesis)


def find_newest(schedule: Schedule) -> Job:
  """The newest commit, or None if the exchange holds no run yet."""
  first = yield from find_first()
  if first is None:
    return None
  newest = first
  listed = yield Call("list", (keys.COMMITS,))
  rounds = [t for name in listed if (t := keys.commit_round(name))]
  t = max(rounds, default=0)
  if t:
    # None: the listing is stale; the walk finds the rest.
    newest = (yield from commit_at(t, first)) or first
  t = newest.commit.round
  while True:  # listings may lag behind
    t = schedule.next_round(t)
    item = yield Call("get", (keys.commit(t),))
    if item is None:
      return newest
    if item.value != SWEPT:
      commit = read_commit(item.value, t, first.commit.run_id)
      newest = Newest(commit, wire.sha256(item.value), first.genesis)


def commit_at(t: int, newest: Newest) -> Job:
  """Round t's commit; None if its content is gone already."""
  item = yield Call("get", (keys.commit(t),))
  if item is None or item.value == SWEPT:
    return None
  commit = read_commit(item.value, t, newest.commit.run_id)
  return Newest(commit, wire.sha256(item.value), newest.genesis)


def create_run(
  run_id: str, genesis: Genesis, epoch: int, fragments: tuple
) -> Job:
  """Creates commit 0; the fragments must be stored already."""
  commit = Commit(
    run_id=run_id,
    round=0,
    epoch=epoch,
    previous="",
    counted=(),
    refused=(),
    fragments=fragments,
    tokens=0,
    progress=(),
    vector_clock=(("syncer", 0),),
    genesis=genesis,
  )
  data = messages.encode(commit)
  if not (yield Call("put_if_absent", (keys.commit(0), data), durable=True)):
    raise DamagedRun(
      "another syncer has started a run in this exchange at the same time; "
      "this one stops"
    )
  return Newest(commit, wire.sha256(data), genesis)


def make_genesis(
  config: config_lib.Config, layout: Layout, code_version: str
) -> Genesis:
  """What commit 0 says about a run."""
  return Genesis(
    config=wire.canonical_json(config.to_dict()).decode(),
    config_sha256=config.digest,
    layout=wire.canonical_json(layout.to_json()).decode(),
    code_version=code_version,
  )


def check_genesis(
  genesis: Genesis, config: config_lib.Config, layout: Layout
) -> Mapping[str, tuple[Any, Any]]:
  """The changes since the run's start; `ConfigError` if one is not allowed.

  A layout that differs although the configs agree means that the program
  itself has changed.
  """
  if not genesis.has_arrays:
    raise config_lib.ConfigError(
      "this run was simulated without arrays (--compute=none): it has no "
      "parameters. Train along it (launch.simulate --history) to get some."
    )
  old = config_lib.from_dict(json.loads(genesis.config))
  changes = config_lib.check_resumable(old, config)
  stored = Layout.from_json(json.loads(genesis.layout))
  if stored.digest != layout.digest:
    theirs = {spec.path: spec for spec in stored.tensors}
    ours = {spec.path: spec for spec in layout.tensors}
    names = sorted(theirs.keys() | ours.keys())
    odd = [n for n in names if theirs.get(n) != ours.get(n)]
    raise config_lib.ConfigError(
      "the program's parameters are not those this run started with: "
      + (
        f"{odd[0]} is {ours.get(odd[0], 'absent')}, was "
        f"{theirs.get(odd[0], 'absent')}"
        if odd
        else "the same tensors are assigned to other fragments"
      )
      + ". Use the program the run was started with, or a new workdir."
    )
  return changes


def claim_member(
  run_id: str, learner: int, nonce: str, host: str, pid: int
) -> Job:
  """Claims the next life of a learner: (its record, the one before)."""
  listed = yield Call("list", (keys.MEMBERS,))
  n = keys.newest_lives(listed).get(learner, 0)
  before = None
  if n:
    before = yield Call("get", (keys.member(learner, n),))
  while True:
    n += 1
    last = read_member(before)
    member = Member(
      run_id=run_id,
      learner=learner,
      incarnation=n,
      nonce=nonce,
      host=host,
      pid=pid,
      beat=0,
      seen=0,
      steps=0,
      tokens=0,
      next_sample=last.next_sample if last else 0,
      left=False,
    )
    key, data = keys.member(learner, n), messages.encode(member)
    if (yield Call("put_if_absent", (key, data))):
      return member, last
    before = yield Call("get", (key,))


def joined(
  member: Member,
  last: Member | None,
  commit: Commit,
  position: Mapping[str, int],
  **more: Any,
) -> Joined:
  """The first event of a life that enters at a commit.

  Args:
    member: the life.
    last: the one before, if there was one.
    commit: has the parameters it starts with.
    position: of the learner's own checkpoint; empty: it has none.
    more: further fields of the event.
  """
  return Joined(
    now_ns=0,
    learner=member.learner,
    incarnation=member.incarnation,
    seen=commit.round,
    run_tokens=commit.tokens,
    versions=tuple((ref.version, ref.epoch) for ref in commit.fragments),
    next_sample=max(
      position.get("next_sample", 0), last.next_sample if last else 0
    ),
    **more,
  )


def newer_life(learner: int, incarnation: int) -> Job:
  """The record of a life that has taken this one's place; None: none has.

  What is no record is nobody's life, and hides none.
  """
  while True:
    incarnation += 1
    item = yield Call("get", (keys.member(learner, incarnation),))
    if item is None:
      return None
    if (member := read_member(item)) is not None:
      return member


def read_member(item: Item | None) -> Member | None:
  """What a member's object says; garbage says nothing."""
  try:
    return messages.decode(Member, item.value) if item else None
  except wire.WireError:
    return None


def next_beat(member: Member, state: LearnerState, *, left: bool) -> Member:
  """A member's record with the next beat, as its learner's state is now."""
  return replace(
    member,
    beat=member.beat + 1,
    seen=state.seen,
    steps=state.step,
    tokens=state.tokens,
    next_sample=state.next_sample,
    left=left,
  )


def claim_lease(
  nonce: str,
  host: str,
  pid: int,
  expected: Any,
  shard: int = 0,
  shards: int = 1,
) -> Job:
  """Takes a shard's lease over from `expected` (an Item or None).

  Returns (the new lease, its generation), or None if somebody was faster.
  """
  last = 0
  if expected is not None:
    last = yield from _last_epoch(expected.value)
  # The next of this shard's, whoever has claimed the last one.
  epoch = last + 1 + (shard - last) % shards
  lease = Lease(epoch, nonce, host, pid, 0)
  generation = yield Call(
    "compare_and_swap",
    (
      keys.lease(shard),
      messages.encode(lease),
      None if expected is None else expected.generation,
    ),
  )
  return None if generation is None else (lease, generation)


def _last_epoch(lease: bytes) -> Job:
  """Of a lease; if that is garbage, the highest that left a trace."""
  try:
    return messages.decode(Lease, lease).epoch
  except wire.WireError:
    names = yield Call("list", (keys.syncer_tapes(),))
    names = [*names, *(yield Call("list", (keys.STATES,)))]
    return max((e for n in names if (e := keys.epoch(n))), default=0)
