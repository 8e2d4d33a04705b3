"""The fault script on real processes: what hits, and how it is proved."""

import pathlib
import signal
import time

import pytest

from ddiloco.live.children import Child, Journal
from ddiloco.live.faults import FaultRunner
from ddiloco.protocol.faults import parse, to_json
from tests.live.processes import DEADLINE_S, wait_for

IDLE = "import time; time.sleep(600)"
POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
print("ready", flush=True)
time.sleep(600)
"""


class Stage:
  """Two learners and a syncer that only sleep, and a fault runner on them."""

  def __init__(self, tmp_path, script, program=IDLE):
    self.journal = Journal(tmp_path)
    self.children = {
      name: Child(name, ["-S", "-c", program], tmp_path / f"{name}.log")
      for name in ("learner 0", "learner 1", "syncer")
    }
    self.runner = FaultRunner(parse(script), self.children, self.journal)

  def __enter__(self):
    for child in self.children.values():
      child.start(self.journal)
    return self

  def __exit__(self, *error):
    for child in self.children.values():
      if child.process is not None:
        child.process.kill()
        child.process.wait()

  def look(self, round_):
    """What the supervisor does again and again."""
    self.runner.tick(round_)
    for child in self.children.values():
      code = child.poll(self.journal)
      if code is not None:
        self.runner.exited(child.name, code)

  def until(self, what, condition, round_=5):
    def done():
      self.look(round_)
      return condition()

    return wait_for(what, done, DEADLINE_S)

  def proofs(self):
    return self.journal.lines("fault")

  def until_proof(self, round_=5):
    return self.until("proof in the journal", self.proofs, round_)[-1]


def kernel_state(pid):
  text = pathlib.Path(f"/proc/{pid}/stat").read_text()
  return text.rpartition(")")[2].split()[0]


def test_a_kill_is_due_at_its_round_and_proved_by_its_signal(tmp_path):
  with Stage(tmp_path, "at round 5 kill learner 1") as stage:
    child = stage.children["learner 1"]
    pid = child.process.pid
    for _ in range(3):
      stage.look(4)
    assert child.process.poll() is None
    proof = stage.until_proof(round_=7)
    assert stage.runner.finish() == []
    assert stage.children["learner 0"].running
  assert (proof["who"], proof["took_effect"]) == ("learner 1", True)
  assert proof["fault"] == to_json(parse("at round 5 kill learner 1"))[0]
  assert proof["evidence"] == {"at_round": 7, "pid": pid, "exit_code": -9}


def test_a_timed_fault_counts_from_the_first_step(tmp_path):
  with Stage(tmp_path, "at 0.05s kill syncer") as stage:
    stage.look(10**6)
    assert stage.children["syncer"].running and not stage.proofs()
    begun_s = time.monotonic()
    stage.runner.begin()
    assert stage.until_proof()["took_effect"]
    assert time.monotonic() - begun_s >= 0.05


def test_a_kill_for_a_while_says_when_the_victim_was_back(tmp_path):
  with Stage(tmp_path, "at round 1 kill learner 1 for 0.01s") as stage:
    child = stage.children["learner 1"]
    first = child.process.pid
    stage.until("end", lambda: not child.running)
    due_s = stage.runner.restart_s("learner 1")
    assert due_s is not None and stage.runner.restart_s("learner 0") is None
    child.start(stage.journal)
    stage.look(5)
    assert not stage.proofs(), "it is back once it steps again"
    child.ready = True
    evidence = stage.until_proof()["evidence"]
  assert evidence["pid"] == first and evidence["exit_code"] == -9
  assert evidence["back_after_s"] > 0.01
  assert stage.runner.restart_s("learner 1") is None


def test_a_process_that_dies_of_something_else_is_no_proof(tmp_path):
  with Stage(tmp_path, "at round 1 kill learner 1") as stage:
    stage.runner.tick(1)
    stage.runner.exited("learner 1", 1)
    assert stage.proofs()[0]["took_effect"] is False
    assert len(stage.runner.finish()) == 1


def test_a_pause_is_proved_by_the_kernel_and_ends(tmp_path):
  with Stage(tmp_path, "at round 1 pause learner 0 for 0.2s") as stage:
    pid = stage.children["learner 0"].process.pid
    stage.until("stopped process", lambda: kernel_state(pid) == "T")
    proof = stage.until_proof()
    assert proof["took_effect"] and proof["evidence"]["pid"] == pid
    stage.until("running process", lambda: kernel_state(pid) != "T")
    assert stage.children["learner 0"].running


def test_slowness_is_a_duty_cycle_that_ends_running(tmp_path):
  with Stage(tmp_path, "at round 1 slow learner 0 by 3x for 0.6s") as stage:
    pid, states = stage.children["learner 0"].process.pid, set()
    stage.until(
      "proof", lambda: states.add(kernel_state(pid)) or stage.proofs()
    )
    assert states >= {"T", "S"}, "it is stopped for a part of the time only"
    assert stage.proofs()[0]["took_effect"]
    stage.until("running process", lambda: kernel_state(pid) != "T")


def test_slowness_to_the_end_took_effect(tmp_path):
  with Stage(tmp_path, "at round 1 slow learner 0 by 3x") as stage:
    child = stage.children["learner 0"]
    pid = child.process.pid
    stage.until("stopped process", lambda: kernel_state(pid) == "T")
    stage.look(5)
    child.send(signal.SIGKILL)
    assert stage.until_proof()["took_effect"]
    assert stage.runner.finish() == []


def test_a_stop_is_a_polite_request_to_leave(tmp_path):
  with Stage(tmp_path, "at round 1 stop learner 1", POLITE) as stage:
    child = stage.children["learner 1"]
    wait_for("handler", lambda: "ready" in child.last_words(), DEADLINE_S)
    assert not stage.runner.leaves("learner 1")
    proof = stage.until_proof()
    assert stage.runner.leaves("learner 1")
    assert not stage.runner.leaves("learner 0")
  assert proof["took_effect"] and proof["evidence"]["exit_code"] == 4


def test_a_late_joiner_is_absent_until_its_time(tmp_path):
  stage = Stage(tmp_path, "at round 5 start learner 1")
  runner, child = stage.runner, stage.children["learner 1"]
  assert runner.absent_at_first("learner 1")
  assert not runner.absent_at_first("learner 0")
  runner.tick(4)
  assert runner.waiting and child.restart_s is None
  runner.tick(5)
  assert not runner.waiting and child.restart_s <= time.monotonic()
  try:
    child.start(stage.journal)
    runner.tick(6)
    assert stage.proofs() == []
    child.ready = True
    runner.tick(7)
    (proof,) = stage.proofs()
  finally:
    child.process.kill()
    child.process.wait()
  assert proof["took_effect"]
  assert proof["evidence"] == {"at_round": 5, "pid": child.process.pid}


def test_who_has_left_comes_back_and_leaves_again(tmp_path):
  script = (
    "at round 1 stop learner 1; at round 5 start learner 1;"
    "at round 9 stop learner 1"
  )
  with Stage(tmp_path, script, POLITE) as stage:
    runner, child = stage.runner, stage.children["learner 1"]
    assert not runner.absent_at_first("learner 1")
    wait_for("handler", lambda: "ready" in child.last_words(), DEADLINE_S)
    runner.tick(6)
    assert child.running and child.restart_s is None, "it has not left yet"
    stage.until("end", lambda: not child.running, 4)
    child.over = True  # as the supervisor notes
    assert runner.leaves("learner 1")
    stage.look(6)
    assert child.restart_s is not None and not child.over
    assert not runner.leaves("learner 1")
    child.start(stage.journal)
    child.ready = True
    stage.until("two proofs", lambda: len(stage.proofs()) == 2, 6)
    stage.until("three proofs", lambda: len(stage.proofs()) == 3, 9)
    assert runner.leaves("learner 1") and runner.finish() == []
  assert all(proof["took_effect"] for proof in stage.proofs())


def test_a_fault_waits_for_something_to_hit(tmp_path):
  stage = Stage(tmp_path, "at round 1 kill syncer")
  stage.look(9)
  with stage:
    assert stage.until_proof(10)["evidence"]["at_round"] == 10


def test_a_fault_that_was_never_due_took_no_effect(tmp_path):
  script = "at round 50 kill learner 0; at 9h pause syncer for 1s"
  with Stage(tmp_path, script) as stage:
    stage.runner.begin()
    stage.look(49)
    idle = stage.runner.finish()
  assert len(idle) == 2 and "50" in idle[0]
  for proof in stage.proofs():
    assert proof["took_effect"] is False
    assert proof["evidence"] == {"why": "the run ended before it was due"}


def test_a_resumed_run_does_not_repeat_what_was_proved(tmp_path):
  twice = "at round 1 kill learner 0; at round 2 kill learner 1"
  with Stage(tmp_path, twice) as stage:
    stage.until("both proofs", lambda: len(stage.proofs()) == 2)
  with Stage(tmp_path, f"{twice}; at round 3 kill syncer") as stage:
    stage.until("third proof", lambda: len(stage.proofs()) == 3)
    assert stage.runner.finish() == []
    for name in ("learner 0", "learner 1"):
      assert stage.children[name].process.poll() is None


def test_an_unproved_fault_is_tried_again(tmp_path):
  script = "at round 50 kill learner 0"
  with Stage(tmp_path, script) as stage:
    stage.runner.finish()
  with Stage(tmp_path, script) as stage:
    assert stage.until("proof", lambda: stage.proofs()[1:], 50)[0][
      "took_effect"
    ]


@pytest.mark.parametrize("what", ["kill", "pause"])
def test_two_faults_on_one_victim_are_told_apart(tmp_path, what):
  more = " for 0.01s" if what == "pause" else ""
  script = f"at round 1 {what} learner 0{more}; at round 9 kill learner 0"
  with Stage(tmp_path, script) as stage:
    child = stage.children["learner 0"]
    stage.until_proof(1)
    if not child.running:
      child.start(stage.journal)
    stage.until("second proof", lambda: len(stage.proofs()) == 2, 9)
  assert [p["took_effect"] for p in stage.proofs()] == [True, True]
