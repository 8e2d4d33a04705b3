"""The exchange: one contract over every store, races, kills and failures."""

import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st

from ddiloco.engine.ports import ExchangeError, ExchangeRefused
from ddiloco.live import stores as files
from ddiloco.live.exchange import TensorStoreExchange
from tests.live import stores

ROOT = pathlib.Path(__file__).parents[2]
CHILD_DEADLINE_S = 60  # Far above what a child needs, on a busy machine too.


@pytest.fixture(params=["memory", "file", "lockfile", "s3"])
def exchange(request, tmp_path):
  """Every kind of store that can do all that a run needs."""
  return stores.open_new(request.param, tmp_path / "exchange")


@pytest.fixture(params=["memory", "file", "lockfile", "s3", "gs"])
def plain(request, tmp_path):
  """Also the emulator of gs, which ignores every write's condition."""
  return stores.open_new(request.param, tmp_path / "exchange")


def test_what_is_put_is_read(plain):
  exchange = plain
  assert exchange.get("a/b") is None
  for value in (b"one", b"", bytes(range(256)) * 40):
    for durable in (False, True):
      exchange.put("a/b", value, durable=durable)
      assert exchange.get("a/b").value == value


def test_every_write_changes_the_generation(exchange):
  seen = set()
  for _ in range(20):
    exchange.put("k", b"same")
    seen.add(exchange.get("k").generation)
  assert len(seen) == 20


def test_only_the_first_create_wins(exchange):
  assert exchange.put_if_absent("k", b"first")
  assert not exchange.put_if_absent("k", b"second", durable=True)
  assert exchange.put_if_absent("k", b"first"), "the stored object is ours"
  assert exchange.get("k").value == b"first"


def test_swaps_need_the_current_generation(exchange):
  first = exchange.compare_and_swap("k", b"1", None)
  assert first == exchange.get("k").generation
  assert exchange.compare_and_swap("k", b"other", None) is None
  assert exchange.compare_and_swap("k", b"1", None) == first, "it is ours"
  second = exchange.compare_and_swap("k", b"2", first)
  assert second == exchange.get("k").generation != first
  assert exchange.compare_and_swap("k", b"3", first) is None
  exchange.delete("k")
  assert exchange.compare_and_swap("k", b"3", second) is None
  assert exchange.get("k") is None
  with pytest.raises(AssertionError, match="empty generation"):
    exchange.compare_and_swap("k", b"3", b"")


def test_listing_and_deleting_by_prefix(plain):
  exchange = plain
  for key in ("a/1/x", "a/10/x", "a/2/x", "a/2/y-1", "b"):
    exchange.put(key, b"")
  assert exchange.list("") == ["a/1/x", "a/10/x", "a/2/x", "a/2/y-1", "b"]
  assert exchange.list("a/1") == ["a/1/x", "a/10/x"]
  assert exchange.list("a/1/") == ["a/1/x"]
  assert exchange.list("a/2/y-") == ["a/2/y-1"]
  assert exchange.list("c/") == []
  exchange.delete_prefix("a/1/")
  exchange.delete_prefix("c/")
  exchange.delete("a/2/x")
  exchange.delete("a/2/x")
  assert exchange.list("a/") == ["a/10/x", "a/2/y-1"]


@pytest.mark.parametrize(
  "key",
  ["", "/a", "a/", "a//b", "..", "a/../b", ".", "a b", "a\n", "é", "a\0"]
  + ["x.__lock", "a/x.__lock/b", "k" * 201, "k/" * 257 + "k"],
)
def test_invalid_keys_are_refused(exchange, key):
  for operation in (
    lambda: exchange.put(key, b""),
    lambda: exchange.put_if_absent(key, b""),
    lambda: exchange.compare_and_swap(key, b"", None),
    lambda: exchange.get(key),
    lambda: exchange.delete(key),
  ):
    with pytest.raises(ValueError, match="invalid key"):
      operation()
  assert exchange.list("") == []


def test_the_longest_keys_work(exchange):
  for key in ("k" * 200, "/".join(["k" * 102] * 5)[:512]):
    assert exchange.put_if_absent(key, b"x")
    assert exchange.get(key).value == b"x"


@pytest.mark.parametrize("prefix", ["/", "a//", "../", "a b", "a/./"])
def test_invalid_prefixes_are_refused(exchange, prefix):
  with pytest.raises(ValueError, match="invalid prefix"):
    exchange.list(prefix)
  with pytest.raises(ValueError, match="invalid prefix"):
    exchange.delete_prefix(prefix)
  with pytest.raises(ValueError, match="whole exchange"):
    exchange.delete_prefix("")


