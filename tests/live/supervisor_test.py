"""The supervisor's policy, on processes that only do what a case needs."""

import os
import signal

import pytest

from ddiloco.engine.ports import Item
from ddiloco.live import supervisor as supervisor_lib
from ddiloco.live.children import Child, Journal
from ddiloco.live.supervisor import Supervisor
from ddiloco.protocol import keys, messages
from ddiloco.protocol.faults import parse
from ddiloco.protocol.messages import Member
from ddiloco.types import Exit, Status
from tests.live.faults_live_test import kernel_state
from tests.lm.tiny import tiny_config

IDLE = "import time; time.sleep(600)"
# Says when it is told to end, and ends as a role does then.
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""
DONE = ""
# A syncer whose run is complete once the test says so.
UNTIL_TOLD = """
import os, sys, time
while not os.path.exists("{end}"):
  time.sleep(0.01)
"""


def fails(code, words="the last words"):
  return (
    f"import sys; print('the first words'); print({words!r}); sys.exit({code})"
  )


class World:
  """A supervisor, the scripts of its roles, and an exchange that it reads.

  The exchange is in memory: a learner's record is there while its process
  runs. `watch` is called at every look, so that cases need no threads.
  """

  def __init__(
    self, tmp_path, *, faults="", quorum=1, learners=2, shards=1, **live
  ):
    self.workdir, self.end = tmp_path, tmp_path / "end"
    self.scripts = {f"learner {i}": IDLE for i in range(learners)}
    self.scripts["syncer"] = UNTIL_TOLD.format(end=self.end)
    self.scripts["evaluator"] = DONE
    self.ready = set(self.scripts)
    self.watch = lambda: None
    self.others = {}  # learners that are nobody's child: beat, left
    live = {"restart_limit": 2, "restart_backoff_s": 0.01} | live
    self.config = tiny_config(
      str(tmp_path),
      learners={"count": learners},
      sync={"quorum_min": quorum},
      stop={"rounds": 100},
      syncer={"shards": shards},
      live=live,
    )
    self.faults = parse(faults) if faults else ()
    self.journal = Journal(tmp_path)
    self.supervisor = None

  def run(self):
    self.supervisor = Supervisor(
      self.config,
      self.faults,
      workdir=self.workdir,
      exchange=self,
      arguments=(),
    )
    status = self.supervisor.run()
    for child in self.supervisor.children.values():
      assert not child.running, "nothing may be left behind"
    (end,) = self.journal.lines("end")
    assert end["status"] == status
    return status, self.supervisor.exit

  def roles(self, config, workdir, arguments):
    return [
      Child(name, ["-S", "-c", script], workdir / f"{name}.log")
      for name, script in self.scripts.items()
    ]

  def child(self, name):
    return self.supervisor.children[name]

  def complete(self):
    self.end.touch()

  def when(self, condition, action):
    """Acts at the first look at which the condition holds."""
    acted = []

    def watch():
      if not acted and condition():
        acted.append(True)
        action()

    self.watch = watch

  def lines(self, what, who=None):
    return [e for e in self.journal.lines(what) if who in (None, e.get("who"))]

  # What a monitor asks of an exchange.

  def get(self, key):
    life = keys.member_life(key)
    if life is None:
      self.watch()
      return None
    if life[0] in self.others:
      beat, left = self.others[life[0]]
      member = Member("run", *life, "n", "far", 7, beat, 0, 9, 90, 18, left)
      return Item(messages.encode(member), b"generation")
    pid = self.child(f"learner {life[0]}").process.pid
    member = Member("run", *life, "nonce", "host", pid, 1, 0, 9, 90, 18, False)
    return Item(messages.encode(member), b"generation")

  def list(self, prefix):
    return [
      keys.member(child.learner, 1)
      for child in self.supervisor.children.values()
      if prefix == keys.MEMBERS
      and child.learner is not None
      and child.running
      and child.name in self.ready
    ] + [keys.member(i, 1) for i in self.others if prefix == keys.MEMBERS]


