"""The hostile exchange: what befalls operations, and what never happens."""

import pytest

from ddiloco.engine.ports import Call, ExchangeError
from ddiloco.sim.clock import Heap, stream
from ddiloco.sim.exchange import SimExchange, Weather
from ddiloco.types import SECOND_NS

MS = 1_000_000


class Store:
  """An exchange, and a way to ask it something and wait."""

  def __init__(self, seed=0, **weather):
    self.heap = Heap()
    self.exchange = SimExchange(self.heap, stream(seed, "exchange"))
    self.exchange.weather = Weather(**weather)

  def ask(self, method, *args, who="learner-0", wanted=lambda: True):
    """The result, once everything that follows has happened."""
    replies = self.send(method, *args, who=who, wanted=wanted)
    self.settle()
    assert len(replies) <= 1
    return replies[0] if replies else None

  def send(self, method, *args, who="learner-0", wanted=lambda: True):
    """The list that the result will be in."""
    replies = []
    self.exchange.submit(who, Call(method, args), replies.append, wanted)
    return replies

  def settle(self):
    while self.heap.step():
      pass


def failed(result):
  return isinstance(result, ExchangeError)


def test_fair_weather_does_what_the_port_says():
  store = Store()
  assert store.ask("get", "a/1") is None
  assert store.ask("put", "a/2", b"two") is None
  assert store.ask("put_if_absent", "a/1", b"one") is True
  assert store.ask("put_if_absent", "a/1", b"other") is False
  assert store.ask("put_if_absent", "a/1", b"one") is True
  assert store.ask("get", "a/1").value == b"one"
  assert store.ask("list", "a/") == ["a/1", "a/2"]
  assert store.ask("list", "a/2") == ["a/2"]
  generation = store.ask("get", "a/1").generation
  assert store.ask("compare_and_swap", "a/1", b"new", None) is None
  assert store.ask("compare_and_swap", "a/1", b"new", generation)
  assert store.ask("compare_and_swap", "a/1", b"new", generation) is None
  store.ask("put", "b/1", b"")
  store.ask("delete_prefix", "a/")
  store.ask("delete", "a/1")
  assert store.exchange.names("a/") == []
  assert store.exchange.names("b/") == ["b/1"]
  assert store.exchange.effects == {}


@pytest.mark.parametrize(
  "trouble, fails, written",
  [
    ("lost", True, False),
    ("refused", True, False),
    ("unconfirmed", True, True),
    ("late", False, True),
    ("doubled", False, True),
  ],
)
def test_a_write_in_bad_weather(trouble, fails, written):
  store = Store(**{trouble: 1.0})
  assert failed(store.ask("put", "k/1", b"value")) == fails
  assert (store.exchange.peek("k/1") == b"value") == written
  assert store.exchange.effects[trouble] == 1


def test_a_doubled_write_comes_again_after_a_delete():
  store = Store(doubled=1.0)
  replies = store.send("put", "k/1", b"value")
  while not replies:
    store.heap.step()
  store.exchange.weather = Weather()
  store.exchange._delete("k/1")
  store.settle()
  assert store.exchange.peek("k/1") == b"value"


def test_a_refused_put_may_leave_a_part_behind():
  store = Store(refused=1.0, torn=1.0)
  assert failed(store.ask("put", "k/1", b"value"))
  torn = store.exchange.peek("k/1")
  assert torn is not None and b"value".startswith(torn)
  assert failed(store.ask("put_if_absent", "k/2", b"value"))
  assert store.exchange.peek("k/2") is None  # creates are atomic


def test_a_stale_read_and_a_lagging_listing():
  store = Store(lag_ns=SECOND_NS)
  store.ask("put", "k/1", b"old")
  store.ask("put", "k/1", b"new")
  store.exchange.weather = Weather(stale=1.0, lagging=1.0)
  assert store.ask("get", "k/1").value == b"old"
  assert store.ask("list", "k/") == []
  store.heap.after(2 * SECOND_NS, lambda: None)
  store.settle()
  assert store.ask("list", "k/") == ["k/1"]


