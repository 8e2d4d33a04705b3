"""Computes a run again from its tapes and compares every commit's bits.

  python -m launch.replay --workdir=runs/a --output=replay.json \
    [--exchange=URL] [--from_round=240] [--decisions_only]

Exit code 0: everything is as it was; 1: the first difference is printed.
"""

import json
import sys
import time

from absl import flags

from ddiloco import config as config_lib
from ddiloco.types import Exit
from launch import command
from launch import flags as common

OUTPUT = flags.DEFINE_string("output", None, "Where to write replay.json.")
FROM_ROUND = flags.DEFINE_integer(
  "from_round", None, "Begin with the snapshot of this round, not at the start."
)
DECISIONS_ONLY = flags.DEFINE_boolean(
  "decisions_only",
  False,
  "Compare decisions, not arrays: for tapes of another machine or release.",
)


def main() -> int:
  """Replays the run in --workdir; reads only, apart from --output."""
  from ddiloco.live import workdir as workdir_lib
  from ddiloco.sim import history as history_lib
  from ddiloco.sim import islands

  workdir = common.workdir()
  command.write_output(OUTPUT, "")  # before the work, not after it
  history = history_lib.load(common.open_exchange(workdir), FROM_ROUND.value)
  if common.CONFIG.value or (workdir / workdir_lib.RESOLVED).exists():
    config_lib.check_resumable(history.config, common.config(workdir))
  if history.genesis.has_arrays:
    for shape in history.shapes[:1]:
      islands.set_environment(shape)
  command.prepare_jax(1, 1, workdir / "cache")
  result = islands.replay(
    history,
    cache_dir=str(workdir / "cache"),
    decisions_only=DECISIONS_ONLY.value,
    say=_Progress().say,
  )
  text = json.dumps(result, indent=2)
  print(text)
  command.write_output(OUTPUT, text + "\n")
  return Exit.OK if result["first_mismatch"] is None else Exit.FAILED


class _Progress:
  """A line at most every two seconds."""

  def __init__(self):
    self._said_s = 0.0

  def say(self, line: str) -> None:
    """Shows how far the replay is."""
    if time.monotonic() - self._said_s > 2:
      self._said_s = time.monotonic()
      print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
  command.run(main)
