"""Carries out the syncer's commands: inspects, merges, stores, commits."""

import functools
import hashlib
from typing import Any

import jax
import numpy as np

from ddiloco.algo import codecs, merge
from ddiloco.algo.fragments import Layout
from ddiloco.algo.outer import OuterStep, state_from_bytes, state_to_bytes
from ddiloco.engine.actor import Lane, Plane, Work
from ddiloco.engine.ports import Call, DamagedRun, ExchangeError, Job, Ready
from ddiloco.engine.records import (
  check_object,
  fragment_shapes,
  read_params,
)
from ddiloco.engine.tape_writer import TapeWriter
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  FragmentState,
  Member,
)
from ddiloco.protocol.rules import Rules
from ddiloco.protocol.syncer_types import (
  AnswerChecked,
  AnswerGarbled,
  AnswerSeen,
  Check,
  Committed,
  Drop,
  MemberSeen,
  Merge,
  Merged,
  Sweep,
  WriteCommit,
)
from ddiloco.types import Refusal

Key = tuple[int, int, int, int]  # round, learner, incarnation, attempt
Fragment = tuple[tuple[Any, ...], Any]  # parameters, outer state


class SyncerPlane(Plane):
  """The global parameters, the outer optimizer's state, the answers held."""

  def __init__(
    self,
    *,
    layout: Layout,
    codec: codecs.Codec,
    rules: Rules,
    merge_rules: tuple[str, ...],
    outer: Any,
    epoch: int,
    tape: TapeWriter,
  ):
    self._layout, self._codec, self._rules = layout, codec, rules
    self._epoch, self._tape = epoch, tape
    shapes = [fragment_shapes(layout, p) for p in range(layout.num_fragments)]
    rules_of = [
      tuple(merge_rules[i] for i in layout.fragment(p))
      for p in range(layout.num_fragments)
    ]
    # Fragments of equal shapes share their compiled functions.
    merger = functools.cache(lambda s, r: merge.Merger(codec, s, r))
    outer_step = functools.cache(lambda s: OuterStep(outer, s))
    inspect = functools.cache(lambda s: codecs.inspect(codec, s))
    self._mergers = [
      merger(s, r) for s, r in zip(shapes, rules_of, strict=True)
    ]
    self._outer = [outer_step(s) for s in shapes]
    self._inspect = [inspect(s) for s in shapes]
    self._shapes = shapes
    self._fragments: list[Fragment] = []
    self._candidates: dict[int, dict[int, Fragment]] = {}
    self._headers: dict[Key, AnswerHeader] = {}
    self._answers: dict[Key, dict[int, codecs.Payload]] = {}
    self._members: dict[int, tuple[int, int, bool]] = {}

  # --- State ----------------------------------------------------------------

  def initialise(self, leaves: list[np.ndarray]) -> Job:
    """Stores round 0's fragments; returns their records."""
    states = []
    for p in range(self._layout.num_fragments):
      params = tuple(
        np.array(leaves[i], np.float32) for i in self._layout.fragment(p)
      )
      fragment = params, self._outer[p].init()
      self._fragments.append(fragment)
      states.append((yield from self._store(0, p, fragment)))
    return tuple(states)

  def load(self, commit: Commit) -> Job:
    """Goes on from a commit: parameters and outer states."""
    for p, ref in enumerate(commit.fragments):
      where = (ref.version, p, ref.epoch)
      params = yield Call("get", (keys.params(*where),))
      outer = yield Call("get", (keys.outer_state(*where),))
      try:
        tensors = read_params(params and params.value, ref, self._shapes[p])
        what = f"outer state of fragment {p}, version {ref.version}"
        data = outer and outer.value
        check_object(data, ref.outer_bytes, ref.outer_sha256, what)
      except ValueError as error:
        raise DamagedRun(
          f"cannot go on from commit {commit.round}: {error}"
        ) from error
      state = state_from_bytes(self._outer[p].init(), data)
      self._fragments.append((tensors, state))

  def warm_up(self) -> None:
    """Compiles inspecting, merging and stepping before the first answer."""
    for p, shapes in enumerate(self._shapes):
      payload = tuple(
        np.zeros(spec.shape, spec.dtype)
        for spec in self._codec.payload_spec(shapes)
      )
      jax.block_until_ready(self._inspect[p](payload))
      merged = self._mergers[p].merge((payload,), (1.0,))
      merged = self._mergers[p].merge((payload,) * 3, (0.5, 0.25, 0.25))
      jax.block_until_ready(self._outer[p].apply(*self._fragments[p], merged))

  def _store(self, t: int, p: int, fragment: Fragment) -> Job:
    params = codecs.to_bytes(fragment[0])
    outer = state_to_bytes(fragment[1])
    where = (t, p, self._epoch)
    yield Call("put", (keys.params(*where), params), durable=True)
    yield Call("put", (keys.outer_state(*where), outer), durable=True)
    return FragmentState(
      version=t,
      epoch=self._epoch,
      params_bytes=len(params),
      params_sha256=wire.sha256(params),
      outer_bytes=len(outer),
      outer_sha256=wire.sha256(outer),
    )

  @property
  def params_digest(self) -> str:
    """SHA-256 over the parameters of all fragments, in order."""
    digest = hashlib.sha256()
    for params, _ in self._fragments:
      digest.update(codecs.to_bytes(params))
    return digest.hexdigest()

  # --- Commands -------------------------------------------------------------

  def perform(self, command: Any) -> Work | None:
    """Turns a command into the job that carries it out."""
    match command:
      case Check():
        # Taken now: the round's commit, which may be faster, forgets it.
        header = self._headers[_key(command)]
        return Work(Lane.PARALLEL, self._check(command, header))
      case Drop():
        self._answers.pop(_key(command), None)
        self._headers.pop(_key(command), None)
      case Merge():
        return Work(Lane.COMPUTE, self._merge(command))
      case WriteCommit():
        return Work(Lane.ORDERED, self._commit(command.commit))
      case Sweep():
        return Work(Lane.PARALLEL, self._sweep(command))
    return None

  def _check(self, command: Check, header: AnswerHeader) -> Job:
    key = _key(command)
    due = [item.fragment for item in header.contributions]
    data = []
    for number, part in enumerate(header.parts):
      try:
        item = yield Call("get", (keys.answer_part(*key, number),))
      except ExchangeError:
        return AnswerChecked(0, *key, Refusal.MISSING_PART, ())
      if item is None:
        return AnswerChecked(0, *key, Refusal.MISSING_PART, ())
      if len(item.value) != part.bytes:
        return AnswerChecked(0, *key, Refusal.SIZE, ())
      if wire.sha256(item.value) != part.sha256:
        return AnswerChecked(0, *key, Refusal.CHECKSUM, ())
      data.append(item.value)
    view = memoryview(b"".join(data))
    payloads, norms, offset = {}, [], 0
    for p in due:
      size = self._rules.answer_bytes[p]
      payloads[p] = codecs.from_bytes(
        self._codec, self._shapes[p], view[offset : offset + size]
      )
      offset += size
      finite, lengths = self._inspect[p](payloads[p])
      if not bool(finite):
        return AnswerChecked(0, *key, Refusal.NON_FINITE, ())
      norm = float(np.linalg.norm(np.asarray(lengths, np.float64)))
      norms.append(round(norm * 1e9))
    self._answers[key] = payloads
    return AnswerChecked(0, *key, None, tuple(norms))

  def _merge(self, command: Merge) -> Job:
    t, states = command.round, []
    held = [
      (t, item.learner, item.incarnation, item.attempt)
      for item in command.counted
    ]
    due = [item.fragment for item in command.counted[0].contributions]
    self._candidates[t] = {}
    for index, p in enumerate(due):
      weights = merge.token_weights(
        [
          (item.contributions[index].tokens, item.contributions[index].steps)
          for item in command.counted
        ]
      )
      merged = self._mergers[p].merge(
        (self._answers[key][p] for key in held), weights
      )
      params, state = self._fragments[p]
      fragment = self._outer[p].apply(params, state, merged)
      yield Ready(fragment)
      fragment = jax.tree.map(np.asarray, fragment)
      self._candidates[t][p] = fragment
      states.append((yield from self._store(t, p, fragment)))
    return Merged(0, t, tuple(states))

  def _commit(self, commit: Commit) -> Job:
    data = messages.encode(commit)
    yield from self._tape.flush()
    won = yield Call(
      "put_if_absent", (keys.commit(commit.round), data), durable=True
    )
    fragments = self._candidates.pop(commit.round)
    if won:
      for p, fragment in fragments.items():
        self._fragments[p] = fragment
      # A copy of the keys: other threads add headers meanwhile.
      for key in [k for k in list(self._headers) if k[0] <= commit.round]:
        self._headers.pop(key, None)
        self._answers.pop(key, None)
    return Committed(0, commit.round, won, wire.sha256(data))

  def _sweep(self, command: Sweep) -> Job:
    """Deletes; what an outage leaves behind goes at the next start."""
    try:
      for t in command.answers:
        yield Call("delete_prefix", (keys.answers(t),))
      for version, p in command.states:
        yield Call("delete_prefix", (keys.states(version, p),))
      for t in command.commits:
        yield Call("delete", (keys.commit(t),))
    except ExchangeError:
      pass
    return None

  def sweep_all(self, commit: Commit) -> Job:
    """Deletes what earlier lives left that this commit does not need."""
    schedule = self._rules.schedule
    keep = set()
    for p, ref in enumerate(commit.fragments):
      keep.add(keys.states(ref.version, p))
      keep.add(keys.states(schedule.version_before(p, ref.version), p))
    for name in (yield Call("list", (keys.STATES,))):
      if not any(name.startswith(prefix) for prefix in keep):
        yield Call("delete", (name,))
    for name in (yield Call("list", (keys.ANSWERS,))):
      t = keys.answer_round(name)
      if t is None or t <= commit.round:
        yield Call("delete", (name,))
    oldest = commit.round - 2 * schedule.interval
    for name in (yield Call("list", (keys.COMMITS,))):
      t = keys.commit_round(name)
      if t is not None and 0 < t <= oldest:
        yield Call("delete", (name,))

  # --- What to look for -----------------------------------------------------

  def poll_answer(self, key: Key) -> Job:
    """Looks for an answer's header."""
    item = yield Call("get", (keys.answer_header(*key),))
    if item is None:
      return None
    try:
      header = messages.decode(AnswerHeader, item.value)
    except wire.WireError as error:
      return AnswerGarbled(0, key, error.reason)
    self._headers[key] = header
    return AnswerSeen(0, key, header)

  def list_members(self) -> Job:
    """The newest life of every learner that ever joined."""
    lives: dict[int, int] = {}
    for name in (yield Call("list", (keys.MEMBERS,))):
      life = keys.member_life(name)
      if life is not None:
        lives[life[0]] = max(life[1], lives.get(life[0], 0))
    return tuple(sorted(lives.items()))

  def poll_member(self, learner: int, incarnation: int) -> Job:
    """Looks whether a learner's record has changed."""
    item = yield Call("get", (keys.member(learner, incarnation),))
    if item is None:
      return None
    try:
      member = messages.decode(Member, item.value)
    except wire.WireError:
      return None  # garbage is no sign of life
    if member.run_id != self._rules.run_id:
      return None
    news = (incarnation, member.beat, member.left)
    if self._members.get(learner) == news:
      return None
    self._members[learner] = news
    return MemberSeen(0, learner, *news)


def _key(command: Check | Drop) -> Key:
  return (
    command.round,
    command.learner,
    command.incarnation,
    command.attempt,
  )
