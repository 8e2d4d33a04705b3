"""Child processes: their logs, their journal, and no orphan."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from ddiloco.live import log
from ddiloco.live.children import PARENT_VARIABLE, Child, Journal
from tests.live.processes import DEADLINE_S, ROOT, wait_for


@pytest.fixture
def journal(tmp_path):
  return Journal(tmp_path)


@contextlib.contextmanager
def started(child, journal):
  child.start(journal)
  try:
    yield child
  finally:
    if child.process is not None:
      child.process.kill()
      child.process.wait()


def python(tmp_path, script, **options):
  """A child that runs a script, without the time `site` takes."""
  arguments = ["-S", "-c", script]
  return Child("learner 3", arguments, tmp_path / "logs/x.log", **options)


def ended(child, journal):
  code = wait_for(
    "end of the process",
    lambda: [c] if (c := child.poll(journal)) is not None else [],
    DEADLINE_S,
  )
  return code[0]


def test_the_journal_is_one_object_a_line(tmp_path, journal):
  journal.write("start", who="syncer", pid=7)
  journal.write("exit", who="syncer", pid=7, code=-9)
  lines = (tmp_path / "launch.jsonl").read_text().splitlines()
  first, second = map(json.loads, lines)
  assert 0 < first.pop("unix_ns") <= second.pop("unix_ns")
  assert first == {"what": "start", "who": "syncer", "pid": 7}
  assert second == {"what": "exit", "who": "syncer", "pid": 7, "code": -9}


def test_the_journal_is_read_by_kind_whatever_lies_in_it(tmp_path, journal):
  assert journal.lines("fault") == []
  journal.write("fault", n=1)
  with open(tmp_path / "launch.jsonl", "ab") as file:
    file.write(b'{"what": "fault", "n"\n[]\n\xff\n\n')
  journal.write("start", n=2)
  journal.write("fault", n=3)
  assert [line["n"] for line in journal.lines("fault")] == [1, 3]


def test_a_full_disk_costs_a_line_not_the_launcher(tmp_path, monkeypatch):
  (tmp_path / "launch.jsonl").symlink_to("/dev/full")
  warned = []
  monkeypatch.setattr(
    log.logger, "warning", lambda *a: warned.append(a[0] % a[1:])
  )
  Journal(tmp_path).write("exit", who="syncer")
  assert len(warned) == 1 and "No space left" in warned[0]


def test_output_goes_to_the_log_over_all_lives(tmp_path, journal):
  script = (
    "import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"
  )
  child = python(tmp_path, script)
  for _ in range(2):
    with started(child, journal):
      assert child.running and child.restart_s is None
      assert ended(child, journal) == child.code == 5
    assert not child.running and child.poll(journal) is None
  assert sorted(child.log.read_text().split()) == ["err"] * 2 + ["out"] * 2
  assert [line["code"] for line in journal.lines("exit")] == [5, 5]
  pids = [line["pid"] for line in journal.lines("start")]
  assert pids == [line["pid"] for line in journal.lines("exit")]


def test_signals_reach_it_and_are_no_error_without_it(tmp_path, journal):
  child = python(tmp_path, "import time; time.sleep(600)")
  child.send(signal.SIGTERM)
  with started(child, journal):
    child.send(signal.SIGKILL)
    assert ended(child, journal) == -signal.SIGKILL
    child.send(signal.SIGTERM)


def test_last_words_are_the_end_of_the_log(tmp_path, journal):
  child = python(tmp_path, "print(*range(20), sep='\\n')")
  assert child.last_words() == ""
  with started(child, journal):
    ended(child, journal)
  assert child.last_words(2) == "18\n19"
  assert child.last_words().splitlines()[0] == "14"


def test_a_nice_child_is_nice_and_keeps_its_process_id(tmp_path, journal):
  child = python(tmp_path, "import os; print(os.nice(0), os.getpid())")
  polite = python(tmp_path, child.arguments[-1], niceness=7)
  with started(polite, journal):
    pid = polite.process.pid
    ended(polite, journal)
  niceness = min(os.nice(0) + 7, 19)
  assert polite.last_words(1) == f"{niceness} {pid}"


@pytest.mark.parametrize(
  "name, learner",
  [("learner 0", 0), ("learner 12", 12), ("syncer", None), ("evaluator", None)],
)
def test_learners_have_numbers(tmp_path, name, learner):
  assert Child(name, [], tmp_path / "log").learner == learner


FAITHFUL = """
import sys, time
from ddiloco.live.children import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(600)
"""

LAUNCHER = """
import pathlib, sys, time
from ddiloco.live.children import Child, Journal
here = pathlib.Path(sys.argv[1])
Child("learner 0", ["-c", sys.argv[2]], here / "log").start(Journal(here))
time.sleep(600)
"""


def test_children_die_with_a_killed_launcher(tmp_path):
  launcher = subprocess.Popen(
    [sys.executable, "-c", LAUNCHER, str(tmp_path), FAITHFUL], cwd=ROOT
  )
  pid = None
  try:
    path = tmp_path / "log"
    wait_for(
      "child that is ready",
      lambda: path.exists() and "ready" in path.read_text(),
      DEADLINE_S,
    )
    pid = Journal(tmp_path).lines("start")[0]["pid"]
    os.kill(pid, 0)
    launcher.kill()
    launcher.wait()
    wait_for("end of the orphan", lambda: not alive(pid), DEADLINE_S)
  finally:
    launcher.kill()
    launcher.wait()
    if pid is not None and alive(pid):
      os.kill(pid, signal.SIGKILL)


def alive(pid):
  """Whether a process runs: one that nobody has reaped does not."""
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] not in "ZX"
  except OSError:
    return False


@pytest.mark.parametrize(
  "parent, code",
  [
    pytest.param("1", -signal.SIGTERM, id="its launcher died before it asked"),
    pytest.param(None, 0, id="started by hand"),
  ],
)
def test_a_role_looks_for_its_launcher(parent, code):
  script = "from ddiloco.live.children import *; die_with_parent()"
  env = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
  if parent is not None:
    env[PARENT_VARIABLE] = parent
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=ROOT, env=env, timeout=DEADLINE_S
  )
  assert done.returncode == code
