"""launch.goodput: the table, one cluster, a log, and bad input."""

import json

import pytest

from ddiloco.protocol import faults
from experiments.goodput import analysis
from tests.launch.commands import assert_user_error, launch


def test_the_table_is_the_papers(tmp_path):
  """Within the bounds that the study's own page states, with fewer seeds."""
  output, page = tmp_path / "t1.json", tmp_path / "t1.html"
  code, text, errors = launch(
    "goodput", "--table", f"--output={output}", f"--page={page}", "--seeds=4"
  )
  assert code == 0, errors
  found = json.loads(output.read_text())
  rows = found["rows"]
  assert len(rows) == 30
  keys = {"learners", "elastic", "chips", "goodput", "uptime"}
  assert keys <= rows[0].keys()
  assert analysis.mean_error(rows) <= 1.5
  far = [cell for cell in analysis.cells(rows) if abs(cell.error) > 5]
  assert far == []
  assert max(abs(e) for *_, e in analysis.rule_of_thumb(rows)) <= 2
  assert "16 decoupled learners" in text and found["made_with"] in text
  assert "not its authors&#x27; parameters" in page.read_text()


def test_one_cluster_and_its_faults(command, tmp_path):
  path = tmp_path / "faults.json"
  result = command(
    "goodput", "--learners=4", "--chips=1.2e6", "--hours=1", f"--faults={path}"
  )
  assert result.code == 0, result.err
  assert "4 decoupled learners" in result.out
  assert "95% intervals: +-" in result.out
  script = faults.parse(path.read_text())
  assert len(script) > 50 and {f.what for f in script} == {"shrink"}
  faults.check(script, learners=4, stop_rounds=None, live=False)


def test_a_log_is_what_fails(command, tmp_path):
  log = tmp_path / "log.csv"
  log.write_text("start,end,chips\n0,3600,4096\n")
  flags = ("--chips=8192", "--learners=2", "--slice_chips=64", "--hours=1")
  result = command("goodput", *flags, f"--failures={log}")
  assert result.code == 0, result.err
  assert " 50.0 /100.0" in result.out
  log.write_text("start,end,chips\n5,1,64\n")
  assert_user_error(
    command("goodput", *flags, f"--failures={log}"), "line 2", "ends at 1"
  )


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--chips=0", ["chips = 0"]),
    ("--chips=1000.5", ["chips = 1000.5", "whole number"]),
    ("--slice_chips=7", ["slice_chips = 7", "does not divide"]),
    ("--mtbi_years=-1", ["mtbi_s", "must be positive"]),
    ("--return=weibull(3)", ["weibull(3)", "exponweib(a=2"]),
    ("--return=exponweib(a=2, c=1)", ["gives a, c", "mean"]),
    ("--return=exponweib(a=2, c=x, mean=3)", ["c=x", "positive"]),
    ("--learners=200", ["128 slices for 200 learners"]),
    ("--hours=0", ["hours = 0"]),
    ("--seeds=0", ["no seed"]),
    ("--failures=nowhere.csv", ["nowhere.csv", "cannot be read"]),
    ("--output=/nowhere/x.json", ["/nowhere/x.json", "cannot be written"]),
  ],
)
def test_bad_input_is_refused(command, flag, words):
  assert_user_error(command("goodput", flag), *words)