def test_what_fails_is_tried_again_until_the_deadline():
  store = Store(refused=1.0)
  store.exchange.deadline_ns = 10 * SECOND_NS
  assert failed(store.ask("get", "k/1"))
  assert store.exchange.effects["refused"] > 3
  assert 5 * SECOND_NS < store.heap.now_ns < 11 * SECOND_NS
  replies = store.send("put", "k/1", b"value")
  store.heap.step()
  store.exchange.weather = Weather()
  store.settle()
  assert replies == [None]


def test_a_dead_caller_tries_no_more():
  store = Store(refused=1.0)
  store.exchange.deadline_ns = 10 * SECOND_NS
  alive = [True]
  replies = store.send("put", "k/1", b"value", wanted=lambda: alive[0])
  store.heap.step()
  alive[0] = False
  store.settle()
  assert replies == [] and store.exchange.effects["refused"] == 1


@pytest.mark.parametrize(
  "method, args",
  [
    ("put_if_absent", ("k/1", b"mine")),
    ("compare_and_swap", ("k/1", b"mine", None)),
  ],
)
def test_a_success_that_was_reported_as_a_failure_is_recognised(method, args):
  store = Store(unconfirmed=1.0)
  store.exchange.deadline_ns = SECOND_NS
  replies = store.send(method, *args)
  while not store.exchange.effects:
    store.heap.step()
  store.exchange.weather = Weather()
  store.settle()
  assert replies[0] and not failed(replies[0])
  assert store.exchange.peek("k/1") == b"mine"


def test_a_partition_and_an_outage_answer_nobody():
  store = Store()
  store.exchange.cut_off.add("learner-0")
  assert failed(store.ask("get", "k/1"))
  assert store.ask("get", "k/1", who="syncer") is None
  assert store.exchange.hits == {("partition", "learner-0"): 1}
  store.exchange.outage = True
  assert failed(store.ask("get", "k/1", who="syncer"))
  assert store.exchange.hits["outage", "syncer"] == 1


def test_a_full_store_reads_and_deletes():
  store = Store()
  store.ask("put", "k/1", b"value")
  store.exchange.full = True
  for method, *args in (
    ("put", b"new"),
    ("put_if_absent", b"new"),
    ("compare_and_swap", b"new", None),
  ):
    assert failed(store.ask(method, "k/2", *args))
  assert store.ask("get", "k/1").value == b"value"
  store.ask("delete", "k/1")
  assert store.exchange.peek("k/1") is store.exchange.peek("k/2") is None


def test_what_is_clogged_comes_in_its_order():
  store = Store(spread=0.0)
  store.exchange.clog("learner-0")
  replies = [store.send("put", "k/1", b"%d" % n) for n in range(3)]
  store.settle()
  assert replies == [[], [], []] and store.exchange.peek("k/1") is None
  store.exchange.unclog("learner-0")
  store.settle()
  assert replies == [[None]] * 3 and store.exchange.peek("k/1") == b"2"


def test_healing_ends_all_trouble():
  store = Store(lost=1.0, delay_ns=7 * MS)
  exchange = store.exchange
  exchange.outage = exchange.full = True
  exchange.cut_off.add("learner-0")
  exchange.clog("learner-1")
  replies = store.send("put", "k/1", b"value", who="learner-1")
  exchange.heal()
  assert store.ask("put", "k/2", b"value") is None and replies == [None]
  assert exchange.weather == Weather(delay_ns=7 * MS)


def test_a_watched_key_is_told_once():
  store, told = Store(), []
  store.exchange.when("k/1", lambda: told.append(1))
  store.settle()
  assert told == []
  store.ask("put", "k/1", b"value")
  store.ask("put", "k/1", b"value")
  assert told == [1]
  store.exchange.when("k/1", lambda: told.append(2))
  store.settle()
  assert told == [1, 2]


def test_operations_overtake_each_other_but_not_in_still_air():
  """Two writes sent one after the other; the later one need not win."""

  def last_written(seed, spread):
    store = Store(seed, spread=spread)
    for value in (b"first", b"second"):
      store.send("put", "a/1", value)
    store.settle()
    return store.ask("get", "a/1").value

  assert {last_written(seed, 1.0) for seed in range(20)} == {
    b"first",
    b"second",
  }
  assert {last_written(seed, 0.0) for seed in range(20)} == {b"second"}
