"""Faults on real processes that only sleep: what hits, heals and is proved."""

import os
import random
import re
import signal
import time
import types

import pytest

from ddiloco.chaos import clocks, defects, garbage, processes
from ddiloco.chaos.kinds import Draw
from ddiloco.chaos.runner import ChaosRunner, told
from ddiloco.chaos.stage import Job, Stage, TooLate, file_limit
from ddiloco.live.children import Child, Journal, is_stopped
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.monitor import View
from ddiloco.protocol import keys, messages
from ddiloco.protocol.fields import replace
from ddiloco.protocol.messages import Lease, Member
from tests.live.processes import DEADLINE_S, wait_for
from tests.sim.small import make_config

SYNCERS = ("syncer", "syncer 1")
IDLE = "import time; time.sleep(600)"
FAILS = "import sys; print('the last words'); sys.exit(1)"
DIVERGES = """
import signal, sys, time
def end(*_):
  print("E 10:00:00 learner 0 stops: its parameters are not finite")
  sys.exit(1)
signal.signal(signal.SIGUSR1, end)
print("ready", flush=True)
time.sleep(600)
"""


class World:
  """A session whose two learners and syncer sleep, and a runner on it."""

  def __init__(self, tmp_path, *kinds, scripts=None, seed="1", shards=1):
    self.journal = Journal(tmp_path)
    scripts = scripts or {}
    self.children = {
      name: Child(
        name,
        ["-S", "-c", scripts.get(name, IDLE)],
        tmp_path / f"{name}.log",
      )
      for name in ("learner 0", "learner 1", *SYNCERS[:shards])
    }
    store = TensorStoreExchange(str(tmp_path / "exchange"))
    self.view = View()
    self.stage = Stage(
      config=make_config(
        live={"heartbeat_s": 0.2, "lease_s": 0.4}, syncer={"shards": shards}
      ),
      workdir=tmp_path,
      store=store,
      raw=store,
      arguments=(),
      directory=tmp_path / "exchange",
      session=self,
    )
    draws = [Draw(i, 0.0, kind, f"{seed}/{i}") for i, kind in enumerate(kinds)]
    self.said = []
    self.runner = ChaosRunner(self.stage, draws, say=self.said.append)

  def at_work(self, actor):
    return actor

  def __enter__(self):
    for child in self.children.values():
      child.start(self.journal)
      child.ready = True
    self.runner.begin()
    return self

  def __exit__(self, *error):
    for child in self.children.values():
      if child.process is not None:
        child.process.kill()
        child.process.wait()

  def look(self):
    """What the supervisor does again and again."""
    self.runner.tick(0)
    for child in self.children.values():
      code = child.poll(self.journal)
      if code is not None:
        self.runner.exited(child.name, code)
        child.restart_s = self.runner.restart_s(child.name)
      elif not child.running and child.restart_s is not None:
        child.start(self.journal)
        child.ready = True

  def until(self, what, condition):
    def done():
      self.look()
      return condition()

    return wait_for(what, done, DEADLINE_S)

  def proof(self):
    """The line of the journal once the first fault is over."""
    self.until("proof", lambda: self.journal.lines("fault"))
    return self.journal.lines("fault")[0]

  def put(self, key, record):
    self.stage.raw.put(key, messages.encode(record))


def only_learners(monkeypatch):
  monkeypatch.setattr(processes, "SYNCER", "learner")
  monkeypatch.setattr(processes, "STANDBY", "learner")
  monkeypatch.setattr(processes, "EVALUATOR", "learner")


def test_a_kill_is_proved_by_its_signal_and_comes_back(tmp_path, monkeypatch):
  only_learners(monkeypatch)
  with World(tmp_path, "kill") as world:
    proof = world.proof()
    child = world.children[proof["who"]]
    assert child.process.pid != proof["evidence"]["pid"]
    assert world.runner.finish() == [] and world.runner.ended == []
  assert proof["took_effect"] and proof["evidence"]["exit_code"] == -9
  assert proof["evidence"]["back_after_s"] > 0
  assert proof["fault"]["what"] == "kill"
  assert world.runner.counts() == {"kill": {"injected": 1, "took_effect": 1}}


def test_what_the_end_cuts_short_is_journalled_and_not_counted(
  tmp_path, monkeypatch
):
  only_learners(monkeypatch)
  with World(tmp_path, "nan") as world:
    monkeypatch.setattr(processes.defects, "NAN", 0)  # nothing will happen
    world.until("begin", lambda: world.said)
    world.look()
    assert world.runner.counts()["nan"]["injected"] == 1
    assert world.runner.finish() == []
  assert world.runner.counts() == {}
  (line,) = world.journal.lines("fault")
  assert not line["took_effect"]
  assert line["evidence"]["why"] == "the run ended before its proof"


