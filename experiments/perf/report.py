"""How performance commands state their results."""

import json
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
  """Median and its 95% interval from order statistics (no distribution)."""
  ordered, n = sorted(values), len(values)
  half = 0.98 * math.sqrt(n)
  low = max(math.floor(n / 2 - half), 0)
  high = min(math.ceil(n / 2 + half), n - 1)
  return statistics.median(ordered), ordered[low], ordered[high]


def target(
  name: str,
  values: Sequence[float],
  unit: str,
  limit: float,
  *,
  at_least: bool = False,
) -> dict[str, Any]:
  """A target `median <= limit`; says so when its interval straddles it.

  With `at_least` it is `median >= limit`.
  """
  if not values:
    raise ValueError(f"{name}: nothing was measured")
  median, low, high = median_interval(values)
  return {
    "name": name,
    "value": round(median, 4),
    "low": round(low, 4),
    "high": round(high, 4),
    "n": len(values),
    "unit": unit,
    "target": limit,
    "met": median >= limit if at_least else median <= limit,
    "within_noise": low < limit <= high if at_least else low <= limit < high,
  }


def publish(targets: list[dict[str, Any]], output: str) -> None:
  """Prints the targets as a table; writes them as JSON."""
  for item in targets:
    verdict = "met" if item["met"] else "MISSED"
    if item["within_noise"]:
      verdict += ", within noise"
    print(
      f"{item['name']:<52} {item['value']:>9} {item['unit']:<7} "
      f"[{item['low']}, {item['high']}] n={item['n']}  "
      f"target {item['target']}: {verdict}"
    )
  if output:
    pathlib.Path(output).write_text(
      json.dumps({"targets": targets}, indent=2) + "\n"
    )
