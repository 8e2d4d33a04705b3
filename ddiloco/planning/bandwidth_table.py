"""Bandwidth for a compute utilisation: the paper's Table 13, or a config's."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddiloco.planning import bandwidth
from ddiloco.planning.bandwidth import Link, Traffic, needed_gbps

UTILISATIONS = (50, 75, 90, 95, 99)  # %
SITES = ((1.0, 2), (5.0, 2), (1.0, 8), (5.0, 8))  # seconds a step, sites
METHODS = ("data_parallel", "decoupled", "decoupled_int4")
PARAMETERS = 5e9
_BF16, _INT4 = 16, 4  # bits
# Where the paper's search for a bandwidth seems to end.
_TABLE_TOLERANCE = 0.0075
_PRINTED = {
  "data_parallel": (
    (49, 81, 104, 113, 195),
    (9.5, 16, 21, 23, 49),
    (85, 140, 183, 198, 391),
    (17, 28, 37, 40, 49),
  ),
  "decoupled": (
    (0.58, 1.2, 1.7, 1.9, 2.2),
    (0.12, 0.23, 0.34, 0.39, 0.43),
    (1.0, 2.0, 3.0, 3.3, 3.8),
    (0.21, 0.40, 0.59, 0.68, 0.75),
  ),
  "decoupled_int4": (
    (0.15, 0.29, 0.43, 0.49, 0.53),
    (0.03, 0.06, 0.08, 0.10, 0.11),
    (0.26, 0.51, 0.75, 0.84, 0.94),
    (0.05, 0.10, 0.15, 0.17, 0.19),
  ),
}


class Setting(NamedTuple):
  """How decoupled learners exchange fragments."""

  fragments: int  # P
  interval: int  # H
  overlap: int  # tau
  why: str


MATCHING = Setting(
  14,
  100,
  2,
  "what the printed rows of decoupled learners fit; the text says H = P = 24",
)
STATED = Setting(
  24,
  24,
  2,
  "as the text has it; 80 Gbit in 24 steps of 1 s are 3.33 Gbit/s, so no "
  "search can end at the printed 2.2",
)


def traffic(method: str, sites: int, setting: Setting) -> Traffic:
  """What a method sends of the table's model."""
  if method == "data_parallel":
    return bandwidth.data_parallel(PARAMETERS * _BF16, sites)
  bits = _INT4 if method == "decoupled_int4" else _BF16
  return bandwidth.decoupled(
    [PARAMETERS * bits / setting.fragments] * setting.fragments,
    interval=setting.interval,
    overlap=setting.overlap,
    sites=sites,
  )


def table(
  setting: Setting, methods: Sequence[str] = METHODS
) -> list[dict[str, Any]]:
  """The numbers of Table 13, in its order, each with the printed one.

  Of data-parallel training `needed_gbps` too: see `_TABLE_TOLERANCE`.
  """
  rows = []
  for i, (step_s, sites) in enumerate(SITES):
    for method in methods:
      for j, percent in enumerate(UTILISATIONS):
        sent, target = traffic(method, sites, setting), percent / 100
        search = functools.partial(needed_gbps, sent, target, step_s=step_s)
        row = {
          "step_s": step_s,
          "sites": sites,
          "method": method,
          "utilisation": percent,
          "gbps": search(tolerance=_TABLE_TOLERANCE),
          "printed": _PRINTED[method][i][j],
        }
        if method == "data_parallel":
          row["needed_gbps"] = search()
        rows.append(row)
  return rows


def both() -> tuple[dict[str, list[dict[str, Any]]], str]:
  """The table at the setting that it fits and at the stated one, and a text."""
  found, told = {}, []
  for name, setting, methods in (
    ("rows", MATCHING, METHODS),
    ("rows_as_stated", STATED, METHODS[1:]),
  ):
    found[name] = table(setting, methods)
    p, h, tau, why = setting
    told += [f"P = {p}, H = {h}, tau = {tau}: {why}", "", text(found[name]), ""]
  told.append(
    "In brackets: as printed. Data-parallel 99% is where the paper's search "
    "ends, a bisection to 0.75 points; see needed_gbps for what it takes."
  )
  return found, "\n".join(told)


def of_traffic(
  sent: dict[str, Traffic],
  *,
  step_s: float,
  link: Link,
  utilisations: Sequence[int] = UTILISATIONS,
) -> list[dict[str, Any]]:
  """Rows for traffic of one's own, by name."""
  return [
    {
      "step_s": step_s,
      "sites": item.sites,
      "method": name,
      "utilisation": percent,
      "gbps": needed_gbps(item, percent / 100, step_s=step_s, link=link),
    }
    for name, item in sent.items()
    for percent in utilisations
  ]


def text(rows: Sequence[dict[str, Any]]) -> str:
  """Rows for a terminal: Gbit/s, and the printed ones in brackets."""
  percents = list(dict.fromkeys(row["utilisation"] for row in rows))
  head = "".join(f"{f'{p}%':>16}" for p in percents)
  lines = [f"{'Gbit/s for a utilisation of':<34}{head}"]
  groups: dict[tuple, list[str]] = {}
  for row in rows:
    key = row["step_s"], row["sites"], row["method"]
    cell = f"{row['gbps']:.3g}"
    if "printed" in row:
      cell += f" ({row['printed']:g})"
    groups.setdefault(key, []).append(f"{cell:>16}")
  for (step_s, sites, method), cells in groups.items():
    name = f"{step_s:g} s, {sites} sites, {method}"
    lines.append(f"{name:<34}" + "".join(cells))
  return "\n".join(lines)
