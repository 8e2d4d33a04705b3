"""The charts of report.html, as plain Plotly figures.

A figure is `{"data": [...], "layout": {...}}`. Colours are Okabe and Ito's,
which people with any colour vision can tell apart.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddiloco.protocol import ledger
from ddiloco.report import accounting as accounting_lib
from ddiloco.report.accounting import Accounting
from ddiloco.report.lives import LearnerLife
from ddiloco.report.run import Run
from ddiloco.types import MILLISECOND_NS, SECOND_NS

Figure = dict[str, Any]

BLACK, ORANGE, SKY, GREEN = "#333333", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#BBBBBB"
_LEARNERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
_POINTS_MAX = 300  # of a curve

_TIME = {
  accounting_lib.PROGRAM_STARTUP: SKY,
  accounting_lib.RECOVERY: BLACK,
  accounting_lib.EXCHANGE: BLUE,
  accounting_lib.WAITING: YELLOW,
  accounting_lib.STALL: ORANGE,
  accounting_lib.OTHER: GREY,
}
_TOKENS = {
  ledger.MERGED: GREEN,
  ledger.PENDING: SKY,
  ledger.OVERWRITTEN: YELLOW,
  ledger.BLENDED: YELLOW,
  ledger.LATE: ORANGE,
  ledger.UNANSWERED: GREY,
  ledger.DIED: BLACK,
}


def learner_colour(learner: int) -> str:
  """A learner's colour in every chart."""
  return _LEARNERS[learner % len(_LEARNERS)]


class Ticks:
  """A time axis from the run's start, in the unit that fits it."""

  def __init__(self, accounting: Accounting):
    self._origin_ns = accounting.origin_ns
    span_s = (accounting.end_ns - accounting.origin_ns) / SECOND_NS
    self.unit, seconds = "s", 1
    if span_s > 10800:
      self.unit, seconds = "h", 3600
    elif span_s > 600:
      self.unit, seconds = "min", 60
    self._unit_ns = seconds * SECOND_NS

  def at(self, unix_ns: float) -> float:
    """A moment on the axis."""
    return round((unix_ns - self._origin_ns) / self._unit_ns, 5)

  def length(self, ns: float) -> float:
    """A stretch of the axis."""
    return round(ns / self._unit_ns, 5)

  @property
  def title(self) -> str:
    """The axis title."""
    return f"time since the start ({self.unit})"


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
  """The layout all charts share, with titles for both axes."""
  axis = {
    "gridcolor": "#E5E5E5",
    "zerolinecolor": "#CCCCCC",
    "ticklabelstandoff": 5,
  }
  base = {
    "height": 360,
    "margin": {"l": 64, "r": 16, "t": 40, "b": 48},
    "paper_bgcolor": "#FFFFFF",
    "plot_bgcolor": "#FFFFFF",
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222222"},
    "legend": {
      "orientation": "h",
      "traceorder": "normal",
      "x": 0,
      "y": 1.02,
      "yanchor": "bottom",
    },
    "xaxis": {**axis, "title": {"text": x}},
    "yaxis": {**axis, "title": {"text": y}},
  }
  for key, value in more.items():
    base[key] = {**base[key], **value} if key in ("xaxis", "yaxis") else value
  return base


def binned(values: Sequence[float], bins: int) -> list[float | None]:
  """Means of at most `bins` stretches; None where one has no number."""
  array = np.asarray(values, np.float64)
  if len(array) <= bins:
    return _plain(array)
  begins = _stretches(len(array), bins)
  finite = np.isfinite(array)
  sums = np.add.reduceat(np.where(finite, array, 0.0), begins)
  counts = np.add.reduceat(finite.astype(np.int64), begins)
  return _plain(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))


