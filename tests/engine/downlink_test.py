"""The compressed way down: one truth, whoever has come by it, however."""

import collections
import json

import numpy as np
import pytest

from ddiloco.algo import codecs
from ddiloco.engine.downlink import (
  make_downlink,
  read_now,
  read_params,
  read_version,
)
from ddiloco.engine.null_arrays import NullDownlink
from ddiloco.protocol import keys, messages, retention, wire
from ddiloco.protocol.messages import FragmentState, StepLink, StepRef
from ddiloco.protocol.schedule import Schedule
from tests.engine.regression import free_config, make_config, make_world

DOWN = {
  "int4": {"up": "f32", "down": "int4", "down_full_every": 4},
  "stochastic": {
    "up": "int8",
    "down": "e3m0",
    "down_full_every": 3,
    "rounding": "stochastic",
  },
}


def digest(tensors):
  return wire.sha256(codecs.to_bytes(tensors))


def assert_one_truth(world):
  """Every holder's parameters are those that commits name, to the bit."""
  newest = world.commits[-1]
  refs = {
    (ref.version, p): ref
    for commit in world.commits
    for p, ref in enumerate(commit.fragments)
  }
  for node in world.lives:
    for p in range(len(newest.fragments)):
      arrays = node.plane.arrays
      if hasattr(arrays, "_anchors"):
        version = node.state.fragments[p].anchor
        found = digest(arrays._anchors[p])
      else:
        version = node.state.fragments[p].version
        found = digest(arrays._fragments[p].params)
      assert found == refs[version, p].params_sha256, (node, p)
  # Whoever reads the exchange, an evaluator say, finds the same.
  downlink = make_downlink(world.config, world.layout)
  for p, ref in enumerate(newest.fragments):
    job = read_params(p, ref, downlink)
    data = read_now(job, lambda key: world.exchange.get(key).value)
    assert wire.sha256(data) == ref.params_sha256


def truths(world):
  """Digests of the parameters and outer states of every commit."""
  return [
    [(ref.params_sha256, ref.outer_sha256) for ref in commit.fragments]
    for commit in world.commits
  ]


@pytest.mark.parametrize(
  "codec",
  [
    DOWN["int4"],
    pytest.param(DOWN["stochastic"], marks=pytest.mark.slow),
  ],
  ids=DOWN.keys(),
)
def test_all_hold_the_same_bits_whoever_dies(codec):
  config = make_config(
    2, 3, 3, codec=codec, outer={"momentum": 0.9}, stop={"rounds": 18}
  )
  undisturbed = make_world(config).run()
  assert_one_truth(undisturbed)
  world = make_world(config)
  world.run_to_round(8)
  world.syncers[0].kill()
  world.start_syncer()
  world.run_to_round(13)
  assert_one_truth(world)
  world.syncers[1].kill()
  world.start_syncer()
  world.run()
  assert_one_truth(world)
  # The next syncers went on bit for bit, residuals included.
  assert truths(world) == truths(undisturbed)


def test_learners_come_and_go():
  config = free_config(
    3, 4, 5, 2, codec=DOWN["int4"], stop={"rounds": 40}, merge={"rule": "rda"}
  )
  world = make_world(config)
  for t in (7, 16, 23):
    world.run_to_round(t)
    world.learners[t % 3].kill()
    world.join(t % 3)
    assert_one_truth_of_joined(world, t % 3)
  world.run()
  assert_one_truth(world)


def assert_one_truth_of_joined(world, m):
  arrays = world.learners[m].plane.arrays
  for p, ref in enumerate(world.commits[-1].fragments):
    assert digest(arrays._anchors[p]) == ref.params_sha256


def watch_reads(world):
  """Counts what is read from here on, by the kind of object."""
  reads = collections.Counter()

  def hook(method, key):
    if method == "get" and key.startswith(keys.STATES):
      reads[key.rpartition(".")[2]] += 1

  world.exchange.before = hook
  return reads


def test_who_holds_the_version_before_reads_its_step_alone():
  world = make_world(free_config(2, 3, 3, codec=DOWN["int4"]))
  reads = watch_reads(world)
  world.run()
  assert reads["step"] > 20 and reads.keys() == {"step"}


def test_who_missed_versions_takes_the_newest_full_one_and_the_steps_since():
  world = make_world(free_config(2, 3, 3, codec=DOWN["int4"]))
  world.run_to_round(9)
  late = world.learners[1]
  late.hold = frozenset({"_fetch"})
  late.blind = True
  world.run_to_round(27)
  reads = watch_reads(world)
  late.hold, late.blind = frozenset(), False
  world.run()
  assert reads["params"] >= 1
  assert_one_truth(world)


def test_a_copy_that_went_bad_is_replaced_by_a_full_one():
  world = make_world(free_config(2, 3, 3, codec=DOWN["int4"]))
  world.run_to_round(7)
  arrays = world.learners[0].plane.arrays
  held = arrays._held[1]
  bad = tuple(x + 1 for x in held.tensors)
  arrays._held[1] = held._replace(tensors=bad)
  arrays._anchors[1] = bad
  reads = watch_reads(world)
  world.run()
  assert reads["params"] == 1
  assert_one_truth(world)


