"""The fault script: two forms, one set of records, no contradictions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import faults
from ddiloco.protocol.faults import Fault

SECOND_NS = 1_000_000_000


def _fault(what, learner=1, *, round=None, ns=None, span=None, factor=None):
  who = "syncer" if learner is None else "learner"
  return Fault(round, ns, who, learner, what, span, factor)


SIMULATED = [
  "partition learner 0 for 2s",
  "clog syncer for 1.5s",
  "jump learner 1 for 3600s",
  "nan learner 0",
  "outlier learner 0 by 100x",
  "layout learner 0",
  "outdated learner 0",
  "rival syncer for 2s",
  "rival syncer",
  "outage exchange for 5s",
  "full exchange for 5s",
]

EXAMPLES = [
  (
    "at round 60 kill learner 1 for 5s",
    {
      "at": {"round": 60},
      "who": "learner 1",
      "what": "kill",
      "for": {"s": 5},
    },
    _fault("kill", round=60, span=5 * SECOND_NS),
  ),
  (
    "at 12.5s pause learner 0 for 2s",
    {"at": {"s": 12.5}, "who": "learner 0", "what": "pause", "for": {"s": 2}},
    _fault("pause", 0, ns=12_500_000_000, span=2 * SECOND_NS),
  ),
  (
    "at 500ms slow learner 2 by 1.5x for 2m",
    {
      "at": {"s": 0.5},
      "who": "learner 2",
      "what": "slow",
      "factor": 1.5,
      "for": {"s": 120},
    },
    _fault("slow", 2, ns=500_000_000, span=120 * SECOND_NS, factor=1500),
  ),
  (
    "at 1h kill syncer",
    {"at": {"s": 3600}, "who": "syncer", "what": "kill"},
    _fault("kill", None, ns=3600 * SECOND_NS),
  ),
  (
    "at round 100 stop learner 2",
    {"at": {"round": 100}, "who": "learner 2", "what": "stop"},
    _fault("stop", 2, round=100),
  ),
  (
    "at 0.1s start learner 3",
    {"at": {"s": 0.1}, "who": "learner 3", "what": "start"},
    _fault("start", 3, ns=100_000_000),
  ),
]


@pytest.mark.parametrize("text, record, fault", EXAMPLES)
def test_both_forms_give_the_same_record(text, record, fault):
  assert faults.parse(text) == (fault,)
  assert faults.parse(json.dumps([record])) == (fault,)
  assert faults.to_json([fault]) == [record]


def test_a_script_keeps_its_order_and_ignores_space_case_and_empty_records():
  script = ";  At 3s  KILL syncer ;\n at round 2 stop learner 0 \n;"
  assert [f.what for f in faults.parse(script)] == ["kill", "stop"]
  assert faults.parse("") == faults.parse(" ;\n ") == faults.parse("[]") == ()


_spans = st.one_of(st.none(), st.integers(1, 2**63 - 1))


@st.composite
def _faults(draw):
  what = draw(st.sampled_from(sorted(faults.KINDS)))
  kind = faults.KINDS[what]
  who = draw(st.sampled_from(kind.actors))
  when = draw(st.integers(0, 2**63 - 1))
  by_round = draw(st.booleans())
  span = None
  if kind.span != "refused":
    span = draw(_spans)
  if kind.span == "required":
    span = span or 1
  return Fault(
    at_round=when if by_round else None,
    at_ns=None if by_round else when,
    who=who,
    learner=draw(st.integers(0, 9999)) if who == "learner" else None,
    what=what,
    for_ns=span,
    factor_permille=(
      draw(st.integers(1001, faults.FACTOR_PERMILLE_MAX))
      if kind.has_factor
      else None
    ),
    shard=draw(st.integers(0, 99)) if who == "syncer" else 0,
  )


@given(st.lists(_faults(), max_size=4))
def test_both_forms_round_trip_exactly(script):
  assert faults.parse(faults.to_text(script)) == tuple(script)
  decoded = json.loads(json.dumps(faults.to_json(script)))
  assert faults.parse(json.dumps(decoded)) == tuple(script)
  assert faults.from_json(decoded) == tuple(script)


@given(st.text(max_size=60) | st.text('at 0.5s;kill[{}]":e,-', max_size=60))
def test_any_other_text_is_refused_with_a_value_error(text):
  try:
    script = faults.parse(text)
  except ValueError:
    return
  assert faults.parse(faults.to_text(script)) == script


BAD_TEXT = [
  ("at round 5 crash learner 1", "kinds are kill, pause, slow, stop, start"),
  ("at round 5 nap learner 1", "unknown kind 'nap'"),
  ("at 5 kill learner 1", "'5' is no time"),
  ("at -5s kill learner 1", "must be from 0"),
  ("at round -1 kill learner 1", "must be from 0"),
  ("at round 1.5 kill learner 1", "'1.5' is no whole number"),
  ("at 5s kill learner one", "'one' is no whole number"),
  ("at 5s kill learner -1", "must be from 0"),
  ("at 5s kill peer", "'peer' is no actor"),
  ("at 5s kill syncer -1", "the shard is -1"),
  ("at 5s outage exchange 1 for 1s", "does not read"),
  ("at 5s kill learner 1 for -2s", "'for' is -2000000000 ns"),
  ("at 5s kill learner 1 for 0s", "must be positive"),
  ("at 5s kill learner 1 by 3x", "takes no factor"),
  ("at 5s pause learner 1", "pause needs 'for'"),
  ("at 5s stop learner 1 for 3s", "stop takes no 'for'"),
  ("at 5s slow learner 1 for 3s", "slow needs a factor"),
  ("at 5s slow learner 1 by 3", "'3' is no factor"),
  ("at 5s slow learner 1 by 1x", "above 1"),
  ("at 5s slow learner 1 by 0.5x", "above 1"),
  ("at 5s slow learner 1 by 1.0001x", "finer than 1/1000"),
  ("at 5s slow syncer by 2x", "applies to learner"),
  ("at 5s start syncer", "applies to learner"),
  ("at 5s kill exchange", "applies to learner or syncer"),
  ("at 5s outage syncer for 1s", "applies to exchange"),
  ("at 5s outage exchange", "outage needs 'for'"),
  ("at 5s jump syncer", "jump needs 'for'"),
  ("at 5s outlier learner 1", "outlier needs a factor"),
  ("at 0.1ns kill syncer", "finer than"),
  ("at 99999999999999999999s kill syncer", "must be from 0"),
  ("kill learner 1 at 5s", "does not read as"),
  ("at 5s kill learner 1 kill learner 2", "does not read as"),
]


@pytest.mark.parametrize("text, reason", BAD_TEXT)
def test_a_bad_record_is_named_with_the_accepted_forms(text, reason):
  with pytest.raises(ValueError) as error:
    faults.parse("at 1s stop learner 0; " + text)
  assert str(error.value).startswith("fault 2 (")
  assert reason in str(error.value)
  assert "at round 60 kill learner 1 for 5s" in str(error.value)


BAD_RECORDS = [
  ("5", "no JSON object"),
  ('{"who": "syncer", "what": "kill"}', "lacks at"),
  ('{"at": {"s": 1}, "who": "syncer", "what": "kill", "why": 1}', "why"),
  ('{"at": {"s": 1, "round": 2}, "who": "syncer", "what": "kill"}', "no time"),
  ('{"at": {"s": true}, "who": "syncer", "what": "kill"}', "no number"),
  ('{"at": {"s": NaN}, "who": "syncer", "what": "kill"}', "no number"),
  ('{"at": {"round": true}, "who": "syncer", "what": "kill"}', "no whole"),
  ('{"at": {"round": 1.5}, "who": "syncer", "what": "kill"}', "no whole"),
  ('{"at": {"s": 1}, "who": 3, "what": "kill"}', "no actor"),
  ('{"at": {"s": 1}, "who": "syncer", "what": ["kill"]}', "unknown kind"),
  ('{"at": {"s": 1}, "who": "syncer", "what": "kill", "for": 5}', "no time"),
]


@pytest.mark.parametrize("record, reason", BAD_RECORDS)
def test_a_bad_json_record_is_named(record, reason):
  with pytest.raises(ValueError, match="^fault 1 ") as error:
    faults.parse(f"[{record}]")
  assert reason in str(error.value)


@pytest.mark.parametrize(
  "text", ['[{"at"', "[" * 100_000, "[1e999999999]", "[" + "9" * 5000 + "]"]
)
def test_broken_json_is_a_value_error(text):
  with pytest.raises(ValueError, match="Accepted: "):
    faults.parse(text)


def test_a_fault_cannot_be_built_with_both_or_neither_time():
  for round_, ns in ((None, None), (1, 1)):
    with pytest.raises(ValueError, match="either a round or a time"):
      _fault("kill", round=round_, ns=ns)
  with pytest.raises(ValueError, match="with learner number None"):
    Fault(1, None, "learner", None, "kill")


CONTRADICTIONS = [
  ("at 1s kill learner 3", "the run's learners are 0 to 2"),
  ("at 1s kill syncer 2", "syncer.shards = 2: they are 0 to 1"),
  ("at round 100 kill learner 0", "never happens"),
  ("at round 5 stop learner 1; at round 9 kill learner 1", "stopped for good"),
  ("at 9s kill learner 1; at 5s stop learner 1", "stopped for good"),
  ("at round 5 stop learner 1; at 9s stop learner 1", "already made to stop"),
  (
    "at round 5 start learner 1; at 9s start learner 1",
    "already made to start",
  ),
  (
    "at round 3 start learner 1; at 9s stop learner 1;"
    "at round 5 start learner 1",
    "already made to start",
  ),
  (
    "at round 5 stop learner 1; at round 9 start learner 1;"
    "at round 7 kill learner 1",
    "absent until started",
  ),
  (
    "at round 5 stop learner 1; at round 9 start learner 1;"
    "at round 12 stop learner 1; at round 14 kill learner 1",
    "stopped for good",
  ),
  ("at round 9 start learner 1; at round 5 kill learner 1", "absent until"),
  ("at round 5 start learner 1; at round 5 stop learner 1", "at once"),
  ("at 5s kill learner 1 for 5s; at 7s pause learner 1 for 1s", "under kill"),
  ("at 7s kill syncer; at 5s pause syncer for 5s", "under pause"),
  ("at round 5 kill syncer; at round 5 stop syncer", "already under kill"),
  ("at 5s slow learner 1 by 2x; at 9s slow learner 1 by 3x", "under slow"),
]


@pytest.mark.parametrize("text, reason", CONTRADICTIONS)
def test_contradictions_are_refused(text, reason):
  with pytest.raises(ValueError) as error:
    faults.check(faults.parse(text), learners=3, stop_rounds=100, shards=2)
  assert reason in str(error.value)
  assert str(error.value).startswith("fault ")


SOUND = [
  "",
  "at round 99 kill learner 0",
  "at round 40 start learner 2; at round 60 stop learner 2; at 1s kill syncer",
  "at round 5 stop learner 1; at round 7 start learner 1;"
  "at round 9 kill learner 1; at round 20 stop learner 1",
  "at 9s start learner 1; at 5s stop learner 1; at 12s stop learner 1",
  "at round 9 start learner 1; at 5s stop learner 1",
  "at 5s kill learner 1 for 5s; at 10s kill learner 1 for 5s",
  "at 5s slow learner 1 by 3x for 10s; at 7s kill learner 1 for 1s",
  "at 5s kill learner 0; at 5s kill learner 1; at 5s kill syncer",
  "at 5s stop syncer; at 9s kill learner 0",
  "at 0s start learner 0; at 1s start learner 1; at 2s start learner 2",
]


@pytest.mark.parametrize("text", SOUND)
def test_sound_scripts_pass(text):
  faults.check(faults.parse(text), learners=3, stop_rounds=100)


@pytest.mark.parametrize("text", SIMULATED)
def test_what_only_a_simulation_can_do_is_refused_live(text):
  script = faults.parse(f"at 1s kill syncer for 2s; at 5s {text}")
  assert faults.parse(faults.to_text(script)) == script
  faults.check(script, learners=3, stop_rounds=100, live=False)
  with pytest.raises(ValueError) as error:
    faults.check(script, learners=3, stop_rounds=100)
  assert str(error.value).startswith("fault 2 (")
  assert "only kill, pause, slow, stop, start;" in str(error.value)
  assert "launch.simulate" in str(error.value)


def test_the_distance_of_a_jump_is_no_span():
  script = "at 1s jump syncer for 1h; at 2s jump syncer for 1h"
  faults.check(faults.parse(script), learners=1, stop_rounds=None, live=False)


def test_without_a_last_round_any_round_passes():
  script = faults.parse("at round 100000 kill learner 0")
  faults.check(script, learners=1, stop_rounds=None)
  faults.check(script, learners=1, stop_rounds=0)


def test_a_run_that_no_learner_could_begin_is_refused():
  script = "at round 1 start learner 0; at round 1 start learner 1"
  with pytest.raises(ValueError, match="needs 1 learners, and 0 are there"):
    faults.check(faults.parse(script), learners=2, stop_rounds=None)
  faults.check(faults.parse(script), learners=3, stop_rounds=None)


@pytest.mark.parametrize(
  "script, learners",
  [
    ("at round 9 start learner 1; at round 4 start learner 0", 4),
    ("at round 5 stop learner 0; at round 9 start learner 0", 3),
  ],
  ids=["late", "back"],
)
def test_a_learner_that_a_round_would_wait_for_cannot_start_at_one(
  script, learners
):
  limits = {"learners": learners, "stop_rounds": None}
  faults.check(faults.parse(script), **limits, quorum=2)
  with pytest.raises(ValueError, match="fault 2 .*needs 3 learners, and 2 are"):
    faults.check(faults.parse(script), **limits, quorum=3)


def test_who_starts_at_a_time_comes_whatever_the_round():
  later = "at 9s start learner 1; at round 4 start learner 0"
  faults.check(faults.parse(later), learners=4, stop_rounds=None, quorum=3)
