"""Faults of what lies in a store: objects that are garbled or cut short.

Drawn are those that a run promises to survive. A record or state of which
there is one copy and which a commit names is brought back after a while: who
overwrites the newest parameters for good has destroyed the run. Commits and
tapes are left alone: a damaged commit ends every life that reads it, with its
name, and tapes are what the run is checked by.
"""

import os
import pathlib
import random
import signal
from collections.abc import Callable, Iterator

from ddiloco.chaos.processes import (
  checkpoints,
  lose_machine,
  unfinished,
  until_there_are_peers,
)
from ddiloco.chaos.stage import (
  BACK_S,
  LEARNER,
  SYNCER,
  Job,
  Stage,
  Steps,
  TooLate,
  decode,
)
from ddiloco.live.children import Child
from ddiloco.protocol import keys, tape, wire
from ddiloco.protocol.learner_types import FetchFailed
from ddiloco.protocol.messages import Lease, Member
from ddiloco.types import Exit

_TRIES = 12
_HELD_S = 2.0  # a reader is, at most, while what it will read is garbled


def garbled(rng: random.Random, data: bytes) -> tuple[str, bytes]:
  """What is left of an object, and what has happened to it."""
  how = rng.choice(("cut", "flipped", "emptied", "noise"))
  if how == "cut":
    return how, data[: rng.randrange(len(data))]
  if how == "flipped":
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return how, bytes(changed)
  if how == "emptied":
    return how, b""
  return how, rng.randbytes(rng.randint(1, 2 * len(data)))


def _garble(stage: Stage, job: Job, key: str) -> tuple[bytes, bytes] | None:
  """Garbles an object, if it is there: (what it was, what it is)."""
  item = stage.raw.get(key)
  if item is None or not item.value:
    return None
  how, data = garbled(job.rng, item.value)
  stage.raw.put(key, data)
  job.evidence |= {
    "key": key,
    "how": how,
    "bytes": [len(item.value), len(data)],
  }
  return item.value, data


# --- Answers ------------------------------------------------------------------


def answer(stage: Stage, job: Job) -> Steps:
  """An answer; proved by the commit, which names it as refused.

  The syncer is held for a moment, so that it cannot have read it before.
  """
  child = yield from stage.victim(job, SYNCER)
  held_s = min(_HELD_S, stage.config.live.lease_s / 2)
  for _ in range(_TRIES):
    if (yield from _garble_answer(stage, job, child, held_s)):
      job.took_effect = True
      return
    yield from stage.wait(0.5)
  raise TooLate("no garbled answer was still wanted")


def _garble_answer(
  stage: Stage, job: Job, child: Child, held_s: float
) -> Iterator[None]:
  """One try; whether it was refused by that."""
  if not child.running:
    raise TooLate(f"{child.name} is gone")
  stage.stop(child)
  try:
    before = set(stage.names(keys.ANSWERS))

    def fresh() -> str | None:
      found = [n for n in stage.names(keys.ANSWERS) if n not in before]
      headers = (n for n in found if n.endswith(".header"))
      own = (n for n in headers if stage.owns(child, keys.answer_round(n)))
      return next(own, None)

    try:
      header = yield from stage.until("answer", fresh, held_s)
    except TooLate:
      return False
    key = header
    if job.rng.random() < 0.5:
      key = header.replace(".header", ".part-0")
    if _garble(stage, job, key) is None:
      return False
  finally:
    child.send(signal.SIGCONT)
  t, *life = _answer_key(header)
  yield from stage.until(
    "commit after it", lambda: max(stage.commits, default=0) >= t, BACK_S
  )
  commit = stage.commits.get(t)
  for item in commit.refused if commit else ():
    if [item.learner, item.incarnation, item.attempt] == life:
      job.evidence["refused"] = str(item.reason)
      return True
  return False


def _answer_key(header: str) -> list[int]:
  """Round, learner, incarnation and attempt."""
  return [int(x) for x in header.removeprefix(keys.ANSWERS).split(".")[:4]]


# --- State --------------------------------------------------------------------


def state(stage: Stage, job: Job) -> Steps:
  """The parameters that a commit is about to name; then they are back.

  Proved by a learner's tape: what it fetched was damaged.
  """
  child = yield from stage.victim(job, SYNCER)
  t = yield from stage.aim(child, lambda: _uncommitted(stage, child))
  kept: dict[str, tuple[bytes, bytes]] = {}
  try:
    try:
      for name in stage.names(f"{keys.STATES}{t:09d}."):
        if keys.state_parts(name)[2] != "outer":
          if (found := _garble(stage, job, name)) is not None:
            kept[name] = found
    finally:
      child.send(signal.SIGCONT)
    _excuse_syncers(stage)
    yield from stage.wait(job.span_s(1, 3))
    _excuse_syncers(stage)
  finally:
    for name, (was, now) in kept.items():
      item = stage.raw.get(name)
      if item is not None and item.value == now:  # else it is swept, or anew
        stage.raw.put(name, was)
  job.evidence["round"] = t
  job.evidence["tape"] = yield from stage.until(
    "learner that has noticed", lambda: _fetch_failed(stage, t), BACK_S
  )
  job.took_effect = True


def _uncommitted(stage: Stage, child: Child) -> int | None:
  """A syncer's round whose state is stored and whose commit is not."""
  if stage.directory is not None:
    t = unfinished(stage.directory)
    return t if stage.owns(child, t) else None
  states = [keys.state_parts(name) for name in stage.names(keys.STATES)]
  t = max((parts[0] for parts in states if parts), default=0)
  committed = not t or stage.get(keys.commit(t)) is not None
  return None if committed or not stage.owns(child, t) else t


