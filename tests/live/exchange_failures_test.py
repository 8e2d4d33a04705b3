"""The exchange on stores that fail: retried, given up, or recognised."""

import threading

import pytest
import tensorstore as ts

from ddiloco.engine.ports import ExchangeError
from ddiloco.live.exchange import TensorStoreExchange
from tests.live import stores


@pytest.fixture(params=["memory", "file", "lockfile", "s3"])
def exchange(request, tmp_path):
  """Every kind of store that can do all that a run needs."""
  return stores.open_new(request.param, tmp_path / "exchange")


class _Faulty:
  """A store whose first writes and reads do, or do not, and then fail."""

  def __init__(self, store, messages, *, effective=False):
    self.store = store
    self.messages = list(messages)
    self.effective = effective

  def _perform(self, start):
    if not self.messages:
      return start()
    if self.effective:
      start().result()
    promise, future = ts.Promise.new()
    promise.set_exception(ValueError(self.messages.pop(0)))
    return future

  def write(self, *args, **kwargs):
    return self._perform(lambda: self.store.write(*args, **kwargs))

  def read(self, *args, **kwargs):
    return self._perform(lambda: self.store.read(*args, **kwargs))


class _Silent:
  """A store that never replies."""

  def read(self, key):
    self.promise, future = ts.Promise.new()
    return future


def _break(exchange, messages, **kwargs):
  store = _Faulty(exchange._stores[0], messages, **kwargs)
  exchange._stores = (store, store)
  return store


TRANSIENT = [
  "UNAVAILABLE: connection reset",
  "ABORTED: All 0 retry attempts failed: HTTP response code: 503",
  "RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']",
  "OUT_OF_RANGE: Failed to write: File too large [os_error_code='27']",
  "UNKNOWN: Failed to write: Input/output error [os_error_code='5']",
  "NOT_FOUND: Failed to rename: No such file [os_error_code='2']",
  "DEADLINE_EXCEEDED: timed out",
]
PERMANENT = [
  "PERMISSION_DENIED: Failed to open [os_error_code='13']",
  "FAILED_PRECONDITION: Not a directory [os_error_code='20']",
  "UNIMPLEMENTED: Failed to lock [os_error_code='38']",
  "NOT_FOUND: The specified bucket does not exist",
  "Failed to open: File name too long [os_error_code='36']",
]


@pytest.mark.parametrize("message", TRANSIENT)
def test_transient_failures_are_retried(exchange, message):
  store = _break(exchange, [message, message])
  exchange.put("k", b"v")
  assert exchange.get("k").value == b"v"
  assert store.messages == []


@pytest.mark.parametrize("message", PERMANENT)
def test_permanent_failures_are_not_retried(exchange, message):
  store = _break(exchange, [message, "never reached"])
  with pytest.raises(ExchangeError, match="put of 'k' .* cannot help"):
    exchange.put("k", b"v")
  assert store.messages == ["never reached"]


def test_a_write_that_only_seemed_to_fail_is_recognised(exchange):
  _break(exchange, [TRANSIENT[0]], effective=True)
  assert exchange.put_if_absent("k", b"mine 1")
  _break(exchange, [TRANSIENT[0]], effective=True)
  old = exchange.get("k").generation
  new = exchange.compare_and_swap("k", b"mine 2", old)
  assert exchange.get("k") == (b"mine 2", new)
  assert new != old


def test_a_lost_write_after_a_failure_stays_lost(exchange):
  exchange.put("k", b"theirs")
  _break(exchange, TRANSIENT[:1])
  assert not exchange.put_if_absent("k", b"mine 1")
  _break(exchange, TRANSIENT[:1])
  assert exchange.compare_and_swap("k", b"mine 2", None) is None
  assert exchange.get("k").value == b"theirs"


def test_retries_end_at_the_deadline(tmp_path):
  exchange = TensorStoreExchange(str(tmp_path), deadline_s=0.5)
  store = _break(exchange, TRANSIENT[:1] * 1000)
  with pytest.raises(ExchangeError, match="put of 'k' .*connection reset"):
    exchange.put("k", b"v")
  assert 900 < len(store.messages) < 999, "retried, and with back-off"


def test_a_store_that_never_replies_is_given_up(tmp_path):
  exchange = TensorStoreExchange(str(tmp_path), deadline_s=0.1)
  exchange._stores = (_Silent(),) * 2
  with pytest.raises(ExchangeError, match="get of 'k' .* no reply"):
    exchange.get("k")


def test_an_interrupt_ends_the_back_off(tmp_path):
  interrupt = threading.Event()
  interrupt.set()
  exchange = TensorStoreExchange(
    str(tmp_path), deadline_s=3600, interrupt=interrupt
  )
  exchange.put("k", b"v")
  store = _break(exchange, TRANSIENT[:1] * 50)
  with pytest.raises(ExchangeError, match="after 1 tries .*interrupted"):
    exchange.get("k")
  assert len(store.messages) == 49
