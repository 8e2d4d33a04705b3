"""With a run key, what others put into the exchange is refused by reason."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError
from ddiloco.engine import startup
from ddiloco.engine.ports import DamagedRun
from ddiloco.engine.sealing import RunKey, SealedExchange
from ddiloco.protocol import keys, learner_types, messages, wire
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.wire import Unauthentic
from ddiloco.report.tapes import TapeReader, find_lives
from ddiloco.types import Refusal
from tests.engine.lockstep import RUN_ID, Lockstep
from tests.engine.memory import MemoryExchange
from tests.engine.recovery_test import assert_one_history
from tests.engine.refusal_test import FORGER, Forgery
from tests.engine.regression import Regression, free_config, make_config

KEY = RunKey(b"k" * 32, "/keys/run")
OTHER = RunKey(b"o" * 32, "/keys/other")
FIRST = keys.commit(0)
NAMES = st.sampled_from(
  [keys.commit(1), keys.member(0, 1), keys.lease(0), keys.params(3, 1, 1)]
)


class Store(MemoryExchange):
  """One that knows what is left of an old commit when it is sealed."""

  def _write(self, key, value):
    if value.endswith(b"\n" + SWEPT):
      self.plant(key, value)
      return self.objects[key].generation
    return super()._write(key, value)


class Sealed(SealedExchange):
  """For a lock-step world: what was written is told as it was given."""

  def __init__(self):
    super().__init__(Store(), KEY, "memory")

  def __getattr__(self, name):
    return getattr(self._exchange, name)

  @property
  def history(self):
    written = self._exchange.history
    return {name: self._open(name, data) for name, data in written.items()}

  def sealed(self, key, data, *, by=KEY, run=None):
    """What somebody with a key would have stored there."""
    other = SealedExchange(MemoryExchange(), by, "memory")
    other._run = self._run if run is None else run
    return other._seal(key, data)


def open_run(store, key=KEY):
  return SealedExchange(store, key, "gs://bucket/run")


def started(key=KEY):
  """A store in which a run has just started, and its exchange."""
  store = MemoryExchange()
  exchange = open_run(store, key)
  assert exchange.put_if_absent(FIRST, b"genesis")
  return store, exchange


def why_not(exchange, name):
  """Why an object does not open; it must not."""
  item = exchange.get(name)
  assert isinstance(item.value, Unauthentic) and item.value == b""
  assert item.value.why.startswith(f"{name} is not authentic: ")
  assert "Restore it from a copy" in item.value.why
  with pytest.raises(wire.WireError) as caught:
    messages.decode(messages.Commit, item.value)
  assert caught.value.reason is Refusal.UNAUTHENTIC
  return item.value.why


# --- One object ---------------------------------------------------------------


@given(name=NAMES, value=st.binary(max_size=300))
def test_what_was_sealed_opens_for_all_who_have_the_key(name, value):
  store, exchange = started()
  exchange.put(name, value, durable=True)
  assert store.objects[name].value != value
  for reader in (exchange, open_run(store)):
    assert reader.get(name) == (value, store.objects[name].generation)


@given(value=st.binary(max_size=60), data=st.data())
def test_no_byte_of_it_can_be_altered(value, data):
  store, exchange = started()
  name = data.draw(NAMES)
  exchange.put(name, value)
  stored = bytearray(store.objects[name].value)
  at = data.draw(st.integers(0, len(stored) - 1))
  stored[at] ^= data.draw(st.integers(1, 255))
  store.plant(name, bytes(stored))
  why_not(exchange, name)


@given(value=st.binary(max_size=60), data=st.data())
def test_it_cannot_be_cut_or_lengthened(value, data):
  store, exchange = started()
  name = data.draw(NAMES)
  exchange.put(name, value)
  stored = store.objects[name].value
  kept = data.draw(st.integers(0, len(stored) - 1))
  for forged in (stored[:kept], stored + data.draw(st.binary(min_size=1))):
    store.plant(name, forged)
    why_not(exchange, name)


@pytest.mark.parametrize(
  "forge, why",
  [
    (lambda run, name: b"junk", "it is not sealed by a run key"),
    (lambda run, name: b"", "it is not sealed by a run key"),
    (lambda run, name: b"ddiloco-sealed 1 no line", "not sealed by a run key"),
    (lambda run, name: run.sealed(name, b"x")[17:], "not sealed by a run key"),
    (lambda run, name: b"ddiloco-sealed 2 a b c d\n", "not of format 1"),
    (lambda run, name: b"ddiloco-sealed 1 a b\n", "not of format 1"),
    (
      lambda run, name: run.sealed(name, b"x", by=OTHER),
      "another run key than /keys/run",
    ),
    (lambda run, name: run.sealed(name, b"x")[:-1] + b"y", "was altered after"),
    (
      lambda run, name: run.sealed(keys.commit(4), b"x"),
      "moved here from commit/000000004",
    ),
    (
      lambda run, name: run.sealed(name, b"x", run="1" * 32),
      "of another run with the same key",
    ),
  ],
)
def test_what_is_wrong_is_named(forge, why):
  run = Sealed()
  run.put_if_absent(FIRST, b"genesis")
  run.get(FIRST)
  for name in (keys.commit(3), keys.member(1, 1)):
    run.plant(name, forge(run, name))
    assert why in why_not(run, name)
  run.plant(FIRST, forge(run, FIRST))
  assert why in why_not(run, FIRST)  # whoever has entered goes on


def test_one_run_has_one_number_from_its_first_object_on():
  store = MemoryExchange()
  starter, late = open_run(store), open_run(store)
  assert late.get(FIRST) is None and late.get(keys.lease(0)) is None
  assert starter.compare_and_swap(keys.lease(0), b"lease", None) == b"1"
  assert late.get(keys.lease(0)).value == b"lease"  # before there is a run
  starter.put(keys.params(0, 0, 1), b"params")
  assert starter.put_if_absent(FIRST, b"genesis")
  assert late.get(keys.params(0, 0, 1)).value == b"params"
  late.put(keys.member(0, 1), b"here")
  assert starter.get(keys.member(0, 1)).value == b"here"


def test_a_create_is_ones_own_only_with_ones_own_bytes():
  store, exchange = started()
  name = keys.commit(1)
  assert exchange.put_if_absent(name, b"mine")
  assert exchange.put_if_absent(name, b"mine")
  assert not open_run(store).put_if_absent(name, b"theirs")
  assert exchange.get(name).value == b"mine"


def test_the_other_operations_are_the_stores():
  store, exchange = started()
  generation = exchange.compare_and_swap(keys.lease(0), b"a", None)
  assert exchange.compare_and_swap(keys.lease(0), b"b", b"wrong") is None
  assert exchange.compare_and_swap(keys.lease(0), b"c", generation)
  exchange.put(keys.member(0, 1), b"x")
  exchange.put(keys.member(0, 2), b"x")
  assert exchange.list(keys.MEMBERS) == store.list(keys.MEMBERS)
  exchange.delete(keys.member(0, 1))
  exchange.delete_prefix(keys.MEMBERS)
  assert set(store.objects) == {FIRST, keys.lease(0)}


def test_a_key_does_not_show_itself():
  secret = b"a secret of the run, 32 or longer"
  key = RunKey(secret, "/keys/run")
  store, exchange = started(key)
  exchange.put(keys.lease(0), b"x")
  shown = f"{key!r} {key} {vars(exchange)}" + repr(store.objects)
  assert secret.decode() not in shown and secret.hex() not in shown


# --- The door -----------------------------------------------------------------


@pytest.mark.parametrize(
  "theirs, ours, words",
  [
    (KEY, None, ["it is sealed by a run key", "Give --run_key_file"]),
    (None, KEY, ["it is not sealed", "leave out --run_key_file=/keys/run"]),
    (OTHER, KEY, ["another run key than /keys/run", "was started with"]),
  ],
)
@pytest.mark.parametrize("name", [FIRST, keys.lease(0), keys.commit(1)])
def test_who_has_not_the_runs_key_does_not_come_in(theirs, ours, words, name):
  store, _ = started(theirs)
  with pytest.raises(ConfigError) as caught:
    open_run(store, ours).get(name)
  for word in ["gs://bucket/run", "commit/000000000 is not authentic", *words]:
    assert word in str(caught.value)


def test_a_moved_first_commit_opens_no_door():
  store, exchange = started()
  exchange.put(keys.commit(1), b"next")
  store.plant(FIRST, store.objects[keys.commit(1)].value)
  with pytest.raises(ConfigError, match="moved here from commit/000000001"):
    open_run(store).get(FIRST)


def test_without_a_key_nothing_is_added():
  store, exchange = started(None)
  exchange.put(keys.commit(1), b"plain")
  assert store.objects[keys.commit(1)].value == b"plain"
  assert open_run(store, None).get(keys.commit(1)).value == b"plain"
  store.plant(keys.commit(2), Sealed().sealed(keys.commit(2), b"x", run="0"))
  assert "is sealed by a run key" in why_not(exchange, keys.commit(2))


# --- Whole runs ---------------------------------------------------------------


def quorate(exchange=None):
  config = make_config(
    3,
    sync={"quorum_min": 2, "grace": False},
    stop={"rounds": 0, "tokens": 10**6},
    codec={"up": "f32"},
  )
  world = Lockstep(config, [Regression(m) for m in range(3)], exchange=exchange)
  world.start_syncer()
  for m in (0, 1):
    world.join(m)
  world.run_job(startup.claim_member(RUN_ID, FORGER, "forger", "host", 1))
  world.run_to_round(6)
  return world


@pytest.fixture(scope="module")
def world():
  return quorate(Sealed())


def test_a_key_changes_no_bit_of_a_run(world):
  plain = quorate()
  for t in range(7):
    for ours, theirs in zip(
      world.params_at(t), plain.params_at(t), strict=True
    ):
      np.testing.assert_array_equal(ours, theirs)


def plant_answer(forgery, *, header, part):
  """Stores a good answer; `header` and `part` make the bytes of both."""
  exchange, (t, m, n, attempt) = forgery.world.exchange, forgery.key
  name = keys.answer_part(t, m, n, attempt, 0)
  exchange.plant(name, part(exchange, name, forgery.part))
  name = keys.answer_header(t, m, n, attempt)
  data = messages.encode(forgery.header)
  exchange.plant(name, header(exchange, name, data))


def plain(exchange, name, data):
  return data


def honest(exchange, name, data):
  return exchange.sealed(name, data)


def foreign(exchange, name, data):
  return exchange.sealed(name, data, by=OTHER)


def moved(exchange, name, data):
  return exchange.sealed(name.replace("answer/", "answer/1"), data)


def brought(exchange, name, data):
  return exchange.sealed(name, data, run="f" * 32)


@pytest.mark.parametrize("forge", [plain, foreign, moved, brought])
@pytest.mark.parametrize("where", ["header", "part"])
def test_an_answer_without_the_key_is_refused(world, forge, where):
  forgery = Forgery(world)
  made = {"header": honest, "part": honest} | {where: forge}
  plant_answer(forgery, **made)
  assert forgery.outcome() == "unauthentic"
  world.run_to_round(world.committed + 2)
  assert_one_history(world)


def test_an_answer_with_the_key_is_counted(world):
  forgery = Forgery(world)
  plant_answer(forgery, header=honest, part=honest)
  assert forgery.outcome() == "counted"


@pytest.mark.parametrize(
  "sizes",
  [
    lambda size: [1 << 50],
    lambda size: [size, 1 << 40],
    lambda size: [1 << 40, size - (1 << 40)],
    lambda size: [0] * 1000 + [size],
  ],
)
def test_a_header_that_announces_too_much_costs_no_read(world, sizes):
  forgery = Forgery(world)
  parts = [messages.PartRef(n, "") for n in sizes(len(forgery.part))]
  forgery.change(parts=tuple(parts))
  read = []
  store = world.exchange._exchange
  store.before = lambda method, key: read.append(key)
  plant_answer(forgery, header=honest, part=honest)
  assert forgery.outcome() == "size"
  name = keys.answer_header(*forgery.key)
  assert name in read
  assert not [k for k in read if k.startswith(name.replace("header", "part"))]


def test_a_part_of_another_size_than_announced_is_not_decoded(
  world, monkeypatch
):
  forgery = Forgery(world)
  forgery.part += bytes(1 << 20)
  arrays = world.syncers[-1].plane.arrays
  decoded, inspect = [], arrays.inspect
  monkeypatch.setattr(
    arrays,
    "inspect",
    lambda key, *args: decoded.append(key) or inspect(key, *args),
  )
  plant_answer(forgery, header=honest, part=honest)
  assert forgery.outcome() == "size"
  assert decoded and forgery.key not in decoded


def test_a_member_without_the_key_is_no_sign_of_life(world):
  def heard():
    return [
      (v.beat, v.changed_ns)
      for v in world.syncers[-1].state.learners
      if v.learner == FORGER
    ]

  before = heard()
  member = world.run_job(
    startup.claim_member(RUN_ID, FORGER, "again", "host", 1)
  )[0]
  world.settle()
  assert heard() != before
  before, beat = heard(), dataclasses.replace(member, beat=9)
  world.exchange.plant(
    keys.member(FORGER, member.incarnation), messages.encode(beat)
  )
  world.settle()
  assert heard() == before


def test_a_life_without_the_key_takes_nobodys_place(world):
  def newer():
    return world.run_job(startup.newer_life(9, 1))

  claim = startup.claim_member(RUN_ID, 9, "nonce", "host", 1)
  first, _ = world.run_job(claim)
  assert (first.incarnation, newer()) == (1, None)
  forged = dataclasses.replace(first, incarnation=2, host="forger")
  world.exchange.plant(keys.member(9, 2), messages.encode(forged))
  assert newer() is None
  third, before = world.run_job(
    startup.claim_member(RUN_ID, 9, "again", "elsewhere", 2)
  )
  assert (third.incarnation, before) == (3, None)
  assert newer() == third


@pytest.fixture
def alone():
  config = free_config(1, stop={"rounds": 60})
  world = Lockstep(config, [Regression(0)], exchange=Sealed())
  world.start_syncer()
  world.join(0)
  world.run_to_round(6)
  return world


def test_a_commit_without_the_key_ends_the_life_that_meets_it(alone):
  alone.syncers[0].kill()
  forged = dataclasses.replace(alone.commit(6), round=7)
  alone.exchange.plant(keys.commit(7), messages.encode(forged))
  with pytest.raises(DamagedRun, match="000000007 is not authentic.*not seal"):
    alone.settle()
  with pytest.raises(DamagedRun, match="000000007 is not authentic.*not seal"):
    alone.run_job(startup.find_newest(alone.schedule))


def test_parameters_without_the_key_are_refused(alone):
  alone.syncers[0].kill()
  ref = alone.commit(6).fragments[1]
  key = keys.params(ref.version, 1, ref.epoch)
  alone.exchange.plant(key, alone.exchange.history[key])
  with pytest.raises(DamagedRun, match=f"go on from commit 6.*{key} is not au"):
    alone.start_syncer()


def test_a_learner_trains_on_without_what_it_must_not_take(alone):
  node = alone.learners[0]
  node.hold = frozenset({"_fetch"})
  alone.run_until(lambda: node.state.fetching)
  (t,) = node.state.fetching
  (p,) = alone.schedule.fragments(t)
  ref = alone.commit(t).fragments[p]
  key = keys.params(ref.version, p, ref.epoch)
  good = alone.exchange.objects[key]
  alone.exchange.plant(key, alone.exchange.history[key])
  node.hold = frozenset()
  alone.settle()
  failed = [e for e, _ in node.log if isinstance(e, learner_types.FetchFailed)]
  assert "is not authentic: it is not sealed" in failed[-1].reason
  alone.exchange.objects[key] = good
  alone.run_until(lambda: node.state.fragments[p].anchor >= t)


def test_a_tape_without_the_key_is_read_up_to_there(alone):
  name = keys.tape("learner-0", 1, 1)
  alone.exchange.plant(name, alone.exchange.history[name])
  (life,) = [x for x in find_lives(alone.exchange) if x.learner == 0]
  warnings = []
  assert list(TapeReader(alone.exchange, life, warnings).records())
  (warning,) = warnings
  assert "segment 1 is damaged: tape/learner-0.1/" in warning
  assert "is not authentic: it is not sealed" in warning
