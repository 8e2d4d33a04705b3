"""Objects that were damaged, mixed up or lost in the exchange."""

import dataclasses

import pytest

from ddiloco.config import ConfigError
from ddiloco.engine import startup
from ddiloco.engine.ports import ExchangeError
from ddiloco.engine.records import DamagedRun
from ddiloco.protocol import keys, learner_types, messages
from tests.engine.lockstep import Lockstep
from tests.engine.memory import MemoryExchange
from tests.engine.recovery_test import assert_one_history
from tests.engine.regression import free_config, make_config, make_world


@pytest.fixture
def world():
  world = make_world(free_config(1, stop={"rounds": 60}))
  world.run_to_round(6)
  return world


def tampered(world, t, **fields):
  return messages.encode(dataclasses.replace(world.commit(t), **fields))


def forge_commit(world, t, **fields):
  """Round t's commit, with some fields changed, before it is made."""
  world.exchange.plant(keys.commit(t), tampered(world, t - 1, **fields))


# --- Commits ----------------------------------------------------------------


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"run_id": "other", "round": 7}, "Two runs share this exchange"),
    ({"round": 8}, "belongs to round 8"),
    ({"round": 7, "previous": "0" * 64}, "two histories"),
  ],
)
def test_learner_refuses_anothers_commit(world, fields, message):
  world.syncers[0].kill()
  forge_commit(world, 7, **fields)
  with pytest.raises(DamagedRun, match=message):
    world.settle()


@pytest.mark.parametrize("cut", [0, 20, -1])
def test_learner_refuses_a_damaged_commit(world, cut):
  world.syncers[0].kill()
  world.exchange.plant(keys.commit(7), tampered(world, 6)[:cut])
  with pytest.raises(DamagedRun, match="commit/000000007 is damaged"):
    world.settle()


def test_nobody_joins_a_damaged_run(world):
  newest = keys.commit(world.committed)
  world.exchange.plant(newest, b"junk")
  with pytest.raises(DamagedRun, match="is damaged"):
    world.join(0)
  world.exchange.plant(keys.commit(0), tampered(world, 0, genesis=None))
  with pytest.raises(DamagedRun, match="not a ddiloco run"):
    world.join(0)


def test_two_first_syncers_start_one_run():
  config, exchange = make_config(1), MemoryExchange()
  world = make_world(config, exchange=exchange)
  genesis = startup.make_genesis(config, world.layout, "version")
  states = world.commit(0).fragments
  again = startup.create_run("another", genesis, 2, states)
  with pytest.raises(DamagedRun, match="another syncer has started a run"):
    world.run_job(again)


# --- Fragments --------------------------------------------------------------


def newest_params(world, p):
  ref = world.commit(world.committed).fragments[p]
  return keys.params(ref.version, p, ref.epoch)


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda data: data[:-4], "are damaged"),
    (lambda data: bytes(len(data)), "are damaged"),
    (None, "are gone"),
  ],
)
def test_learner_asks_again_for_what_it_could_not_fetch(world, spoil, message):
  node = world.learners[0]
  node.hold = frozenset({"_fetch"})
  world.run_until(lambda: node.state.fetching)
  (t,) = node.state.fetching
  (p,) = world.schedule.fragments(t)
  key = newest_params(world, p)
  good = world.exchange.objects.pop(key)
  if spoil:
    world.exchange.plant(key, spoil(good.value))
  node.hold = frozenset()
  world.settle()
  assert node.state.fetched == ()
  failed = [e for e, _ in node.log if isinstance(e, learner_types.FetchFailed)]
  assert failed and message in failed[-1].reason
  steps = node.state.step
  world.step()
  assert node.state.step == steps + 1  # it trains on
  world.exchange.objects[key] = good
  world.run_until(lambda: node.state.fragments[p].anchor >= t)
  assert_one_history(world.run())


def test_learner_trains_on_while_the_store_is_down(world):
  node = world.learners[0]

  def down(method, key):
    raise ExchangeError(f"{method} of {key}: no reply")

  world.syncers[0].blind = True  # its own process has no store either
  world.exchange.before = down
  steps = node.state.step
  for _ in range(12):
    world.step()
  assert node.state.step == steps + 12
  world.exchange.before = lambda method, key: None
  world.syncers[0].blind = False
  assert_one_history(world.run())
  assert world.committed == 60


@pytest.mark.parametrize("name", ["params", "outer"])
@pytest.mark.parametrize("lost", [True, False])
def test_syncer_does_not_go_on_from_damaged_state(world, name, lost):
  world.syncers[0].kill()
  key = newest_params(world, 1).replace("params", name)
  good = world.exchange.objects.pop(key)
  if not lost:
    # Without momentum there is no outer state to cut short.
    world.exchange.plant(key, good.value + b"x")
  with pytest.raises(DamagedRun, match="cannot go on from commit 6: the"):
    world.start_syncer()


# --- Starting ---------------------------------------------------------------


def test_a_stale_listing_hides_nothing(world):
  """The walk from the newest listed commit finds those after it."""
  listed = world.exchange.list
  world.exchange.list = lambda prefix: [
    name for name in listed(prefix) if name <= keys.commit(4)
  ]
  newest = world.run_job(startup.find_newest(world.schedule))
  assert newest.commit.round == world.committed == 6


def test_an_empty_exchange_holds_no_run(world):
  empty = Lockstep(world.config, world.programs)
  assert empty.run_job(startup.find_newest(world.schedule)) is None


def test_a_resumed_run_may_change_some_of_its_config(world):
  genesis = world.commit(0).genesis
  changed = free_config(1, stop={"rounds": 99})
  changes = startup.check_genesis(genesis, changed, world.layout)
  assert changes == {"stop.rounds": (60, 99)}
  with pytest.raises(ConfigError, match="outer.momentum"):
    other = free_config(1, stop={"rounds": 60}, outer={"momentum": 0.5})
    startup.check_genesis(genesis, other, world.layout)


def test_another_model_is_refused_by_the_name_of_a_tensor(world):
  first, *rest = world.layout.tensors
  wider = dataclasses.replace(first, shape=(99, 4))
  layout = dataclasses.replace(world.layout, tensors=(wider, *rest))
  with pytest.raises(ConfigError, match=first.path):
    genesis = world.commit(0).genesis
    startup.check_genesis(genesis, world.config, layout)


def test_lives_are_numbered_and_leave_their_position(world):
  node = world.learners[0]
  world.step()
  node.beat(left=True)
  claim = startup.claim_member("run", 0, "nonce", "host", 1)
  member, before = world.run_job(claim)
  assert (member.incarnation, before.incarnation) == (2, 1)
  assert member.next_sample == before.next_sample == node.state.next_sample
  world.exchange.plant(keys.member(0, 2), b"junk")
  claim = startup.claim_member("run", 0, "nonce", "host", 1)
  member, before = world.run_job(claim)
  assert (member.incarnation, before) == (3, None)


def test_only_one_takes_the_lease(world):
  item = world.exchange.get(keys.lease(0))
  first = world.run_job(startup.claim_lease("a", "host", 1, item))
  assert first[0].epoch == 2
  assert world.run_job(startup.claim_lease("b", "host", 2, item)) is None
