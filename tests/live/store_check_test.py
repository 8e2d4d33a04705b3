"""What a run relies on, tried on stores that keep it and on others."""

import pytest

from ddiloco.config import ConfigError, LiveConfig
from ddiloco.engine.ports import ExchangeRefused
from ddiloco.live import store_check, workdir
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys
from tests.live import stores


@pytest.mark.parametrize("kind", ["memory", "file", "lockfile", "s3"])
def test_stores_that_keep_conditions_pass_and_are_left_as_they_were(
  kind, tmp_path
):
  url = stores.new_url(kind, tmp_path / "exchange")
  locking = {"file_locking": kind} if kind == "lockfile" else {}
  one, other = (TensorStoreExchange(url, **locking) for _ in range(2))
  assert store_check.fault_of(one, other) == ""
  assert one.list("") == []
  if (tmp_path / "exchange").exists():
    assert list((tmp_path / "exchange").iterdir()) == []


def test_a_server_that_ignores_conditions_is_refused(tmp_path):
  url = stores.new_url("gs", tmp_path)
  with pytest.raises(ConfigError, match="not safe.*created again.*conditional"):
    workdir.check_exchange(workdir.open_exchange(url), LiveConfig())
  assert TensorStoreExchange(url).list("") == []


class _Bad:
  """Passes everything on, but for one method that does something else."""

  def __init__(self, store, name, instead):
    self._store, self._name, self._instead = store, name, instead

  def __getattr__(self, name):
    if name == self._name:
      return lambda *args, **options: self._instead(self._store, *args)
    return getattr(self._store, name)


def overwrite(store, key, value, generation=None):
  store.put(key, value)
  return store.get(key).generation


BAD = {
  "created again": ("put_if_absent", overwrite),
  "2 won": ("put_if_absent", lambda store, key, value: value != b"late"),
  "could not be created": ("compare_and_swap", lambda *args: None),
  "an older one only": ("compare_and_swap", overwrite),
  "lacked": ("list", lambda store, prefix: []),
  "still there": ("delete", lambda store, key: None),
}


@pytest.mark.parametrize("fault", BAD)
def test_every_broken_promise_is_named(fault, tmp_path):
  store = TensorStoreExchange(str(tmp_path / "exchange"))
  bad = _Bad(store, *BAD[fault])
  assert fault in store_check.fault_of(bad, bad)
  assert store.list("") == []


@pytest.mark.parametrize(
  "locking, remedy",
  [("os", "file_locking=lockfile, or"), ("lockfile", "or a bucket")],
)
def test_a_file_system_without_locks_names_what_to_try(
  monkeypatch, tmp_path, locking, remedy
):
  def fault_of(one, other):
    raise ExchangeRefused(
      'UNIMPLEMENTED: Failed to acquire lock on file: "k.__lock" '
      "[os_error_code='38']"
    )

  monkeypatch.setattr(store_check, "fault_of", fault_of)
  with pytest.raises(ConfigError, match=f"cannot be locked.*{remedy}"):
    workdir.check_exchange(
      workdir.open_exchange(str(tmp_path)), LiveConfig(file_locking=locking)
    )


def test_a_store_that_cannot_be_written_says_so():
  bucket = stores.new_bucket()
  exchange = workdir.open_exchange(stores.s3_url(bucket))
  stores.delete_bucket(bucket)
  with pytest.raises(ConfigError, match="cannot be used.*NoSuchBucket"):
    workdir.check_exchange(exchange, LiveConfig())


def test_a_store_that_has_a_run_was_checked_before(monkeypatch, tmp_path):
  monkeypatch.setattr(store_check, "fault_of", None)
  exchange = workdir.open_exchange(str(tmp_path / "exchange"))
  exchange.put(keys.commit(0), b"")
  workdir.check_exchange(exchange, LiveConfig())
