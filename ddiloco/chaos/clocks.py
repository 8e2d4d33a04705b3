"""Faults of the wall clocks that processes read.

No decision of a live run asks what time of day it is; a log, a report and
many a library do. So a process with a wrong clock shows by its own log.
"""

import pathlib
import re
import time
from typing import Any

from ddiloco.chaos import defects
from ddiloco.chaos.stage import (
  BACK_S,
  LEARNER,
  SYNCER,
  Job,
  Stage,
  Steps,
  is_other,
  wrong_hours_s,
)
from ddiloco.live.children import Child

_HOUR_S = 3600
_DAY_S = 24 * _HOUR_S
_CLOCK_ERROR_S = 300.0  # between a log's line and the file's own time


def clock(stage: Stage, job: Job) -> Steps:
  """A process comes back with a wall clock that is hours wrong."""
  child = yield from stage.victim(job, LEARNER, LEARNER, SYNCER)
  shift_s = wrong_hours_s(job.rng)
  pid, right = child.process.pid, list(child.arguments)
  child.arguments[:] = _with(right, f"--clock_s={shift_s}")
  end = stage.log_end(child)
  try:
    yield from stage.strike(child, 0.5)
    yield from stage.until("return", lambda: is_other(child, pid), BACK_S)
  finally:
    child.arguments[:] = right  # from the next start on it is right again
  stage.clocks[child.process.pid] = shift_s
  yield from _show_time(stage, job, child, end)
  yield from stage.back(job, child, pid)


def jump(stage: Stage, job: Job) -> Steps:
  """A process's wall clock jumps; until its next start."""
  child = yield from stage.victim(job, LEARNER, SYNCER)
  end = stage.log_end(child)
  pid = child.process.pid
  stage.clocks[pid] = stage.clocks.get(pid, 0) + jump_s(child)
  child.send(defects.JUMP)
  yield from _show_time(stage, job, child, end)


def jump_s(child: Child) -> int:
  """How far the clocks of a role jump when told to."""
  given = [a for a in child.arguments if a.startswith("--jump_s=")]
  return int(given[0].partition("=")[2])


def with_defects(child: Child, rng: Any) -> None:
  """Lets a role's processes have what `defects` can do to them."""
  flag, module, *rest = child.arguments
  assert flag == "-m", child.arguments
  jump = f"--jump_s={wrong_hours_s(rng)}"
  child.arguments[:] = [
    *("-m", defects.__name__, jump, module),
    *rest,
  ]


def _with(arguments: list[str], flag: str) -> list[str]:
  return [*arguments[:2], flag, *arguments[2:]]


def _show_time(stage: Stage, job: Job, child: Child, end: int) -> Steps:
  """Waits for a line in the victim's log whose time is as wrong as told."""
  shift_s = job.evidence["shift_s"] = stage.clocks[child.process.pid]
  job.evidence["log_is_wrong_by_s"] = yield from stage.until(
    "line of its log with that time",
    lambda: _clock_error_s(stage.log_since(child, end), child.log, shift_s),
    BACK_S,
  )
  job.took_effect = True


def _clock_error_s(said: str, log: pathlib.Path, shift_s: int) -> int | None:
  """The error of the newest line's time of day, if it is about `shift_s`."""
  times = re.findall(r"^[A-Z] (\d\d):(\d\d):(\d\d) ", said, re.MULTILINE)
  if not times:
    return None
  hour, minute, second = map(int, times[-1])
  right = time.localtime(log.stat().st_mtime)
  found_s = (hour - right.tm_hour) * _HOUR_S + (minute - right.tm_min) * 60
  # Of a day it knows the time only.
  beyond_s = (found_s + second - right.tm_sec - shift_s + _DAY_S / 2) % _DAY_S
  error_s = round(beyond_s - _DAY_S / 2)
  return shift_s + error_s if abs(error_s) < _CLOCK_ERROR_S else None
