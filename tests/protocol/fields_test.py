"""Records are frozen dataclasses in every respect but the time they take."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.protocol.fields import record, replace


@record
class Point:
  """A record."""

  x: int
  y: tuple[int, ...]
  name: str = "origin"


@dataclasses.dataclass(frozen=True, slots=True)
class Plain:
  """What a record is compared with."""

  x: int
  y: tuple[int, ...]
  name: str = "origin"


VALUES = {
  "x": st.integers(),
  "y": st.lists(st.integers(), max_size=2).map(tuple),
  "name": st.text(max_size=3),
}


@given(
  st.fixed_dictionaries(VALUES), st.fixed_dictionaries({}, optional=VALUES)
)
def test_copies_are_those_of_dataclasses(values, changes):
  changed = replace(Point(**values), **changes)
  plain = dataclasses.replace(Plain(**values), **changes)
  assert dataclasses.astuple(changed) == dataclasses.astuple(plain)
  assert changed == Point(**values | changes) == dataclasses.replace(changed)
  assert hash(changed) == hash(Point(**values | changes))
  assert repr(changed) == repr(plain).replace("Plain", "Point")


def test_fields_have_their_defaults():
  assert Point(1, ()) == Point(x=1, y=(), name="origin")
  assert Point.__doc__ == "A record." and Point.__init__.__name__ == "__init__"
  assert not hasattr(Point(1, ()), "__dict__")


def test_records_do_not_change():
  point = Point(1, (2,))
  copied = replace(point, x=3)
  with pytest.raises(dataclasses.FrozenInstanceError):
    point.x = 4
  with pytest.raises(dataclasses.FrozenInstanceError):
    copied.x = 4
  assert (point.x, copied.x) == (1, 3)


@pytest.mark.parametrize(
  "wrong",
  [
    lambda: Point(1),
    lambda: Point(1, (), "", 2),
    lambda: Point(1, (), z=2),
    lambda: replace(Point(1, ()), z=2),
  ],
)
def test_wrong_fields_are_refused(wrong):
  with pytest.raises(TypeError):
    wrong()


def test_copy_and_pickle_keep_the_value():
  point = Point(1, (2, 3), "p")
  assert copy.deepcopy(point) == point
  assert pickle.loads(pickle.dumps(point)) == point
