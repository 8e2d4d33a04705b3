"""What newcomers cost, and what extra compute brings.

  python -m experiments.upsizing.run --output=runs/upsizing [--interval=24]

Fig. 12 and Table 4 of the paper, by the model of `ddiloco.planning.upsizing`.
"""

import html
import pathlib

from absl import app, flags

from ddiloco.planning.upsizing import (
  Scavenging,
  downtime_steps,
  free_copy_steps,
)
from ddiloco.report import charts, page
from experiments import study

OUTPUT = flags.DEFINE_string("output", None, "Folder.", required=True)
INTERVAL = flags.DEFINE_integer("interval", 24, "H.", lower_bound=1)

_COPY_STEPS = (0, 1, 2, 4, 6, 8, 12, 16, 20, 24, 32)
# Extra compute: printed times of data-parallel and of decoupled training.
_PRINTED = {
  0.0: (1.00, 1.00),
  0.25: (1.07, 0.90),
  0.5: (1.09, 0.83),
  1.0: (1.02, 0.75),
  3.0: (0.80, 0.62),
}


def downtimes(interval: int) -> list[dict[str, float]]:
  """Steps lost by either method, against what one copy takes."""
  return [
    {
      "copy_steps": float(copy),
      "data_parallel": downtime_steps(copy, interval=interval, decoupled=False),
      "decoupled": downtime_steps(copy, interval=interval, decoupled=True),
    }
    for copy in _COPY_STEPS
  ]


def times() -> list[dict[str, float]]:
  """The time of a run against extra compute, at equal FLOPs."""
  return [
    {
      "extra": extra,
      "ideal": Scavenging(extra).ideal_time,
      "printed_data_parallel": printed[0],
      "printed_decoupled": printed[1],
    }
    for extra, printed in _PRINTED.items()
  ]


def report(lost: list[dict[str, float]], took: list[dict[str, float]]) -> str:
  """results.md."""
  free = free_copy_steps(interval=INTERVAL.value)
  lines = [
    f"Steps lost to one upsizing, H = {INTERVAL.value}; decoupled learners "
    f"lose none up to {free:g} steps a copy",
    "",
    "| steps a copy | data-parallel, everybody | decoupled, the newcomer |",
    "| --- | --- | --- |",
  ]
  lines += [
    f"| {row['copy_steps']:g} | {row['data_parallel']:g} | "
    f"{row['decoupled']:g} |"
    for row in lost
  ]
  lines += [
    "",
    "Training time with extra compute for half of the FLOPs, of that without",
    "",
    "| extra | ideal | decoupled, printed | data-parallel, printed | excess |",
    "| --- | --- | --- | --- | --- |",
  ]
  lines += [
    f"| {row['extra']:.0%} | {row['ideal']:.3f} | "
    f"{row['printed_decoupled']:.2f} | {row['printed_data_parallel']:.2f} | "
    f"{row['printed_data_parallel'] - row['ideal']:+.2f} |"
    for row in took
  ]
  return "\n".join(lines) + "\n"


def draw(lost: list[dict[str, float]]) -> str:
  """results.html."""
  data = [
    {
      "type": "scatter",
      "mode": "lines+markers",
      "name": name.replace("_", "-"),
      "x": [row["copy_steps"] for row in lost],
      "y": [row[name] for row in lost],
      "line": {"color": charts.learner_colour(i)},
    }
    for i, name in enumerate(("data_parallel", "decoupled"))
  ]
  figure = {
    "data": data,
    "layout": charts.layout(
      "steps to send one copy of the model", "steps lost"
    ),
  }
  title = "What an upsizing costs"
  body = [
    f"<h1>{html.escape(title)}</h1>\n",
    page.section("lost", "Downtime", f"Inner steps, H = {INTERVAL.value}."),
  ]
  return page.document(title, body, {"lost": figure})


def main(argv: list[str]) -> None:
  """Writes results.md, results.json and results.html."""
  del argv
  folder = pathlib.Path(OUTPUT.value)
  lost, took = downtimes(INTERVAL.value), times()
  results = {"downtimes": lost, "times": took}
  study.publish(folder, report(lost, took), results)
  (folder / "results.html").write_text(draw(lost))


if __name__ == "__main__":
  app.run(main)
