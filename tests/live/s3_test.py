"""An S3 server that throttles, breaks, lies still, loses replies, refuses."""

import threading
import time

import pytest

from ddiloco.chaos import proxy as proxies
from ddiloco.chaos import s3
from ddiloco.config import ConfigError, LiveConfig
from ddiloco.engine.ports import ExchangeError, ExchangeRefused
from ddiloco.live import exchange as exchange_lib
from ddiloco.live import workdir
from ddiloco.live.exchange import TensorStoreExchange
from tests.live import processes, stores

DEADLINE_S = 60.0


@pytest.fixture
def proxy():
  with proxies.proxy_of(stores.s3_port()) as proxy:
    yield proxy


@pytest.fixture
def hurry(monkeypatch):
  """Many small waits instead of a few long ones."""
  monkeypatch.setattr(exchange_lib, "_BACKOFF_MIN_S", 0.004)


@pytest.fixture
def exchange(proxy):
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  return TensorStoreExchange(url, deadline_s=DEADLINE_S)


# Each is asked for after `x` = b"old" was put; what it returns, and what is
# then in the exchange, does not depend on how often it had to be tried.
OPERATIONS = {
  "put": (lambda e: e.put("x", b"new"), {"x": b"new"}, "PUT"),
  "put_if_absent": (
    lambda e: e.put_if_absent("y", b"mine"),
    {"x": b"old", "y": b"mine"},
    "PUT",
  ),
  "compare_and_swap": (
    lambda e: bool(e.compare_and_swap("x", b"new", e.get("x").generation)),
    {"x": b"new"},
    "PUT",
  ),
  "get": (lambda e: e.get("x").value, {"x": b"old"}, "GET.*/x"),
  "missing": (lambda e: e.get("no"), {"x": b"old"}, "GET.*/no"),
  "list": (lambda e: e.list(""), {"x": b"old"}, "GET.*list"),
  "delete": (lambda e: e.delete("x"), {}, "DELETE"),
  "delete_prefix": (lambda e: e.delete_prefix("x"), {}, "DELETE"),
}
RESULTS = {
  "put_if_absent": True,
  "compare_and_swap": True,
  "get": b"old",
  "list": ["x"],
}
FAULTS = {
  "throttled": proxies.error(429, "TooManyRequests"),
  "throttled_retry_after": proxies.error(
    429, "TooManyRequests", Retry_After="1"
  ),
  "slow_down": proxies.error(503, "SlowDown"),
  "unavailable_retry_after": proxies.error(503, "", Retry_After="1"),
  "internal_error": proxies.error(500, "InternalError"),
  "bad_gateway": proxies.error(502, ""),
  "conflict": proxies.error(409, "ConditionalRequestConflict"),
  "reset": proxies.reset,
  "reset_in_body": proxies.reset_in_body,
  "truncated": proxies.truncate,
  "reply_lost": proxies.lose_reply,
}


def contents(exchange):
  return {key: exchange.get(key).value for key in exchange.list("")}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_outlasts_what_goes_wrong(
  hurry, exchange, proxy, name, fault
):
  operation, after, request = OPERATIONS[name]
  exchange.put("x", b"old")
  told = proxy.inject(FAULTS[fault], request, times=2)
  assert operation(exchange) == RESULTS.get(name)
  # What ends with the headers is whole when the connection breaks.
  assert 1 <= told.hits <= 2
  proxy.lift(told)
  assert contents(exchange) == after


@pytest.mark.parametrize("connection", ["new", "used"])
def test_a_conditional_write_whose_reply_was_lost_is_ours(
  exchange, proxy, connection
):
  """On a used connection libcurl itself sends the request a second time."""
  first = exchange.compare_and_swap("k", b"1", None)
  if connection == "new":
    told = proxy.inject(proxies.reset_in_body, "GET", times=1)
    exchange.get("k")
    assert told.hits == 1
  told = proxy.inject(proxies.lose_reply, "PUT", times=1)
  second = exchange.compare_and_swap("k", b"2", first)
  assert told.hits == 1
  assert second and exchange.get("k") == (b"2", second)
  told = proxy.inject(proxies.lose_reply, "PUT", times=1)
  assert exchange.put_if_absent("new", b"mine") and told.hits == 1


