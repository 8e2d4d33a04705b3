"""Reads what the launcher and the evaluator wrote into a workdir."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ddiloco.types import SECOND_NS

JOURNAL = "launch.jsonl"
EVALUATIONS = "eval.jsonl"


@dataclasses.dataclass(slots=True)
class Process:
  """One process of a role, as the launcher saw it. Unix ns; 0: not seen."""

  who: str
  pid: Any
  started_ns: int
  exited_ns: int = 0
  code: int | None = None
  clock_ns: int = 0  # the start, by the machine's monotonic clock

  def unix_ns(self, who: str, pid: int, clock_ns: int) -> int | None:
    """An instant of its monotonic clock, by the launcher's wall clock.

    None if what `who` tells did not happen in this process.
    """
    same = who == self.who or merges(who) and merges(self.who)
    if not (same and pid == self.pid and self.clock_ns):
      return None
    found_ns = self.started_ns + clock_ns - self.clock_ns
    over_ns = self.exited_ns or found_ns
    return found_ns if self.started_ns <= found_ns <= over_ns else None


@dataclasses.dataclass(slots=True)
class Session:
  """One start of the launcher, until all of its processes were gone."""

  started_ns: int
  ended_ns: int = 0  # 0: the launcher died, or is at work
  status: str = ""
  reason: str = ""
  processes: list[Process] = dataclasses.field(default_factory=list)
  faults: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  given_up: list[str] = dataclasses.field(default_factory=list)

  def process_of(
    self, who: str, started_ns: int, pid: int = 0
  ) -> Process | None:
    """The process that a life which began then ran in.

    By its number, if the life has told it: of several syncers any may merge.
    """
    found = None
    for process in self.processes:
      over = 0 < process.exited_ns < started_ns
      fits = process.pid == pid if pid else process.who == who
      if fits and process.started_ns <= started_ns and not over:
        found = process
    return found

  def fault_ns(self, line: dict[str, Any], rounds: Mapping[int, Any]) -> int:
    """When a journalled fault hit; its line is written once it is over."""
    fault, evidence = _dict(line.get("fault")), _dict(line.get("evidence"))
    what, span = fault.get("what"), _dict(fault.get("for"))
    for process in self.processes:
      who = str(line.get("who"))  # of the fault; who merges changes
      same = who == process.who or merges(who) and merges(process.who)
      if same and process.pid == evidence.get("pid"):
        if what in ("kill", "stop") and process.exited_ns:
          return process.exited_ns
        if what == "start":
          return process.started_ns
    for unit, unit_ns in (("s", SECOND_NS), ("ns", 1)):
      if type(span.get(unit)) in (int, float):
        return max(line["unix_ns"] - round(span[unit] * unit_ns), 0)
    at_round = evidence.get("at_round")
    hit = rounds.get(at_round) if type(at_round) is int else None
    return hit.committed_ns if hit and hit.committed_ns else line["unix_ns"]


def merges(who: str) -> bool:
  """Whether a process is one of the syncer's, at work or waiting for it."""
  return who.partition(" ")[0] in ("syncer", "standby")


def _dict(value: Any) -> dict[str, Any]:
  return value if isinstance(value, dict) else {}


def _finite(text: str) -> float | None:
  value = float(text)
  return value if math.isfinite(value) else None


def read_lines(path: pathlib.Path, warnings: list[str]) -> list[dict[str, Any]]:
  """The JSON objects of a file, one a line; a bad line costs only itself."""
  try:
    text = path.read_text(encoding="utf-8", errors="replace")
  except FileNotFoundError:
    return []
  except OSError as error:
    warnings.append(f"{path.name} cannot be read: {error.strerror}")
    return []
  lines = []
  for number, line in enumerate(text.splitlines(), 1):
    if not line.strip():
      continue
    try:
      value = json.loads(line, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
      value = None
    if isinstance(value, dict) and type(value.get("unix_ns")) is int:
      lines.append(value)
    else:
      warnings.append(f"{path.name}: line {number} is damaged; left out")
  return lines


def append_line(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Adds one for `read_lines`; a line that a death cut short stays alone."""
  with open(path, "a+b") as file:
    if file.tell():
      file.seek(-1, os.SEEK_END)
      if file.read() != b"\n":
        file.write(b"\n")
    file.write(json.dumps(value).encode() + b"\n")


def read_sessions(lines: list[dict[str, Any]]) -> list[Session]:
  """The launcher's sessions, from the lines of its journal."""
  sessions: list[Session] = []
  running: dict[str, Process] = {}
  for line in lines:
    what, who = line.get("what"), str(line.get("who", ""))
    # A role started twice without an exit: the launcher itself had died.
    again = what == "start" and who in running
    if not sessions or sessions[-1].ended_ns or again:
      sessions.append(Session(line["unix_ns"]))
      running = {}
    session = sessions[-1]
    match what:
      case "start":
        clock_ns = line.get("clock_ns")
        running[who] = Process(
          who,
          line.get("pid"),
          line["unix_ns"],
          clock_ns=clock_ns if type(clock_ns) is int else 0,
        )
        session.processes.append(running[who])
      case "exit" if who in running:
        process = running.pop(who)
        process.exited_ns = line["unix_ns"]
        code = line.get("code")
        process.code = code if type(code) is int else None
      case "fault":
        session.faults.append(line)
      case "give_up":
        session.given_up.append(who)
      case "end":
        session.ended_ns = line["unix_ns"]
        session.status = str(line.get("status", ""))
        session.reason = str(line.get("reason", ""))
  return sessions


def read_evaluations(
  path: pathlib.Path, warnings: list[str]
) -> list[dict[str, Any]]:
  """The evaluations of the syncer's parameters, by round; the newest of each.

  Those of learners, and scores on tasks, are left out.
  """
  by_round = {}
  for line in read_lines(path, warnings):
    if line.get("of", "syncer") != "syncer" or "tasks" in line:
      continue
    numbers = [line.get(name) for name in ("round", "tokens", "loss")]
    if all(type(n) in (int, float) for n in numbers):
      by_round[line["round"]] = line
    else:
      warnings.append(
        f"{path.name}: the evaluation of round {line.get('round')} is left "
        "out, its numbers are missing or not finite"
      )
  return [by_round[t] for t in sorted(by_round)]
