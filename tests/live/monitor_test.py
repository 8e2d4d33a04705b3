"""The onlooker's view of a run, whatever has happened to the run's objects."""

import pytest

from ddiloco.engine.ports import ExchangeError, Item
from ddiloco.live import monitor as monitor_lib
from ddiloco.live import workplace
from ddiloco.live.monitor import Monitor
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit, Lease, Member
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.schedule import Schedule
from ddiloco.protocol.wire import Unauthentic

SCHEDULE = Schedule(num_fragments=2, interval=4, overlap=2)  # rounds 2, 4, 6 …


class Store(dict):
  """As much of an exchange as a reader needs; `away` makes it fail."""

  away = False

  def get(self, key):
    if self.away:
      raise ExchangeError("away")
    return Item(self[key], b"1") if key in self else None

  def list(self, prefix):
    if self.away:
      raise ExchangeError("away")
    return sorted(key for key in self if key.startswith(prefix))

  def commit(self, t, **fields):
    values = {
      "run_id": "run",
      "round": t,
      "epoch": 1,
      "previous": "",
      "counted": (),
      "refused": (),
      "fragments": (),
      "tokens": 100 * t,
      "progress": (),
      "vector_clock": (),
      "genesis": None,
    }
    self[keys.commit(t)] = messages.encode(Commit(**values | fields))

  def member(self, learner, incarnation, beat=1, left=False):
    member = Member(
      "run", learner, incarnation, "n", "host", 7, beat, 0, 0, 0, 0, left
    )
    self[keys.member(learner, incarnation)] = messages.encode(member)


@pytest.fixture
def store():
  return Store()


@pytest.fixture
def monitor(store, monkeypatch):
  """Of a clock that the test moves; each look finds the members, too."""
  monkeypatch.setattr(monitor_lib, "_MEMBERS_EVERY_S", -1.0)
  made = Monitor(store, SCHEDULE)
  made.now_s = 1000.0
  monkeypatch.setattr(monitor_lib.time, "monotonic", lambda: made.now_s)
  return made


def test_nothing_is_seen_where_nothing_is(monitor):
  assert not monitor.poll()
  assert monitor.view.commit is None and monitor.view.round == 0


def test_commits_are_followed_in_the_order_of_the_schedule(monitor, store):
  store.commit(0)
  monitor.poll()
  assert monitor.view.round == 0 and monitor.view.commit is not None
  assert not monitor.poll()
  store.commit(2)
  store.commit(3)  # No round of this schedule.
  store.commit(4)
  monitor.now_s += 1
  assert monitor.poll()
  assert (monitor.view.round, monitor.view.commit.tokens) == (4, 400)
  assert monitor.view.commit_s == monitor.now_s
  assert not monitor.poll()


def test_a_monitor_that_comes_late_skips_what_retention_took(monitor, store):
  for t in range(2, 20, 2):
    store[keys.commit(t)] = SWEPT
  for t in (0, 20, 22, 24):
    store.commit(t)
  monitor.poll()
  assert monitor.view.round == 0, "it does not list at every look"
  monitor.now_s += 3
  assert monitor.poll() and monitor.view.round == 24
  store.commit(26)
  assert monitor.poll() and monitor.view.round == 26


def test_listing_an_idle_run_again_and_again_changes_nothing(monitor, store):
  store.commit(0)
  store.commit(2)
  monitor.poll()
  for _ in range(5):
    monitor.now_s += 3
    assert not monitor.poll()
  assert monitor.view.round == 2
  assert monitor.view.commit_s == 1000, "when the commit came, not a look"


def test_a_store_that_is_away_changes_nothing(monitor, store):
  store.commit(0)
  store.member(1, 1)
  monitor.poll()
  store.away = True
  store.commit(2)
  assert not monitor.poll()
  assert monitor.view.round == 0 and set(monitor.view.members) == {1}
  store.away = False
  assert monitor.poll() and monitor.view.round == 2


@pytest.mark.parametrize("key", [keys.commit(2), keys.member(1, 1)])
def test_garbage_is_not_believed(monitor, store, key):
  store.commit(0)
  monitor.poll()
  store[key] = b"garbage"
  assert not monitor.poll()
  assert monitor.view.round == 0 and monitor.view.members == {}


@pytest.mark.parametrize("garbage", [b"garbage", Unauthentic("not sealed")])
def test_garbage_hides_nobody_else(monitor, store, garbage):
  store.commit(0)
  for learner in range(3):
    store.member(learner, 1)
  store[keys.member(1, 1)] = store[keys.lease(0)] = garbage
  monitor.poll()
  assert set(monitor.view.members) == {0, 2}


def test_who_is_elsewhere_and_who_of_them_is_live(monitor, store):
  for learner in (0, 1, 5, 7):
    store.member(learner, 1)
  monitor.poll()
  monitor.now_s += 5
  store.member(5, 1, beat=2)
  store.member(7, 1, beat=2, left=True)
  monitor.poll()
  view = monitor.view
  assert view.elsewhere({0, None}) == [1, 5, 7]
  assert [m for m in (0, 1, 5, 7) if view.is_live(m, 3.0)] == [5]
  assert [m for m in (0, 1, 5, 7) if view.is_live(m, 6.0)] == [0, 1, 5]


def test_the_newest_life_of_every_learner_is_shown(monitor, store):
  store.commit(0)
  store.member(0, 1)
  for incarnation in (1, 2, 10):
    store.member(3, incarnation)
  store["members/not-a-life"] = b""
  monitor.poll()
  lives = {i: m.incarnation for i, m in monitor.view.members.items()}
  assert lives == {0: 1, 3: 10}


def test_a_beat_is_when_a_record_changed(monitor, store):
  store.member(0, 1)
  store.member(1, 1)
  monitor.poll()
  begun_s = monitor.now_s
  monitor.now_s += 5
  store.member(1, 1, beat=2)
  monitor.poll()
  assert monitor.view.beat_s == {0: begun_s, 1: begun_s + 5}


def test_members_are_read_less_often_than_commits(monitor, store, monkeypatch):
  monkeypatch.setattr(monitor_lib, "_MEMBERS_EVERY_S", 0.5)
  store.commit(0)
  monitor.poll()
  store.member(0, 1)
  store.commit(2)
  assert monitor.poll() and monitor.view.members == {}
  monitor.now_s += 1
  monitor.poll()
  assert set(monitor.view.members) == {0}


def test_who_merges_is_known_by_the_lease(monitor, store):
  store.commit(0)
  monitor.poll()
  assert monitor.view.syncer_pids.get(0, 0) == 0
  for host, pid, known in (
    (workplace.host(), 7, 7),
    (workplace.host(), 8, 8),
    ("elsewhere", 9, 0),  # its numbers mean nothing here
  ):
    store[keys.lease(0)] = messages.encode(Lease(1, "n", host, pid, 0))
    monitor._members_s = 0.0
    monitor.poll()
    assert monitor.view.syncer_pids.get(0, 0) == known