def test_a_pause_is_proved_by_the_kernel_and_over(tmp_path, monkeypatch):
  only_learners(monkeypatch)
  with World(tmp_path, "pause") as world:
    world.until("begin", lambda: world.said)
    job = world.runner.jobs[0]
    pid = job.evidence["pid"]
    world.until("stopped process", lambda: job.took_effect)
    assert is_stopped(pid)
    world.runner.heal()
    wait_for("running process", lambda: not is_stopped(pid), DEADLINE_S)
    assert world.runner.finish() == []
  assert world.journal.lines("fault")[0]["took_effect"]


def test_a_slow_learner_runs_and_stands_and_runs_again(tmp_path, monkeypatch):
  monkeypatch.setattr(
    random.Random, "uniform", lambda self, a, b: min(b, 6) / 4 + 1
  )
  with World(tmp_path, "slow") as world:
    proof = world.proof()
    pid = proof["evidence"]["pid"]
    wait_for("running process", lambda: not is_stopped(pid), DEADLINE_S)
  assert proof["took_effect"]


def test_a_full_disk_is_the_kernels_limit_and_is_lifted(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, "SYNCER", "learner")
  monkeypatch.setattr(random.Random, "uniform", lambda self, a, b: a / 4)
  with World(tmp_path, "full") as world:
    for i in (0, 1):
      pid = world.children[f"learner {i}"].process.pid
      member = Member("run", i, 1, "", "", pid, 3, 0, 1, 64, 2, False)
      world.view.members[i] = member
      world.put(keys.member(i, 1), member)
    world.until("begin", lambda: world.runner.jobs[0].begun_s)
    pid = world.runner.jobs[0].evidence["pid"]
    assert file_limit(pid) == 0
    proof = world.proof()
    assert file_limit(pid) == file_limit(os.getpid())
  assert proof["took_effect"] and proof["evidence"]["file_bytes_max"] == 0
  assert proof["evidence"]["silent_s"] > 0


def test_a_beat_that_goes_on_is_no_full_disk(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, "LEARNER", "syncer")
  monkeypatch.setattr(random.Random, "uniform", lambda self, a, b: a / 4)
  with World(tmp_path, "full") as world:
    pid = world.children["syncer"].process.pid
    beats = iter(range(10**6))

    def beat():
      world.put(keys.lease(0), Lease(1, "", "", pid, next(beats)))
      return world.journal.lines("fault")

    world.until("proof", beat)
    assert "took NO effect" in world.said[-1]
    assert world.runner.finish() == ["full of syncer (no proof)"]


def test_parameters_that_are_no_numbers_end_a_life(tmp_path):
  scripts = dict.fromkeys(("learner 0", "learner 1"), DIVERGES)
  with World(tmp_path, scripts=scripts) as world:
    for m in (0, 1):
      child = world.children[f"learner {m}"]
      wait_for("handler", lambda c=child: "ready" in c.last_words(), DEADLINE_S)
    world.runner.jobs = World(tmp_path, "nan").runner.jobs
    proof = world.proof()
    assert world.runner.ended == []
  assert proof["took_effect"] and proof["evidence"]["exit_code"] == 1


def test_an_end_that_no_fault_accounts_for_is_a_violation(tmp_path):
  with World(tmp_path, scripts={"learner 1": FAILS}) as world:
    world.until("end", lambda: world.runner.ended)
    assert world.children["learner 1"].restart_s is None
  (ended,) = world.runner.ended
  assert told(ended) == {
    "what": "ended by itself with exit code 1",
    "who": "learner 1",
    "round": 0,
    "words": "the last words",
  }


def test_two_faults_do_not_hit_one_process_at_a_time(tmp_path):
  with World(tmp_path, *["slow"] * 3) as world:
    for _ in range(5):
      world.look()
    names = [name for job in world.runner.jobs for name in job.names]
    assert sorted(names) == ["learner 0", "learner 1"]
    world.runner.withdraw()
    assert world.runner.counts()["slow"]["injected"] == 2
    world.runner.heal()
    assert world.stage.busy == set() and not world.runner.busy
    for child in world.children.values():
      pid = child.process.pid
      wait_for("running process", lambda p=pid: not is_stopped(p), DEADLINE_S)


def test_the_middle_of_a_merge_is_a_state_without_its_commit(tmp_path):
  folder = tmp_path / "exchange"
  for name in ("state", "commit"):
    (folder / name).mkdir(parents=True)
  look = processes.unfinished
  assert look(tmp_path) is None and look(folder) is None
  for t in (0, 1):
    (folder / keys.commit(t)).touch()
  (folder / keys.params(1, 0, 1)).touch()
  assert look(folder) is None
  (folder / keys.outer_state(2, 1, 1)).touch()
  assert look(folder) == 2