def test_threads_share_one_exchange(exchange):
  won = [[] for _ in range(4)]

  def race(me):
    for i in range(50):
      if exchange.put_if_absent(f"k/{i}", b"%d" % me):
        won[me].append(i)

  threads = [threading.Thread(target=race, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(sum(won, [])) == list(range(50))


def test_a_closed_exchange_refuses(exchange):
  exchange.close()
  with pytest.raises(ExchangeError, match="get of 'k' .* is closed"):
    exchange.get("k")


KEYS = ["a", "b/1", "b/10", "b/2/x", "c/y"]
PREFIXES = ["", "a", "b/", "b/1", "b/2/", "c/y", "d"]


class _AgainstDict(stateful.RuleBasedStateMachine):
  """Any sequence of operations does what it would do to a dict."""

  kind: str

  def __init__(self):
    super().__init__()
    self.folder = tempfile.TemporaryDirectory()
    self.exchange = stores.open_new(self.kind, self.folder.name)
    self.model = {}
    self.seen = {key: [None] for key in KEYS}
    self.writes = 0

  def teardown(self):
    self.folder.cleanup()

  def _value(self):
    self.writes += 1
    return b"%d" % self.writes

  def _generation(self, key):
    item = self.exchange.get(key)
    assert (item and item.value) == self.model.get(key)
    generation = item and item.generation
    self.seen[key].append(generation)
    return generation

  @stateful.rule(key=st.sampled_from(KEYS), durable=st.booleans())
  def put(self, key, durable):
    self.model[key] = self._value()
    self.exchange.put(key, self.model[key], durable=durable)
    self._generation(key)

  @stateful.rule(key=st.sampled_from(KEYS), durable=st.booleans())
  def put_if_absent(self, key, durable):
    value = self._value()
    won = self.exchange.put_if_absent(key, value, durable=durable)
    assert won == (key not in self.model)
    self.model.setdefault(key, value)
    self._generation(key)

  @stateful.rule(key=st.sampled_from(KEYS), data=st.data())
  def compare_and_swap(self, key, data):
    current = self._generation(key)
    expected = data.draw(st.sampled_from([current, *self.seen[key]]))
    value = self._value()
    new = self.exchange.compare_and_swap(key, value, expected)
    assert (new is not None) == (expected == current)
    if new:
      self.model[key] = value
      assert self._generation(key) == new

  @stateful.rule(key=st.sampled_from(KEYS))
  def delete(self, key):
    self.exchange.delete(key)
    self.model.pop(key, None)
    assert self._generation(key) is None

  @stateful.rule(prefix=st.sampled_from(PREFIXES[1:]))
  def delete_prefix(self, prefix):
    self.exchange.delete_prefix(prefix)
    for key in [key for key in self.model if key.startswith(prefix)]:
      del self.model[key]

  @stateful.rule(prefix=st.sampled_from(PREFIXES))
  def list(self, prefix):
    expected = sorted(key for key in self.model if key.startswith(prefix))
    assert self.exchange.list(prefix) == expected


@pytest.mark.parametrize("kind", ["memory", "file", "lockfile", "s3"])
def test_any_history_matches_a_dict(kind):
  machine = type(f"_{kind}", (_AgainstDict,), {"kind": kind})
  stateful.run_state_machine_as_test(
    machine,
    settings=settings(
      max_examples=5 if kind == "s3" else 25, stateful_step_count=30
    ),
  )


# What processes do to each other. They are started afresh, never forked:
# TensorStore aborts a process that forks.


def _start(program, *args, locking="os"):
  prelude = (
    "import sys\n"
    "from ddiloco.live.exchange import TensorStoreExchange\n"
    f"exchange = TensorStoreExchange(sys.argv[1], file_locking={locking!r})\n"
  )
  return subprocess.Popen(
    [sys.executable, "-c", prelude + program, *map(str, args)],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )


def _output(child):
  output, _ = child.communicate(timeout=CHILD_DEADLINE_S)
  assert child.returncode == 0
  return output


def _wait_until(condition, child):
  """Other processes give no signal to wait for, so this polls."""
  deadline_s = time.monotonic() + CHILD_DEADLINE_S
  while not condition():
    assert child.poll() is None, "the child ended too early"
    assert time.monotonic() < deadline_s
    time.sleep(0.001)


@pytest.mark.live
@pytest.mark.parametrize("kind, each", [("file", 200), ("s3", 40)])
def test_racing_processes_create_each_object_once(tmp_path, kind, each):
  race = f"""
me = sys.argv[2]
exchange.put("ready/" + me, b"")
while exchange.get("go") is None:
  pass
for i in range({each}):
  if exchange.put_if_absent(f"k/{{i}}", me.encode()):
    print(i)
"""
  url = stores.new_url(kind, tmp_path)
  children = [_start(race, url, i) for i in range(3)]
  exchange = TensorStoreExchange(url)
  _wait_until(lambda: len(exchange.list("ready/")) == 3, children[0])
  exchange.put("go", b"")
  winners = {}
  for me, child in enumerate(children):
    for key in map(int, _output(child).split()):
      assert winners.setdefault(key, me) == me, "two winners"
  assert sorted(winners) == list(range(each))
  for key, me in winners.items():
    assert exchange.get(f"k/{key}").value == b"%d" % me


@pytest.mark.live
@pytest.mark.parametrize(
  "kind, each", [("file", 100), ("lockfile", 30), ("s3", 30)]
)
def test_racing_swaps_lose_no_increment(tmp_path, kind, each):
  count = f"""
me = sys.argv[2].encode()
exchange.put_if_absent("n", b"0 ")
done = 0
while done < {each}:
  item = exchange.get("n")
  value = b"%d %s" % (int(item.value.split(b" ")[0]) + 1, me)
  done += exchange.compare_and_swap("n", value, item.generation) is not None
"""
  url = stores.new_url(kind, tmp_path)
  locking = kind if kind == "lockfile" else "os"
  for child in [_start(count, url, me, locking=locking) for me in "ab"]:
    _output(child)
  value = TensorStoreExchange(url).get("n").value
  assert value.split(b" ")[0] == b"%d" % (2 * each)


@pytest.mark.live
def test_a_killed_writer_tears_nothing(tmp_path):
  size = 8 << 20
  write = f"""
for i in range(1_000_000):
  exchange.put("a/k", bytes([i % 256]) * {size})
"""
  exchange = TensorStoreExchange(str(tmp_path))
  lock = tmp_path / "a" / "k.__lock"
  for _ in range(4):
    exchange.delete_prefix("a/")
    child = _start(write, tmp_path)
    _wait_until(lambda: exchange.get("a/k") is not None, child)
    # A lock file that holds data is a write under way.
    _wait_until(lambda: lock.exists() and _size(lock) > 0, child)
    child.kill()
    child.communicate()
    assert child.returncode == -9
    value = exchange.get("a/k").value
    assert len(value) == size and value == value[:1] * size, "torn"
    exchange.put("a/k", b"next")
    assert exchange.get("a/k").value == b"next"


def _size(path):
  try:
    return path.stat().st_size
  except FileNotFoundError:
    return 0


def test_what_a_killed_writer_leaves_is_hidden_and_swept(tmp_path):
  exchange = TensorStoreExchange(str(tmp_path))
  exchange.put("a/k", b"old")
  for name in ("k", "other"):
    (tmp_path / "a" / f"{name}.__lock").write_bytes(b"half" * 100)
  (tmp_path / "a" / "no key!").write_bytes(b"another program's")
  assert exchange.list("a/") == ["a/k"]
  exchange.put("a/k", b"new")
  assert exchange.get("a/k").value == b"new"
  assert exchange.put_if_absent("a/other", b"created")
  assert exchange.get("a/other").value == b"created"
  exchange.delete_prefix("a/")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 3, 8, 20])
