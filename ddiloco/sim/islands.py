"""Replays a run in the process shapes it had: in one process, or several.

XLA chooses the order of sums by a process's threads and devices, so lives of
unlike shapes are replayed in processes of their own, which hand each other
bytes through a folder. This module is imported before JAX is.
"""

import collections
import contextlib
import multiprocessing
import os
import pathlib
import queue
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.protocol import wire
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.schedule import make_schedule
from ddiloco.sim import history as history_lib
from ddiloco.sim import script as script_lib
from ddiloco.sim.history import BadTape, Difference, History, Life, Shape
from ddiloco.sim.script import Script

_POLL_S = 0.01
_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+")


def set_environment(shape: Shape) -> None:
  """What XLA reads when JAX is first imported. The tape wins."""
  flags = _DEVICES.sub("", os.environ.get("XLA_FLAGS", ""))
  count = f"--xla_force_host_platform_device_count={shape.devices}"
  os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
  if shape.backend == "cpu":  # there always is one
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.pop("PJRT_NPROC", None)
  if shape.threads:
    os.environ["PJRT_NPROC"] = str(shape.threads)


def replay(
  history: History,
  *,
  cache_dir: str,
  decisions_only: bool,
  say: Callable[[str], None],
) -> dict[str, Any]:
  """Replays a run up to the first difference; what replay.json says.

  Raises `BadTape` if the tapes cannot be replayed, here or at all.
  """
  if not (history.genesis.has_arrays or decisions_only):
    raise BadTape(
      "this run was simulated without arrays (--compute=none), so there are no "
      "parameters to compare: compare the decisions with --decisions_only."
    )
  from ddiloco.sim import replay as replay_lib  # imports JAX

  commits: dict[str, Commit] = {}
  records = sum(len(life.records) for life in history.lives)
  result = {
    "run_id": history.first.run_id,
    "compared": "decisions" if decisions_only else "parameters",
    "lives": len(history.lives),
    "records": records,
    "commits": _count(history),
    "matched": 0,
    "first_mismatch": None,
  }
  difference = replay_lib.redecide_all(history, commits)
  if difference is not None:
    return result | {"first_mismatch": _told(difference)}
  found = history_lib.chain(history, commits, history.lives)
  say(f"{records:,} records are decided as they were")
  if decisions_only:
    return result | {"matched": len(found)}
  scripts = script_lib.write(history, found)
  matched, mismatch = 0, None
  for t, mismatch in _run(history, scripts, cache_dir):
    if mismatch is not None:
      break
    matched += t > 0
    say(f"round {t} of {history.newest.round} has the same bits")
  if mismatch is not None:
    result["first_mismatch"] = {"what": "parameters"} | mismatch._asdict()
  return result | {"matched": matched}


def _count(history: History) -> int:
  schedule = make_schedule(history.config.sync)
  rounds = range(history.start.round + 1, history.newest.round + 1)
  return sum(map(schedule.is_round, rounds))


def _told(difference: Difference) -> dict[str, Any]:
  told = {"what": "decision"} | difference._asdict()
  for name in ("recorded", "decided"):
    if isinstance(told[name], tuple):
      told[name] = [wire.pack(command) for command in told[name]]
  return told


# --- Processes --------------------------------------------------------------


class MemoryStore:
  """A store inside one process; see `replay.Store`."""

  def __init__(self, wanted: collections.Counter[str]):
    self._left = collections.Counter(wanted)
    self._values: dict[str, bytes] = {}

  def wants(self, key: str) -> bool:
    """Whether anybody will take it."""
    return self._left[key] > 0

  def has(self, key: str) -> bool:
    """Whether it is there yet."""
    return key in self._values

  def take(self, key: str) -> bytes:
    """Its content; gone after as many takes as were wanted."""
    value = self._values[key]
    self._left[key] -= 1
    if not self._left[key]:
      del self._values[key]
    return value

  def put(self, key: str, value: bytes) -> None:
    """Keeps it as long as somebody wants it."""
    if self.wants(key):
      self._values[key] = value


