"""The chart of who did what when: a row for each learner and the syncer."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ddiloco.report.accounting import Accounting, Span
from ddiloco.report.charts import (
  BLACK,
  BLUE,
  GREEN,
  ORANGE,
  PURPLE,
  SKY,
  VERMILLION,
  YELLOW,
  Figure,
  Ticks,
  layout,
)
from ddiloco.report.run import Run
from ddiloco.report.story import count, duration
from ddiloco.report.workdir import merges

_SPANS_MAX = 1500  # of one kind in one row
_SYNCER = "syncer"

# Kind -> name, colour, whether hatched. Painted in this order.
_KINDS = {
  "wait": ("round open", "#DDDDDD", False),
  "grace": ("grace window, pace", PURPLE, False),
  "merge": ("merge and commit", BLUE, False),
  "step": ("inner steps", GREEN, False),
  "held": ("held by wait", YELLOW, False),
  "start": ("starting", SKY, False),
  "stall": ("stalled", ORANGE, False),
  "dead": ("dead", BLACK, True),
}
_Rows = dict[str, list[Span]]


def timeline(run: Run, accounting: Accounting, ticks: Ticks) -> Figure:
  """The timeline of a run."""
  rows: _Rows = {_SYNCER: syncer_spans(run)}
  for learner in reversed(accounting.learners):
    rows[f"learner {learner}"] = accounting.learners[learner].spans
  data = [
    trace for kind in _KINDS if (trace := _bars(kind, rows, ticks)) is not None
  ]
  data += [_returns(accounting, ticks), _faults(run, rows, ticks)]
  shape = layout(
    ticks.title,
    "",
    barmode="overlay",
    bargap=0.3,
    height=170 + 46 * len(rows),
    margin={"l": 84, "r": 16, "t": 60, "b": 48},
    yaxis={"categoryorder": "array", "categoryarray": list(rows)},
  )
  return {"data": [t for t in data if t["x"]], "layout": shape}


def _bars(kind: str, rows: _Rows, ticks: Ticks) -> dict[str, Any] | None:
  name, colour, hatched = _KINDS[kind]
  y, base, x, text = [], [], [], []
  for row, spans in rows.items():
    for span in thin(spans, kind):
      long_ns = span.end_ns - span.begin_ns
      y.append(row)
      base.append(ticks.at(span.begin_ns))
      x.append(ticks.length(long_ns))
      steps = f"{count(span.steps)} steps, " if span.steps else ""
      text.append(f"{name}: {steps}{duration(long_ns)}")
  if not x:
    return None
  marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
  if hatched:
    marker["pattern"] = {
      "shape": "/",
      "size": 6,
      "bgcolor": colour,
      "fgcolor": "#AAAAAA",
    }
  return {
    "type": "bar",
    "orientation": "h",
    "name": name,
    "y": y,
    "base": base,
    "x": x,
    "hovertext": text,
    "hoverinfo": "text+y",
    "marker": marker,
  }


def thin(spans: Iterable[Span], kind: str) -> list[Span]:
  """The spans of a kind, at most some 1500: small gaps and bits are dropped."""
  some = [span for span in spans if span.kind == kind]
  some = sorted(
    (s for s in some if s.end_ns > s.begin_ns), key=lambda s: s.begin_ns
  )
  if len(some) <= _SPANS_MAX:
    return some
  if kind == "held":  # what is left out belongs to the steps around it
    by_length = sorted(some, key=lambda s: s.begin_ns - s.end_ns)
    return sorted(by_length[:_SPANS_MAX], key=lambda s: s.begin_ns)
  gaps = [b.begin_ns - a.end_ns for a, b in zip(some, some[1:], strict=False)]
  limit_ns = sorted(gaps, reverse=True)[_SPANS_MAX - 1]
  return join(some, limit_ns)


def join(spans: list[Span], gap_ns: int) -> list[Span]:
  """Joins spans, ascending by beginning, that are no further apart."""
  joined: list[Span] = []
  for span in spans:
    last = joined[-1] if joined else None
    if last is not None and span.begin_ns - last.end_ns <= gap_ns:
      joined[-1] = dataclasses.replace(
        last,
        end_ns=max(last.end_ns, span.end_ns),
        steps=last.steps + span.steps,
      )
    else:
      joined.append(span)
  return joined


def syncer_spans(run: Run) -> list[Span]:
  """The syncer's row."""
  spans = []
  for kind, begin, end in (
    ("wait", "opened_ns", "quorum_ns"),
    ("grace", "quorum_ns", "closed_ns"),
    ("merge", "closed_ns", "committed_ns"),
  ):
    some = [
      Span(kind, getattr(round_, begin), getattr(round_, end))
      for round_ in run.syncer.rounds.values()
      if getattr(round_, begin) and getattr(round_, end)
    ]
    # Rounds in flight overlap: what is shown is their union.
    spans += join(sorted(some, key=lambda s: s.begin_ns), 0)
  for before, life in run.syncer.successions():
    process = run.process_of(life.who, life.started_ns, life.pid)
    start_ns = process.started_ns if process else life.started_ns
    if before is not None:
      last_ns = before.last_ns
      start_ns = max(start_ns, last_ns)  # a standby's has waited for it
      if run.session_of(life.started_ns) == run.session_of(before.started_ns):
        spans.append(Span("dead", last_ns, start_ns))
    spans.append(Span("start", start_ns, life.opened_ns))
  return spans


def _returns(accounting: Accounting, ticks: Ticks) -> dict[str, Any]:
  back = [death for death in accounting.deaths if death.back_ns]
  return {
    "type": "scatter",
    "mode": "markers",
    "name": "back at work",
    "x": [ticks.at(death.back_ns) for death in back],
    "y": [_row(death.learner) for death in back],
    "hovertext": [
      f"back after {duration(death.back_ns - death.at_ns)}" for death in back
    ],
    "hoverinfo": "text",
    "marker": {
      "symbol": "triangle-up",
      "size": 13,
      "color": "#FFFFFF",
      "line": {"color": BLACK, "width": 2},
    },
  }


def _faults(run: Run, rows: _Rows, ticks: Ticks) -> dict[str, Any]:
  """The fault script's marks, where each fault hit."""
  x, y, text = [], [], []
  for session in run.sessions:
    for line in session.faults:
      who = str(line.get("who", ""))
      who = _SYNCER if merges(who) else who
      if who in rows and line.get("took_effect") is True:
        x.append(ticks.at(session.fault_ns(line, run.syncer.rounds)))
        y.append(who)
        text.append(f"fault: {plain(str(_what(line)))}")
  return {
    "type": "scatter",
    "mode": "markers",
    "name": "fault",
    "x": x,
    "y": y,
    "hovertext": text,
    "hoverinfo": "text",
    "marker": {
      "symbol": "x",
      "size": 12,
      "color": VERMILLION,
      "line": {"color": "#FFFFFF", "width": 1},
    },
  }


def _what(line: dict[str, Any]) -> Any:
  fault = line.get("fault")
  return fault.get("what") if isinstance(fault, dict) else fault


def plain(text: str) -> str:
  """Text that Plotly, which knows some HTML, shows as it is."""
  for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
    text = text.replace(character, entity)
  return text


def _row(learner: int | None) -> str:
  return _SYNCER if learner is None else f"learner {learner}"
