"""Learners that nobody planned join, leave, die and come back in a live run.

The run has a key: whoever has it takes part, and nobody sees it.
"""

import base64
import contextlib
import os
import pathlib
import signal

import pytest

from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.run_key import read
from ddiloco.live.workdir import open_exchange
from ddiloco.protocol import keys, messages, syncer_types, wire
from ddiloco.protocol.messages import Member
from tests.live import processes
from tests.live.live_run_test import SCHEDULE, Evidence
from tests.live.processes import DEADLINE_S, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]

PLANNED, ALL = 2, 8
ROUNDS = 70
KILLED, STOPPED = (2, 3), (4, 5)
BACK = (2, 4)
SECRET = b"it was a dark and stormy key, Nobody knows 17"
FORMS = (SECRET, SECRET.hex().encode(), base64.b64encode(SECRET))


class Run:
  """A launcher with two learners, and six that are started by hand."""

  def __init__(self, commands, folder):
    self.commands, self.workdir = commands, folder / "run"
    self.key, self.other = folder / "key", folder / "other"
    for path, secret in ((self.key, SECRET), (self.other, SECRET[::-1])):
      path.write_bytes(secret)
      path.chmod(0o600)
    url = str(self.workdir / "exchange")
    self.exchange = open_exchange(url, read(str(self.key)))
    self.local = self.start("local")
    self.learners = {}

  def start(self, module, *flags, workdir=None, key="key"):
    workdir = workdir or self.workdir
    flags = [
      *flags,
      *processes.run_flags(
        workdir,
        data_shards=ALL,
        stop_rounds=ROUNDS,
        # Eight of them still have most of two cores to themselves.
        learners_slowdown="(20.0,)",
        # What they do while rounds are held is a lot for one answer.
        sync_outlier_factor=0.0,
      ),
    ]
    if key:
      flags.append(f"--run_key_file={getattr(self, key)}")
    return self.commands.start(module, *flags, workdir=workdir)

  def join(self, learner):
    """One with an even number has a workdir of its own, as elsewhere."""
    flags, workdir = [f"--learner={learner}"], None
    if learner % 2 == 0:
      workdir = self.workdir.parent / f"machine-{learner}"
      flags.append(f"--exchange={self.workdir / 'exchange'}")
    self.learners[learner] = self.start("learner", *flags, workdir=workdir)

  def members(self):
    return {
      keys.member_life(key): messages.decode(
        Member, self.exchange.get(key).value
      )
      for key in self.exchange.list(keys.MEMBERS)
    }

  def wait_until_they_step(self, *lives):
    def stepping():
      members = self.members()
      return all(life in members and members[life].steps for life in lives)

    wait_for(f"steps of {lives}", stepping, DEADLINE_S)

  def wait_until_counted(self, *lives):
    missing = set(lives)

    def counted():
      for key in self.exchange.list(keys.COMMITS)[-2 * SCHEDULE.interval :]:
        with contextlib.suppress(wire.WireError):  # swept meanwhile
          data = self.exchange.get(key).value
          commit = messages.decode(messages.Commit, data)
          missing.difference_update(
            (item.learner, item.incarnation) for item in commit.counted
          )
      return not missing

    wait_for(f"answers of {lives}", counted, DEADLINE_S)

  @contextlib.contextmanager
  def rounds_held(self):
    """Starts take as long as they take; no round goes by meanwhile."""
    (pid,) = [
      line["pid"]
      for line in processes.journal(self.workdir)
      if (line["what"], line.get("who")) == ("start", "syncer")
    ]
    os.kill(pid, signal.SIGSTOP)
    try:
      yield
    finally:
      os.kill(pid, signal.SIGCONT)


def test_learners_come_and_go(tmp_path):
  with processes.commands_in(tmp_path) as commands:
    run = Run(commands, tmp_path)
    run.wait_until_they_step((0, 1), (1, 1))
    joiners = range(PLANNED, ALL)
    with run.rounds_held():
      for learner in joiners:
        run.join(learner)
      run.wait_until_they_step(*((m, 1) for m in joiners))
      check_processes(tmp_path)
    run.wait_until_counted(*((m, 1) for m in range(ALL)))
    with run.rounds_held():
      for learner in KILLED:
        run.learners[learner].process.kill()
      for learner in STOPPED:
        run.learners[learner].process.terminate()
      for learner in STOPPED:
        assert run.learners[learner].finish() == 4
      for learner in BACK:
        run.join(learner)
      check_outsiders(run)
      run.wait_until_they_step(*((m, 2) for m in BACK))
    assert run.local.finish() == 0, run.local.explain()
    for learner, command in run.learners.items():
      expected = {3: -signal.SIGKILL, 5: 4}.get(learner, 0)
      assert command.finish() == expected, command.stderr
    assert processes.processes_of(tmp_path) == {}, "all end by themselves"
    check_history(run)
    check_what_is_left(run)


def check_processes(folder):
  """Nothing that other users may see of a process tells the key."""
  found = processes.processes_of(folder)
  assert len(found) >= 1 + 1 + ALL  # the launcher, the syncer, the learners
  for pid in found:
    for name in ("cmdline", "environ"):
      with contextlib.suppress(OSError):  # it has ended
        data = pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
        assert not any(form in data for form in FORMS), (pid, name)


def check_outsiders(run):
  learner = run.start("learner", "--learner=7", key=None)
  syncer = run.start("syncer", key="other")
  for role, words in (
    (learner, "it is sealed by a run key. Give --run_key_file."),
    (syncer, f"sealed by another run key than {run.other}"),
  ):
    assert role.finish() == 2, role.explain()
    assert role.stderr.splitlines()[-1].startswith("error: the run in ")
    assert words in role.stderr


def check_history(run):
  evidence = Evidence(run.workdir, run.exchange)
  summary = evidence.summary
  assert (summary["status"], summary["rounds"]) == ("completed", ROUNDS)
  assert summary["params_digest"] == evidence.params_digest
  assert not [w for w in summary["warnings"] if "tape" in w]
  evidence.check_tokens()
  page = (run.workdir / "report.html").read_text()
  accounts = summary["ledger"]["learners"]
  assert sorted(accounts) == [str(m) for m in range(ALL)]
  for m in range(ALL):
    assert f"learner {m}" in page and accounts[str(m)]["merged"] > 0
    joined = f"learner {m}, life 1, has joined on" in run.local.stderr
    assert joined == (m >= PLANNED), run.local.stderr
  counted = {
    (item.learner, item.incarnation)
    for life in evidence.lives["syncer"]
    for merge in life.commands(syncer_types.Merge)
    for item in merge.counted
  }
  assert counted == {(m, 1) for m in range(ALL)} | {(m, 2) for m in BACK}


def check_what_is_left(run):
  raw = TensorStoreExchange(run.exchange.url)
  names = raw.list("")
  rooms = {name.split("/")[0] for name in names}
  assert rooms >= {"commit", "lease", "members", "state", "tape"}
  for name in names:
    assert raw.get(name).value.startswith(b"ddiloco-sealed 1 "), name
  for path in run.workdir.parent.rglob("*"):
    if path.is_file() and path != run.key:
      data = path.read_bytes()
      assert not any(form in data for form in FORMS), path