class FolderStore(MemoryStore):
  """One process's part of a store that several share."""

  def __init__(
    self,
    folder: pathlib.Path,
    shape: Shape,
    wanted: dict[Shape, collections.Counter[str]],
  ):
    super().__init__(wanted[shape])
    self._own = folder / _name(shape)
    self._others = {
      folder / _name(other): some
      for other, some in wanted.items()
      if other != shape
    }

  def wants(self, key: str) -> bool:
    """Whether anybody will take it, here or elsewhere."""
    return super().wants(key) or any(s[key] for s in self._others.values())

  def has(self, key: str) -> bool:
    """Whether it is there yet; fetches it if it comes from elsewhere."""
    path = self._own / key
    if not super().has(key) and path.exists():
      super().put(key, path.read_bytes())
      path.unlink()
    return super().has(key)

  def put(self, key: str, value: bytes) -> None:
    """Leaves it in the folder of every process that wants it."""
    super().put(key, value)
    for folder, wanted in self._others.items():
      if wanted[key]:
        temporary = folder / f".{key}"
        temporary.write_bytes(value)
        temporary.replace(folder / key)


def _name(shape: Shape) -> str:
  return f"{shape.backend}-{shape.threads}-{shape.devices}"


def _run(history: History, scripts: Sequence[Script], cache_dir: str):
  """Yields (round, mismatch or None) of every commit computed again."""
  shapes = history.shapes
  if len(shapes) > 1:
    yield from _run_processes(history, scripts, cache_dir)
  elif shapes:
    found: collections.deque = collections.deque()
    store = MemoryStore(script_lib.wanted(scripts))
    lives = history.lives
    for key in _work(history, lives, scripts, store, cache_dir, found.append):
      while found:
        yield found.popleft()
      if key:
        raise BadTape(f"every life waits: the first one for {key}")
    yield from found


def _work(
  history: History,
  lives: Sequence[Life],
  scripts: Sequence[Script],
  store: MemoryStore,
  cache_dir: str,
  found: Callable[[tuple], None],
):
  """Runs lives of one shape; yields what they wait for, "" now and then."""
  from ddiloco.engine.loading import load_model
  from ddiloco.sim import replay as replay_lib
  from ddiloco.sim.observers import Comparison

  replay_lib.check_facts(lives)
  observer = Comparison(found)
  if any(life is history.lives[0] for life in lives):
    model = load_model(history.config, None, cache_dir)
    replay_lib.genesis(history, model, store, observer)
    yield ""
  yield from replay_lib.run_scripts(
    history, lives, scripts, store, observer, cache_dir=cache_dir
  )


def _run_processes(history: History, scripts: Sequence[Script], cache_dir: str):
  context = multiprocessing.get_context("spawn")
  results, processes = context.Queue(), []
  before = {n: os.environ.get(n) for n in ("XLA_FLAGS", "PJRT_NPROC")}
  with tempfile.TemporaryDirectory(prefix="replay-") as folder:
    try:
      for shape in history.shapes:
        (pathlib.Path(folder) / _name(shape)).mkdir()
      for shape in history.shapes:
        set_environment(shape)
        arguments = (history, scripts, shape, folder, cache_dir, results)
        process = context.Process(target=_child, args=arguments, daemon=True)
        process.start()
        processes.append(process)
      yield from _gather(results, processes)
    finally:
      for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
          os.environ[name] = value
      for process in processes:
        process.terminate()
        process.join()


def _gather(results: Any, processes: Sequence[Any]):
  working = len(processes)
  while working:
    try:
      kind, value = results.get(timeout=1.0)
    except queue.Empty:
      broken = [p.exitcode for p in processes if p.exitcode]
      if broken:
        raise RuntimeError(
          f"a replaying process ended with exit code {broken[0]}"
        ) from None
      continue
    match kind:
      case "commit":
        yield value
      case "bad":
        raise BadTape(value)
      case "done":
        working -= 1


def _child(
  history: History,
  scripts: Sequence[Script],
  shape: Shape,
  folder: str,
  cache_dir: str,
  results: Any,
) -> None:
  """Replays the lives of one shape, in a process of that shape."""
  wanted: dict[Shape, collections.Counter[str]] = {}
  mine = []
  for life, script in zip(history.lives, scripts, strict=True):
    some = wanted.setdefault(life.shape, collections.Counter())
    some.update(script_lib.wanted([script]))
    if life.shape == shape:
      mine.append((life, script))
  store = FolderStore(pathlib.Path(folder), shape, wanted)
  with contextlib.suppress(KeyboardInterrupt):
    try:
      lives, own = zip(*mine, strict=True)
      for key in _work(
        history,
        lives,
        own,
        store,
        cache_dir,
        lambda value: results.put(("commit", value)),
      ):
        if key:
          time.sleep(_POLL_S)  # until another process has got there
      results.put(("done", None))
    except BadTape as error:
      results.put(("bad", str(error)))
