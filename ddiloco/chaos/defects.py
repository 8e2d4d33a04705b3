"""Runs a command on a machine with defects.

  python -m ddiloco.chaos.defects [--clock_s=S] [--jump_s=S] MODULE [FLAGS]

is `python -m MODULE FLAGS`, but for this process

  the wall clock, as Python's `time` tells it, is wrong by --clock_s from the
  start, and by --jump_s more after SIGUSR2;
  after SIGUSR1 all of a learner's parameters are no numbers, as after an
  error of its hardware, at its next step.

Nothing in the command itself knows of this. Clocks that C++ reads by itself
(S3 signs requests with one) stay right.
"""

import argparse
import runpy
import signal
import sys
import time
from typing import Any

_ARRAYS = "ddiloco.engine.learner_arrays"
_LOG = "ddiloco.live.log"
NAN = signal.SIGUSR1
JUMP = signal.SIGUSR2


class Clock:
  """Takes the place of `time.time` and `time.time_ns`."""

  def __init__(self, shift_s: float):
    self._shift_ns = 0
    self._time_ns = time.time_ns
    self.move(shift_s)
    time.time_ns = self.time_ns
    time.time = lambda: self.time_ns() / 1e9

  def move(self, by_s: float) -> None:
    """Sets the clock, relative to what it says."""
    self._shift_ns += round(by_s * 1e9)

  def time_ns(self) -> int:
    """What this machine believes the time to be."""
    return self._time_ns() + self._shift_ns


def spoil(arrays: Any) -> None:
  """Makes the next step of any learner start from what are no numbers.

  Args:
    arrays: the module of `LearnerArrays`.
  """
  import jax

  kind = arrays.LearnerArrays
  step = kind.step

  def spoilt(self, command):
    kind.step = step
    program, state = self._program, self._state
    params = jax.tree.map(lambda x: x * float("nan"), program.params(state))
    self._state = program.with_params(state, params)
    return step(self, command)

  kind.step = spoilt


def main(argv: list[str]) -> None:
  """Takes the command line, without the name of this module."""
  parser = argparse.ArgumentParser(allow_abbrev=False)
  parser.add_argument("--clock_s", type=float, default=0.0)
  parser.add_argument("--jump_s", type=float, default=0.0)
  parser.add_argument("module")
  options, flags = parser.parse_known_args(argv)
  clock = Clock(options.clock_s)

  def jump(number, frame):
    clock.move(options.jump_s)
    if _LOG in sys.modules:  # its next line has the new time
      sys.modules[_LOG].logger.warning("the wall clock was set")

  def nan(number, frame):
    if _ARRAYS in sys.modules:
      spoil(sys.modules[_ARRAYS])

  signal.signal(JUMP, jump)
  signal.signal(NAN, nan)
  sys.argv = [options.module, *flags]
  runpy.run_module(options.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main(sys.argv[1:])
