"""The swarm: fresh seeds for every change, and all that ever failed."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

from ddiloco.config import from_dict
from ddiloco.engine.version import code_version
from ddiloco.protocol.fault_kinds import KINDS
from ddiloco.sim import swarm
from ddiloco.sim.draws import draw
from tests.sim.mutants import retention_one_version_early

FRESH = 200
# What each of these seeds found, when it was new.
ONCE_FAILED = {
  265: "an island that began without a slice never went on",
  324: "a torn manifest took a whole snapshot's place",
  33167: "a create that had won was confirmed after its commit was swept",
  102101: "apply = own forgot where its own commit's fragments were",
  300355: "at_overlap waited for a version that was gone",
  305725: "the same",
  2222: "a shard cleared another one's unfinished snapshot away",
  500146: "a learner that recovered forgot the commit it knew of",
  972903821: "a full store tore what it had whole, asked twice",
  500379: "a learner whose peers gave nothing went on from a commit long gone",
}
TROUBLES = (
  "crash",
  "doubled",
  "lagging",
  "late",
  "lost",
  "refused",
  "stale",
  "torn",
  "unconfirmed",
)


def test_fresh_seeds_show_no_violation():
  """Every version of the code tries seeds that no other has tried."""
  digest = code_version().partition("+")[2]
  first = int(digest, 16) % 10**9
  effects = collections.Counter()
  for seed in range(first, first + FRESH):
    result = swarm.run_seed(seed)
    assert result.violation is None, swarm.describe(result)
    effects.update(result.faults)
  idle = {*KINDS, *TROUBLES} - effects.keys()
  assert not idle, f"never took effect: {idle}"


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_what_once_failed_holds(seed):
  result = swarm.run_seed(seed)
  assert result.violation is None, swarm.describe(result)


def test_a_seed_is_one_history():
  first, second = (swarm._Run(5, None, None, 0) for _ in range(2))
  first.play()
  second.play()
  logs = [[life.log for life in run.world.lives] for run in (first, second)]
  assert logs[0] == logs[1] and len(logs[0]) > 2
  assert first.world.heap.now_ns == second.world.heap.now_ns


def test_a_history_is_the_same_in_every_process():
  """What Python hashes differently from process to process decides nothing."""
  code = (
    "import hashlib; from ddiloco.sim import swarm;"
    "run = swarm._Run(5, None, None, 0); run.play();"
    "logs = repr([life.log for life in run.world.lives]);"
    "print(hashlib.sha256(logs.encode()).hexdigest())"
  )
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", code],
      cwd=pathlib.Path(__file__).parents[2],
      env=os.environ | {"PYTHONHASHSEED": seed},
      stdout=subprocess.PIPE,
    )
    for seed in ("1", "2")
  ]
  first, second = (process.communicate()[0] for process in processes)
  assert first == second and len(first) == 65


def test_plans_differ_in_what_exists():
  plans = [draw(seed) for seed in range(40)]
  for plan in plans:
    weather = plan.weather
    assert 0 <= weather.lost < 0.1 and weather.delay_ns > 0
  assert {plan.weather.lost > 0 for plan in plans} == {True, False}
  assert {plan.crash_chance > 0 for plan in plans} == {True, False}
  assert len({plan.config.sync for plan in plans}) > 30


def test_a_given_config_is_kept():
  config = from_dict({"stop": {"rounds": 30}})
  assert draw(3, config).config is config


def test_a_violation_tells_how_to_see_it_again(monkeypatch):
  retention_one_version_early(monkeypatch)
  result = next(r for r in map(swarm.run_seed, range(20)) if r.violation)
  text = swarm.describe(result, ["--config=c.py"])
  command = (
    "python -m launch.simulate --compute=none --config=c.py --seeds=1 "
    f"--seed={result.seed}"
  )
  assert "one of the newest two" in text
  assert f"reproduce: {command}\n" in text and code_version() in text
  assert f"{command} --until={result.transitions + 1}" in text
  assert "syncer/1" in text and "Committed(" in text and "plan: " in text
  again = swarm.run_seed(result.seed)
  assert again.violation == result.violation
  before = swarm.run_seed(result.seed, until=result.transitions + 1)
  assert before.violation is None
  assert before.transitions == result.transitions


def test_until_stops_just_before_an_event():
  result = swarm.run_seed(1, until=100)
  assert result.transitions == 99 and "is alive" in result.story
  assert "after 99 events" in swarm.show(1, None, 100)


def test_the_command_stops_just_before_an_event():
  found = simulate("--seed=1", "--until=100")
  assert found.returncode == 0, found.stderr
  assert found.stdout.startswith("seed 1, after 99 events")
  assert "is alive: SyncerState(" in found.stdout


def test_no_progress_says_who_is_missing(monkeypatch):
  monkeypatch.setattr(swarm, "_LIVENESS_EVENTS", 1)
  result = swarm.run_seed(0)
  assert "no progress: 1 events after all trouble ended" in result.violation


def simulate(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "launch.simulate", "--compute=none", *arguments],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_the_command_counts_and_says_so(tmp_path):
  output = tmp_path / "swarm.json"
  found = simulate("--seeds=5", "--seed=3", f"--output={output}")
  assert found.returncode == 0, found.stderr
  assert "5 of 5 seeds" in found.stdout
  told = json.loads(output.read_text())
  assert (told["seeds"], told["first_seed"], told["violations"]) == (5, 3, 0)
  assert told["events"] > 1000 and told["events_per_s"] > 0
  assert sum(told["faults"].values()) > 10


def test_the_command_refuses_an_output_it_cannot_write(tmp_path):
  found = simulate("--seeds=1", f"--output={tmp_path}/no/such.json")
  assert found.returncode == 2 and "cannot be written" in found.stderr


def test_a_violation_is_exit_code_1(monkeypatch, capsys):
  retention_one_version_early(monkeypatch)
  found = swarm.run(0, 3, report=print)
  assert found["violations"] > 0
  assert "VIOLATION: seed" in capsys.readouterr().out


def test_an_interrupted_swarm_tells_what_it_found(monkeypatch):
  results, said = iter([swarm.run_seed(1), swarm.run_seed(2)]), []

  def run_seed(seed, *, config):
    result = next(results, None)
    if result is None:
      raise KeyboardInterrupt
    return result

  monkeypatch.setattr(swarm, "run_seed", run_seed)
  found = swarm.run(1, 10, report=said.append)
  assert (found["seeds"], found["violations"]) == (2, 0)
  assert found["events"] > 0
  assert said[-1] == "interrupted: 2 of 10 seeds, 0 violations"
