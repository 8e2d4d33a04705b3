"""Progress: plain lines by default, a table on a terminal."""

import dataclasses
import io
import time

import pytest
import rich.console

from ddiloco.config import SyncerConfig
from ddiloco.live import console as console_lib
from ddiloco.live.children import Child
from ddiloco.live.console import Progress
from ddiloco.live.monitor import View
from ddiloco.protocol import messages
from ddiloco.protocol.messages import Member
from tests.live.monitor_test import Store
from tests.live.processes import fill, small_disk
from tests.lm.tiny import tiny_config


@pytest.fixture
def clock(monkeypatch):
  """Seconds that only the test moves; the first entry is now."""
  now_s = [5000.0]
  monkeypatch.setattr(console_lib.time, "monotonic", lambda: now_s[0])
  return now_s


@pytest.fixture
def children(tmp_path):
  names = ("syncer", "learner 0", "learner 1")
  return {name: Child(name, [], tmp_path / "log") for name in names}


@pytest.fixture
def progress(children, tmp_path):
  """Opened by the tests, of a run with both limits."""
  return Progress(config(), children, tmp_path)


def config(**stop):
  stop = {"rounds": 50, "tokens": 9000} | stop
  return tiny_config("x", stop=stop, sync={"quorum_min": 2})


def view_of(t, **fields):
  store = Store()
  store.commit(t)
  (data,) = store.values()
  return View(commit=messages.decode(messages.Commit, data), **fields)


def running(child, ready=True):
  child.process = object()
  child.ready = ready


def test_plain_lines_come_every_few_seconds(clock, progress, capsys):
  with progress:
    for _ in range(100):
      clock[0] += 0.5
      progress.update(view_of(7, commit_s=clock[0]))
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 10
  assert lines[0].startswith(
    "[    5 s] round 7/50, 700 of 9,000 tokens, 0 lear"
  )


def test_limits_that_are_not_set_are_not_shown(
  clock, children, capsys, tmp_path
):
  progress = Progress(config(rounds=0), children, tmp_path)
  clock[0] += 5
  progress.update(View())
  line = capsys.readouterr().err
  assert "] round 0, 0 of 9,000 tokens" in line


def test_who_is_starting_is_named(clock, children, progress, capsys):
  running(children["syncer"])
  running(children["learner 0"], ready=False)
  clock[0] += 5
  progress.update(view_of(0, commit_s=clock[0]))
  assert capsys.readouterr().err.endswith("; starting: learner 0, learner 1\n")


@pytest.mark.parametrize(
  "alive, names",
  [(("syncer", "learner 1"), "syncer, learner 1"), ((), "none")],
)
def test_a_run_without_commits_names_who_is_alive(
  clock, children, progress, capsys, alive, names
):
  for name in alive:
    running(children[name])
  view = view_of(7, commit_s=clock[0])
  clock[0] += 30
  progress.update(view)
  assert capsys.readouterr().err.endswith(
    f"; no commit for 30 s: quorum is 2, alive are {names}\n"
  )


def test_a_shard_that_is_down_is_named(clock, children, progress, capsys):
  progress._config = dataclasses.replace(
    progress._config, syncer=SyncerConfig(shards=2)
  )
  children["syncer 1"] = dataclasses.replace(
    children["syncer"], name="syncer 1"
  )
  running(children["syncer"])
  view = view_of(7, commit_s=clock[0])
  clock[0] += 30
  progress.update(view)
  told = capsys.readouterr().err
  assert told.endswith("; no commit for 30 s: syncer 1 is down\n")


def elsewhere(beat_s):
  """Learners of others: 5 shows itself, 6 does not, 7 has left."""
  members = {
    i: Member("run", i, 2, "n", f"host-{i}", 7, 1, 0, 4321, 98765, 0, i == 7)
    for i in (5, 6, 7)
  }
  return {
    "members": members,
    "beat_s": {5: beat_s, 6: beat_s - 1000, 7: beat_s},
  }


def test_learners_elsewhere_are_named_too(clock, children, progress, capsys):
  running(children["learner 1"])
  view = view_of(7, commit_s=clock[0], **elsewhere(clock[0] + 30))
  clock[0] += 30
  progress.update(view)
  assert capsys.readouterr().err.endswith("alive are learner 1, learner 5\n")


def test_a_full_disk_is_named(clock, children, progress, capsys, tmp_path):
  tmp_path.rmdir()
  with small_disk(tmp_path, "2m"):
    fill(tmp_path / "filler")
    view = view_of(7, commit_s=clock[0])
    clock[0] += 30
    progress.update(view)
  assert capsys.readouterr().err.endswith(
    f"; no commit for 30 s: the disk of {tmp_path} is full. Free some space "
    "and the run goes on\n"
  )


def test_messages_come_at_once_and_keep_their_brackets(clock, progress, capsys):
  with progress:
    progress.say("learner 1 [bold]failed[/bold] in /tmp/[x]")
  assert capsys.readouterr().err == (
    "learner 1 [bold]failed[/bold] in /tmp/[x]\n"
  )


@pytest.fixture
def screen(monkeypatch):
  """What a terminal of 100 columns would be sent."""
  output = io.StringIO()
  monkeypatch.setattr(
    console_lib,
    "Console",
    lambda stderr: rich.console.Console(
      file=output, force_terminal=True, width=100
    ),
  )
  return output


def test_a_terminal_shows_a_table_and_keeps_messages(
  children, screen, tmp_path
):
  running(children["learner 0"])
  running(children["learner 1"], ready=False)
  children["syncer"].over = True
  children["learner 1"].restarts = 3
  member = Member("run", 0, 2, "n", "host", 7, 1, 0, 1234, 56789, 0, False)
  view = view_of(7, commit_s=time.monotonic(), members={0: member})
  with Progress(config(), children, tmp_path) as progress:
    progress.update(view)
    progress.say("learner 1 [x] is back")
  shown = screen.getvalue()
  for words in (
    "round 7/50, 700 of 9,000 tokens",
    "1,234",
    "56,789",
    "running",
    "starting",
    "over",
    "learner 1 [x] is back\n",
  ):
    assert words in shown
  assert "\x1b[?25h" in shown, "the cursor is back at the end"


def test_a_terminal_shows_learners_elsewhere(children, screen, tmp_path):
  now_s = time.monotonic()
  with Progress(config(), children, tmp_path) as progress:
    progress.update(view_of(7, commit_s=now_s, **elsewhere(now_s)))
  rows = [line for line in screen.getvalue().splitlines() if "learner" in line]
  shown = {i: row for row in rows for i in (5, 6, 7) if f"learner {i} " in row}
  assert "running on host-5" in shown[5] and "4,321" in shown[5]
  assert "silent" in shown[6] and "left" in shown[7] and "98,765" in shown[7]


def test_the_terminal_is_left_in_order_after_an_error(
  children, screen, tmp_path
):
  with pytest.raises(ZeroDivisionError):
    with Progress(config(), children, tmp_path):
      raise ZeroDivisionError
  assert screen.getvalue().endswith("\x1b[?25h")
