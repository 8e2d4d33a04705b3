"""The lease is kept from the claim on, given back, and lost aloud."""

import collections
import contextlib
import dataclasses
import functools
import threading
import time

import pytest

from ddiloco.config import ConfigError, LiveConfig
from ddiloco.engine.ports import ExchangeError
from ddiloco.live import workplace
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.lease import take_lease
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Lease

LIVE = LiveConfig(lease_s=0.5)
DEADLINE_S = 30.0


@pytest.fixture
def exchange(tmp_path):
  with_store = TensorStoreExchange(str(tmp_path))
  yield with_store
  with_store.close()


def _take(exchange, live=LIVE):
  return take_lease(exchange, live, threading.Event())


def _stored(exchange) -> Lease:
  return messages.decode(Lease, exchange.get(keys.lease(0)).value)


def test_epochs_are_never_repeated(exchange):
  for epoch in (1, 2, 3):
    held = _take(exchange)
    assert held.epoch == epoch == _stored(exchange).epoch
    held.release()
  assert _stored(exchange).epoch == 3


def test_a_holder_at_work_is_named(exchange):
  held = _take(exchange)
  with pytest.raises(ConfigError) as error:
    _take(exchange)
  assert f"process {_stored(exchange).pid}" in str(error.value)
  assert "epoch 1" in str(error.value)
  held.release()


def _plant(exchange, **changes):
  """A holder on another machine, which nobody can ask whether it lives."""
  lease = Lease(epoch=7, nonce="n", host="elsewhere", pid=1, beat=0)
  lease = dataclasses.replace(lease, **changes)
  exchange.put(keys.lease(0), messages.encode(lease))


def test_a_silent_holder_elsewhere_is_waited_out(exchange):
  _plant(exchange)
  held = _take(exchange)
  assert held.epoch == 8
  held.release()


def test_a_dead_process_of_this_machine_is_not_waited_for(exchange):
  _plant(exchange, host=workplace.host(), pid=2**22 + 1)  # beyond any pid
  held = _take(exchange, LiveConfig(lease_s=10_000.0))
  assert held.epoch == 8
  held.release()


def test_a_holder_is_told_when_the_lease_is_lost(exchange):
  held, told = _take(exchange), threading.Event()
  _plant(exchange)
  held.when_lost(told.set)
  assert told.wait(DEADLINE_S) and held.lost


def test_who_asks_late_is_told_at_once(exchange):
  held, told = _take(exchange), threading.Event()
  _plant(exchange)
  held._thread.join(DEADLINE_S)
  assert held.lost
  held.when_lost(told.set)
  assert told.is_set()


def test_an_interrupted_wait_takes_nothing(exchange):
  _plant(exchange)
  interrupt = threading.Event()
  interrupt.set()
  assert take_lease(exchange, LIVE, interrupt) is None
  assert _stored(exchange).epoch == 7


def test_garbage_is_waited_out_and_repeats_no_epoch(exchange):
  exchange.put(keys.lease(0), b"garbage")
  exchange.put(keys.tape("syncer", 4, 0), b"")
  exchange.put(keys.params(7, 2, 6), b"")
  held = _take(exchange)
  assert held.epoch == 7 == _stored(exchange).epoch
  held.release()


def test_a_holder_writes_over_garbage(exchange):
  held = _take(exchange)
  exchange.put(keys.lease(0), b"garbage")
  _until(lambda: exchange.get(keys.lease(0)).value != b"garbage", "not renewed")
  assert _stored(exchange).epoch == held.epoch and not held.lost
  held.release()


# --- Replies that are lost, and stores that are away -------------------------


class Flaky:
  """An exchange whose next operations, by name, fail after they are done."""

  def __init__(self, exchange):
    self._exchange, self.url = exchange, exchange.url
    self.fail, self.failed = {}, collections.Counter()

  def __getattr__(self, name):
    def operation(*args):
      result = getattr(self._exchange, name)(*args)
      if self.fail.get(name, 0):
        self.fail[name] -= 1
        self.failed[name] += 1
        raise ExchangeError("no reply")
      return result

    return operation


def _until(condition, what):
  end_s = time.monotonic() + DEADLINE_S
  while not condition():
    assert time.monotonic() < end_s, what
    time.sleep(0.01)


def test_a_renewal_whose_reply_was_lost_keeps_the_lease(exchange):
  flaky = Flaky(exchange)
  held = take_lease(flaky, LIVE, threading.Event())
  flaky.fail["compare_and_swap"] = 1
  _until(lambda: flaky.failed["compare_and_swap"], "no renewal failed")
  beat = _stored(exchange).beat
  _until(lambda: _stored(exchange).beat > beat + 1, "it is not renewed again")
  assert not held.lost
  held.release()
  assert _stored(exchange).pid == 0


