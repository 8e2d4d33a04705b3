"""The timeline as a trace for Perfetto or chrome://tracing.

The Trace Event format: complete events ("X") on a row per learner, nested
async events ("b", "e") for the syncer's rounds, which overlap, and instants
("i") where the fault script hit. Times are microseconds from the run's start.
"""

import json
from collections.abc import Iterator
from typing import Any

from ddiloco.report.accounting import Accounting, Span
from ddiloco.report.lives import LearnerLife
from ddiloco.report.run import Run
from ddiloco.report.timeline import syncer_spans

_PID = 1
_SYNCER_ROW = 1  # learner i has row i + 2
_ROUND_PHASES = (
  ("wait", "opened_ns", "quorum_ns"),
  ("grace", "quorum_ns", "closed_ns"),
  ("merge", "closed_ns", "committed_ns"),
)
_ROUND_KINDS = frozenset(name for name, _, _ in _ROUND_PHASES)
_Event = dict[str, Any]


def render(run: Run, accounting: Accounting) -> str:
  """The trace of a run, as JSON."""
  events = list(_events(run, accounting))
  return json.dumps(
    {"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")
  )


def _events(run: Run, accounting: Accounting) -> Iterator[_Event]:
  origin_ns = accounting.origin_ns
  yield from _names(run, accounting)
  for learner, time in accounting.learners.items():
    for life in run.learners.get(learner, []):
      yield from _steps(life, origin_ns)
    for span in time.spans:
      if span.kind != "step":  # those are shown one by one
        yield _span(span, _row(learner), origin_ns)
  for span in syncer_spans(run):
    if span.kind not in _ROUND_KINDS:  # those are shown round by round
      yield _span(span, _SYNCER_ROW, origin_ns)
  for round_ in run.syncer.rounds.values():
    counted = {"counted": [list(item) for item in round_.counted]}
    for name, begin, end in _ROUND_PHASES:
      begin_ns, end_ns = getattr(round_, begin), getattr(round_, end)
      if begin_ns and end_ns:
        label = f"round {round_.number}: {name}"
        yield _async("b", label, round_.number, begin_ns - origin_ns, counted)
        yield _async("e", label, round_.number, end_ns - origin_ns, {})
  yield from _faults(run, origin_ns)


def _names(run: Run, accounting: Accounting) -> Iterator[_Event]:
  yield _metadata("process_name", 0, {"name": f"run {run.run_id}"})
  rows = {_SYNCER_ROW: "syncer"}
  rows |= {_row(i): f"learner {i}" for i in accounting.learners}
  for row, name in rows.items():
    yield _metadata("thread_name", row, {"name": name})
    yield _metadata("thread_sort_index", row, {"sort_index": row})


def _steps(life: LearnerLife, origin_ns: int) -> Iterator[_Event]:
  row = _row(life.learner)
  begins, ends = life.begin_ns.tolist(), life.end_ns.tolist()
  tokens, losses = life.tokens.tolist(), life.losses.tolist()
  for i, (begin_ns, end_ns) in enumerate(zip(begins, ends, strict=True)):
    known = losses[i] == losses[i]  # JSON has no NaN
    yield {
      "name": "step",
      "ph": "X",
      "pid": _PID,
      "tid": row,
      "ts": (begin_ns - origin_ns) / 1e3,
      "dur": (end_ns - begin_ns) / 1e3,
      "args": {
        "step": i + 1,
        "life": life.incarnation,
        "tokens": tokens[i],
        "loss": losses[i] if known else None,
      },
    }


def _span(span: Span, row: int, origin_ns: int) -> _Event:
  return {
    "name": span.kind,
    "ph": "X",
    "pid": _PID,
    "tid": row,
    "ts": (span.begin_ns - origin_ns) / 1e3,
    "dur": max(span.end_ns - span.begin_ns, 0) / 1e3,
  }


def _async(
  phase: str, name: str, number: int, at_ns: int, args: dict[str, Any]
) -> _Event:
  return {
    "name": name,
    "cat": "round",
    "ph": phase,
    "id": number,
    "pid": _PID,
    "tid": _SYNCER_ROW,
    "ts": at_ns / 1e3,
    "args": args,
  }


def _faults(run: Run, origin_ns: int) -> Iterator[_Event]:
  for session in run.sessions:
    for line in session.faults:
      if line.get("took_effect") is not True:
        continue
      kind, _, number = str(line.get("who", "")).partition(" ")
      learner = int(number) if number.isdecimal() else None
      row = _row(learner) if kind == "learner" else _SYNCER_ROW
      at_ns = session.fault_ns(line, run.syncer.rounds)
      yield {
        "name": "fault",
        "ph": "i",
        "s": "t",
        "pid": _PID,
        "tid": row,
        "ts": (at_ns - origin_ns) / 1e3,
        "args": {"fault": line.get("fault")},
      }


def _metadata(name: str, row: int, args: dict[str, Any]) -> _Event:
  return {"name": name, "ph": "M", "pid": _PID, "tid": row, "args": args}


def _row(learner: int | None) -> int:
  return _SYNCER_ROW if learner is None else learner + 2
