"""report.html: one file that reads offline, for somebody new to the run.

It loads nothing from anywhere, and its content policy lets it load nothing.
Whatever comes from files is escaped.
"""

import html
import json
from typing import Any

from plotly import offline

from ddiloco import config as config_lib
from ddiloco.report import charts
from ddiloco.report.accounting import Accounting
from ddiloco.report.charts import Figure, Ticks
from ddiloco.report.run import Run
from ddiloco.report.story import count, duration, percent, size
from ddiloco.report.timeline import timeline
from ddiloco.report.traffic import traffic
from ddiloco.types import SECOND_NS, Apply, Wait

_POLICY = (
  "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
  " img-src data: blob:"
)
_STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #F6F7F8; color: #222;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 20px 16px 48px }
h1 { font-size: 1.5rem; margin: 0 0 .4rem }
h2 { font-size: 1.1rem; margin: 0 }
.lead { font-size: 1.1rem; margin: 0 0 .3rem }
.small { color: #555; font-size: .9rem; margin: .1rem 0 .4rem }
.tiles { display: grid; gap: 10px; margin: 18px 0;
  grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)) }
.tile, section, details { background: #FFF; border: 1px solid #DDD;
  border-radius: 8px; padding: 12px 14px }
.tile b { display: block; font-size: 1.5rem; line-height: 1.25 }
.tile span { color: #555; font-size: .85rem }
section, details { margin: 14px 0 }
.warnings { border-color: #E69F00; background: #FFF8E8 }
.warnings ul { margin: .3rem 0 0; padding-left: 1.2rem }
.warnings li, td { overflow-wrap: anywhere }
summary { cursor: pointer; font-weight: 600 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; margin-top: .5rem }
th, td { text-align: left; padding: 3px 18px 3px 0; vertical-align: top }
td.n, th.n { text-align: right }
td.n, td:first-child { white-space: nowrap }
"""
_SCRIPT = """
for (const [id, figure] of Object.entries(
    JSON.parse(document.getElementById("figures").textContent))) {
  Plotly.newPlot(id, figure.data, figure.layout,
    {responsive: true, displayModeBar: false});
}
"""


def render(run: Run, accounting: Accounting, summary: dict[str, Any]) -> str:
  """The whole page."""
  sections = _sections(run, accounting, summary)
  figures = {f"chart-{i}": s[2] for i, s in enumerate(sections)}
  body = [
    _head(run, summary),
    _tiles(summary),
    _warnings(summary["warnings"]),
    *(section(f"chart-{i}", *s[:2]) for i, s in enumerate(sections)),
    _learners(summary["learners"]),
    _settings(run),
  ]
  return document(f"{run.status}: run {run.run_id[:8]}", body, figures)


def document(title: str, body: list[str], figures: dict[str, Figure]) -> str:
  """A whole page: escaped HTML, and a figure for each element of that id."""
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n"
    f"<style>{_STYLE}</style>\n</head>\n<body>\n"
    f"<main>\n{''.join(body)}</main>\n"
    '<script type="application/json" id="figures">'
    f"{embedded_json(figures)}</script>\n"
    f"<script>{offline.get_plotlyjs()}</script>\n"
    f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
  )


def embedded_json(value: Any) -> str:
  """JSON that cannot end the script element it stands in."""
  text = json.dumps(value, separators=(",", ":"), allow_nan=False)
  for character in "<>&\u2028\u2029":
    text = text.replace(character, f"\\u{ord(character):04x}")
  return text


def _sections(
  run: Run, accounting: Accounting, summary: dict[str, Any]
) -> list[tuple[str, str, Figure]]:
  ticks = Ticks(accounting)
  ledger = summary["ledger"]
  return [
    (
      "Timeline",
      "Drag to zoom, double-click to zoom out. " + _promise(run),
      timeline(run, accounting, ticks),
    ),
    *(_losses(run, ticks) if run.has_arrays else ()),
    (
      "Participation",
      "How many learners' answers each round merged, and whose.",
      charts.participation(run),
    ),
    (
      "Goodput, and where the rest went",
      "Goodput is the time in inner steps over the time a learner was "
      "allocated.",
      charts.goodput(accounting),
    ),
    (
      "Token ledger",
      "Every processed token, exactly once. Merged: part of the global model. "
      "Pending: undecided at the end. Overwritten, or blended where learners "
      "keep a share of their own: stepped after the answer, or between two "
      "versions. Refused: the answer was left out. Late, unanswered, died: no "
      "answer carried it in time.",
      charts.token_ledger(ledger["learners"], ledger["fragments"]),
    ),
    *(_traffic(run) if run.has_arrays else ()),
    (
      "What a round takes",
      "From its opening to its commit; several rounds are in flight at once.",
      charts.round_timing(run),
    ),
  ]


def _losses(run: Run, ticks: Ticks) -> list[tuple[str, str, Figure]]:
  return [
    (
      "Loss against tokens",
      "Thin lines: training loss of each learner, nats per token, smoothed. "
      "Diamonds: the merged model on held-out text, nats per byte.",
      charts.loss_by_tokens(run),
    ),
    (
      "Loss against time",
      "The same losses by the clock.",
      charts.loss_by_time(run, ticks),
    ),
  ]


def _traffic(run: Run) -> list[tuple[str, str, Figure]]:
  text = "Encoded answers from the learners, parameters to them."
  return [("Traffic", text, charts.bytes_by_round(*traffic(run)))]


def section(chart: str, title: str, text: str) -> str:
  """A heading, a text and a figure's element."""
  return (
    f'<section><h2>{html.escape(title)}</h2><p class="small">'
    f'{html.escape(text)}</p><div id="{chart}"></div></section>\n'
  )


def _head(run: Run, summary: dict[str, Any]) -> str:
  first, *rest = summary["story"]
  more = "".join(f"<p>{html.escape(line)}</p>\n" for line in rest)
  return (
    f"<h1>Training run {html.escape(run.run_id[:8])}</h1>\n"
    f'<p class="lead">{html.escape(first)}</p>\n{more}'
    f'<p class="small">Started {html.escape(summary["started"])}, seed '
    f"{run.config.seed}, config {html.escape(run.config_sha256[:12])}. "
    "Independent learners train on their own data and offer what they learnt, "
    "fragment by fragment; a syncer merges what comes in time.</p>\n"
  )


def _promise(run: Run) -> str:
  if run.config.sync.wait is Wait.EXACT or run.config.sync.apply is Apply.OWN:
    return "By this run's policy learners wait for commits (yellow)."
  return (
    "No learner waits for another one, or for the syncer: when one fails, the "
    "others' green bars go on."
  )


def _tiles(summary: dict[str, Any]) -> str:
  evaluation, processed = summary["eval"], summary["tokens_processed"]
  loss, of = "–", "held-out loss: no evaluation"
  if evaluation["loss"] is not None:
    loss = f"{evaluation['loss']:.3f}"
    of = f"held-out loss, nats per byte (round {evaluation['round']})"
  blocked = [
    facts["blocked_ms_per_round"]
    for facts in summary["learners"].values()
    if facts["blocked_ms_per_round"] is not None
  ]
  merged = summary["tokens_merged"] / processed if processed else None
  rejoined = sum(f["incarnations"] - 1 for f in summary["learners"].values())
  participants, sent = summary["participants_mean"], summary["bytes"]
  tiles = [
    (loss, of),
    (f"{summary['rounds']:,}", "rounds committed"),
    (count(processed), f"tokens processed, {percent(merged)} merged"),
    (percent(summary["goodput"]), "goodput"),
    (percent(summary["uptime"]), "uptime: some learner was stepping"),
    (
      "–" if participants is None else f"{participants:.2f}",
      "learners merged a round",
    ),
    (duration(summary["wall_s"] * SECOND_NS), "wall-clock time"),
    (str(max(rejoined, 0)), "restarts of learners"),
    (
      f"{max(blocked):.1f} ms" if blocked else "–",
      "learner time a sync takes, median of the slowest",
    ),
    (size(sent["up"]), f"sent up, {size(sent['down'])} down")
    if sent is not None
    else ("–", "sent: the run had no arrays"),
  ]
  cells = "".join(
    f'<div class="tile"><b>{html.escape(value)}</b>'
    f"<span>{html.escape(label)}</span></div>"
    for value, label in tiles
  )
  return f'<div class="tiles">{cells}</div>\n'


def _warnings(warnings: list[str]) -> str:
  if not warnings:
    return ""
  shown = "".join(f"<li>{html.escape(str(w))}</li>" for w in warnings[:50])
  more = len(warnings) - 50
  shown += f"<li>and {more} more</li>" if more > 0 else ""
  return (
    f'<section class="warnings"><h2>Look at this</h2><ul>{shown}</ul>'
    "</section>\n"
  )


def _learners(learners: dict[str, dict[str, Any]]) -> str:
  columns = (
    ("steps", "steps"),
    ("tokens", "tokens"),
    ("answers", "answers"),
    ("counted", "accepted"),
    ("lives", "incarnations"),
    ("fragments never merged", "fragments_never_merged"),
    ("step, median ms", "step_ms_median"),
    ("blocked a sync, median ms", "blocked_ms_per_round"),
    ("p99 ms", "blocked_ms_p99"),
  )
  head = "".join(f'<th class="n">{title}</th>' for title, _ in columns)
  rows = []
  for learner, facts in learners.items():
    cells = "".join(
      f'<td class="n">{_number(facts[key])}</td>' for _, key in columns
    )
    rejected = ", ".join(f"{r} {n:,}" for r, n in facts["rejected"].items())
    rows.append(
      f"<tr><td>learner {html.escape(learner)}</td>{cells}"
      f"<td>{html.escape(rejected or 'none')}</td></tr>"
    )
  return (
    "<details><summary>The learners in numbers</summary>"
    f'<div class="scroll"><table><tr><th></th>{head}<th>not counted</th></tr>'
    f"{''.join(rows)}</table></div></details>\n"
  )


def _number(value: float | None) -> str:
  if value is None:
    return "–"
  return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _settings(run: Run) -> str:
  changed = config_lib.differences(config_lib.Config(), run.config)
  rows = "".join(
    f"<tr><td>{html.escape(key)}</td><td>{html.escape(repr(new))}</td>"
    f"<td>{html.escape(repr(old))}</td></tr>"
    for key, (old, new) in changed.items()
  )
  return (
    "<details><summary>Configuration: what differs from the defaults"
    f'</summary><div class="scroll"><table><tr><th>key</th><th>value</th>'
    f"<th>default</th></tr>{rows}</table></div></details>\n"
  )
