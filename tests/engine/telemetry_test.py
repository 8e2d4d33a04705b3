"""Event files: what is written, and that nobody waits for a full disk."""

import struct
import subprocess
import sys

from ddiloco.engine.telemetry import Telemetry
from tests.live.processes import (
  DEADLINE_S,
  ROOT,
  environment,
  fill,
  small_disk,
)

# Far more than the file's buffer holds.
STUBBORN = """
import pathlib, sys
from ddiloco.engine.telemetry import Telemetry
telemetry = Telemetry(pathlib.Path(sys.argv[1]), "learner-0")
for step in range(3000):
  telemetry.scalars({"x": 1.0, "y": 2.0}, step)
print("went on")
"""


def test_scalars_reach_the_event_file(tmp_path):
  telemetry = Telemetry(tmp_path, "learner-0")
  telemetry.scalars({"train/loss": 1.5}, 7)
  telemetry._writer.close()
  (path,) = (tmp_path / "tensorboard/learner-0").iterdir()
  data = path.read_bytes()
  assert b"train/loss" in data and struct.pack("<f", 1.5) in data


def test_training_goes_on_with_a_full_disk(tmp_path):
  with small_disk(tmp_path / "disk", "1m") as disk:
    (disk / "tensorboard/learner-0").mkdir(parents=True)
    fill(disk / "filler")
    done = subprocess.run(
      [sys.executable, "-c", STUBBORN, str(disk)],
      cwd=ROOT,
      env=environment(),
      capture_output=True,
      text=True,
      timeout=DEADLINE_S,
      check=False,
    )
  assert done.stdout == "went on\n", done.stderr
  assert done.returncode == 0
  assert done.stderr.count("no TensorBoard from here on") == 1