def test_nothing_is_kept_that_nobody_needs():
  world = make_world(make_config(2, 3, 3, codec=DOWN["int4"]))
  for t in range(1, 31):
    world.run_to_round(t)
    for name in world.exchange.names(keys.STATES):
      version, p, kind = keys.state_parts(name)
      newest = world.schedule.version_before(p, t + 1)
      # Merges of rounds to come may be there already.
      assert version > t or retention.keeps(
        kind, version, newest, p, world.rules
      ), (t, name)
  before = world.exchange.names(keys.STATES)
  world.syncers[0].kill()
  for key in ("state/000000001.1.1.outer", "state/000000003.0.1.step"):
    world.exchange.plant(key, b"left by an outage")
  commit = world.commits[-1]
  world.run_job(
    world._syncer_plane(2, world._tape("syncer", 2)).sweep_all(commit)
  )
  assert world.exchange.names(keys.STATES) == before


# --- Chains of objects ------------------------------------------------------

SCHEDULE = Schedule(1, 2, 1)  # versions 0, 2, 4, …


def chain(length, full=()):
  """A store with versions of fragment 0, and their records by version."""
  store, refs, before = {}, {}, None
  for version in range(0, 2 * length + 1, 2):
    words = b"0 of %d" % version
    step = None
    if before is not None:
      payload = before.version.to_bytes(4) + version.to_bytes(4)
      data = payload + messages.encode(StepLink("run", 0, before))
      store[keys.step(version, 0, 1)] = data
      step = StepRef(len(data), wire.sha256(data), version in full)
    if step is None or step.full:
      store[keys.params(version, 0, 1)] = words
    before = refs[version] = FragmentState(
      version, 1, len(words), wire.sha256(words), 0, "", step
    )
  return store, refs


def read(store, ref, held=None):
  """What is read for a version, and the names of its objects."""
  names = []

  def peek(key):
    names.append(key[len("state/0000000") :])
    return store.get(key)

  job = read_version(0, ref, NullDownlink(), held, SCHEDULE)
  params, payloads = read_now(job, peek)
  return params, len(payloads), names


@pytest.mark.parametrize(
  "held, version, expected",
  [
    (None, 0, ["00.0.1.params"]),
    (None, 4, ["04.0.1.step", "02.0.1.step", "00.0.1.params"]),
    (None, 6, ["06.0.1.params"]),
    (None, 8, ["08.0.1.step", "06.0.1.params"]),
    (6, 8, ["08.0.1.step"]),
    (4, 6, ["06.0.1.step"]),  # though it is there in full
    (4, 8, ["08.0.1.step", "06.0.1.step"]),
    (2, 8, ["08.0.1.step", "06.0.1.params"]),
    (0, 4, ["04.0.1.step", "02.0.1.step"]),
    (8, 6, ["06.0.1.params"]),  # one that came late
  ],
)
def test_what_a_version_is_put_together_from(held, version, expected):
  store, refs = chain(4, full={6})
  params, steps, names = read(store, refs[version], held)
  assert names == expected
  assert steps == sum(name.endswith("step") for name in expected)
  assert (params is None) == all(name.endswith("step") for name in expected)


def test_its_parameters_are_those_the_commit_names():
  store, refs = chain(3)
  data = read_now(read_params(0, refs[6], NullDownlink()), store.get)
  assert data == b"0 of 6"


def spoil(change):
  store, refs = chain(3)
  key = keys.step(4, 0, 1)
  change(store, key)
  return store, refs


@pytest.mark.parametrize(
  "change, words",
  [
    (lambda store, key: store.pop(key), "step to version 4 .* gone"),
    (
      lambda store, key: store.update({key: store[key][:-1]}),
      "step to version 4 .* damaged",
    ),
    (
      lambda store, key: store.update({keys.params(0, 0, 1): b"0 of 1"}),
      "parameters of 0 are damaged",
    ),
  ],
)
def test_a_broken_chain_says_where(change, words):
  store, refs = spoil(change)
  with pytest.raises(ValueError, match=words):
    read_now(read_params(0, refs[6], NullDownlink()), store.get)


@pytest.mark.parametrize(
  "link, words",
  [
    (b"garbage", "names no version before: step: not a ddiloco record"),
    (lambda refs: StepLink("run", 1, refs[2]), "does not lead to it"),
    (lambda refs: StepLink("run", 0, refs[4]), "does not lead to it"),
  ],
)
def test_a_link_that_leads_astray_is_refused(link, words):
  store, refs = chain(3)
  link = link if isinstance(link, bytes) else messages.encode(link(refs))
  data = bytes(8) + link
  store[keys.step(4, 0, 1)] = data
  step = StepRef(len(data), wire.sha256(data), False)
  ref = FragmentState(4, 1, 6, wire.sha256(b"0 of 4"), 0, "", step)
  with pytest.raises(ValueError, match=words):
    read_now(read_params(0, ref, NullDownlink()), store.get)


def test_the_record_says_what_is_stored():
  _, refs = chain(2, full={4})
  plain = json.loads(
    messages.encode(StepLink("run", 0, refs[4])).split(b"\n")[1]
  )
  assert plain["previous"]["step"]["full"] is True
  assert messages.decode(
    StepLink, messages.encode(StepLink("run", 0, refs[2]))
  ) == StepLink("run", 0, refs[2])
  assert np.all([ref.params_bytes == 6 for ref in refs.values()])
