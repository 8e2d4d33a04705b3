"""Who may use a workdir, and which config continues its run."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from ddiloco.config import ConfigError
from ddiloco.live import workdir as workdir_lib
from ddiloco.protocol import keys
from tests.live.processes import DEADLINE_S, ROOT
from tests.lm.tiny import tiny_config

HOLD = """
import pathlib, sys, time
from ddiloco.live import workdir
held = workdir.lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_one_launcher_at_a_time(tmp_path):
  with workdir_lib.lock(tmp_path):
    with pytest.raises(ConfigError, match="in use by another launch.local"):
      workdir_lib.lock(tmp_path)
  with workdir_lib.lock(tmp_path):
    pass


def test_a_killed_launcher_leaves_the_workdir_free(tmp_path):
  holder = subprocess.Popen(
    [sys.executable, "-c", HOLD, str(tmp_path)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
  )
  try:
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match="in use"):
      workdir_lib.lock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait(DEADLINE_S)
    with workdir_lib.lock(tmp_path):
      pass
  finally:
    holder.kill()
    holder.communicate()


def files(folder):
  return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_resolved_config_is_kept_and_read_back(tmp_path):
  config = tiny_config("x")
  assert workdir_lib.settle_config(tmp_path, config, started=False) == {}
  assert workdir_lib.read_config(tmp_path) == config
  stored = json.loads((tmp_path / "config.json").read_text())
  assert stored["sha256"] == config.digest
  assert list(files(tmp_path)) == [tmp_path / "config.json"]


def test_what_may_change_on_resume_is_returned_and_kept(tmp_path):
  workdir_lib.settle_config(tmp_path, tiny_config("x"), started=False)
  later = tiny_config("x", stop={"rounds": 9}, learners={"count": 3})
  changes = workdir_lib.settle_config(tmp_path, later, started=True)
  assert changes == {"stop.rounds": (1, 9), "learners.count": (2, 3)}
  assert workdir_lib.read_config(tmp_path) == later


@pytest.mark.parametrize(
  "groups, key",
  [
    ({"model": {"width": 64}}, "model.width = 64"),
    ({"sync": {"interval_steps": 48}}, "sync.interval_steps = 48"),
    ({"data": {"shards": 9}}, "data.shards = 9"),
    ({"inner": {"learning_rate": 0.5}}, "inner.learning_rate = 0.5"),
  ],
)
def test_another_runs_config_is_refused_and_nothing_changes(
  tmp_path, groups, key
):
  workdir_lib.settle_config(tmp_path, tiny_config("x"), started=False)
  before = files(tmp_path)
  with pytest.raises(ConfigError, match=key) as caught:
    workdir_lib.settle_config(
      tmp_path, tiny_config("x", **groups), started=True
    )
  assert "cannot change on resume" in str(caught.value)
  assert files(tmp_path) == before


def test_a_run_that_never_started_binds_nobody(tmp_path):
  workdir_lib.settle_config(tmp_path, tiny_config("typo"), started=False)
  config = tiny_config("right")
  assert workdir_lib.settle_config(tmp_path, config, started=False) == {}
  assert workdir_lib.read_config(tmp_path) == config


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "{}", '{"config": 3}', '{"config": {"sed": 1}}']
)
def test_a_damaged_config_is_named(tmp_path, text):
  path = tmp_path / "config.json"
  path.write_text(text)
  for use in (
    lambda: workdir_lib.settle_config(tmp_path, tiny_config("x"), started=True),
    lambda: workdir_lib.read_config(tmp_path),
  ):
    with pytest.raises(ConfigError, match="config.json is damaged"):
      use()
  assert path.read_text() == text


def test_a_workdir_without_a_run_says_so(tmp_path):
  with pytest.raises(ConfigError, match="holds no run .* or give --config"):
    workdir_lib.read_config(tmp_path)


def test_the_exchange_is_in_the_workdir_unless_told_otherwise(tmp_path):
  inside = workdir_lib.exchange_url(tmp_path, "")
  assert inside == str(tmp_path / "exchange")
  assert workdir_lib.exchange_url(pathlib.Path("runs"), "").startswith("/")
  assert workdir_lib.exchange_url(tmp_path, "gs://b/p") == "gs://b/p"


@pytest.mark.parametrize("url", ["ftp://x", "file://x", "memory://x", "gs:/x"])
def test_a_url_that_names_no_shared_store_is_refused(url):
  with pytest.raises(ConfigError, match=f"--exchange.*{url}"):
    workdir_lib.open_exchange(url)


def test_a_run_has_started_once_its_first_commit_is_there(tmp_path):
  exchange = workdir_lib.open_exchange(str(tmp_path / "exchange"))
  assert not workdir_lib.has_run(exchange)
  assert not (tmp_path / "exchange").exists(), "looking changes nothing"
  exchange.put(keys.lease(0), b"")
  assert not workdir_lib.has_run(exchange)
  exchange.put(keys.commit(0), b"")
  assert workdir_lib.has_run(exchange)


def test_an_exchange_that_cannot_be_read_is_a_user_error(tmp_path):
  (tmp_path / "file").write_text("")
  exchange = workdir_lib.open_exchange(str(tmp_path / "file"), deadline_s=1.0)
  with pytest.raises(ConfigError, match="--exchange cannot be read.*not a dir"):
    workdir_lib.has_run(exchange)
