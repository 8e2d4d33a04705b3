"""The launcher's and the evaluator's lines, whole or torn."""

import json

import pytest

from ddiloco.report import workdir
from tests.report.history import UNIX_NS, journal, killed_run, s


def read(path):
  warnings = []
  lines = workdir.read_lines(path / "launch.jsonl", warnings)
  return workdir.read_sessions(lines), warnings


def test_sessions_processes_and_faults(tmp_path):
  killed_run(tmp_path)
  (session,), warnings = read(tmp_path)
  assert not warnings
  assert (session.status, session.ended_ns) == (
    "completed",
    UNIX_NS + s(10.2),
  )
  lives = [p for p in session.processes if p.who == "learner 1"]
  assert [(p.exited_ns - UNIX_NS, p.code) for p in lives] == [
    (s(6), -9),
    (s(10.1), 0),
  ]
  process = session.process_of("learner 1", UNIX_NS + s(8))
  assert process is lives[1]
  assert session.process_of("learner 1", UNIX_NS) is None
  (fault,) = session.faults
  assert session.fault_ns(fault, {}) == UNIX_NS + s(6)


def test_an_end_or_a_second_start_begins_a_session(tmp_path):
  start = (0, "start", {"who": "syncer", "pid": 1})
  end = (1, "end", {"status": "stopped", "reason": "SIGINT"})
  journal(tmp_path, start, end, start, start)
  sessions, _ = read(tmp_path)
  assert [x.status for x in sessions] == ["stopped", "", ""]


@pytest.mark.parametrize(
  "line", ["{", "[1]", '{"what": "start"}', '{"unix_ns": "x"}', "\x00", "[" * 9]
)
def test_a_bad_line_costs_only_itself(line, tmp_path):
  path = tmp_path / "launch.jsonl"
  good = json.dumps({"unix_ns": 1, "what": "start", "who": "syncer"})
  path.write_text(f"{good}\n{line}\n\n{good}\n")
  warnings = []
  assert len(workdir.read_lines(path, warnings)) == 2
  assert warnings == ["launch.jsonl: line 2 is damaged; left out"]


@pytest.mark.parametrize("before", ["", "a\n", "a\ntorn"])
def test_a_torn_line_does_not_take_the_next_one_along(before, tmp_path):
  path = tmp_path / "eval.jsonl"
  path.write_text(before)
  for n in (1, 2):
    workdir.append_line(path, {"unix_ns": n})
  found = workdir.read_lines(path, [])
  assert [line["unix_ns"] for line in found] == [1, 2]
  assert path.read_text().startswith(before)


def test_strange_values_do_not_stop_a_report(tmp_path):
  journal(
    tmp_path,
    (0, "start", {"who": ["x"], "pid": {}}),
    (1, "exit", {"who": "y", "code": "z"}),
    (2, "fault", {"fault": 3, "evidence": [], "took_effect": True}),
    (3, "fault", {"fault": {"for": "x"}, "evidence": {"at_round": {}}}),
    (4, "what", {}),
    (5, "end", {"status": 3, "reason": None}),
  )
  (session,), _ = read(tmp_path)
  first, second = session.faults
  assert session.fault_ns(first, {}) == first["unix_ns"]
  assert session.fault_ns(second, {}) == second["unix_ns"]


def test_when_a_pause_began(tmp_path):
  fault = {"what": "pause", "for": {"s": 2}}
  line = {"who": "syncer", "fault": fault, "evidence": {}}
  journal(tmp_path, (9, "fault", line))
  (session,), _ = read(tmp_path)
  assert session.fault_ns(session.faults[0], {}) == UNIX_NS + s(7)


def test_the_newest_evaluation_of_each_round_counts(tmp_path):
  path = tmp_path / "eval.jsonl"
  rows = [(4, 2.0), (0, 5.0), (4, 1.5), (8, "x")]
  path.write_text(
    "".join(
      json.dumps({"unix_ns": 1, "round": t, "tokens": 1, "loss": loss}) + "\n"
      for t, loss in rows
    )
  )
  warnings = []
  found = workdir.read_evaluations(path, warnings)
  assert [(e["round"], e["loss"]) for e in found] == [(0, 5.0), (4, 1.5)]
  assert len(warnings) == 1


def test_evaluations_of_others_are_left_out(tmp_path):
  line = {"unix_ns": 1, "round": 4, "tokens": 1, "loss": 2.0}
  lines = [
    line,
    line | {"of": "syncer", "round": 8},
    line | {"of": "learner:0", "loss": 3.0},
    {"unix_ns": 1, "of": "syncer", "round": 4, "tasks": {"piqa/acc": 0.5}},
  ]
  path = tmp_path / "eval.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  warnings = []
  found = workdir.read_evaluations(path, warnings)
  assert [(e["round"], e["loss"]) for e in found] == [(4, 2.0), (8, 2.0)]
  assert warnings == []


def test_no_files_are_no_lines(tmp_path):
  assert read(tmp_path) == ([], [])