def test_a_file_cut_by_a_crash_reads_as_fewer_bytes(tmp_path, length):
  exchange = TensorStoreExchange(str(tmp_path))
  exchange.put("k", b"the whole value")
  os.truncate(tmp_path / "k", length)
  value = exchange.get("k").value
  assert b"the whole value".startswith(value) and len(value) < 15


# Failures. Real ones where a test can cause them; the others by a store that
# fails as TensorStore does: with a ValueError that starts with the code.


@pytest.mark.parametrize(
  "operation",
  [
    lambda exchange: exchange.put("a/k", b""),
    lambda exchange: exchange.put("a/k", b"", durable=True),
    lambda exchange: exchange.put_if_absent("a/k", b""),
    lambda exchange: exchange.compare_and_swap("a/k", b"", None),
    lambda exchange: exchange.get("a/k"),
    lambda exchange: exchange.list("a/k"),
    lambda exchange: exchange.delete("a/k"),
    lambda exchange: exchange.delete_prefix("a/k"),
  ],
)
def test_a_file_in_place_of_the_directory_is_reported_at_once(
  tmp_path, operation
):
  (tmp_path / "file").write_bytes(b"")
  exchange = TensorStoreExchange(str(tmp_path / "file"), deadline_s=3600)
  with pytest.raises(ExchangeError, match=r"of 'a/k' in .* after 1 tries"):
    operation(exchange)


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path):
  path = tmp_path / "exchange"
  exchange = TensorStoreExchange(str(path), deadline_s=3600)
  exchange.put("a/k", b"v")
  path.rename(tmp_path / "aside")
  operations = (
    lambda: exchange.put("a/k", b"v"),
    lambda: exchange.get("a/k"),
    lambda: exchange.list(""),
    lambda: exchange.put_if_absent("k", b""),
    lambda: exchange.delete_prefix("a/"),
  )
  for operation in operations:
    with pytest.raises(ExchangeRefused, match="gone: was it deleted, or unm"):
      operation()
  assert not path.exists()
  path.mkdir()
  for operation in operations:
    with pytest.raises(ExchangeRefused, match="is not the directory it was"):
      operation()
  assert list(path.iterdir()) == []
  path.rmdir()
  (tmp_path / "aside").rename(path)
  assert exchange.get("a/k").value == b"v", "it was only put aside"