@pytest.fixture
def world(tmp_path, monkeypatch):
  """Makes worlds; signal handlers are what they were afterwards."""
  monkeypatch.setattr("ddiloco.live.monitor._MEMBERS_EVERY_S", 0.0)
  monkeypatch.setattr(supervisor_lib, "_STOP_S", 1.0)
  handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

  def make(**options):
    made = World(tmp_path, **options)
    monkeypatch.setattr(supervisor_lib, "_roles", made.roles)
    return made

  yield make
  for number, handler in handlers.items():
    signal.signal(number, handler)


def test_a_learner_that_crashes_again_and_again_is_given_up(world, capsys):
  world = world(quorum=2)
  world.scripts["learner 1"] = fails(1)
  assert world.run() == (Status.FAILED, Exit.FAILED)
  assert len(world.lines("start", "learner 1")) == 3  # and 2 restarts
  assert [e["who"] for e in world.lines("give_up")] == ["learner 1"]
  reason = world.lines("end")[0]["reason"]
  assert "1 learners are left where sync.quorum_min = 2" in reason
  assert "learner 1" in reason and "learner 0" not in reason
  said = capsys.readouterr().err
  for words in (
    "learner 1 failed with exit code 1 at round 0; it is restarted in 0.0 s (1",
    "(2 of 2), the others go on",
    "failed with exit code 1 3 times and is given up (live.restart_limit)",
    "the first words\nthe last words",
    str(world.child("learner 1").log),
  ):
    assert words in said
  assert len(world.lines("start", "learner 0")) == 1


def test_the_delay_before_a_restart_doubles(world):
  world = world(restart_backoff_s=0.05, quorum=2)
  world.scripts["learner 1"] = fails(1)
  world.run()
  started = [e["unix_ns"] for e in world.lines("start", "learner 1")]
  exited = [e["unix_ns"] for e in world.lines("exit", "learner 1")]
  assert started[1] - exited[0] >= 0.05e9
  assert started[2] - exited[1] >= 0.10e9


def test_the_others_go_on_when_one_is_given_up(world):
  world = world(quorum=1)
  world.scripts["learner 1"] = fails(1)
  world.when(lambda: world.lines("give_up"), world.complete)
  assert world.run() == (Status.COMPLETED, Exit.OK)


def test_learners_elsewhere_count_for_the_quorum(world, capsys):
  world = world(quorum=2)
  world.scripts["learner 1"] = fails(1)
  looks, since = [], []

  def watch():
    looks.append(1)
    world.others[5] = (len(looks), False)
    if world.lines("give_up"):
      since.append(1)
    if len(since) == 5:  # four looks later the session still goes on
      world.complete()

  world.watch = watch
  assert world.run() == (Status.COMPLETED, Exit.OK)
  assert "learner 5, life 1, has joined on far" in capsys.readouterr().err


@pytest.mark.parametrize("left, dead_after_s", [(True, 1e6), (False, 0.3)])
def test_a_learner_elsewhere_that_is_gone_does_not(
  world, capsys, left, dead_after_s
):
  world = world(quorum=2, dead_after_s=dead_after_s, heartbeat_s=0.1)
  world.scripts["learner 1"] = fails(1)
  world.others[5] = (1, False)

  def leave():
    world.others[5] = (2, left)

  world.when(lambda: world.lines("give_up"), leave)
  assert world.run() == (Status.FAILED, Exit.FAILED)
  assert (
    "1 learners are left where sync.quorum_min = 2"
    in (world.lines("end")[0]["reason"])
  )
  gone = "has left" if left else "is silent"
  assert f"learner 5, life 1, {gone}" in capsys.readouterr().err


