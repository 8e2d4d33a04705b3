"""The processes that `launch.local` starts, and the journal of their lives."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from ddiloco.live.log import logger
from ddiloco.report.workdir import JOURNAL, merges

PARENT_VARIABLE = "DDILOCO_PARENT_PID"
_SLICE_S = 0.1  # of the duty cycle that slows a process down


class Journal:
  """One JSON object a line, of what happened to the run's processes."""

  def __init__(self, workdir: pathlib.Path):
    self._path = workdir / JOURNAL

  def write(self, what: str, **facts: Any) -> None:
    """Appends a line; survives a kill of this process, whole or not at all.

    A full disk costs the line: processes must still be looked after.
    """
    line = json.dumps({"unix_ns": time.time_ns(), "what": what, **facts})
    try:
      with open(self._path, "a") as file:
        file.write(line + "\n")
    except OSError as error:
      logger.warning("%s lacks a line: %s (%s)", self._path, line, error)

  def lines(self, what: str) -> list[dict[str, Any]]:
    """The lines of a kind, of earlier sessions too; torn ones are left out."""
    try:
      text = self._path.read_text(errors="replace")
    except OSError:
      return []
    found = []
    for line in text.splitlines():
      with contextlib.suppress(ValueError):
        value = json.loads(line)
        if isinstance(value, dict) and value.get("what") == what:
          found.append(value)
    return found


@dataclasses.dataclass
class Child:
  """A role's process, over all its restarts."""

  name: str  # learner 1 | syncer | standby 1 | evaluator
  arguments: list[str]
  log: pathlib.Path
  niceness: int = 0
  process: subprocess.Popen | None = None
  restarts: int = 0
  started_s: float = 0.0
  restart_s: float | None = None  # when it is due again; None: it is not
  over: bool = False  # ended for good
  code: int | None = None  # of the last exit
  ready: bool = False

  @property
  def learner(self) -> int | None:
    """The learner's number; None for the other roles."""
    kind, _, number = self.name.partition(" ")
    return int(number) if kind == "learner" else None

  @property
  def merges(self) -> bool:
    """Whether it is a syncer, at work or waiting for its turn."""
    return merges(self.name)

  @property
  def running(self) -> bool:
    """Whether a process of this role exists now."""
    return self.process is not None

  def start(self, journal: Journal) -> None:
    """Starts a process; its output goes to the role's log."""
    self.log.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    environment[PARENT_VARIABLE] = str(os.getpid())
    environment.setdefault("JAX_PLATFORMS", "cpu")
    command = [sys.executable, *self.arguments]
    if self.niceness:
      command = ["nice", "-n", str(self.niceness), *command]
    with open(self.log, "ab") as log:
      self.process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
      )
    self.started_s, self.restart_s = time.monotonic(), None
    self.ready = False
    journal.write(
      "start",
      who=self.name,
      pid=self.process.pid,
      clock_ns=time.monotonic_ns(),  # one for all processes of a machine
    )

  def poll(self, journal: Journal) -> int | None:
    """The exit code, once, if the process has ended since the last look."""
    if self.process is None or self.process.poll() is None:
      return None
    self.code = self.process.returncode
    journal.write("exit", who=self.name, pid=self.process.pid, code=self.code)
    self.process = None
    return self.code

  def send(self, number: signal.Signals) -> None:
    """Sends a signal, if there is a process to get it."""
    if self.process is not None and self.process.poll() is None:
      self.process.send_signal(number)

  def last_words(self, lines: int = 6) -> str:
    """The end of its log, for a message about its end."""
    try:
      text = self.log.read_text(errors="replace")
    except OSError:
      return ""
    return "\n".join(text.splitlines()[-lines:])


def die_with_parent() -> None:
  """Asks the kernel to end this process when its launcher dies (Linux)."""
  parent = os.environ.pop(PARENT_VARIABLE, None)
  if parent is None:
    return
  try:
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
  except (OSError, AttributeError):
    return
  if os.getppid() != int(parent):  # it died before we asked
    os.kill(os.getpid(), signal.SIGTERM)


def is_stopped(pid: int) -> bool:
  """Whether the kernel says that a process is stopped."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return stat.rpartition(")")[2].split()[0] == "T"


def slow_down(child: Child, factor: float) -> None:
  """Called often, lets a process run one part in `factor` of the time."""
  stop = (time.monotonic() / _SLICE_S) % 1 >= 1 / factor
  child.send(signal.SIGSTOP if stop else signal.SIGCONT)