def test_a_dead_writers_lock_file_is_waited_out(monkeypatch, tmp_path):
  monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.05)
  monkeypatch.setattr(files, "LOCK_STALE_S", 0.3)
  exchange = TensorStoreExchange(str(tmp_path), file_locking="lockfile")
  exchange.put("a/k", b"old value")
  lock = tmp_path / "a" / "k.__lock"
  lock.write_bytes(b"half of what another wanted to write")
  started_s = time.monotonic()
  generation = exchange.get("a/k").generation
  assert exchange.compare_and_swap("a/k", b"new", generation)
  assert time.monotonic() - started_s >= 0.3, "not at once"
  assert exchange.get("a/k").value == b"new"
  assert [path.name for path in (tmp_path / "a").iterdir()] == ["k"]
  lock.write_bytes(b"")
  exchange.delete("a/k")
  assert exchange.list("") == [] and not lock.exists()


def test_a_living_writers_lock_file_is_respected(monkeypatch, tmp_path):
  monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.02)
  monkeypatch.setattr(files, "LOCK_STALE_S", 0.2)
  exchange = TensorStoreExchange(
    str(tmp_path), file_locking="lockfile", deadline_s=1.0
  )
  lock = tmp_path / "k.__lock"
  lock.write_bytes(b"")
  done = threading.Event()

  def write():
    while not done.wait(0.02):
      with open(lock, "ab") as file:
        file.write(b"x")

  writer = threading.Thread(target=write)
  writer.start()
  try:
    with pytest.raises(ExchangeError, match="Failed to open lock file"):
      exchange.put("k", b"v")
    assert lock.exists()
  finally:
    done.set()
    writer.join()


@pytest.mark.parametrize("sync", ["durable", "all", "none"])
def test_what_is_forced_to_disk_is_an_option(tmp_path, sync):
  exchange = TensorStoreExchange(str(tmp_path), file_sync=sync)
  exchange.put("k", b"v")
  exchange.put("d", b"v", durable=True)
  address = exchange._address
  forced = [spec["file_io_sync"] for spec in (address.fast, address.durable)]
  assert (
    forced
    == {
      "durable": [False, True],
      "all": [True, True],
      "none": [False, False],
    }[sync]
  )


@pytest.mark.parametrize(
  "option", [{"file_locking": "none"}, {"file_sync": "never"}]
)
def test_unknown_options_are_refused(option):
  with pytest.raises(ValueError, match="it must be of"):
    TensorStoreExchange("x", **option)


# Addresses.


def test_one_directory_has_many_names(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  TensorStoreExchange("x y").put("k", b"v")
  for url in (f"{tmp_path}/x y/", f"file://{tmp_path}/x%20y"):
    assert TensorStoreExchange(url).get("k").value == b"v"


def test_memory_urls_name_stores_of_the_process():
  TensorStoreExchange("memory://shared").put("k", b"v")
  assert TensorStoreExchange("memory://shared/").get("k").value == b"v"
  assert TensorStoreExchange("memory://other").get("k") is None


@pytest.mark.parametrize("url", ["gs://bucket", "gs://bucket/prefix"])
def test_remote_stores_open_without_network(url):
  TensorStoreExchange(url).close()


@pytest.mark.parametrize(
  "url",
  ["", "ftp://host/x", "http://host/x", "file:relative", "file://host/x"]
  + ["file:///x?y=1", "gs://", "gs:///x", "gs://bucket/x?y=1"]
  + ["s3://b", "s3://", "s3:///x", "s3://u@bucket/x", "s3://bucket/x#y"],
)
def test_bad_urls_name_the_remedy(url):
  with pytest.raises(ValueError, match=r"use a directory, |write file:///"):
    TensorStoreExchange(url)


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
def test_deadlines_are_positive(deadline_s):
  with pytest.raises(ValueError, match="must be positive"):
    TensorStoreExchange("memory://", deadline_s=deadline_s)
