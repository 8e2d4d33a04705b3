"""Standby syncers: they wait, take over from whoever is gone, and step back."""

import json
import os
import signal

import pytest

from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.learner_types import StepDone
from ddiloco.protocol.messages import Commit, Lease
from ddiloco.protocol.retention import SWEPT
from ddiloco.sim import history as history_lib
from ddiloco.types import Exit
from tests.live import processes
from tests.live.processes import DEADLINE_S, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]
NEVER = 1_000_000  # rounds: these runs are stopped


class Stage:
  """Two learners and two syncers, started by hand."""

  def __init__(self, commands, workdir):
    self.workdir = workdir
    workdir.mkdir()
    self.exchange = TensorStoreExchange(str(workdir / "exchange"))
    self._commands = commands
    self._flags = processes.run_flags(
      workdir, stop_rounds=NEVER, learners_slowdown="(20.0,)"
    )
    self.learners = []
    self.syncers = [self.start("syncer", "--standby")]
    wait_for("run", lambda: processes.newest_round(workdir) >= 0, DEADLINE_S)
    self.syncers.append(self.start("syncer", "--standby"))
    wait_for("standby", self._waits, DEADLINE_S)
    for m in (0, 1):
      self.learners.append(self.start("learner", f"--learner={m}"))
    self.until_round(10)

  def start(self, module, *flags):
    return self._commands.start(
      module, *self._flags, *flags, workdir=self.workdir
    )

  def _waits(self):
    return "waits for the lease" in self.syncers[1].stderr

  def until_round(self, t):
    wait_for(
      f"round {t}",
      lambda: processes.newest_round(self.workdir) >= t,
      DEADLINE_S,
    )

  @property
  def round(self):
    return processes.newest_round(self.workdir)

  def lease(self):
    return messages.decode(Lease, self.exchange.get(keys.lease(0)).value)

  def commits(self):
    """Those whose content is kept, by round."""
    found = {}
    for name in self.exchange.list(keys.COMMITS):
      value = self.exchange.get(name).value
      if value != SWEPT:
        found[keys.commit_round(name)] = value
    return found

  def assert_one_history(self):
    rounds = [keys.commit_round(n) for n in self.exchange.list(keys.COMMITS)]
    assert rounds == list(range(len(rounds)))
    found = self.commits()
    for t, data in found.items():
      if t - 1 in found:
        commit = messages.decode(Commit, data)
        assert commit.previous == wire.sha256(found[t - 1])

  def stop(self):
    """Asks everybody to leave; the syncers last, for nobody waits for them."""
    for group in (self.learners, self.syncers):
      running = [c for c in group if c.process.poll() is None]
      for command in running:
        command.process.terminate()
      for command in running:
        assert command.finish() == Exit.STOPPED, command.explain()


@pytest.fixture
def stage(tmp_path):
  with processes.commands_in(tmp_path) as commands:
    yield Stage(commands, tmp_path / "workdir")


def holder(stage):
  pid = stage.lease().pid
  (command,) = [s for s in stage.syncers if s.process.pid == pid]
  return command


def assert_others_are_refused(stage):
  """A standby of another config, and a second syncer that is no standby."""
  other = stage.start("syncer", "--standby", "--config.codec.up=f32")
  second = stage.start("syncer")
  assert (other.finish(), second.finish()) == (2, 2)
  assert "codec.up = 'f32'" in other.stderr and "'int4'" in other.stderr
  assert "--standby" in second.stderr


def test_a_stopped_syncer_that_wakes_up_writes_on_and_does_no_harm(stage):
  assert_others_are_refused(stage)
  first = holder(stage)
  os.kill(first.process.pid, signal.SIGSTOP)
  t = stage.round
  # On this machine the process is seen to be there: its silence decides.
  stage.until_round(t + 20)
  assert stage.lease().epoch == 2
  os.kill(first.process.pid, signal.SIGCONT)
  wait_for(
    "end of the old holder's life",
    lambda: "life 1 of the syncer ends" in first.stderr,
    DEADLINE_S,
  )
  stage.stop()
  stage.assert_one_history()


def test_the_launcher_keeps_standbys_and_faults_hit_whoever_merges(tmp_path):
  """Of two shards; the one standby takes the place of either."""
  workdir = tmp_path / "workdir"
  with processes.commands_in(tmp_path) as commands:
    run = commands.start(
      "local",
      *processes.run_flags(
        workdir, stop_rounds=80, live_standbys=1, syncer_shards=2
      ),
      "--faults=at round 20 kill syncer 1; at round 50 kill syncer",
      workdir=workdir,
    )
    assert run.finish() == 0, run.explain()
  lines = processes.journal(workdir)
  started = {x["pid"]: x["who"] for x in lines if x["what"] == "start"}
  faults = [x for x in lines if x["what"] == "fault"]
  assert [x["took_effect"] for x in faults] == [True, True]
  hit = [x["evidence"]["pid"] for x in faults]
  assert started[hit[1]] == "syncer"
  lives = history_lib.load(TensorStoreExchange(str(workdir / "exchange"))).lives
  for life in lives:
    if life.learner is not None:  # nobody has lost a step by it
      steps = [r.event for r in life.records if isinstance(r.event, StepDone)]
      assert [step.step for step in steps] == list(range(1, len(steps) + 1))
  merging = {x.incarnation: x.header.pid for x in lives if x.learner is None}
  assert [merging[2], merging[1]] == hit  # an epoch names its shard
  assert {3, 4} <= merging.keys() and started[merging[4]] != started[merging[2]]
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["status"] == "completed" and summary["rounds"] == 80
  told = (workdir / "summary.json").read_text() + run.stdout
  for shard in (0, 1):
    assert f"The syncer's shard {shard} was killed" in told
  # The standby, or the shard's own process if the standby was there first.
  assert f" by {started[merging[4]]};" in told
