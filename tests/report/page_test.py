"""report.html: valid, self-contained, and proof against what files say."""

import html.parser
import json
import re

import plotly.graph_objects as go
import pytest

from ddiloco.report import charts, summary, timeline
from ddiloco.report import page as page_lib
from ddiloco.report.accounting import Span
from tests.report.history import History, encode, journal, killed_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(html.parser.HTMLParser):
  """Requires balanced tags; keeps text, attributes and scripts."""

  def __init__(self):
    super().__init__()
    self.open, self.text, self.attributes, self.scripts = [], [], [], []

  def handle_starttag(self, tag, attrs):
    self.attributes += [(tag, *attr) for attr in attrs]
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open and self.open.pop() == tag, tag

  def handle_data(self, data):
    target = self.scripts if self.open[-1:] == ["script"] else self.text
    target.append(data)


def page(history, path):
  """(page source, checker) of a run's report."""
  summary.write(history, path)
  source = (path / "report.html").read_text(encoding="utf-8")
  checker = Checker()
  checker.feed(source)
  checker.close()
  assert checker.open == []
  return source, checker


def figures(source):
  found = re.search(r'id="figures">(.*?)</script>', source, re.S)
  return json.loads(found[1])


def held_run(path):
  """One learner under wait = exact, and a syncer that died."""
  history = History(wait="exact")
  history.syncer(at=0).open(1, history.make_commit(0)).write()
  history.syncer(life=2, at=3).open(4, history.make_commit(0)).write()
  tape = history.learner(0, at=0).join(1)
  for i in range(1, 5):
    tape.step(3 * i, encode(i, i % 2), hold=True).go(3 * i + 1)
  tape.write()
  return history


@pytest.mark.parametrize("make", [killed_run, held_run, lambda path: History()])
def test_the_page_is_whole(make, tmp_path):
  source, checker = page(make(tmp_path), tmp_path)
  text = "".join(checker.text)
  told = json.loads((tmp_path / "summary.json").read_text())
  for sentence in told["story"]:
    assert sentence in text
  drawn = figures(source)
  assert [("div", "id", key) for key in drawn] == [
    a for a in checker.attributes if a[:2] == ("div", "id")
  ]
  for figure in drawn.values():
    # Plotly's own validation; it raises on what it does not know.
    go.Figure(figure["data"], figure["layout"])


def test_it_tells_what_happened(tmp_path):
  _, checker = page(killed_run(tmp_path), tmp_path)
  text = " ".join("".join(checker.text).split())
  assert (
    "Learner 1 was killed at 6.0 s and was back after 3.0 s with a fresh inner "
    "optimizer; nobody else lost a step." in text
  )
  for part in (
    "held-out loss, nats per byte",
    "goodput",
    "Timeline",
    "Token ledger",
    "sync.num_fragments",
    "No learner waits",
  ):
    assert part in text


def test_a_policy_that_waits_is_not_advertised_as_one_that_does_not(tmp_path):
  _, checker = page(held_run(tmp_path), tmp_path)
  assert "No learner waits" not in "".join(checker.text)


def test_it_loads_nothing(tmp_path):
  _, checker = page(killed_run(tmp_path), tmp_path)
  names = {name for _, name, _ in checker.attributes}
  assert not names & {"src", "href", "srcset", "action", "data"}
  policy = [v for tag, n, v in checker.attributes if n == "content"][0]
  assert policy.startswith("default-src 'none'; ")
  assert "http" not in policy
  own = [script for script in checker.scripts if len(script) < 100_000]
  assert len(own) >= 2
  assert not any("http" in script or "import" in script for script in own)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028"


