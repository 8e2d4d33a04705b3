"""Bytes from anywhere: the record that was written, or a `WireError`."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol import wire
from ddiloco.types import WIRE_FORMAT, Refusal

HEAD = b"ddiloco %d" % WIRE_FORMAT

JSON_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text(max_size=6),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
  ),
  max_leaves=10,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
  name: str
  value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
  number: int
  flag: bool
  reason: Refusal
  maybe: Inner | None
  items: tuple[Inner, ...]
  pair: tuple[str, int]


OUTERS = st.builds(
  Outer,
  number=st.integers(),
  flag=st.booleans(),
  reason=st.sampled_from(Refusal),
  maybe=st.none() | st.builds(Inner, st.text(), st.floats(-9.0, 9.0)),
  items=st.lists(
    st.builds(Inner, st.text(), st.floats(-9.0, 9.0)), max_size=3
  ).map(tuple),
  pair=st.tuples(st.text(), st.integers()),
)
EXAMPLE = Outer(
  3, True, Refusal.LATE, Inner("x", 0.5), (Inner("y", -1.0),), ("z", 4)
)
PLAIN = wire.to_plain(EXAMPLE)


def forged(body: bytes, kind: str = "thing") -> bytes:
  """A frame whose head fits its body, whatever that is."""
  head = f" {WIRE_FORMAT} {kind} {len(body)} {wire.sha256(body)}\n".encode()
  return wire.MAGIC + head + body


def reason_of(data: bytes, kind: str = "thing") -> Refusal:
  with pytest.raises(wire.WireError) as caught:
    wire.unframe(kind, data)
  return caught.value.reason


@given(JSON_VALUES)
def test_frames_round_trip(value):
  assert wire.unframe("thing", wire.frame("thing", value)) == value


@given(JSON_VALUES, st.data())
def test_every_truncation_is_refused(value, data):
  frame = wire.frame("thing", value)
  size = data.draw(st.integers(0, len(frame) - 1))
  assert reason_of(frame[:size]) in (Refusal.MALFORMED, Refusal.SIZE)


def test_every_bit_flip_is_refused():
  frame = wire.frame("thing", PLAIN)
  for bit in range(8 * len(frame)):
    torn = bytearray(frame)
    torn[bit // 8] ^= 1 << bit % 8
    reason_of(bytes(torn))


@given(st.binary(max_size=80))
def test_noise_is_refused(noise):
  assert reason_of(noise) is Refusal.MALFORMED
  reason_of(wire.MAGIC + b" " + noise)


@pytest.mark.parametrize(
  "spoil, reason",
  [
    (lambda d: d.replace(HEAD, b"ddiloco 1", 1), Refusal.MALFORMED),
    (lambda d: d.replace(b"thing", b"other", 1), Refusal.MALFORMED),
    (lambda d: d + b" ", Refusal.SIZE),
    (lambda d: d[:-1] + b"]", Refusal.CHECKSUM),
    (lambda d: d.replace(b"\n", b"", 1), Refusal.MALFORMED),
    (lambda d: b"", Refusal.MALFORMED),
    (lambda d: forged(b"{"), Refusal.MALFORMED),
    (lambda d: forged(b"\xff\xff"), Refusal.MALFORMED),
    (lambda d: forged(b"[" * 100_000), Refusal.MALFORMED),
    (lambda d: forged(b"9" * 5000), Refusal.MALFORMED),
    (lambda d: forged(b"{}", "other"), Refusal.MALFORMED),
  ],
)
def test_reasons(spoil, reason):
  assert reason_of(spoil(wire.frame("thing", PLAIN))) is reason


def test_an_unknown_format_names_both():
  data = wire.frame("thing", 1).replace(HEAD, b"ddiloco 7", 1)
  with pytest.raises(wire.WireError, match=rf"format 7.*reads {WIRE_FORMAT}"):
    wire.unframe("thing", data)


def test_large_records_are_refused_unread(monkeypatch):
  monkeypatch.setattr(wire, "MAX_RECORD_BYTES", 100)
  assert reason_of(wire.frame("thing", "x" * 100)) is Refusal.SIZE


@pytest.mark.parametrize(
  "kind, size", [("answer", 1 << 20), ("member", 1 << 16), ("lease", 1 << 16)]
)
def test_what_many_write_has_a_smaller_limit(monkeypatch, kind, size):
  sound = wire.frame(kind, "x" * (size - 200))
  assert wire.unframe(kind, sound) == "x" * (size - 200)
  monkeypatch.setattr(wire.json, "loads", None)  # what is too large is not read
  with pytest.raises(wire.WireError) as caught:
    wire.unframe(kind, wire.frame(kind, "x" * size))
  assert caught.value.reason is Refusal.SIZE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_not_written(value):
  with pytest.raises(ValueError):
    wire.frame("thing", value)


@given(OUTERS)
def test_dataclasses_round_trip(value):
  text = wire.canonical_json(wire.to_plain(value))
  assert wire.from_plain(Outer, json.loads(text)) == value


@given(OUTERS)
def test_packed_dataclasses_round_trip(value):
  plain = json.loads(wire.canonical_json(wire.pack(value)))
  assert wire.unpack({"Outer": Outer, "Inner": Inner}, plain) == value


def test_a_whole_number_is_a_float_where_one_is_declared():
  value = wire.from_plain(Inner, {"name": "", "value": 2})
  assert type(value.value) is float and value.value == 2.0


def refuses(hint, plain):
  with pytest.raises(wire.WireError) as caught:
    wire.from_plain(hint, plain)
  assert caught.value.reason is Refusal.MALFORMED


@pytest.mark.parametrize("key", PLAIN)
def test_a_missing_field_is_refused(key):
  refuses(Outer, {k: v for k, v in PLAIN.items() if k != key})


def test_an_extra_field_is_refused():
  refuses(Outer, PLAIN | {"extra": 1})


NESTED = [[]]
for _ in range(900):
  NESTED = [NESTED]


@pytest.mark.parametrize(
  "key, value",
  [
    ("number", True),
    ("number", 1.0),
    ("number", "1"),
    ("number", None),
    ("flag", 1),
    ("reason", "because"),
    ("reason", 1),
    ("reason", ["late"]),
    ("reason", {}),
    ("maybe", 1),
    ("maybe", {}),
    ("maybe", {"name": "x", "value": "1"}),
    ("maybe", {"name": "x", "value": True}),
    ("maybe", {"name": "x", "value": float("nan")}),
    ("maybe", {"name": "x", "value": float("inf")}),
    ("maybe", {"name": "x", "value": 10**400}),
    ("items", {}),
    ("items", "xy"),
    ("items", [1]),
    ("items", NESTED),
    ("pair", ["x"]),
    ("pair", ["x", 1, 2]),
    ("pair", [1, "x"]),
    ("pair", None),
  ],
)
def test_a_field_of_another_type_is_refused(key, value):
  refuses(Outer, PLAIN | {key: value})


@pytest.mark.parametrize(
  "plain",
  [
    None,
    {},
    [],
    ["Unknown", 1],
    [["Inner"], 1],
    [{}, 1],
    ["Inner"],
    ["Inner", "x"],
    ["Inner", "x", 1.0, 2],
    ["Inner", 1, 1.0],
    NESTED,
  ],
)
def test_packed_records_of_another_shape_are_refused(plain):
  with pytest.raises(wire.WireError):
    wire.unpack({"Inner": Inner}, plain)


@given(JSON_VALUES)
def test_any_json_value_is_a_record_or_refused(plain):
  for hint in (Outer, Inner, Refusal, tuple[Inner, ...], Inner | None, float):
    try:
      wire.from_plain(hint, plain)
    except wire.WireError:
      pass


def test_deep_nesting_is_refused_at_any_depth():
  # Near the limit of recursion, even a message about the value can fail.
  plain = PLAIN | {"items": [{"name": "X", "value": 1.0}]}
  before, after = wire.canonical_json(plain).split(b'"X"')
  for depth in range(600, 1000):
    body = before + b"[" * depth + b"]" * depth + after
    with pytest.raises(wire.WireError):
      wire.from_plain(Outer, wire.unframe("thing", forged(body)))
