"""A run computed again from its tapes: the same bits, or the first other."""

import dataclasses
import json

import pytest

from ddiloco.config import from_dict
from ddiloco.protocol import keys, tape, wire
from ddiloco.protocol.learner_types import Encode, Step
from ddiloco.sim import history as history_lib
from ddiloco.sim.history import BadTape
from ddiloco.types import WIRE_FORMAT, Exit
from tests.sim import program, runs
from tests.sim.small import MemoryStore, make_config

FAULTS = (
  "at round 15 kill learner 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 30 kill learner 0 for 1s; at round 45 pause syncer for 1s"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The objects that a run with three deaths has left."""
  workdir = tmp_path_factory.mktemp("run")
  code, store = runs.run(workdir, make_config(), seed=11, faults=FAULTS)
  assert code is Exit.OK
  return store.objects


@pytest.fixture
def store(run):
  """An exchange of that run, to be spoilt."""
  store = MemoryStore()
  store.objects = dict(run)
  return store


def segments(store, actor="learner-1", life=1):
  """The keys of a tape, ascending."""
  return store.list(f"tape/{actor}.{life}/")


def rewrite(store, key, **changes):
  """Changes fields of a segment, with a checksum that is right again."""
  segment = tape.decode_segment(store.objects[key])
  segment = dataclasses.replace(segment, **changes)
  store.objects[key] = tape.encode_segment(
    segment.actor,
    segment.incarnation,
    segment.segment,
    segment.header,
    segment.records,
  )


def change_headers(store, prefix="tape/", **changes):
  for key in store.list(prefix):
    header = tape.decode_segment(store.objects[key]).header
    if header is not None:
      rewrite(store, key, header=dataclasses.replace(header, **changes))


def test_every_commit_comes_out_with_the_same_bits(store):
  result = runs.replay(store)
  assert (result["commits"], result["matched"]) == (60, 60)
  assert result["first_mismatch"] is None
  assert result["lives"] == 6
  assert result["compared"] == "parameters"
  restored = {
    life.name: life.header.restored for life in history_lib.load(store).lives
  }
  assert restored["learner-0, life 2"] and restored["learner-1, life 2"]


def test_decisions_alone(store):
  change_headers(store, backend="tpu")
  result = runs.replay(store, decisions_only=True)
  assert (result["commits"], result["matched"]) == (60, 60)
  assert result["compared"] == "decisions"


def test_a_run_under_way_is_replayed_up_to_its_newest_commit(store):
  for t in range(58, 61):
    store.objects.pop(keys.commit(t))
  result = runs.replay(store)
  assert (result["commits"], result["matched"]) == (57, 57)


def test_other_bits_are_found_at_the_first_commit_they_reach(
  store, monkeypatch
):
  monkeypatch.setattr(program, "TARGETS_SCALE", 1.01)
  result = runs.replay(store)
  assert result["matched"] < 3
  mismatch = result["first_mismatch"]
  assert mismatch["what"] == "parameters"
  assert mismatch["round"] == result["matched"] + 1
  assert mismatch["recorded"] != mismatch["replayed"]


@pytest.mark.parametrize(
  "actor, kind", [("learner-0", Step), ("learner-1", Encode)], ids=str
)
def test_another_decision_is_named(store, actor, kind):
  def spoil(record):
    commands = [
      dataclasses.replace(c, **{dataclasses.fields(kind)[0].name: 99})
      if isinstance(c, kind)
      else c
      for c in record.commands
    ]
    return dataclasses.replace(record, commands=tuple(commands))

  for key in segments(store, actor):
    records = tape.decode_segment(store.objects[key]).records
    odd = [r for r in records if any(isinstance(c, kind) for c in r.commands)]
    if odd:
      break
  rewrite(
    store, key, records=tuple(spoil(r) if r is odd[0] else r for r in records)
  )
  result = runs.replay(store)
  mismatch = result["first_mismatch"]
  assert result["matched"] == 0
  assert (mismatch["what"], mismatch["actor"]) == ("decision", actor)
  assert (mismatch["life"], mismatch["index"]) == (1, odd[0].index)
  assert [c for c in mismatch["recorded"] if 99 in c]
  assert mismatch["decided"] == [wire.pack(c) for c in odd[0].commands]
  json.dumps(result)


def test_an_event_that_no_machine_can_meet_is_named(store):
  key = segments(store)[3]
  records = tape.decode_segment(store.objects[key]).records
  first = tape.decode_segment(store.objects[segments(store)[0]]).records[0]
  again = dataclasses.replace(records[0], event=first.event)
  rewrite(store, key, records=(again, *records[1:]))
  mismatch = runs.replay(store)["first_mismatch"]
  assert mismatch["index"] == records[0].index
  assert "cannot meet this event" in mismatch["decided"]


# --- Tapes that cannot be replayed ------------------------------------------


def cut_learner(store):
  for key in segments(store, "learner-0")[5:]:
    del store.objects[key]


def cut_syncer(store):
  for key in segments(store, "syncer", 2)[3:]:
    del store.objects[key]


def remove_learner(store):
  for key in segments(store, "learner-0", 2):
    del store.objects[key]


def remove_middle(store):
  del store.objects[segments(store)[2]]


def cut_segment(store):
  key = segments(store)[4]
  store.objects[key] = store.objects[key][:-10]


def edit_segment(store):
  key = segments(store)[4]
  store.objects[key] = store.objects[key].replace(b"learner", b"Learner")


def write_future_format(store):
  key = segments(store)[0]
  store.objects[key] = store.objects[key].replace(
    b"ddiloco %d " % WIRE_FORMAT, b"ddiloco 99 ", 1
  )


def swap_tapes(store):
  for key in segments(store, "learner-1", 2):
    del store.objects[key]
  for key in segments(store, "learner-0", 2):
    other = key.replace("learner-0", "learner-1")
    store.objects[other] = store.objects[key]


def take_from_another_run(store):
  change_headers(store, "tape/learner-1.2/", run_id="sim-99")


def take_another_config(store):
  config = make_config(outer={"learning_rate": 0.5})
  change_headers(
    store,
    "tape/learner-1.2/",
    config=wire.canonical_json(config.to_dict()).decode(),
    config_sha256=config.digest,
  )


def edit_config(store):
  change_headers(store, "tape/learner-1.2/", config_sha256="0" * 64)


def take_unreadable_config(store):
  change_headers(store, "tape/learner-1.2/", config='{"seeds":1}')


def lose_the_beginning(store):
  key = segments(store)[0]
  records = tape.decode_segment(store.objects[key]).records
  shifted = [dataclasses.replace(r, index=r.index - 1) for r in records[1:]]
  rewrite(store, key, records=tuple(shifted))
  for other in segments(store)[1:]:
    del store.objects[other]


def lose_a_checkpoint(store):
  change_headers(store, "tape/learner-1.2/", restored=(1, 7))


def change_version(store):
  key = segments(store, "learner-1", 2)[0]
  libraries = dict(tape.decode_segment(store.objects[key]).header.libraries)
  changed = tuple((libraries | {"jax": "0.0.1"}).items())
  change_headers(store, "tape/learner-1.2/", libraries=changed)


def change_machine(store):
  change_headers(store, "tape/learner-1.2/", cpu_features="riscv")


def change_code(store):
  change_headers(store, code_version="0.0.0+abc")


def lose_the_run(store):
  del store.objects[keys.commit(0)]


@pytest.mark.parametrize(
  "spoil, parts",
  [
    (cut_learner, ["learner 0, life 1", "ends at record", "truncated"]),
    (cut_syncer, ["on no tape of the syncer", "life 2 at record"]),
    (remove_learner, ["learner 0, life 2", "is missing"]),
    (remove_middle, ["learner-1, life 1", "segment 2", "is missing"]),
    (cut_segment, ["learner-1, life 1", "segment 4", "truncated"]),
    (edit_segment, ["learner-1, life 1", "segment 4", "checksum"]),
    (write_future_format, ["wire format 99", f"reads {WIRE_FORMAT}"]),
    (swap_tapes, ["learner-1, life 2 is that of learner-0"]),
    (take_from_another_run, ["run sim-99", "holds run sim-11"]),
    (take_another_config, ["learner-1, life 2", "outer.learning_rate"]),
    (edit_config, ["learner-1, life 2 names config 0000", "edited"]),
    (take_unreadable_config, ["learner-1, life 2", "cannot read its config"]),
    (lose_the_beginning, ["learner-1, life 1 begins with"]),
    (lose_a_checkpoint, ["checkpoint.1.1.7", "truncated or removed"]),
    (change_version, ["jax = 0.0.1", "--decisions_only"]),
    (change_machine, ["cpu_features = riscv", "--decisions_only"]),
    (change_code, ["code_version = 0.0.0+abc", "--decisions_only"]),
  ],
  ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_tape_is_refused_with_one_message(store, spoil, parts):
  spoil(store)
  with pytest.raises(BadTape) as refused:
    runs.replay(store)
  message = str(refused.value)
  assert [part for part in parts if part not in message] == []


def test_without_a_run_there_is_nothing_to_replay(store):
  lose_the_run(store)
  with pytest.raises(ValueError, match="no run in this exchange"):
    runs.replay(store)


# --- Process shapes ---------------------------------------------------------


def test_lives_of_unlike_shapes_run_in_processes_of_their_own(store):
  # The program's bits do not depend on how many devices lie idle.
  change_headers(store, "tape/learner-1.", devices=2)
  history = history_lib.load(store)
  assert [shape.devices for shape in history.shapes] == [2, 8]
  result = runs.replay(store)
  assert (result["matched"], result["first_mismatch"]) == (60, None)


def test_a_bad_tape_is_refused_by_those_processes_too(store):
  change_headers(store, "tape/learner-1.", devices=2, cpu_features="riscv")
  with pytest.raises(BadTape, match="riscv"):
    runs.replay(store)


def test_a_resumed_run_may_have_changed_its_config(store):
  values = make_config().to_dict()
  values["sync"]["quorum_min"] = 2
  config = from_dict(values)
  change_headers(
    store,
    "tape/learner-1.2/",
    config=wire.canonical_json(config.to_dict()).decode(),
    config_sha256=config.digest,
  )
  # A learner's decisions do not depend on K.
  assert runs.replay(store)["matched"] == 60