def test_hostile_strings_are_only_text(tmp_path):
  history = killed_run(tmp_path)
  history.objects["tape/learner-0.1/000000001"] = b"x"
  fault = {"what": HOSTILE, "who": "learner 1"}
  fields = {"who": "learner 1", "fault": fault, "evidence": {"why": HOSTILE}}
  journal(
    tmp_path,
    (11, "start", {"who": "syncer", "pid": 3}),
    (12, "fault", {**fields, "took_effect": True}),
    (13, "fault", {**fields, "took_effect": False}),
    (14, "give_up", {"who": HOSTILE}),
    (15, "end", {"status": "failed", "reason": HOSTILE}),
  )
  source, checker = page(history, tmp_path)
  assert "<script>alert" not in source and "<img" not in source
  assert len(re.findall("<script", source.split("Plotly.newPlot")[0])) < 20
  assert "alert(2)" in "".join(checker.text)
  marks = [
    trace
    for trace in figures(source)["chart-0"]["data"]
    if trace["name"] == "fault"
  ]
  assert "&lt;/script&gt;" in marks[0]["hovertext"][-1]


@pytest.mark.parametrize("who", ["syncer", "syncer 1", "standby 1"])
def test_a_fault_of_whoever_merges_is_in_the_syncers_row(tmp_path, who):
  history = killed_run(tmp_path)
  fault = {"what": "kill", "who": who}
  fields = {"who": who, "fault": fault, "evidence": {}, "took_effect": True}
  journal(tmp_path, (7, "fault", fields))
  source, _ = page(history, tmp_path)
  traces = {t["name"]: t for t in figures(source)["chart-0"]["data"]}
  assert "syncer" in traces["fault"]["y"]


def test_the_timeline_shows_the_death_and_the_return(tmp_path):
  source, _ = page(killed_run(tmp_path), tmp_path)
  traces = {t["name"]: t for t in figures(source)["chart-0"]["data"]}
  dead = traces["dead"]
  assert (dead["y"], dead["base"], dead["x"]) == (["learner 1"], [5], [2.5])
  assert traces["back at work"]["x"] == [9]
  assert traces["fault"]["x"] == [6]
  steps = traces["inner steps"]
  bars = zip(steps["y"], steps["base"], steps["x"], strict=True)
  assert set(bars) == {
    ("learner 0", 1, 9),
    ("learner 1", 1, 4),
    ("learner 1", 9, 1),
  }


# --- The pieces -------------------------------------------------------------


def spans(kind, count, gap_ns=1):
  return [
    Span(kind, i * (10 + gap_ns), i * (10 + gap_ns) + 10, 1)
    for i in range(count)
  ]


def test_a_row_keeps_its_steps_when_it_is_thinned():
  some = spans("step", 5000)
  some[2500] = Span("step", some[2500].begin_ns + 9, some[2500].end_ns, 1)
  thinned = timeline.thin(some, "step")
  assert len(thinned) <= 1500
  assert sum(span.steps for span in thinned) == 5000
  assert thinned[0].begin_ns == 0 and thinned[-1].end_ns == some[-1].end_ns
  # The one gap that is larger than the others stays.
  assert some[2500].begin_ns in [span.begin_ns for span in thinned]


def test_the_longest_waits_are_kept():
  some = [Span("held", 100 * i, 100 * i + 1 + i % 7) for i in range(3000)]
  thinned = timeline.thin(some, "held")
  assert len(thinned) == 1500
  assert min(s.end_ns - s.begin_ns for s in thinned) >= 4
  assert thinned == sorted(thinned, key=lambda span: span.begin_ns)


def test_few_spans_stay_as_they_are():
  some = spans("step", 3) + [Span("step", 99, 99)]
  assert timeline.thin(some, "step") == spans("step", 3)
  assert timeline.thin(some, "held") == []


def test_means_of_stretches():
  assert charts.binned([1, 3, 5, 7], 2) == [2, 6]
  assert charts.binned([1.5, 2.5], 9) == [1.5, 2.5]
  nan = float("nan")
  assert charts.binned([1, nan, nan, nan], 2) == [1, None]
  assert charts.binned([1, 3, 5, 7, 9], 2) == [3, 8]
  assert charts.binned([], 3) == []


@pytest.mark.parametrize(
  "text, shown", [("a<b>&", "a&lt;b&gt;&amp;"), ("plain", "plain")]
)
def test_plotly_shows_text_as_it_is(text, shown):
  assert timeline.plain(text) == shown


def test_json_cannot_end_its_element():
  text = page_lib.embedded_json({"a": HOSTILE + "&"})
  assert not set(text) & set("<>&\u2028\u2029")
  assert json.loads(text) == {"a": HOSTILE + "&"}
