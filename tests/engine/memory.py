"""An exchange in memory that watches its users, and fails when told to."""

import re
from collections.abc import Callable
from typing import Any

import jax

from ddiloco.engine.ports import (
  Call,
  Item,
  Job,
  Ready,
  drive,
)
from ddiloco.protocol import keys
from ddiloco.protocol.retention import SWEPT


class Killed(Exception):
  """Raised by a hook: the actor at work dies here."""


class MemoryExchange:
  """An exchange that keeps whatever was ever written, and watches over it.

  The hooks `before` and `after` are called with (method, key) around every
  operation; what they raise is what the caller gets.
  """

  def __init__(self):
    self.objects: dict[str, Item] = {}
    self.history: dict[str, bytes] = {}
    self.commits: list[str] = []
    self.changes = 0
    self.before = self.after = _no_hook

  def names(self, prefix: str) -> list[str]:
    return sorted(name for name in self.objects if name.startswith(prefix))

  def put(self, key: str, value: bytes, *, durable: bool = False) -> None:
    self._run("put", key, lambda: self._write(key, value))

  def put_if_absent(
    self, key: str, value: bytes, *, durable: bool = False
  ) -> bool:
    def create() -> bool:
      if key not in self.objects:
        self._write(key, value)
      return self.objects[key].value == value

    return self._run("put_if_absent", key, create)

  def compare_and_swap(
    self, key: str, value: bytes, generation: bytes | None
  ) -> bytes | None:
    def swap() -> bytes | None:
      found = self.objects.get(key)
      if (found.generation if found else None) != generation:
        return None
      return self._write(key, value)

    return self._run("compare_and_swap", key, swap)

  def get(self, key: str) -> Item | None:
    return self._run("get", key, lambda: self.objects.get(key))

  def list(self, prefix: str) -> list[str]:
    return self._run("list", prefix, lambda: self.names(prefix))

  def delete(self, key: str) -> None:
    self._run("delete", key, lambda: self.objects.pop(key, None))

  def delete_prefix(self, prefix: str) -> None:
    def delete() -> None:
      for name in self.names(prefix):
        del self.objects[name]

    self._run("delete_prefix", prefix, delete)

  def plant(self, key: str, value: bytes) -> None:
    """Stores what no actor of this run has written."""
    self.changes += 1
    self.objects[key] = Item(value, b"%d" % self.changes)

  def _write(self, key: str, value: bytes) -> bytes:
    if value == SWEPT and key in self.history:
      self.plant(key, value)
      return self.objects[key].generation
    if not key.startswith((keys.MEMBERS, keys.LEASES)):
      assert self.history.get(key, value) == value, f"{key} is write-once"
    if key.startswith(keys.COMMITS) and key not in self.history:
      self.commits.append(key)
    self.history[key] = value
    self.plant(key, value)
    return self.objects[key].generation

  def once(
    self, when: str, method: str, pattern: str, error: Exception
  ) -> "Fault":
    """Raises `error` before or after the first such operation."""
    fault = Fault(method, pattern, error)
    setattr(self, when, fault)
    return fault

  def _run(self, method: str, key: str, operation: Callable[[], Any]) -> Any:
    self.before(method, key)
    result = operation()
    self.after(method, key)
    return result


class Fault:
  """A hook that raises an error once; keys match from their beginning."""

  def __init__(self, method: str, pattern: str, error: Exception):
    self._method, self._pattern, self._error = method, pattern, error
    self.happened = False

  def __call__(self, method: str, key: str) -> None:
    wanted = method == self._method and re.match(self._pattern, key)
    if wanted and not self.happened:
      self.happened = True
      raise self._error


def _no_hook(method: str, key: str) -> None:
  """What happens around an operation unless a test says otherwise."""


def run_job(job: Job, exchange: MemoryExchange) -> Any:
  """Runs a job's requests one after the other; returns its result."""

  def answer(request: Call | Ready) -> Any:
    if isinstance(request, Ready):
      return jax.block_until_ready(request.arrays)
    return request.on(exchange)

  return drive(job, answer)