def _stretches(length: int, bins: int) -> np.ndarray:
  """Where equal stretches begin; the last one may be shorter."""
  return np.arange(0, length, -(-length // bins))


def _plain(array: np.ndarray) -> list[float | None]:
  return [float(f"{v:.6g}") if np.isfinite(v) else None for v in array]


# --- Loss -------------------------------------------------------------------


def loss_by_tokens(run: Run) -> Figure:
  """Training and held-out loss against the tokens the run had processed."""
  processed = _processed(run)
  data = [
    _training(learner, lives, lambda life: processed(life.end_ns))
    for learner, lives in run.learners.items()
  ]
  points = [e["tokens"] for e in run.evaluations]
  data.append(_held_out(run, points))
  return {
    "data": data,
    "layout": layout("tokens processed by the run", "loss (nats)"),
  }


def loss_by_time(run: Run, ticks: Ticks) -> Figure:
  """The same against time, which shows what failures cost."""
  data = [
    _training(learner, lives, lambda life: life.end_ns, ticks.at)
    for learner, lives in run.learners.items()
  ]
  points = []
  for evaluation in run.evaluations:
    # A model is as old as its commit, whenever it was evaluated.
    round_ = run.syncer.rounds.get(evaluation["round"])
    committed_ns = round_.committed_ns if round_ else 0
    if evaluation["round"] == 0:
      committed_ns = run.sessions[0].started_ns if run.sessions else 0
    points.append(ticks.at(committed_ns or evaluation["unix_ns"]))
  data.append(_held_out(run, points))
  return {"data": data, "layout": layout(ticks.title, "loss (nats)")}


def _processed(run: Run) -> Callable[[np.ndarray], np.ndarray]:
  """Tokens that all learners had processed, by Unix ns."""
  lives = [*itertools.chain(*run.learners.values())]
  none = np.zeros(0, np.int64)
  end_ns = np.concatenate([none, *(life.end_ns for life in lives)])
  tokens = np.concatenate([none, *(life.tokens for life in lives)])
  order = np.argsort(end_ns, kind="stable")
  end_ns, total = end_ns[order], np.cumsum(tokens[order])
  total = np.concatenate(([0], total))
  return lambda at_ns: total[np.searchsorted(end_ns, at_ns, side="right")]


def _training(
  learner: int,
  lives: list[LearnerLife],
  where: Any,
  scale: Any = float,
) -> dict[str, Any]:
  steps = max(sum(life.steps for life in lives), 1)
  x: list[float | None] = []
  y: list[float | None] = []
  for life in lives:
    if not life.steps:
      continue
    bins = max(_POINTS_MAX * life.steps // steps, 1)
    x += [None if v is None else scale(v) for v in _means(where(life), bins)]
    y += binned(life.losses, bins)
    x.append(None)  # A new life is a new line.
    y.append(None)
  return {
    "type": "scatter",
    "mode": "lines",
    "name": f"learner {learner}, training",
    "x": x,
    "y": y,
    "line": {"color": learner_colour(learner), "width": 1.2},
    "opacity": 0.8,
  }


def _means(values: np.ndarray, bins: int) -> list[float]:
  """As `binned`, for integers too large to round."""
  if len(values) <= bins:
    return values.tolist()
  begins = _stretches(len(values), bins)
  origin = values[0]
  sums = np.add.reduceat(values - origin, begins)
  lengths = np.diff(np.append(begins, len(values)))
  return (origin + sums // lengths).tolist()


def _held_out(run: Run, x: list[float]) -> dict[str, Any]:
  return {
    "type": "scatter",
    "mode": "lines+markers",
    "name": "held out, per byte",
    "x": x,
    "y": [e["loss"] for e in run.evaluations],
    "text": [f"round {e['round']}" for e in run.evaluations],
    "line": {"color": BLACK, "width": 2, "dash": "dot"},
    "marker": {"color": BLACK, "size": 10, "symbol": "diamond"},
  }


# --- Rounds -----------------------------------------------------------------


def participation(run: Run) -> Figure:
  """How many learners each round merged, and which."""
  rounds = sorted(run.syncer.rounds)
  learners = [
    {learner for learner, _, _ in run.syncer.rounds[t].counted} for t in rounds
  ]
  bins = min(len(rounds), _POINTS_MAX)
  x = binned(rounds, bins)
  width = x[1] - x[0] if len(x) > 1 else 1  # the last stretch is shorter
  known = set(run.learners).union(*learners)
  data = [
    {
      "type": "bar",
      "name": f"learner {learner}",
      "x": x,
      "width": width,
      "y": binned([float(learner in some) for some in learners], bins),
      "marker": {"color": learner_colour(learner), "line": {"width": 0}},
    }
    for learner in sorted(known)
  ]
  ticks = {"dtick": 1} if len(known) <= 10 else {}
  shape = layout(
    "round", "learners merged", barmode="stack", bargap=0, yaxis=ticks
  )
  return {"data": data, "layout": shape}


def bytes_by_round(up: dict[int, int], down: dict[int, int]) -> Figure:
  """Bytes both ways, cumulative."""
  data = []
  for name, values, colour in (
    ("answers, up", up, ORANGE),
    ("parameters, down", down, BLUE),
  ):
    rounds = np.array(sorted(values), np.int64)
    total = np.cumsum([values[t] for t in rounds.tolist()])
    keep = np.unique(np.linspace(0, len(rounds) - 1, 400).astype(np.int64))
    keep = keep[keep >= 0]
    data.append(
      {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": rounds[keep].tolist() if len(rounds) else [],
        "y": total[keep].tolist() if len(rounds) else [],
        "line": {"color": colour, "width": 2},
      }
    )
  return {"data": data, "layout": layout("round", "bytes, cumulative")}


def round_timing(run: Run) -> Figure:
  """Percentiles of the phases of a round."""
  phases = (
    ("first answer", "opened_ns", "first_ns"),
    ("quorum", "first_ns", "quorum_ns"),
    ("pace, grace", "quorum_ns", "closed_ns"),
    ("merge", "closed_ns", "merged_ns"),
    ("commit", "merged_ns", "committed_ns"),
  )
  values = {
    name: [
      max(getattr(r, end) - getattr(r, begin), 0) / MILLISECOND_NS
      for r in run.syncer.rounds.values()
      if getattr(r, begin) and getattr(r, end)
    ]
    or [0.0]
    for name, begin, end in phases
  }
  data = [
    {
      "type": "bar",
      "name": f"{q}th percentile" if q != 50 else "median",
      "x": list(values),
      "y": [round(float(np.percentile(v, q)), 2) for v in values.values()],
      "marker": {"color": colour},
    }
    for q, colour in ((50, SKY), (90, BLUE), (99, BLACK))
  ]
  shape = layout("phase of a round", "ms", yaxis={"type": "log", "dtick": 1})
  return {"data": data, "layout": shape}


# --- Time and tokens --------------------------------------------------------


def goodput(accounting: Accounting) -> Figure:
  """Where each learner's allocated time went."""
  rows: list[tuple[str, int, int, dict[str, int]]] = [
    (f"learner {i}", t.allocated_ns, t.good_ns, t.bad_ns)
    for i, t in accounting.learners.items()
  ]
  causes = accounting_lib.CAUSES
  rows.append(
    (
      "all",
      sum(row[1] for row in rows),
      sum(row[2] for row in rows),
      {cause: sum(row[3][cause] for row in rows) for cause in causes},
    )
  )
  rows = [row for row in reversed(rows) if row[1]]
  names = [row[0] for row in rows]
  shares = {"goodput": [100 * row[2] / row[1] for row in rows]}
  for cause in causes:
    shares[cause] = [100 * row[3][cause] / row[1] for row in rows]
  data = [
    _bar(name.replace("_", " "), names, values, _TIME.get(name, GREEN), "%")
    for name, values in shares.items()
    if any(values)
  ]
  return {"data": data, "layout": _bars("share of allocated time (%)", rows)}


def token_ledger(learners: dict[str, Any], num_fragments: int) -> Figure:
  """Where each learner's tokens went."""
  names = [f"learner {learner}" for learner in reversed(learners)]
  accounts = list(reversed(learners.values()))
  lost = {cause for account in accounts for cause in account["lost"]}
  order = [c for c in _TOKENS if c in lost]
  order += sorted(lost.difference(order))
  data = [
    _bar(
      where,
      names,
      [round(get(account) / num_fragments, 1) for account in accounts],
      _TOKENS.get(where, VERMILLION),
      " tokens",
    )
    for where, get in (
      (ledger.MERGED, lambda a: a["merged"]),
      (ledger.PENDING, lambda a: a["pending"]),
      *((c, lambda a, c=c: a["lost"].get(c, 0)) for c in order),
    )
  ]
  return {"data": data, "layout": _bars("tokens", accounts)}


def _bar(
  name: str, rows: list[str], values: list[float], colour: str, unit: str
) -> dict[str, Any]:
  return {
    "type": "bar",
    "orientation": "h",
    "name": name,
    "y": rows,
    "x": [round(value, 3) for value in values],
    "marker": {"color": colour},
    "hovertemplate": f"%{{y}}: {name} %{{x:,.4~g}}{unit}<extra></extra>",
  }


def _bars(title: str, rows: Sequence[Any]) -> dict[str, Any]:
  return layout(
    title,
    "",
    barmode="stack",
    bargap=0.35,
    height=150 + 44 * len(rows),
    margin={"l": 84, "r": 16, "t": 60, "b": 48},
  )
