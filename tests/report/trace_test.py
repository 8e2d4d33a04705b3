"""The trace is valid in the Trace Event format and tells what happened."""

import collections
import gzip
import json

import pytest

from ddiloco.report import summary
from tests.report.history import History, killed_run

# Fields that each phase must have, besides name, ph, pid and tid.
NEEDED = {
  "X": {"ts", "dur"},
  "M": {"args"},
  "i": {"ts", "s"},
  "b": {"ts", "id", "cat"},
  "e": {"ts", "id", "cat"},
}


@pytest.fixture
def events(tmp_path):
  summary.write(killed_run(tmp_path), tmp_path)
  return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def rows(events):
  """Names by row."""
  return {
    e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"
  }


def named(events, phase, who):
  number = {name: row for row, name in rows(events).items()}[who]
  return [e for e in events if e["ph"] == phase and e["tid"] == number]


def test_every_event_has_what_its_phase_needs(events):
  for event in events:
    assert {"name", "ph", "pid", "tid"} <= event.keys()
    assert NEEDED[event["ph"]] <= event.keys()
    assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


def test_everybody_has_a_row(events):
  assert sorted(rows(events).values()) == ["learner 0", "learner 1", "syncer"]


def test_steps_one_by_one(events):
  steps = [e for e in named(events, "X", "learner 1") if e["name"] == "step"]
  assert len(steps) == 5
  assert [e["args"]["life"] for e in steps] == [1, 1, 1, 1, 2]
  assert steps[1]["dur"] == 1e6  # a second, in microseconds
  assert steps[1]["ts"] == 2e6
  assert steps[1]["args"]["tokens"] == 6


def test_starts_and_deaths(events):
  spans = collections.Counter(
    e["name"] for e in named(events, "X", "learner 1")
  )
  assert spans["start"] == 2 and spans["dead"] == 1
  (dead,) = [e for e in named(events, "X", "learner 1") if e["name"] == "dead"]
  assert dead["ts"] + dead["dur"] == 7.5e6  # back in a new process


def test_rounds_begin_and_end(events):
  begun = {(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "b"}
  ended = {(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == "e"}
  assert begun.keys() == ended.keys()
  assert {number for number, _ in begun} == {1, 2, 3, 4}
  assert all(begun[key] <= ended[key] for key in begun)
  assert ended[4, "round 4: merge"] == pytest.approx(10.04e6)


def test_a_fault_is_an_instant_where_it_hit(events):
  (fault,) = named(events, "i", "learner 1")
  assert fault["ts"] == 6e6
  assert fault["args"]["fault"]["what"] == "kill"


def test_a_long_trace_is_compressed(tmp_path, monkeypatch):
  history = killed_run(tmp_path)
  summary.write(history, tmp_path)
  plain = (tmp_path / "trace.json").read_text()
  monkeypatch.setattr(summary, "_TRACE_BYTES_MAX", 100)
  summary.write(history, tmp_path)
  assert not (tmp_path / "trace.json").exists()
  packed = (tmp_path / "trace.json.gz").read_bytes()
  assert gzip.decompress(packed).decode() == plain


def test_a_run_that_has_just_begun_has_a_trace_too(tmp_path):
  history = History()
  history.syncer().open(1, history.make_commit(0)).write()
  summary.write(history, tmp_path)
  events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  assert list(rows(events).values()) == ["syncer"]
