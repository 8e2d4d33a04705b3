"""Goodput and uptime by learners and chips, as the paper's Table 1 has them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from ddiloco.planning.goodput import Cluster, Outcome, simulate

# (learners, elastic): the first two are data-parallel training.
ROWS = ((1, False), (1, True), (2, True), (4, True), (8, True), (16, True))
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


def describe(outcome: Outcome) -> dict[str, Any]:
  """A row: means over seeds, and half the width of their 95% intervals."""
  cluster = outcome.cluster
  row: dict[str, Any] = {
    "learners": cluster.learners,
    "elastic": cluster.elastic,
    "chips": cluster.chips,
  }
  for name in ("goodput", "uptime"):
    values = getattr(outcome, name)
    row[name] = float(values.mean())
    row[f"{name}_ci95"] = interval(values)
  return row


def interval(values: np.ndarray) -> float | None:
  """Half the width of the 95% interval of a mean; None with one value."""
  if len(values) < 2:
    return None
  error = values.std(ddof=1) / np.sqrt(len(values))
  return float(stats.t.ppf(0.975, len(values) - 1) * error)


def table(
  base: Cluster, *, hours: float, seeds: Sequence[int]
) -> list[dict[str, Any]]:
  """Every row of the table; of `base` all but learners, elasticity, chips."""
  rows = []
  for learners, elastic in ROWS:
    for chips in CHIPS:
      cluster = dataclasses.replace(
        base, learners=learners, elastic=elastic, chips=chips
      )
      rows.append(describe(simulate(cluster, hours=hours, seeds=seeds)))
  return rows


def name(row: dict[str, Any]) -> str:
  """What a row is of, in words."""
  if row["learners"] > 1:
    return f"{row['learners']} decoupled learners"
  return f"data-parallel, {'' if row['elastic'] else 'not '}elastic"


def text(rows: Sequence[dict[str, Any]]) -> str:
  """The table for a terminal: goodput and uptime, %."""
  sizes = sorted({row["chips"] for row in rows})
  lines = [f"{'goodput / uptime, %':<26}" + "".join(map(_size, sizes))]
  for kind in dict.fromkeys(map(name, rows)):
    cells = {row["chips"]: row for row in rows if name(row) == kind}
    lines.append(f"{kind:<26}" + "".join(_cell(cells[n]) for n in sizes))
  widths = [
    max((100 * row[f"{what}_ci95"] for row in rows), default=0.0)
    for what in ("goodput", "uptime")
    if None not in [row[f"{what}_ci95"] for row in rows]
  ]
  if widths:
    goodput, uptime = widths
    lines.append(f"95% intervals: +-{goodput:.2f} / +-{uptime:.2f} at most")
  return "\n".join(lines)


def _size(chips: int) -> str:
  return f"{f'{chips:,}':>15}"


def _cell(row: dict[str, Any]) -> str:
  return f"{100 * row['goodput']:>8.1f} /{100 * row['uptime']:5.1f}"
