"""The lease is kept from the claim on, given back, and lost aloud."""

import dataclasses
import threading

import pytest

from ddiloco.config import ConfigError, LiveConfig
from ddiloco.live import workplace
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.lease import take_lease
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Lease

LIVE = LiveConfig(heartbeat_s=0.05, dead_after_s=0.5)
DEADLINE_S = 30.0


@pytest.fixture
def exchange(tmp_path):
  with_store = TensorStoreExchange(str(tmp_path))
  yield with_store
  with_store.close()


def _take(exchange, live=LIVE):
  return take_lease(exchange, live, threading.Event())


def _stored(exchange) -> Lease:
  return messages.decode(Lease, exchange.get(keys.LEASE).value)


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
  exchange.put(keys.LEASE, messages.encode(lease))


def test_a_silent_holder_elsewhere_is_waited_out(exchange):
  _plant(exchange)
  held = _take(exchange)
  assert held.epoch == 8
  held.release()


def test_a_dead_process_of_this_machine_is_not_waited_for(exchange):
  _plant(exchange, host=workplace.host(), pid=2**22 + 1)  # beyond any pid
  held = _take(exchange, LiveConfig(heartbeat_s=1.0, dead_after_s=10_000.0))
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
