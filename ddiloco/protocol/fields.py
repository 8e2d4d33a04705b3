"""Frozen records that are cheap to make and to copy.

Every transition makes new states, and every event, command and message is a
record: in a simulation of the protocol alone, making them is the largest part
of the work.
"""

import dataclasses
import functools
from typing import Any, TypeVar, dataclass_transform

_Record = TypeVar("_Record")


@dataclass_transform(frozen_default=True)
def record(cls: type[_Record]) -> type[_Record]:
  """A frozen dataclass with slots; making and copying one is fast.

  The `__init__` of a frozen dataclass looks every slot up by its name. These
  methods, made from text as that one is, hold on to the slots.
  """
  cls = dataclasses.dataclass(frozen=True, slots=True)(cls)
  names = [field.name for field in dataclasses.fields(cls)]
  scope = {f"_set_{name}": getattr(cls, name).__set__ for name in names}
  scope |= {"_new": functools.partial(object.__new__, cls), "_same": object()}
  init = [
    f"def __init__(self, {', '.join(names)}):",
    *(f"  _set_{name}(self, {name})" for name in names),
  ]
  copy = [
    f"def __replace__(self, *, {', '.join(f'{n}=_same' for n in names)}):",
    "  _copy = _new()",
    *(f"  _set_{n}(_copy, self.{n} if {n} is _same else {n})" for n in names),
    "  return _copy",
  ]
  exec("\n".join([*init, *copy]), scope)
  scope["__init__"].__defaults__ = cls.__init__.__defaults__
  cls.__init__ = functools.update_wrapper(scope["__init__"], cls.__init__)
  cls.__replace__ = scope["__replace__"]
  return cls


def replace(value: _Record, **changes: Any) -> _Record:
  """A copy of a record with some of its fields changed."""
  return value.__replace__(**changes)
