"""The records of the wire: what is written is what is read."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import messages, wire
from ddiloco.protocol.messages import (
  AnswerHeader,
  Commit,
  Counted,
  Lease,
  Member,
)
from ddiloco.types import WIRE_FORMAT
from tests.protocol import records
from tests.protocol.scenario import Syncer, first_commit, make_rules

RECORDS = st.one_of(
  records.HEADERS, records.COMMITS, records.MEMBERS, records.LEASES
)
CLASSES = (AnswerHeader, Commit, Member, Lease)
RULES = make_rules()
EXAMPLES = [
  Syncer(RULES).header(1),
  first_commit(RULES),
  Member("run", 0, 1, "nonce", "host", 7, 1, 0, 0, 0, 0, False),
  Lease(1, "nonce", "host", 7, 1),
]


@given(RECORDS)
def test_records_round_trip(record):
  data = messages.encode(record)
  assert messages.decode(type(record), data) == record
  assert messages.encode(messages.decode(type(record), data)) == data


@pytest.mark.parametrize("record", EXAMPLES)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_record_of_another_kind_is_refused(record, cls):
  if type(record) is not cls:
    with pytest.raises(wire.WireError):
      messages.decode(cls, messages.encode(record))


@pytest.mark.parametrize("record", EXAMPLES)
def test_every_damaged_byte_is_refused(record):
  data = messages.encode(record)
  for index in range(len(data)):
    torn = bytearray(data)
    torn[index] ^= 0x20
    for damaged in (bytes(torn), data[:index]):
      with pytest.raises(wire.WireError):
        messages.decode(type(record), damaged)


def spoilt(plain, junk, path):
  """A copy with one value, found by walking `path`, replaced by junk."""
  copy = json.loads(json.dumps(plain))
  parent, key = None, None
  node = copy
  for turn in path:
    if isinstance(node, dict) and node:
      parent, key = node, sorted(node)[turn % len(node)]
    elif isinstance(node, list) and node:
      parent, key = node, turn % len(node)
    else:
      break
    node = parent[key]
  if parent is None:
    return junk
  parent[key] = junk
  return copy


@given(
  st.sampled_from(EXAMPLES),
  st.lists(st.integers(0, 30), min_size=1, max_size=5),
  st.none()
  | st.booleans()
  | st.integers(-5, 5)
  | st.floats()
  | st.text(max_size=3)
  | st.lists(st.integers(), max_size=2)
  | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
def test_any_change_of_a_field_is_a_record_or_refused(record, path, junk):
  plain = spoilt(wire.to_plain(record), junk, path)
  kind = messages.encode(record).split(b" ")[2].decode()
  body = json.dumps(plain).encode()  # with NaN, which JSON lacks
  head = f" {WIRE_FORMAT} {kind} {len(body)} {wire.sha256(body)}\n".encode()
  try:
    read = messages.decode(type(record), wire.MAGIC + head + body)
  except wire.WireError:
    return
  # What is accepted can be written again, into a tape for example.
  again = messages.decode(type(record), messages.encode(read))
  assert again == read


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999", b"9" * 999])
def test_metrics_that_no_tape_could_hold_are_refused(number):
  plain = wire.to_plain(EXAMPLES[0]) | {"metrics": [["loss", "X"]]}
  body = wire.canonical_json(plain).replace(b'"X"', number)
  head = f" {WIRE_FORMAT} answer {len(body)} {wire.sha256(body)}\n".encode()
  with pytest.raises(wire.WireError):
    messages.decode(AnswerHeader, wire.MAGIC + head + body)


def test_the_counted_attempt_of_a_life():
  commit = dataclasses.replace(
    EXAMPLES[1], counted=(Counted(0, 2, 3, ()), Counted(4, 1, 1, ()))
  )
  assert commit.counted_attempt(0, 2) == 3
  assert commit.counted_attempt(4, 1) == 1
  assert commit.counted_attempt(0, 1) == 0  # an earlier life
  assert commit.counted_attempt(1, 2) == 0