@contextlib.contextmanager
def _standby(exchange, **options):
  """A standby in a thread, and what it has got."""
  interrupt, got = threading.Event(), []

  def wait():
    got.append(take_lease(exchange, LIVE, interrupt, standby=True, **options))

  thread = threading.Thread(target=wait)
  thread.start()
  try:
    yield thread, got
  finally:
    interrupt.set()
    thread.join(DEADLINE_S)
    for held in filter(None, got):
      held.release()


def _beats_of(exchange, held, count):
  beat = _stored(exchange).beat
  _until(lambda: _stored(exchange).beat > beat + count, "it is not renewed")
  assert not held.lost


def test_a_standby_waits_for_the_end_of_one_at_work(exchange):
  held = _take(exchange)
  with _standby(exchange) as (thread, got):
    _beats_of(exchange, held, 3)
    assert thread.is_alive() and not got
    held.release()
    thread.join(DEADLINE_S)
    assert got[0].epoch == 2


def test_a_standby_takes_over_from_one_that_is_silent(exchange):
  hung, told = Flaky(exchange), threading.Event()
  held = take_lease(hung, LIVE, threading.Event())
  held.when_lost(told.set)
  awake = threading.Event()
  hung.compare_and_swap = lambda *args: (
    awake.wait(DEADLINE_S) and exchange.compare_and_swap(*args)
  )
  with _standby(exchange) as (thread, got):
    thread.join(DEADLINE_S)
    assert got[0].epoch == 2
    awake.set()  # the old holder writes on, and finds out
    assert told.wait(DEADLINE_S) and held.lost


def test_an_outage_of_the_store_is_no_silence_of_the_holder(exchange):
  """Nobody could renew anything: the holder's time counts anew."""
  held, flaky = _take(exchange), Flaky(exchange)
  with _standby(flaky) as (thread, got):
    flaky.fail["get"] = 20
    _until(lambda: not flaky.fail["get"], "no outage")
    _beats_of(exchange, held, 2)
    assert thread.is_alive() and not got
  assert got == [None]
  held.release()


def test_a_standby_goes_once_the_run_is_over(exchange):
  held, over = _take(exchange), threading.Event()
  with _standby(exchange, over=over.is_set) as (thread, got):
    over.set()
    thread.join(DEADLINE_S)
    assert got == [None]
  held.release()


def test_each_shard_has_a_lease_and_epochs_of_its_own(exchange):
  """The k-th life of shard s of S has epoch (k - 1) S + s + 1."""
  take = functools.partial(take_lease, exchange, LIVE, threading.Event())
  for life in range(3):
    held = [take(shards=3, wanted=(shard,)) for shard in (2, 0, 1)]
    assert [h.shard for h in held] == [2, 0, 1]
    assert [h.epoch for h in held] == [3 * life + 1 + s for s in (2, 0, 1)]
    for item in held:
      item.release()


def test_a_shards_epochs_stay_its_own_whoever_has_claimed_one(exchange):
  """A process of another config may have had the lease for a moment."""
  for shards, epoch in ((2, 1), (1, 2), (2, 3), (3, 4), (2, 5)):
    held = take_lease(exchange, LIVE, threading.Event(), shards=shards)
    assert (held.shard, held.epoch) == (0, epoch)
    held.release()
  held = take_lease(exchange, LIVE, threading.Event(), shards=2, wanted=(1,))
  assert held.epoch == 2
  held.release()


def test_a_garbled_lease_of_a_shard_gives_no_epoch_again(exchange):
  """The newest life that left a trace was its 3rd, another shard's its 4th."""
  for epoch in (8, 10):
    exchange.put(keys.params(7, 1, epoch), b"a version")
  exchange.put(keys.lease(1), b"garbage")
  held = take_lease(exchange, LIVE, threading.Event(), shards=3, wanted=(1,))
  assert held.epoch == 11
  held.release()


def test_a_standby_takes_whichever_shard_is_free_first(exchange):
  options = {"shards": 2, "standby": True}
  first = take_lease(exchange, LIVE, threading.Event(), **options)
  second = take_lease(exchange, LIVE, threading.Event(), **options)
  assert (first.shard, second.shard) == (0, 1)
  with pytest.raises(ConfigError, match="at work for shard 1 in"):
    take_lease(exchange, LIVE, threading.Event(), shards=2, wanted=(1,))
  second.release()
  again = take_lease(exchange, LIVE, threading.Event(), **options)
  assert (again.shard, again.epoch) == (1, 4)
  for item in (first, again):
    item.release()