def test_a_syncer_that_crashes_again_and_again_ends_the_session(world, capsys):
  world = world()
  world.scripts["syncer"] = fails(1)
  assert world.run() == (Status.FAILED, Exit.FAILED)
  assert len(world.lines("start", "syncer")) == 3
  reason = world.lines("end")[0]["reason"]
  assert reason.startswith("syncer failed with exit code 1 3 times")
  assert reason.endswith("the first words\nthe last words")
  assert f"failed: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize(
  "standby, status", [(False, Status.FAILED), (True, Status.COMPLETED)]
)
def test_every_shard_of_the_syncer_has_somebody(world, standby, status):
  """One that is given up ends the session, unless a standby can follow it."""
  world = world(shards=2)
  world.scripts["syncer 1"] = fails(1)
  if standby:
    world.scripts["standby 1"] = IDLE
  world.when(lambda: world.lines("give_up"), world.complete)
  assert world.run()[0] is status
  assert [line["who"] for line in world.lines("give_up")] == ["syncer 1"]


@pytest.mark.parametrize("who", ["syncer", "learner 0", "learner 1"])
def test_a_user_error_is_passed_on_in_its_own_words(world, capsys, who):
  world = world()
  words = "error: data.path = 'x' does not exist. Name a directory."
  world.scripts[who] = fails(2, words)
  assert world.run() == (Status.FAILED, Exit.USER_ERROR)
  assert len(world.lines("start", who)) == 1, "trying again cannot help"
  assert capsys.readouterr().err.splitlines()[-1] == words


def test_without_an_evaluation_the_run_goes_on(world, capsys):
  world = world()
  world.scripts["evaluator"] = fails(2, "error: nothing to evaluate")
  world.when(lambda: world.lines("exit", "evaluator"), world.complete)
  assert world.run() == (Status.COMPLETED, Exit.OK)
  assert "nothing is evaluated: error: nothing to" in capsys.readouterr().err


def test_a_complete_run_is_evaluated_at_last(world, capsys):
  world = world()
  world.ready = set()  # so no evaluator is started before the end
  world.scripts |= {"syncer": DONE, "learner 0": DONE}
  world.scripts["evaluator"] = "print('measured')"
  assert world.run() == (Status.COMPLETED, Exit.OK)
  assert world.child("evaluator").last_words() == "measured"
  assert world.lines("exit", "evaluator")[0]["code"] == 0
  assert "the run is complete" in capsys.readouterr().err


def test_processes_that_miss_the_end_are_stopped(world):
  world = world()
  world.scripts |= {"learner 0": POLITE, "learner 1": STUBBORN}
  world.when(
    lambda: (
      "deaf" in world.child("learner 1").last_words()
      and world.lines("ready", "learner 0")
    ),
    world.complete,
  )
  assert world.run() == (Status.COMPLETED, Exit.OK)
  codes = {e["who"]: e["code"] for e in world.lines("exit")}
  assert codes["learner 0"] in (4, -signal.SIGTERM)
  assert codes["learner 1"] == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(world, capsys, number):
  world = world()
  world.scripts |= {"learner 0": POLITE, "learner 1": STUBBORN}
  world.when(
    lambda: "deaf" in world.child("learner 1").last_words(),
    lambda: os.kill(os.getpid(), number),
  )
  assert world.run() == (Status.STOPPED, Exit.STOPPED)
  codes = {e["who"]: e["code"] for e in world.lines("exit")}
  assert codes["learner 1"] == -signal.SIGKILL, "after a while to write"
  assert codes["syncer"] == -signal.SIGTERM
  assert f"stopped: {number.name} received" in capsys.readouterr().err
  assert world.lines("end")[0]["reason"] == f"{number.name} received"


def test_a_paused_process_can_be_stopped(world):
  world = world(faults="at 0s pause learner 0 for 9m")

  def paused():
    child = world.child("learner 0")
    return child.running and kernel_state(child.process.pid) == "T"

  world.when(paused, lambda: os.kill(os.getpid(), signal.SIGTERM))
  assert world.run() == (Status.STOPPED, Exit.STOPPED)
  codes = {e["who"]: e["code"] for e in world.lines("exit")}
  assert codes["learner 0"] == -signal.SIGTERM
  assert world.lines("fault")[0]["took_effect"]


