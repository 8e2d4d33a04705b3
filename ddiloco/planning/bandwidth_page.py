"""Compute utilisation against bandwidth (Fig. 13), as an offline page."""

import html
from collections.abc import Mapping

import numpy as np

from ddiloco.planning.bandwidth import PERFECT, Link, Traffic, utilisation
from ddiloco.report import charts, page

_POINTS = 48
_STEPS = 300  # enough for a curve
_DECADES = (-3.0, 2.0)  # around what is sent in a step's time


def render(
  sent: Mapping[str, Traffic], *, step_s: float, note: str, link: Link = PERFECT
) -> str:
  """The page of some traffic, by name; `note` says what it is of."""
  title = "Bandwidth and compute utilisation"
  body = [
    f"<h1>{title}</h1>\n",
    f'<p class="small">{html.escape(note)}</p>\n',
    page.section(
      "curves",
      "Compute utilisation",
      "Share of the time that nobody waits for the exchange between sites.",
    ),
  ]
  return page.document(title, body, {"curves": figure(sent, step_s, link)})


def figure(
  sent: Mapping[str, Traffic], step_s: float, link: Link
) -> charts.Figure:
  """One curve for each traffic."""
  most = max(sum(t.bits) * t.ring for t in sent.values()) / 1e9 / step_s
  gbps = most * np.logspace(*_DECADES, _POINTS)
  data = []
  for i, (name, traffic) in enumerate(sent.items()):
    shares = [
      utilisation(traffic, float(x), step_s=step_s, link=link, steps=_STEPS)
      for x in gbps
    ]
    data.append(
      {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [float(f"{x:.4g}") for x in gbps],
        "y": [round(100 * share, 2) for share in shares],
        "line": {"color": charts.learner_colour(i), "width": 3},
      }
    )
  layout = charts.layout(
    "Gbit/s between sites",
    "compute utilisation, %",
    xaxis={"type": "log", "dtick": 1},
    yaxis={"range": [0, 102]},
    height=440,
  )
  return {"data": data, "layout": layout}
