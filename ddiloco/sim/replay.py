"""Computes a run's arrays again from its tapes, commit by commit.

Every life of every actor executes its script (`script`) with the engine's
own arrays; what lives handed each other through the exchange they hand each
other through a `Store`. Each commit's parameters and outer state must come
out with the digests that the commit names. What a simulated fault did to an
answer on its way is on no tape: if it was counted all the same (an `outlier`
before there is a median), its commit comes out differently.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ddiloco.algo.fragments import Layout
from ddiloco.engine.facts import facts
from ddiloco.engine.learner_arrays import LearnerArrays, travelling
from ddiloco.engine.learner_bytes import Captured, LearnerBytes, part_of
from ddiloco.engine.loading import Model, answer_bytes, load_model, make_codec
from ddiloco.engine.records import place_params
from ddiloco.engine.snapshots import check_learner
from ddiloco.engine.state_bytes import StateBytes
from ddiloco.engine.syncer_arrays import SyncerArrays
from ddiloco.engine.version import code_version
from ddiloco.protocol import wire
from ddiloco.protocol.fields import replace
from ddiloco.protocol.learner_types import (
  ApplyFragments,
  Checkpoint,
  Encode,
  Give,
  Joined,
  Resumed,
  Settle,
  Snapshot,
  Step,
)
from ddiloco.protocol.messages import Commit, FragmentState, StepRef
from ddiloco.protocol.rules import Rules, make_rules
from ddiloco.protocol.snapshots import LearnerSnapshot
from ddiloco.protocol.syncer_types import Opened
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.history import (
  BadTape,
  Base,
  Difference,
  History,
  Life,
  owned,
  redecide,
)
from ddiloco.sim.observers import Observer
from ddiloco.sim.script import (
  Entry,
  Script,
  answer_key,
  commit_key,
  open_answers,
  outer_key,
  params_key,
  snapshot_key,
)


class Store(Protocol):
  """Where lives leave bytes for each other."""

  def wants(self, key: str) -> bool:
    """Whether anybody will take it."""

  def has(self, key: str) -> bool:
    """Whether it is there yet."""

  def take(self, key: str) -> bytes:
    """Its content; gone after as many takes as scripts need it."""

  def put(self, key: str, value: bytes) -> None:
    """Leaves it for those who need it."""


class NotFinite(Exception):
  """An answer that was counted holds what is no number here."""


def rules_of(history: History, life: Life) -> Rules:
  """Those that a life's machine ran with."""
  genesis, config = history.genesis, life.config
  if genesis.has_arrays:
    layout = Layout.from_json(json.loads(genesis.layout))
    digest, sizes = layout.digest, answer_bytes(layout, make_codec(config))
  else:
    null = NullCompute(config)
    digest, sizes = null.layout_digest, null.answer_bytes
  return make_rules(
    config, run_id=history.first.run_id, layout=digest, answer_bytes=sizes
  )


def redecide_all(
  history: History, commits: dict[str, Commit]
) -> Difference | None:
  """Decides every record of every actor again; the first other decision."""
  for life in history.lives:
    difference = redecide(life, rules_of(history, life), commits)
    if difference is not None:
      return difference
  return None


def check_facts(lives: Sequence[Life]) -> None:
  """`BadTape` if this process cannot give these lives' bits."""
  here = {"code_version": code_version(), **facts()}
  here["libraries"] = dict(here["libraries"])
  for life in lives:
    header = life.header
    for name, value in here.items():
      was = getattr(header, name)
      if name == "libraries":
        was = dict(was)
        odd = [n for n in sorted(was | value) if was.get(n) != value.get(n)]
        name = odd[0] if odd else name
        was, value = (was.get(name), value.get(name)) if odd else (0, 0)
      if was != value:
        raise BadTape(
          f"tape of {life.name} was recorded with {name} = {was}, here it is "
          f"{value}: the bits may differ. Replay it where it was recorded, or "
          "compare the decisions alone with --decisions_only."
        )


