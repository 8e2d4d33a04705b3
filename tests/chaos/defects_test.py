"""Defects of a process's machine, and what of the project they can touch."""

import ast
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from ddiloco.chaos import defects, mounts
from tests.live.processes import DEADLINE_S

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import sys, time
print(time.time_ns(), time.time(), sys.argv[1:], flush=True)
sys.stdin.readline()
print(time.time_ns(), flush=True)
"""
# Who may ask for the time of day, and what for. Nobody decides anything by it.
WALL_CLOCK = {
  "ddiloco/chaos/clocks.py": "proves that a clock is wrong",
  "ddiloco/chaos/defects.py": "makes it wrong",
  "ddiloco/chaos/weather.py": "makes a store's wrong",
  "ddiloco/engine/telemetry.py": "dates TensorBoard's points",
  "ddiloco/live/children.py": "dates the journal's lines",
  "ddiloco/live/evaluator.py": "dates evaluations",
  "ddiloco/live/workplace.py": "dates a life, in its tape's header",
  "ddiloco/planning/failure_log.py": "reads the dates that a log states",
  "ddiloco/report/summary.py": "shows a date",
}


def reads_wall_clock(tree):
  """Whether a module names the time of day, a date, or a file's time."""
  names = {"time", "time_ns", "localtime", "gmtime", "strftime", "ctime"}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      if any(alias.name == "datetime" for alias in node.names):
        return True
    elif isinstance(node, ast.ImportFrom) and node.module in ("time",):
      return True
    elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
      return True
    elif isinstance(node, ast.Attribute) and node.attr in names:
      value = node.value
      if isinstance(value, ast.Name) and value.id == "time":
        return True
  return False


def test_nobody_decides_by_the_time_of_day():
  found = {
    path.relative_to(ROOT).as_posix()
    for folder in ("ddiloco", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if reads_wall_clock(ast.parse(path.read_text()))
  }
  assert found == WALL_CLOCK.keys()


@pytest.mark.parametrize(
  "source, found",
  [
    ("import time\nx = time.time()", True),
    ("import time\nx = time.time_ns", True),
    ("from time import time", True),
    ("from datetime import datetime", True),
    ("import datetime", True),
    ("import time\nx = time.monotonic_ns() + time.sleep(1)", False),
  ],
)
def test_the_search_finds_what_it_is_for(source, found):
  assert reads_wall_clock(ast.parse(source)) is found


def test_a_process_believes_in_another_time_of_day(tmp_path):
  (tmp_path / "shown.py").write_text(PROGRAM)
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", defects.__name__),
      *("--clock_s=-7200", "--jump_s=10800", "shown", "--flag=1", "x"),
    ],
    env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    at_ns, at_s, flags = process.stdout.readline().split(" ", 2)
    process.send_signal(defects.JUMP)
    after, _ = process.communicate("\n", timeout=DEADLINE_S)
  finally:
    process.kill()
  now_ns = os.stat(tmp_path / "shown.py").st_mtime_ns
  hour_ns = 3600 * 10**9
  assert abs(int(at_ns) - now_ns + 2 * hour_ns) < 0.2 * hour_ns
  assert abs(float(at_s) - int(at_ns) / 1e9) < 60
  assert flags.strip() == "['--flag=1', 'x']"
  assert abs(int(after) - now_ns - hour_ns) < 0.2 * hour_ns


def test_parameters_are_no_numbers_from_the_next_step_on(monkeypatch):
  from ddiloco.engine import learner_arrays
  from ddiloco.engine.loading import load_model
  from ddiloco.protocol.learner_types import Step
  from tests.sim.small import make_config

  config = make_config()
  arrays = learner_arrays.LearnerArrays(
    config, (model := load_model(config, 0, "")), model.state
  )
  steps = [Step(n, 4 * n, 0, 0) for n in (1, 2, 3)]
  monkeypatch.setattr(
    learner_arrays.LearnerArrays, "step", learner_arrays.LearnerArrays.step
  )

  def loss(command):
    return float(jax.device_get(arrays.step(command).metrics["loss"]))

  assert np.isfinite(loss(steps[0]))
  defects.spoil(learner_arrays)
  assert not np.isfinite(loss(steps[1]))
  assert not arrays.is_finite(arrays.copy_state())
  kept = learner_arrays.LearnerArrays.step
  loss(steps[2])
  assert learner_arrays.LearnerArrays.step is kept, "it has struck once"


MOUNTED = """
import pathlib, sys
from ddiloco.chaos import mounts
folder = pathlib.Path(sys.argv[1])
try:
  mounts.enter()
  read_only = mounts.ReadOnly(folder)
except mounts.Unavailable as error:
  sys.exit(f"skip: {error}")
found = []
for value in (False, True, False):
  read_only.set(value)
  found.append(read_only.refuses())
  try:
    (folder / "x").write_text("x")
  except OSError as error:
    found.append(error.errno)
print(found)
"""


def test_a_directory_is_read_only_for_a_while_and_for_us_alone(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", MOUNTED, str(tmp_path)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=DEADLINE_S,
    check=False,
  )
  if "skip" in done.stderr:
    pytest.skip(done.stderr)
  assert done.stdout.strip() == "[False, True, 30, False]", done.stderr
  assert str(tmp_path) not in pathlib.Path("/proc/self/mounts").read_text()


def test_users_are_asked_once_whether_they_can_be_root(monkeypatch):
  started = []
  monkeypatch.setattr(os, "geteuid", lambda: 1000)
  monkeypatch.setattr(mounts.shutil, "which", lambda name: "/bin/unshare")
  monkeypatch.setattr(os, "execvp", lambda *args: started.append(args))
  result = subprocess.CompletedProcess([], 1)
  monkeypatch.setattr(subprocess, "run", lambda *a, **k: result)
  monkeypatch.setattr(os, "environ", dict(os.environ))
  mounts.start_again_as_root("launch.chaos")
  assert not started, "this system does not let them"
  result.returncode = 0
  monkeypatch.setattr(sys, "argv", ["chaos.py", "--seed=3"])
  mounts.start_again_as_root("launch.chaos")
  ((program, command),) = started
  assert program == "unshare"
  assert command[-3:] == ["-m", "launch.chaos", "--seed=3"]
  mounts.start_again_as_root("launch.chaos")  # as which it was started
  assert len(started) == 1
  assert signal.SIGUSR2 == defects.JUMP
