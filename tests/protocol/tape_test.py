"""Tapes: what is recorded is what is read, or it is refused."""

import dataclasses

import pytest

from ddiloco.protocol import learner, messages, syncer, tape, wire
from ddiloco.protocol.syncer_types import WriteCommit
from ddiloco.protocol.tape import CommitDigest, Header, Record
from ddiloco.types import Refusal
from tests.protocol.scenario import STEP_NS, make_rules
from tests.protocol.world import World

HEADER = Header(
  run_id="run",
  actor="learner-0",
  incarnation=1,
  seed=3,
  config="{}",
  config_sha256="digest",
  code_version="0",
  backend="cpu",
  devices=8,
  processes=1,
  threads=2,
  cpu_features="avx2",
  libraries=(("jax", "0.10"),),
  started_unix_ns=10**18,
  started_ns=5,
)


def life(actor):
  """A life of a faulty run: its name, its records and its final state."""
  rules = make_rules(4, 4, 2, quorum_min=2)
  world = World(
    rules, (STEP_NS, STEP_NS), delay_ns_max=STEP_NS, failures_permille=200
  )
  world.run(30)
  script = world.syncer if actor == tape.SYNCER else world.learners[0]
  records = tuple(
    Record(index, event, tuple(commands))
    for index, (event, commands) in enumerate(script.log)
  )
  return rules, records, script.state


def segments(actor, records, size=40):
  """The encoded segments of a life."""
  return [
    tape.encode_segment(
      actor,
      1,
      number,
      dataclasses.replace(HEADER, actor=actor) if number == 0 else None,
      records[first : first + size],
    )
    for number, first in enumerate(range(0, len(records), size))
  ]


@pytest.mark.parametrize("actor", [tape.SYNCER, tape.learner_actor(0)])
def test_a_life_is_read_back(actor):
  _, records, _ = life(actor)
  read = [tape.decode_segment(data) for data in segments(actor, records)]
  header, joined = tape.join(read)
  assert header == dataclasses.replace(HEADER, actor=actor)
  assert len(read) > 2
  assert [r.event for r in joined] == [r.event for r in records]
  assert [r.commands for r in joined] == [
    tuple(tape.recorded(command) for command in r.commands) for r in records
  ]


@pytest.mark.parametrize(
  "actor, machine", [(tape.SYNCER, syncer), (tape.learner_actor(0), learner)]
)
def test_replaying_a_life_gives_its_decisions(actor, machine):
  rules, records, final = life(actor)
  read = [tape.decode_segment(data) for data in segments(actor, records)]
  _, joined = tape.join(read)
  state, commands = machine.start(joined[0].event, rules)
  for record in joined[1:]:
    state, commands = machine.step(state, record.event, rules)
    assert tuple(map(tape.recorded, commands)) == record.commands
  assert state == final


def test_a_commit_is_recorded_by_its_digest():
  _, records, _ = life(tape.SYNCER)
  commands = [c for r in records for c in r.commands]
  command = next(c for c in commands if isinstance(c, WriteCommit))
  digest = wire.sha256(messages.encode(command.commit))
  assert tape.recorded(command) == CommitDigest(command.commit.round, digest)


def test_an_empty_segment():
  data = tape.encode_segment("syncer", 2, 7, None, [])
  assert tape.decode_segment(data) == tape.Segment("syncer", 2, 7, None, ())


@pytest.mark.parametrize("actor", [tape.SYNCER, tape.learner_actor(0)])
def test_a_torn_segment_is_refused(actor):
  _, records, _ = life(actor)
  data = segments(actor, records)[0]
  for size in range(0, len(data), 97):
    with pytest.raises(wire.WireError):
      tape.decode_segment(data[:size])


PLAIN = {
  "actor": "learner-0",
  "incarnation": 1,
  "segment": 0,
  "header": wire.to_plain(HEADER),
  "records": [[0, ["Tick", 5], [["Stop", "reason"]]]],
}


def test_the_plain_form():
  segment = tape.decode_segment(wire.frame("tape", PLAIN))
  assert segment.header == HEADER
  assert len(segment.records) == 1


@pytest.mark.parametrize(
  "plain",
  [
    None,
    [],
    "tape",
    {},
    {k: v for k, v in PLAIN.items() if k != "header"},
    {k: v for k, v in PLAIN.items() if k != "records"},
    PLAIN | {"extra": 1},
    PLAIN | {"actor": 0},
    PLAIN | {"actor": ["syncer"]},
    PLAIN | {"incarnation": "1"},
    PLAIN | {"segment": None},
    PLAIN | {"header": {}},
    PLAIN | {"header": 1},
    PLAIN | {"records": None},
    PLAIN | {"records": 3},
    PLAIN | {"records": [3]},
    PLAIN | {"records": [[]]},
    PLAIN | {"records": [[0, ["Tick", 5]]]},
    PLAIN | {"records": [[0, ["Tick", 5], [], []]]},
    PLAIN | {"records": [["0", ["Tick", 5], []]]},
    PLAIN | {"records": [[0, ["Tick"], []]]},
    PLAIN | {"records": [[0, ["Tock", 5], []]]},
    PLAIN | {"records": [[0, ["AnswerSeen", 5, [], {}], []]]},
    PLAIN | {"records": [[0, [[], 5], []]]},
    PLAIN | {"records": [[0, ["Tick", 5], None]]},
    PLAIN | {"records": [[0, ["Tick", 5], [["Merge", 1, []]]]]},
    PLAIN | {"records": [[0, ["Tick", 5], ["Stop"]]]},
  ],
)
def test_other_shapes_are_refused(plain):
  with pytest.raises(wire.WireError):
    tape.decode_segment(wire.frame("tape", plain))


def test_another_kind_of_record_is_refused():
  with pytest.raises(wire.WireError, match="expected a tape"):
    tape.decode_segment(wire.frame("commit", PLAIN))


def joined_error(read):
  with pytest.raises(wire.WireError) as caught:
    tape.join(read)
  return caught.value.reason


def test_only_a_whole_life_is_joined():
  actor = tape.learner_actor(0)
  _, records, _ = life(actor)
  read = [tape.decode_segment(data) for data in segments(actor, records)]
  first, second, third, *_ = read
  change = dataclasses.replace
  assert tape.join([first, second])[1] == first.records + second.records
  assert joined_error([]) is Refusal.MISSING_PART
  assert joined_error([second]) is Refusal.MISSING_PART
  assert joined_error([first, third]) is Refusal.MISSING_PART
  assert joined_error([change(first, header=None)]) is Refusal.MISSING_PART
  shorter = change(first, records=first.records[:-1])
  assert joined_error([shorter, second]) is Refusal.MALFORMED
  for other in (
    change(second, actor="learner-1"),
    change(second, incarnation=2),
  ):
    assert joined_error([first, other]) is Refusal.MALFORMED