def run_scripts(
  history: History,
  lives: Sequence[Life],
  scripts: Sequence[Script],
  store: Store,
  observer: Observer,
  *,
  cache_dir: str,
) -> Iterator[str]:
  """Executes these lives' scripts.

  Yields now and then: a key if every life has to wait, the first one for that,
  else nothing. Raises `NotFinite`.
  """
  models = _Models(cache_dir)
  waiting: list[tuple[Life, Iterator[str], str]] = []
  for life, script in zip(lives, scripts, strict=True):
    if life.learner is None:
      job = _syncer(history, life, script, store, observer)
    else:
      job = _learner(history, life, script, models, store, observer)
    waiting.append((life, job, ""))
  while waiting:
    moved, still = False, []
    for life, job, key in waiting:
      if key and not store.has(key):
        still.append((life, job, key))
        continue
      moved = True
      key = next(job, None)
      if key is not None:
        still.append((life, job, key))
    waiting = still
    yield waiting[0][2] if waiting and not moved else ""


def genesis(
  history: History, model: Model, store: Store, observer: Observer
) -> None:
  """Computes commit 0, a model's initial parameters; or reads a snapshot."""
  if history.base is not None:
    _publish_base(history.base, model, store)
    return
  config, first = history.config, history.first
  arrays = SyncerArrays.from_config(config, model.layout, model.codec)
  arrays.initialise(jax.device_get(jax.tree.leaves(_params(model))))
  due = range(len(first.fragments))
  observer.committed(first, arrays, _publish(arrays, first, due, None, store))


def _publish_base(base: Base, model: Model, store: Store) -> None:
  refs = enumerate(base.commit.fragments)
  for (p, ref), (params, outer) in zip(refs, base.fragments, strict=True):
    where = ref.version, p, ref.epoch
    store.put(params_key(*where), params)
    store.put(outer_key(*where), outer)
  for learner, (header, data) in base.learners.items():
    store.put(snapshot_key(learner), data)
    captured = _captured(model, header, data)
    for key, item in zip(
      open_answers(header), captured.encoded.values(), strict=True
    ):
      store.put(key, part_of(item))


def _captured(model: Model, header: LearnerSnapshot, data: bytes) -> Captured:
  layout = LearnerBytes(model.program, model.state, model.layout, model.codec)
  check_learner(header, layout)
  return layout.unpack(model.state, header.attempts, data)


class _Models:
  """Programs, one for each learner and config."""

  def __init__(self, cache_dir: str):
    self._cache_dir = cache_dir
    self._models: dict[tuple[int | None, str], Model] = {}

  def of(self, life: Life) -> Model:
    """The life's; its state is copied, steps donate theirs."""
    key = life.learner, life.config.digest
    if key not in self._models:
      self._models[key] = load_model(life.config, life.learner, self._cache_dir)
    return self._models[key]


def _params(model: Model) -> Any:
  return model.program.params(model.state)


def _wait(entry: Entry, store: Store) -> Iterator[str]:
  for key in entry.needs:
    while not store.has(key):
      yield key


# --- The syncer -------------------------------------------------------------


def _syncer(
  history: History,
  life: Life,
  script: Script,
  store: Store,
  observer: Observer,
) -> Iterator[str]:
  layout = Layout.from_json(json.loads(history.genesis.layout))
  codec = make_codec(life.config)
  arrays = SyncerArrays.from_config(life.config, layout, codec)
  for entry in script:
    yield from _wait(entry, store)
    match entry.work:
      case Opened():
        _open(arrays, entry.work.commit, owned(life), store)
      case Commit():
        states = _merge(arrays, entry, store)
        observer.committed(entry.work, arrays, states)
        store.put(commit_key(entry.work), b"")


def _open(
  arrays: SyncerArrays, commit: Commit, owned_: Sequence[int], store: Store
) -> None:
  for p in owned_:
    ref = commit.fragments[p]
    where = ref.version, p, ref.epoch
    params = store.take(params_key(*where))
    outer = store.take(outer_key(*where))
    arrays.load(p, _ref(ref.version, ref.epoch, params, outer), params, outer)