def test_what_somebody_else_wrote_meanwhile_is_not_ours(exchange, proxy):
  rival = TensorStoreExchange(
    exchange.url.replace(str(proxy.port), str(proxy.target))
  )

  def overtaken(handler):
    rival.put("k", b"theirs")
    proxies.reset(handler)

  told = proxy.inject(overtaken, "PUT .*/k", times=1)
  assert not exchange.put_if_absent("k", b"mine")
  assert told.hits == 1 and exchange.get("k").value == b"theirs"
  proxy.inject(overtaken, "PUT .*/k", times=1)
  old = exchange.get("k").generation
  assert exchange.compare_and_swap("k", b"mine", old) is None
  assert exchange.get("k").value == b"theirs"


@pytest.mark.parametrize(
  "act", [proxies.error(500, "InternalError"), proxies.reset]
)
def test_an_outage_ends_at_the_deadline_with_its_cause(proxy, act):
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  exchange = TensorStoreExchange(url, deadline_s=0.6)
  told = proxy.inject(act)
  with pytest.raises(ExchangeError, match="get of 'k' .*tries in") as caught:
    exchange.get("k")
  assert not isinstance(caught.value, ExchangeRefused)
  assert 3 <= told.hits <= 40, "tried again, and with back-off"
  proxy.lift(told)
  assert exchange.get("k") is None


def test_an_outage_that_ends_in_time_is_not_noticed(exchange, proxy):
  told = proxy.inject(proxies.error(503, "SlowDown"))

  def end():
    while told.hits < 6:
      time.sleep(0.01)  # Other threads' requests give no signal.
    proxy.lift(told)

  ender = threading.Thread(target=end)
  ender.start()
  exchange.put("k", b"v")
  ender.join()
  assert exchange.get("k").value == b"v" and told.hits >= 6


def test_a_server_that_never_replies_is_given_up(proxy):
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  exchange = TensorStoreExchange(url, deadline_s=0.5)
  told = proxy.inject(proxies.hang, times=1)
  with pytest.raises(ExchangeError, match="get of 'k' .* no reply"):
    exchange.get("k")
  assert told.hits == 1
  assert exchange.get("k") is None


STALLED = """
import sys
from ddiloco.live.exchange import TensorStoreExchange
exchange = TensorStoreExchange(sys.argv[1], deadline_s=60)
print(exchange.put_if_absent("k", b"mine"), exchange.get("k").value)
"""


@pytest.mark.live
def test_a_connection_on_which_nothing_moves_is_tried_anew(proxy):
  """In a process of its own, which reads a shorter patience at its start."""
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  told = proxy.inject(proxies.hang, "PUT", times=1)
  patience = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}
  assert processes.run_python(STALLED, url, env=patience) == "True b'mine'\n"
  assert told.hits == 1


# --- Refusals -----------------------------------------------------------------


def test_a_refusal_is_reported_at_once_and_in_words(exchange, proxy):
  told = proxy.inject(proxies.error(403, "AccessDenied"))
  with pytest.raises(ExchangeRefused) as caught:
    exchange.put("k", b"v")
  # Once more with fresh credentials: they may have been replaced.
  assert told.hits == 2
  text = str(caught.value)
  assert "put of 'k'" in text and "AccessDenied: as told (HTTP 403)" in text
  assert "<Error>" not in text and "\n" not in text


def test_expired_credentials_are_replaced_by_fresh_ones(
  monkeypatch, tmp_path, proxy
):
  file = tmp_path / ".aws" / "credentials"
  file.parent.mkdir()

  def write(key):
    file.write_text(
      f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\n"
    )

  for name in s3.CREDENTIALS:
    monkeypatch.delenv(name)
  monkeypatch.setenv("HOME", str(tmp_path))
  write("OLD")
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  exchange = TensorStoreExchange(url, deadline_s=DEADLINE_S)
  only_old = proxy.inject(proxies.expired("OLD"))
  exchange.put("k", b"1")
  assert only_old.hits == 1
  proxy.lift(only_old)
  only_new = proxy.inject(proxies.expired("NEW"))

  def refresh():
    while only_new.hits < 3:
      time.sleep(0.01)  # Other threads' requests give no signal.
    write("NEW")

  refresher = threading.Thread(target=refresh)
  refresher.start()
  exchange.put("k", b"2")
  refresher.join()
  assert only_new.hits >= 4
  before = only_new.hits
  assert exchange.get("k").value == b"2"
  assert only_new.hits == before + 1, "the fresh ones are kept"