@pytest.mark.parametrize("seed", range(4))
def test_the_shard_that_merges_is_the_one_that_is_hit(tmp_path, seed):
  """Of two; P = H = 3, so round 4 is the second one's."""
  with World(tmp_path, "kill_in_merge", seed=seed, shards=2) as world:
    first, second = (world.children[name] for name in SYNCERS)
    assert world.stage.merging() == {"syncer": 0, "syncer 1": 1}
    assert [world.stage.owns(c, 4) for c in (first, second)] == [False, True]
    world.stage.raw.put(keys.params(4, 1, 2), b"a version")
    world.stage.raw.put(keys.commit(3), b"a commit")
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
      world.look()
    victim = world.runner.jobs[0].names[0]
    hit = [c.name for c in (first, second) if c.code == -signal.SIGKILL]
    assert hit == (["syncer 1"] if victim == "syncer 1" else [])


def test_a_process_is_caught_while_it_writes(tmp_path):
  path = tmp_path / "exchange" / "answer" / "x.__lock"
  path.parent.mkdir(parents=True)
  writes = f"import time; f = open({str(path)!r}, 'w'); time.sleep(600)"
  scripts = dict.fromkeys(("learner 0", "learner 1", "syncer"), writes)
  with World(tmp_path, "kill_in_write", scripts=scripts) as world:
    proof = world.proof()
  assert proof["took_effect"] and proof["evidence"]["writing"] == "answer/x"


def test_what_cannot_be_found_is_too_late_and_left_running(
  tmp_path, monkeypatch
):
  monkeypatch.setattr("ddiloco.chaos.stage.AIM_S", 0.05)
  with World(tmp_path) as world:
    child = world.children["syncer"]
    seen = iter([True, False])
    with pytest.raises(TooLate, match="never found"):
      for _ in world.stage.aim(child, lambda: next(seen, False)):
        pass
    pid = child.process.pid
    wait_for("running process", lambda: not is_stopped(pid), DEADLINE_S)


# --- Garbage and clocks -------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_what_is_garbled_is_another(seed):
  rng = random.Random(seed)
  data = rng.randbytes(rng.randint(1, 300))
  how, after = garbage.garbled(rng, data)
  assert after != data
  assert (how == "flipped") == (len(after) == len(data)) or how == "noise"


def test_a_garbled_lease_is_healed_by_its_holder(tmp_path):
  with World(tmp_path, "garble_lease") as world:
    pid = world.children["syncer"].process.pid
    world.put(keys.lease(0), Lease(1, "", "", pid, 1))
    world.until("begin", lambda: world.runner.jobs[0].evidence.get("how"))
    for _ in range(3):
      world.look()
    assert not world.journal.lines("fault"), "nobody has healed it"
    world.put(keys.lease(0), Lease(1, "", "", pid, 2))
    assert world.proof()["took_effect"]


def test_what_another_fault_has_taken_stays_taken(tmp_path):
  """The garbled lease's holder may be hit again before the lease is healed."""
  with World(tmp_path, "garble_lease") as world:
    stage, syncer = world.stage, world.children["syncer"]
    lease = Lease(1, "", "", syncer.process.pid, 1)
    world.put(keys.lease(0), lease)
    world.until("begin", lambda: world.runner.jobs[0].evidence.get("how"))
    other = Job(Draw(1, 0.0, "kill_in_snapshot", "1"))
    assert syncer.name not in stage.busy
    stage.take(other, syncer)
    world.put(keys.lease(0), replace(lease, beat=2))
    assert world.proof()["took_effect"]
    assert syncer.name in stage.busy


def test_who_is_gone_cannot_be_stopped(tmp_path):
  world = World(tmp_path)
  with pytest.raises(TooLate, match="syncer is gone"):
    world.stage.stop(world.children["syncer"])


@pytest.mark.parametrize("shift_s, found", [(7200, True), (0, False)])
def test_a_wrong_clock_shows_in_the_log(tmp_path, shift_s, found):
  log = tmp_path / "log"
  then = time.time() + 7200
  said = time.strftime("I %H:%M:%S a line\n", time.localtime(then))
  log.write_text(said)
  assert bool(clocks._clock_error_s(said, log, shift_s)) is found
  assert clocks._clock_error_s("no line has a time\n", log, 7200) is None


def test_a_role_is_started_with_the_defects_it_may_get(tmp_path):
  child = Child("learner 1", ["-m", "launch.learner", "--learner=1"], tmp_path)
  clocks.with_defects(child, random.Random(1))
  flag, name, jump, *rest = child.arguments
  assert (flag, name) == ("-m", defects.__name__)
  assert rest == ["launch.learner", "--learner=1"]
  assert re.fullmatch(r"--jump_s=-?\d+", jump)
  assert clocks.jump_s(child) % 3600 == 0 != clocks.jump_s(child)


def test_a_number_that_nobody_has_had():
  config = make_config(data={"shards": 4})
  stage = Stage(config, None, None, None, ())
  found = []
  while (number := stage.next_number()) is not None:
    found.append(number)
    stage.joined[f"learner {number}"] = types.SimpleNamespace(learner=number)
  assert found == [2, 3]
  assert signal.SIGUSR1 == defects.NAN