def _merge(
  arrays: SyncerArrays, entry: Entry, store: Store
) -> dict[int, FragmentState]:
  commit = entry.work
  t, due = commit.round, []
  for key in entry.needs[len(commit.counted) :]:
    store.take(key)
  for item in commit.counted:
    key = (t, item.learner, item.incarnation, item.attempt)
    due = [part.fragment for part in item.contributions]
    if arrays.inspect(key, due, store.take(answer_key(t, item))) is None:
      raise NotFinite(
        f"round {t} counts the answer of learner {item.learner}, life "
        f"{item.incarnation}, which is not finite here: training has diverged"
      )
  for index, p in enumerate(due):
    arrays.merge(t, p, index, commit.counted)
  states = _publish(arrays, commit, due, t, store)
  arrays.close(t, True)
  return states


def _publish(
  arrays: SyncerArrays,
  commit: Commit,
  due: Sequence[int],
  t: int | None,
  store: Store,
) -> dict[int, FragmentState]:
  """Hands on the fragments; returns their records."""
  states = {}
  for p in due:
    params, outer = arrays.stored(p, t)
    where = (commit.round, p, commit.epoch)
    store.put(params_key(*where), params)
    store.put(outer_key(*where), outer)
    # Whoever follows finds the parameters; who replays compares these two.
    state = _ref(commit.round, commit.epoch, params, outer)
    if (payload := arrays.step(p, commit.round)) is not None:
      step = StepRef(len(payload), wire.sha256(payload), full=True)
      state = replace(state, step=step)
    states[p] = state
  return states


def _ref(
  version: int, epoch: int, params: bytes, outer: bytes
) -> FragmentState:
  return FragmentState(
    version=version,
    epoch=epoch,
    params_bytes=len(params),
    params_sha256=wire.sha256(params),
    outer_bytes=len(outer),
    outer_sha256=wire.sha256(outer),
  )


# --- Learners ---------------------------------------------------------------


def _learner(
  history: History,
  life: Life,
  script: Script,
  models: _Models,
  store: Store,
  observer: Observer,
) -> Iterator[str]:
  model, arrays = models.of(life), None
  saved = StateBytes(model.program, model.state)
  for entry in script:
    yield from _wait(entry, store)
    match entry.work:
      case Joined():
        arrays = _join(model, life, entry, saved, store)
      case Resumed() | Snapshot():
        header, _ = history.base.learners[life.learner]
        data = store.take(entry.needs[0])
        captured = _captured(model, header, data)
        arrays = LearnerArrays.resumed(life.config, model, captured)
      case Step():
        result = arrays.step(entry.work)
        observer.stepped(life, arrays, entry.work, result)
      case Settle():
        arrays.settle(entry.work)
      case ApplyFragments():
        _place(arrays, entry, store)
        arrays.apply(entry.work)
      case Encode():
        encoded = arrays.encode(entry.work)
        if store.wants(entry.gives[0]):
          # What is not finite was never written, so nobody wants it.
          part = arrays.part(encoded) or b""
          store.put(entry.gives[0], part)
          observer.answered(entry.gives[0], part)
      case Checkpoint() if store.wants(entry.gives[0]):
        store.put(entry.gives[0], saved.pack(arrays.copy_state()))
      case Give() if store.wants(entry.gives[0]):
        store.put(entry.gives[0], arrays.travel.pack(arrays.copy_state()))


def _join(
  model: Model, life: Life, entry: Entry, saved: StateBytes, store: Store
) -> LearnerArrays:
  refs, objects = [], []
  for p, (version, epoch) in enumerate(entry.work.versions):
    objects.append(store.take(entry.needs[p]))
    refs.append(_ref(version, epoch, objects[p], b""))
  state = jax.tree.map(jnp.copy, model.state)
  if life.header.restored is not None:
    state = saved.unpack(state, store.take(entry.needs[-1]))
  elif life.header.donor is not None:
    travel = travelling(life.config, model.program, model.state)
    state = travel.unpack(state, store.take(entry.needs[-1]))
  if entry.work.borrowed:
    return LearnerArrays(life.config, model, state)
  own = model.program.params(state)
  params = place_params(model.layout, own, refs, objects)
  state = model.program.with_params(state, params)
  return LearnerArrays(life.config, model, state)


def _place(arrays: LearnerArrays, entry: Entry, store: Store) -> None:
  t = entry.work.round
  for p, key in zip(entry.work.fragments, entry.needs, strict=True):
    data = store.take(key)
    arrays.place(t, p, _ref(t, 0, data, b""), data)
