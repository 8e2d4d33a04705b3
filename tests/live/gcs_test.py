"""Google Cloud Storage: an emulator that throttles, breaks and refuses.

It ignores every write's condition, so that no lease or commit can be tried on
it; what a store without conditions is told is in store_check_test.py.
"""

import pytest

from ddiloco.chaos import proxy as proxies
from ddiloco.engine.ports import ExchangeError, ExchangeRefused
from ddiloco.live import exchange as exchange_lib
from ddiloco.live.exchange import TensorStoreExchange
from tests.live import stores


@pytest.fixture
def proxy(monkeypatch):
  with proxies.proxy_of(stores.gcs_port()) as proxy:
    url = f"http://127.0.0.1:{proxy.port}"
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
    yield proxy


def open_through(proxy, deadline_s=60.0):
  exchange = TensorStoreExchange(stores.new_gs_url(), deadline_s=deadline_s)
  assert exchange.get("k") is None and proxy.requests, "by way of the proxy"
  return exchange


@pytest.mark.parametrize(
  "act",
  [
    proxies.error(429, "rateLimitExceeded"),
    proxies.error(503, "backendError", Retry_After="1"),
    proxies.error(500, "internalError"),
    proxies.reset,
    proxies.reset_in_body,
    proxies.lose_reply,
  ],
)
def test_an_operation_outlasts_what_goes_wrong(monkeypatch, proxy, act):
  monkeypatch.setattr(exchange_lib, "_BACKOFF_MIN_S", 0.004)
  exchange = open_through(proxy)

  def outlasts(operation):
    told = proxy.inject(act, times=2)
    found = operation()
    assert told.hits >= 1
    proxy.lift(told)
    return found

  outlasts(lambda: exchange.put("a/k", b"v"))
  assert outlasts(lambda: exchange.get("a/k")).value == b"v"
  assert outlasts(lambda: exchange.list("a/")) == ["a/k"]
  exchange.put("b", b"")
  outlasts(lambda: exchange.delete_prefix("a/"))
  assert exchange.list("") == ["b"]
  outlasts(lambda: exchange.delete("b"))
  assert exchange.list("") == []


def test_a_token_that_expired_is_no_refusal(proxy):
  exchange = open_through(proxy)
  told = proxy.inject(proxies.error(401, "authError"), times=2)
  exchange.put("k", b"v")
  assert told.hits == 2 and exchange.get("k").value == b"v"


def test_a_refusal_is_reported_at_once(proxy):
  exchange = open_through(proxy)
  told = proxy.inject(proxies.error(403, "forbidden"))
  with pytest.raises(ExchangeRefused, match="put of 'k' .*cannot help"):
    exchange.put("k", b"v")
  assert told.hits == 2, "once more with fresh credentials"


def test_an_outage_ends_at_the_deadline_with_its_cause(proxy):
  exchange = open_through(proxy, deadline_s=0.6)
  told = proxy.inject(proxies.error(503, "backendError"))
  with pytest.raises(ExchangeError, match="put of 'k' .*HTTP 503"):
    exchange.put("k", b"v")
  assert 3 <= told.hits <= 40


def test_a_bucket_that_does_not_exist_is_named(proxy):
  exchange = TensorStoreExchange("gs://no-such-bucket/run")
  with pytest.raises(ExchangeRefused, match="put of 'k' .*cannot help"):
    exchange.put("k", b"v")
  assert proxy.requests
