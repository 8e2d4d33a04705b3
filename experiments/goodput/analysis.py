"""How far a simulated table is from the printed one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ddiloco.planning.goodput_table import CHIPS, ROWS, name
from experiments.goodput.paper import PRINTED

FAR = 5.0  # points
Rows = Sequence[dict[str, Any]]


class Cell(NamedTuple):
  """One number of the table, in %."""

  what: str  # goodput | uptime
  kind: str
  chips: int
  printed: float
  simulated: float

  @property
  def error(self) -> float:
    """Points too much."""
    return self.simulated - self.printed


def cells(rows: Rows) -> list[Cell]:
  """All 60, in the order of the table."""
  found = []
  for row in rows:
    key, i = (row["learners"], row["elastic"]), CHIPS.index(row["chips"])
    for what, printed in PRINTED.items():
      cell = (what, name(row), row["chips"], printed[key][i], 100 * row[what])
      found.append(Cell(*cell))
  return found


def mean_error(rows: Rows) -> float:
  """Mean absolute error over all cells, in points."""
  return sum(abs(cell.error) for cell in cells(rows)) / len(cells(rows))


def rule_of_thumb(rows: Rows) -> list[tuple[int, int, float]]:
  """goodput(kM, kN) - goodput(M, N) for k = 2: (M, N, points)."""
  goodput = {
    (r["learners"], r["chips"]): 100 * r["goodput"]
    for r in rows
    if r["elastic"]
  }
  return [
    (m, n, goodput[2 * m, 2 * n] - goodput[m, n])
    for m, n in goodput
    if (2 * m, 2 * n) in goodput
  ]


def report(rows: Rows, made_with: str) -> str:
  """results.md."""
  lines = [made_with, ""]
  for what in PRINTED:
    lines += [f"{what}, %: simulated (printed)", ""]
    lines += ["| | " + " | ".join(f"{n:,}" for n in CHIPS) + " |"]
    lines += ["| --- |" + " --- |" * len(CHIPS)]
    for learners, elastic in ROWS:
      kind = name({"learners": learners, "elastic": elastic})
      own = [c for c in cells(rows) if (c.what, c.kind) == (what, kind)]
      numbers = (f"{c.simulated:.1f} ({c.printed})" for c in own)
      lines.append(f"| {kind} | " + " | ".join(numbers) + " |")
    lines.append("")
  far = [cell for cell in cells(rows) if abs(cell.error) > FAR]
  worst = max(cells(rows), key=lambda cell: abs(cell.error))
  rule = max(rule_of_thumb(rows), key=lambda item: abs(item[2]))
  lines += [
    f"Mean absolute error over {len(cells(rows))} cells: "
    f"{mean_error(rows):.2f} points.",
    f"Cells off by more than {FAR:g} points: {len(far)}"
    + "".join(f"; {c.what} of {c.kind} at {c.chips:,}" for c in far)
    + ".",
    f"The worst: {worst.what} of {worst.kind} at {worst.chips:,} chips, "
    f"{worst.error:+.1f}.",
    "Rule of thumb, goodput(2M, 2N) - goodput(M, N): "
    f"{rule[2]:+.1f} points at most (M = {rule[0]}, N = {rule[1]:,}).",
  ]
  return "\n".join(lines) + "\n"
