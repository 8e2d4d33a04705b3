"""A plan as a page that reads offline."""

import html
from typing import Any

from ddiloco.planning import planner
from ddiloco.report import charts, page


def render(made: dict[str, Any]) -> str:
  """The page of `planner.make_plan`."""
  title = "Plan of a run"
  warned = "".join(
    f"<p><b>Warning:</b> {html.escape(line)}.</p>\n"
    for line in made["warnings"]
  )
  figures = {
    "islands": _islands(made),
    "rounds": _rounds(made["curves"]),
    "failures": _failures(made),
  }
  body = [
    f"<h1>{title}</h1>\n",
    warned,
    page.section(
      "islands",
      "Islands",
      "Tokens a second of each, with batches whose steps end together.",
    ),
    page.section(
      "rounds",
      "The longest round against bandwidth",
      "From an answer to its commit, fetched. Above the dashed line there is "
      "no slack: the inner steps that may pass meanwhile are over.",
    ),
    page.section(
      "failures",
      "Goodput and uptime",
      "Of these islands, and of the same chips in one data-parallel run.",
    ),
    f'<section><h2>In words</h2><pre class="small">'
    f"{html.escape(planner.text(made))}</pre></section>\n",
  ]
  return page.document(title, body, figures)


def _islands(made: dict[str, Any]) -> charts.Figure:
  rows = made["islands"]
  kinds = list(dict.fromkeys(row["slice"] for row in rows))
  data = [
    {
      "type": "bar",
      "name": kind,
      "x": [
        f"island {i}" for i, row in enumerate(rows) if row["slice"] == kind
      ],
      "y": [round(row["tokens_per_s"]) for row in rows if row["slice"] == kind],
      "marker": {"color": charts.learner_colour(k)},
    }
    for k, kind in enumerate(kinds)
  ]
  return {"data": data, "layout": charts.layout("", "tokens a second")}


def _rounds(curves: dict[str, Any]) -> charts.Figure:
  gbps = [float(f"{x:.4g}") for x in curves["gbps"]]
  data = [
    {
      "type": "scatter",
      "mode": "lines",
      "name": name,
      "x": gbps,
      "y": [float(f"{y:.4g}") for y in seconds],
      "line": {"color": charts.learner_colour(i), "width": 3},
    }
    for i, (name, seconds) in enumerate(curves["round_s"].items())
  ]
  limit_s = curves["overlap_steps"] * curves["step_s"]
  data.append(
    {
      "type": "scatter",
      "mode": "lines",
      "name": f"tau = {curves['overlap_steps']} steps",
      "x": [gbps[0], gbps[-1]],
      "y": [limit_s, limit_s],
      "line": {"color": charts.BLACK, "dash": "dash"},
    }
  )
  log = {"type": "log", "dtick": 1}
  layout = charts.layout(
    "Gbit/s of a link", "s", xaxis=log, yaxis=log, height=440
  )
  return {"data": data, "layout": layout}


def _failures(made: dict[str, Any]) -> charts.Figure:
  names = {
    "decoupled": f"{len(made['islands'])} decoupled islands",
    "data_parallel": "one data-parallel run",
  }
  data = [
    {
      "type": "bar",
      "name": what,
      "x": list(names.values()),
      "y": [round(100 * made["failures"][name][what], 2) for name in names],
      "marker": {"color": charts.learner_colour(i)},
    }
    for i, what in enumerate(("goodput", "uptime"))
  ]
  layout = charts.layout("", "%", yaxis={"range": [0, 102]}, barmode="group")
  return {"data": data, "layout": layout}