@pytest.mark.parametrize(
  "quorum, status", [(1, Status.COMPLETED), (2, Status.FAILED)]
)
def test_a_run_lasts_as_long_as_there_can_be_a_quorum(world, quorum, status):
  world = world(quorum=quorum)
  world.scripts["learner 1"] = fails(4)  # It was asked to leave.
  world.when(lambda: world.lines("exit", "learner 1"), world.complete)
  if status is Status.FAILED:
    world.watch = lambda: None
  assert world.run()[0] is status
  assert len(world.lines("start", "learner 1")) == 1


def test_a_superseded_learner_is_at_work_elsewhere(world, capsys):
  world = world(quorum=2)
  world.scripts["learner 1"] = fails(3, "superseded by life 2 on elsewhere")
  looks = []
  world.when(
    lambda: world.lines("exit", "learner 1") and looks.append(1) or looks[3:],
    world.complete,
  )
  assert world.run() == (Status.COMPLETED, Exit.OK)
  assert len(world.lines("start", "learner 1")) == 1
  assert (
    "learner 1 is not restarted: superseded by life 2 on elsewhere"
    in capsys.readouterr().err
  )


def test_a_superseded_syncer_ends_the_session(world):
  world = world()
  world.scripts["syncer"] = fails(3)
  assert world.run() == (Status.FAILED, Exit.FAILED)
  assert world.lines("end")[0]["reason"] == "another syncer has taken over"


def test_the_second_learner_waits_for_the_first_ones_programs(world):
  world = world(learners=3)
  world.ready = set()
  looks = []

  def watch():
    looks.append({e["who"] for e in world.lines("start")})
    if len(looks) == 5:
      world.ready = {"learner 0", "learner 1", "learner 2"}
    if world.lines("exit", "evaluator"):
      world.complete()

  world.watch = watch
  assert world.run()[0] is Status.COMPLETED
  assert looks[0] == looks[4] == {"syncer", "learner 0"}
  lines = world.lines("start") + world.lines("ready")
  lines.sort(key=lambda line: line["unix_ns"])
  order = [(line["what"], line["who"]) for line in lines]
  first = order.index(("ready", "learner 0"))
  assert order.index(("start", "learner 1")) > first
  assert order.index(("start", "evaluator")) > order.index(
    ("ready", "learner 2")
  )


def test_earlier_restarts_are_forgiven_after_a_healthy_while(
  world, monkeypatch
):
  monkeypatch.setattr(supervisor_lib, "_HEALTHY_S", 0.0)
  world = world(quorum=2)
  world.scripts["learner 1"] = fails(1)
  world.when(lambda: len(world.lines("exit", "learner 1")) > 4, world.complete)
  assert world.run() == (Status.COMPLETED, Exit.OK)
  assert world.lines("give_up") == []


def test_a_scripted_kill_costs_no_restart_and_comes_back_in_time(world, capsys):
  world = world(faults="at 0s kill learner 1 for 0.3s", restart_limit=0)
  world.when(lambda: world.lines("fault"), world.complete)
  assert world.run() == (Status.COMPLETED, Exit.OK)
  (fault,) = world.lines("fault")
  assert fault["took_effect"] and fault["evidence"]["back_after_s"] >= 0.3
  said = capsys.readouterr().err
  assert "learner 1 was killed by SIGKILL, as scripted; the others" in said
  assert "learner 1 is back in process" in said


def test_an_idle_fault_fails_a_session_that_completes(world, capsys):
  world = world(faults="at round 50 kill learner 1")
  world.when(lambda: world.lines("ready", "learner 1"), world.complete)
  assert world.run() == (Status.COMPLETED, Exit.FAILED)
  assert "these faults took no effect: {'at': {'round': 50}" in (
    capsys.readouterr().err
  )


def test_a_journal_that_fails_leaves_no_process_behind(world, tmp_path):
  (tmp_path / "launch.jsonl").mkdir()
  world = world(quorum=2)
  world.scripts["learner 1"] = fails(1)
  world.supervisor = Supervisor(
    world.config, (), workdir=tmp_path, exchange=world, arguments=()
  )
  assert world.supervisor.run() is Status.FAILED
  assert not any(c.running for c in world.supervisor.children.values())