def _excuse_syncers(stage: Stage) -> None:
  """A syncer that starts now cannot go on from what is damaged."""
  for child in stage.session.children.values():
    if child.merges and child.running:
      stage.excused.setdefault(child.process.pid, Exit.FAILED)


def _fetch_failed(stage: Stage, t: int) -> str | None:
  """The tape of a learner that could not fetch round t for its bytes."""
  newest: dict[str, str] = {}
  for name in stage.names(keys.TAPES):
    if not name.startswith(f"{keys.TAPES}{tape.SYNCER}"):
      newest[name.rpartition("/")[0]] = name
  for name in newest.values():
    try:
      segment = tape.decode_segment(stage.get(name) or b"")
    except wire.WireError:
      continue
    for record in segment.records:
      event = record.event
      if isinstance(event, FetchFailed) and event.round == t:
        if "damaged" in event.reason:
          return f"{name}: {event.reason}"
  return None


# --- What is rewritten --------------------------------------------------------


def heartbeat(stage: Stage, job: Job) -> Steps:
  """A learner's record; its next beat heals it."""
  child = yield from stage.victim(job, LEARNER)
  member = stage.member(child.learner)
  if member is None:
    raise TooLate(f"{child.name} has no record")
  key = keys.member(child.learner, member.incarnation)

  def healed() -> Member | None:
    found = decode(Member, stage.get(key))
    return found if found and found.beat > member.beat else None

  yield from _garble_until(stage, job, key, Member, healed)


def lease(stage: Stage, job: Job) -> Steps:
  """The lease; whoever holds it, or takes it, writes over it."""
  child = yield from stage.victim(job, SYNCER)
  stage.release(job, child)  # it may die before it has healed it
  key = keys.lease(stage.merging().get(child.name, 0))
  yield from _garble_until(
    stage, job, key, Lease, lambda: decode(Lease, stage.get(key))
  )


def _garble_until(
  stage: Stage, job: Job, key: str, kind: type, healed: Callable
) -> Steps:
  """Proved by what a reader finds, and that it is healed."""
  for _ in range(_TRIES):
    if _garble(stage, job, key) is not None:
      if decode(kind, stage.get(key)) is None:  # else it was healed already
        yield from stage.until("new beat", healed, BACK_S)
        job.took_effect = True
        return
    yield
  raise TooLate(f"{key} was always healed before anybody could look")


# --- Copies of a learner's state ----------------------------------------------


def checkpoint(stage: Stage, job: Job) -> Steps:
  """A killed learner's newest; proved by the next life, which refuses it."""
  while not (found := _with_checkpoint(stage)):
    yield
  child = job.rng.choice(found)
  stage.take(job, child)
  pid = child.process.pid
  yield from stage.strike(child, 0.5)
  folder = max(_numbered(stage, child), key=lambda path: int(path.name))
  files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
  files = [path for path in files if path.stat().st_size]
  if job.rng.random() < 0.5:  # all of the disk, or a sector
    files = [max(files, key=lambda path: path.stat().st_size)]
  for path in files:
    job.evidence["how"], data = garbled(job.rng, path.read_bytes())
    path.write_bytes(data)
  job.evidence |= {"checkpoint": int(folder.name), "files": len(files)}
  end = stage.log_end(child)
  words = f"checkpoint {folder.name} is not used"
  yield from stage.until(
    "word of it", lambda: words in stage.log_since(child, end), BACK_S
  )
  job.took_effect = True
  yield from stage.back(job, child, pid)


def _with_checkpoint(stage: Stage) -> list[Child]:
  children = stage.session.children
  return [
    c
    for c in stage.learners()
    if c.name in children and c.name not in stage.busy and _numbered(stage, c)
  ]


def _numbered(stage: Stage, child: Child) -> list[pathlib.Path]:
  folder = checkpoints(stage, child)
  if not folder.is_dir():
    return []
  return [folder / n for n in os.listdir(folder) if n.isdigit()]


def transfer(stage: Stage, job: Job) -> Steps:
  """What a peer gives; proved by the recipient, which refuses it.

  It is held until all of it is there, so that it cannot have taken it.
  """
  yield from until_there_are_peers(stage)
  child = yield from stage.victim(job, LEARNER)
  for _ in range(_TRIES):
    if (yield from _garble_transfer(stage, job, child)):
      job.took_effect = True
      yield from stage.until("return", lambda: child.ready, BACK_S)
      return
  raise TooLate("no peer gave anything")


def _garble_transfer(stage: Stage, job: Job, child: Child) -> Iterator[None]:
  """One try; whether the recipient has refused the gift."""
  ends = yield from lose_machine(stage, job, child)
  end = stage.log_end(child)
  header = keys.transfer_header(*ends)
  stage.stop(child)
  try:
    yield from stage.until("gift", lambda: stage.get(header), BACK_S / 4)
    in_arrays = job.rng.random() < 0.5
    part = keys.transfer_part(*ends, 0)
    found = _garble(stage, job, part if in_arrays else header)
  except TooLate:
    found = None  # its donor has died, perhaps
  finally:
    child.send(signal.SIGCONT)
  if found is None:
    return False
  words = f"no state from learner {ends[0]}: "
  yield from stage.until(
    "word of it", lambda: words in stage.log_since(child, end), BACK_S
  )
  return True