def test_expired_credentials_that_stay_are_named(proxy):
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  exchange = TensorStoreExchange(url, deadline_s=0.5)
  told = proxy.inject(proxies.expired("nobody"))
  with pytest.raises(ExchangeError, match="ExpiredToken: as told"):
    exchange.put("k", b"")
  assert told.hits >= 3


@pytest.mark.parametrize(
  "operation",
  [
    lambda e: e.put("k", b""),
    lambda e: e.put_if_absent("k", b""),
    lambda e: e.compare_and_swap("k", b"", e.seen),
    lambda e: e.compare_and_swap("k", b"", None),
    lambda e: e.list(""),
    lambda e: e.delete_prefix("k"),
  ],
)
def test_a_bucket_that_is_gone_is_no_lost_race(operation):
  bucket = stores.new_bucket()
  exchange = TensorStoreExchange(stores.s3_url(bucket))
  exchange.seen = exchange.compare_and_swap("k", b"", None)
  exchange.delete("k")
  stores.delete_bucket(bucket)
  with pytest.raises(ExchangeRefused, match="NoSuchBucket.* cannot help"):
    operation(exchange)


# --- Memory -------------------------------------------------------------------

CYCLES = """
import os, sys
from ddiloco.live.exchange import TensorStoreExchange
exchange = TensorStoreExchange(sys.argv[1])
value = os.urandom(256 << 10)
def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
for i in range(600):
  exchange.put(f"a/{i}", value)
  assert exchange.get(f"a/{i}").value == value
  exchange.delete(f"a/{i}")
  if i == 99:
    before = resident()
print(resident() - before)
"""


@pytest.mark.live
@pytest.mark.slow
def test_memory_stays_flat_over_many_cycles():
  """500 cycles of 256 KiB: 125 MiB, if a copy of each were kept."""
  grown = int(
    processes.run_python(CYCLES, stores.s3_url(stores.new_bucket()), env={})
  )
  assert grown < 24 << 20, f"{grown >> 20} MiB more"


# --- Addresses ----------------------------------------------------------------


def test_prefixes_of_a_bucket_are_apart():
  bucket = stores.new_bucket()
  one, two, root = (
    TensorStoreExchange(stores.s3_url(bucket, prefix))
    for prefix in ("a", "a%20b/", "")
  )
  one.put("k", b"1")
  two.put("k", b"2")
  assert (one.list(""), two.list("")) == (["k"], ["k"])
  assert root.list("") == ["a/k"], "a name with a space is no key of ours"
  one.delete_prefix("k")
  assert two.get("k").value == b"2"


@pytest.mark.parametrize(
  "options, message",
  [
    ("endpont=http://x", "unknown option 'endpont'. Did you mean endpoint?"),
    ("access_key=AKIA", "It takes endpoint and region.*AWS_ACCESS_KEY_ID"),
    ("endpoint=", "endpoint is empty"),
    ("endpoint=host:9000", r"http\(s\)://host"),
    ("endpoint=ftp://host", r"http\(s\)://host"),
    ("endpoint=http://me:pw@host", "holds a user name.*AWS_ACCESS_KEY_ID"),
    ("region=", "region is empty"),
  ],
)
def test_bad_options_name_the_remedy_and_no_secret(options, message):
  with pytest.raises(ConfigError, match=f"--exchange: .*{message}") as caught:
    workdir.open_exchange(f"s3://bucket/run?{options}")
  assert "pw" not in str(caught.value) and "AKIA=" not in str(caught.value)


@pytest.mark.parametrize(
  "url", ["s3://bucket", "s3://bucket/run?region=eu-west-1"]
)
def test_amazons_own_open_without_network(url):
  TensorStoreExchange(url).close()


def test_a_server_that_keeps_conditions_is_accepted(proxy):
  url = stores.s3_url(stores.new_bucket(), port=proxy.port)
  workdir.check_exchange(workdir.open_exchange(url), LiveConfig())
  assert any("PUT" in request for request in proxy.requests)
