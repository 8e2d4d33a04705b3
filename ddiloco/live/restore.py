"""Starts a run from a snapshot of another one, in an exchange of its own.

Everything is copied and verified on the way; commit 0, which makes it a run,
comes last. Cut short, it leaves nothing that anybody would take for a run,
and a second try writes the same objects again.
"""

import dataclasses
import json
import uuid
from typing import NamedTuple

from ddiloco import config as config_lib
from ddiloco.config import Config, ConfigError
from ddiloco.engine import snapshots
from ddiloco.engine.parts import check_object
from ddiloco.engine.ports import Exchange, run_calls
from ddiloco.engine.sealing import SealedExchange
from ddiloco.live.log import logger
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.fields import replace
from ddiloco.protocol.messages import Commit, Member, Origin
from ddiloco.protocol.snapshots import Manifest, restored
from ddiloco.report.run import read_first


class Listed(NamedTuple):
  """A complete snapshot, as a list shows it."""

  round: int
  tokens: int
  learners: tuple[int, ...]
  left_out: tuple[int, ...]
  num_bytes: int


def listing(exchange: SealedExchange) -> list[Listed]:
  """The complete snapshots of a run that can be read, ascending."""
  found = []
  for t in snapshots.complete_rounds(exchange.list(keys.SNAPSHOTS)):
    try:
      manifest = run_calls(snapshots.read_manifest(keys.snapshot(t)), exchange)
    except ValueError as error:
      logger.warning("the snapshot of round %d cannot be used: %s", t, error)
      continue
    refs = manifest.commit.fragments
    size = sum(ref.params_bytes + ref.outer_bytes for ref in refs)
    size += sum(p.bytes for item in manifest.learners for p in item.parts)
    learners = tuple(item.state.learner for item in manifest.learners)
    tokens = manifest.commit.tokens
    found.append(Listed(t, tokens, learners, manifest.left_out, size))
  return found


def config_of(exchange: SealedExchange, learners: int | None) -> Config:
  """The config that a run started with, for so many learners."""
  first = read_first(exchange, exchange.url)
  values = json.loads(first.genesis.config)
  if learners is not None:
    values["learners"]["count"] = learners
  return config_lib.from_dict(values)


def find(source: SealedExchange, t: int, config: Config) -> Manifest:
  """The snapshot of round t, for a run with this config to go on from.

  Raises `ConfigError`: there is none, or it is of another model or codec.
  """
  first = read_first(source, source.url)
  old = config_lib.from_dict(json.loads(first.genesis.config))
  # No life of the syncer has an epoch yet: its shards may be others.
  old = dataclasses.replace(old, syncer=config.syncer)
  config_lib.check_resumable(old, config)
  try:
    manifest = run_calls(snapshots.read_manifest(keys.snapshot(t)), source)
    _check(manifest, first, t)
  except ValueError as error:
    raise _unusable(source, t, error) from error
  return manifest


def restore(
  source: SealedExchange,
  manifest: Manifest,
  target: SealedExchange,
  config: Config,
) -> None:
  """Starts a run with this config in `target`; nobody works on it yet.

  Raises `ConfigError`: the snapshot is damaged, or the target holds a run.
  """
  first, t = read_first(source, source.url), manifest.commit.round
  if target.get(keys.commit(0)) is not None:
    raise ConfigError(
      f"{target.url} holds a run already. Choose another --into (or another "
      "--into_exchange), or go on with that run: python -m launch.local."
    )
  try:
    _copy(source, keys.snapshot(t), target, manifest)
  except ValueError as error:
    raise _unusable(source, t, error) from error
  run_id = uuid.uuid4().hex
  origin = Origin(first.run_id, t, manifest.digest)
  genesis = replace(
    first.genesis,
    config=wire.canonical_json(config.to_dict()).decode(),
    config_sha256=config.digest,
    origin=origin,
  )
  for member in _members(manifest, run_id):
    key = keys.member(member.learner, member.incarnation)
    target.put(key, messages.encode(member))
  zero = messages.encode(replace(first, run_id=run_id, genesis=genesis))
  commit = restored(manifest, run_id, wire.sha256(zero))
  target.put(keys.commit(t), messages.encode(commit), durable=True)
  target.put(keys.commit(0), zero, durable=True)


def _check(manifest: Manifest, first: Commit, t: int) -> None:
  """`ValueError` unless a manifest is that of the run's round."""
  found = manifest.commit.run_id, manifest.commit.round
  if found != (first.run_id, t):
    raise ValueError(
      f"it is of round {found[1]} of run {found[0]}, not of this run"
    )


def _unusable(source: SealedExchange, t: int, why: ValueError) -> ConfigError:
  rounds = ", ".join(str(item.round) for item in listing(source))
  there = (
    f"There are complete ones of rounds {rounds}."
    if rounds
    else "There is none: a run takes them with "
    "--config.snapshot.every_rounds=100."
  )
  return ConfigError(
    f"the snapshot of round {t} cannot be used: {why}. {there}"
  )


def _copy(
  source: Exchange, prefix: str, target: Exchange, manifest: Manifest
) -> None:
  """Copies a snapshot's objects; `ValueError` if one is gone or damaged."""
  for p, ref in enumerate(manifest.commit.fragments):
    data = run_calls(snapshots.read_fragment(prefix, p, ref), source)
    params, outer = data
    for key, value in (
      (keys.snapshot_params(keys.ORIGIN, p), params),
      (keys.snapshot_outer(keys.ORIGIN, p), outer),
      (keys.params(ref.version, p, 0), params),
      (keys.outer_state(ref.version, p, 0), outer),
    ):
      target.put(key, value, durable=True)
  for header in manifest.learners:
    here = snapshots.part_name(prefix, header)
    there = snapshots.part_name(keys.ORIGIN, header)
    for number, ref in enumerate(header.parts):
      item = source.get(here(number))
      what = f"arrays of learner {header.state.learner} in it"
      check_object(item and item.value, ref.bytes, ref.sha256, what)
      target.put(there(number), item.value, durable=True)
  encoded = source.get(keys.manifest(prefix)).value
  target.put(keys.manifest(keys.ORIGIN), encoded, durable=True)


def _members(manifest: Manifest, run_id: str) -> list[Member]:
  """Lives that have ended, and the data positions that the next ones have."""
  known = {member.learner: member for member in manifest.members}
  for item in manifest.learners:
    state = item.state
    known[state.learner] = Member(
      run_id=run_id,
      learner=state.learner,
      incarnation=state.incarnation,
      nonce="",
      host="",
      pid=0,
      beat=0,
      seen=state.seen,
      steps=state.step,
      tokens=state.tokens,
      next_sample=state.next_sample,
      left=True,
    )
  return [
    replace(member, run_id=run_id, left=True) for member in known.values()
  ]
