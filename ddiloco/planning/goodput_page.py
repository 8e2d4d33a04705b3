"""Goodput and uptime against chips, as a page that reads offline."""

import html
from collections.abc import Sequence
from typing import Any

from ddiloco.planning.goodput_table import name
from ddiloco.report import charts, page
from ddiloco.report.story import count

Rows = Sequence[dict[str, Any]]


def render(rows: Rows, note: str) -> str:
  """The page of a table's rows; `note` says what they were made with."""
  sections = [
    ("Goodput", "Share of all chips' time in useful steps.", "goodput"),
    ("Uptime", "Share of the time in which any learner steps.", "uptime"),
  ]
  body = [
    "<h1>Goodput under failures</h1>\n",
    f'<p class="small">{html.escape(note)}</p>\n',
  ]
  figures = {}
  for title, text, what in sections:
    body.append(page.section(what, title, text))
    figures[what] = figure(rows, what)
  return page.document("Goodput under failures", body, figures)


def figure(rows: Rows, what: str) -> charts.Figure:
  """One line for each kind of row, with its 95% intervals."""
  data = []
  for i, kind in enumerate(dict.fromkeys(map(name, rows))):
    own = sorted((r for r in rows if name(r) == kind), key=lambda r: r["chips"])
    colour = charts.learner_colour(i)
    data.append(
      {
        "type": "scatter",
        "mode": "lines+markers",
        "name": kind,
        "x": [row["chips"] for row in own],
        "y": [round(100 * row[what], 2) for row in own],
        "error_y": {
          "array": [round(100 * (row[f"{what}_ci95"] or 0), 3) for row in own],
          "thickness": 1,
        },
        "line": {
          "color": colour,
          "dash": "solid" if own[0]["elastic"] else "dot",
        },
        "marker": {"color": colour, "size": 8},
      }
    )
  layout = charts.layout(
    "chips",
    f"{what}, %",
    xaxis={
      "type": "log",
      "tickvals": (chips := sorted({row["chips"] for row in rows})),
      "ticktext": [count(n) for n in chips],
    },
    yaxis={"range": [0, 102]},
    height=420,
  )
  return {"data": data, "layout": layout}
