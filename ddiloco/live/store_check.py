"""Whether a store keeps what a run relies on; tried before a run is created.

A run is safe because of two writers who create one object, one is told that
it lost. A file system without locks, or a server that ignores conditions,
tells both that they won, and says nothing.
"""

import contextlib
import threading
import uuid

from ddiloco.engine.ports import Exchange, ExchangeError

_RACES = 4


def fault_of(one: Exchange, other: Exchange) -> str:
  """What the store does wrong; empty if it does nothing wrong.

  Takes two handles of it, as two processes would have. Leaves nothing there.

  Raises:
    ExchangeError: An operation failed, which says nothing about others.
  """
  prefix = f"check-{uuid.uuid4().hex}/"
  try:
    for number in range(_RACES):
      fault = _race(one, other, f"{prefix}race-{number}")
      if fault:
        return fault
    return _swap(one, other, f"{prefix}swap") or _list(one, other, prefix)
  finally:
    with contextlib.suppress(ExchangeError):
      one.delete_prefix(prefix)


def _race(one: Exchange, other: Exchange, key: str) -> str:
  """Both create the object at once."""
  barrier = threading.Barrier(2)
  won: list[bytes] = []
  errors: list[ExchangeError] = []

  def create(exchange: Exchange, value: bytes) -> None:
    barrier.wait()
    try:
      if exchange.put_if_absent(key, value, durable=True):
        won.append(value)
    except ExchangeError as error:
      errors.append(error)

  rival = threading.Thread(target=create, args=(other, b"other"))
  rival.start()
  create(one, b"one")
  rival.join()
  if errors:
    raise errors[0]
  # Once more, when nobody is in the way.
  if other.put_if_absent(key, b"late"):
    return "an object that was there could be created again"
  item = one.get(key)
  if len(won) != 1 or item is None or item.value != won[0]:
    return f"of two writers that created one object, {len(won)} won"
  return ""


def _swap(one: Exchange, other: Exchange, key: str) -> str:
  first = one.compare_and_swap(key, b"first", None)
  if first is None:
    return "an object that was not there could not be created"
  second = other.compare_and_swap(key, b"second", first)
  if second is None:
    return "an object could not be replaced by who knew its generation"
  if one.compare_and_swap(key, b"third", first) is not None:
    return "an object was replaced by who knew an older one only"
  item = one.get(key)
  if item is None or (item.value, item.generation) != (b"second", second):
    return "a replaced object could not be read back"
  return ""


def _list(one: Exchange, other: Exchange, prefix: str) -> str:
  key = f"{prefix}list"
  one.put(key, b"")
  if key not in other.list(prefix):
    return "a listing lacked what had just been written"
  other.delete(key)
  if one.get(key) is not None or key in one.list(prefix):
    return "a deleted object was still there"
  return ""
