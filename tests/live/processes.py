"""Starts the project's commands as processes, waits for them, finds orphans."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lm import tiny

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "tests/live/tiny.py"
# Far above what anything here takes, on a busy machine too.
DEADLINE_S = 180.0
STOP_DEADLINE_S = 10.0  # What the launcher promises.


@functools.cache
def _shared() -> tempfile.TemporaryDirectory:
  """Lives as long as the test process: the text and compiled programs."""
  directory = tempfile.TemporaryDirectory(prefix="ddiloco-tests-")
  tiny.write_text(pathlib.Path(directory.name) / "text")
  return directory


def text() -> str:
  """A directory of documents to train on."""
  return os.path.join(_shared().name, "text")


def environment(**changes: str) -> dict[str, str]:
  """A user's environment, not that of the tests; one cache for all."""
  kept = dict(os.environ)
  for name in ("XLA_FLAGS", "PJRT_NPROC", "JAX_NUMPY_RANK_PROMOTION"):
    kept.pop(name, None)
  kept["JAX_COMPILATION_CACHE_DIR"] = os.path.join(_shared().name, "xla")
  return kept | changes


def run_flags(workdir: pathlib.Path, **config: Any) -> list[str]:
  """The flags of a tiny run; `stop_rounds=9` is `--config.stop.rounds=9`."""
  changed = {"data_path": text()} | config
  return [
    f"--config={CONFIG}",
    f"--workdir={workdir}",
    *(
      f"--config.{key.replace('_', '.', 1)}={value}"
      for key, value in changed.items()
    ),
  ]


def run_python(program: str, *args: str, env: dict[str, str]) -> str:
  """Runs a program to its end, with the project in reach; what it prints."""
  done = subprocess.run(
    [sys.executable, "-c", program, *args],
    env=environment(PYTHONPATH=str(ROOT), **env),
    stdout=subprocess.PIPE,
    text=True,
    timeout=DEADLINE_S,
    check=True,
  )
  return done.stdout


def wait_for(what: str, condition: Callable[[], Any], deadline_s: float) -> Any:
  """The first true value of `condition`; fails after the deadline."""
  end_s = time.monotonic() + deadline_s
  while not (found := condition()):
    assert time.monotonic() < end_s, f"no {what} within {deadline_s} s"
    time.sleep(0.02)
  return found


def processes_of(path: pathlib.Path) -> dict[int, str]:
  """The processes whose command line names `path`, zombies left out."""
  found = {}
  for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) != os.getpid():
      with contextlib.suppress(OSError):
        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        if str(path) in line:
          found[int(entry.name)] = line.strip()
  return found


@dataclasses.dataclass
class Command:
  """A command of the project under way; its output goes to files."""

  process: subprocess.Popen
  workdir: pathlib.Path
  out: pathlib.Path
  err: pathlib.Path

  @property
  def stdout(self) -> str:
    """What it has written so far."""
    return self.out.read_text()

  @property
  def stderr(self) -> str:
    """What it has complained about so far."""
    return self.err.read_text()

  def finish(self, deadline_s: float = DEADLINE_S) -> int:
    """Waits for the end; returns the exit code."""
    try:
      return self.process.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
      raise AssertionError(
        f"not over within {deadline_s} s: {self.stderr}\n{logs(self.workdir)}"
      ) from None

  def interrupt_group(self) -> None:
    """What Ctrl-C on a terminal does: every process gets the signal."""
    os.killpg(self.process.pid, signal.SIGINT)

  def explain(self) -> str:
    """For a failed assertion: everything that was said."""
    return f"{self.stdout}\n{self.stderr}\n{logs(self.workdir)}"


class Commands:
  """Starts commands in one directory; what is left is killed at the end."""

  def __init__(self, directory: pathlib.Path):
    self._directory = directory
    self._started: list[subprocess.Popen] = []

  def start(
    self,
    module: str,
    *flags: str,
    workdir: pathlib.Path,
    env: dict[str, str] | None = None,
  ) -> Command:
    """Starts `python -m launch.<module>`."""
    number = len(self._started)
    out = self._directory / f"{number}-{module}.out"
    err = self._directory / f"{number}-{module}.err"
    with open(out, "wb") as out_file, open(err, "wb") as err_file:
      process = subprocess.Popen(
        [sys.executable, "-m", f"launch.{module}", *flags],
        cwd=ROOT,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=out_file,
        stderr=err_file,
        start_new_session=True,  # The tests' own terminal is not concerned.
      )
    self._started.append(process)
    return Command(process, workdir, out, err)

  def clean_up(self) -> None:
    """Kills what a failed test has left running."""
    for process in self._started:
      if process.poll() is None:
        process.kill()
        process.wait()
    for pid in processes_of(self._directory):
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def commands_in(directory: pathlib.Path) -> Iterator[Commands]:
  """A `Commands` whose processes do not outlive the block."""
  commands = Commands(directory)
  try:
    yield commands
  finally:
    commands.clean_up()


@contextlib.contextmanager
def small_disk(path: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
  """A file system of its own at `path`; skips the test if none can be made."""
  path.mkdir(parents=True)
  mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
  done = subprocess.run(mount, capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip(f"needs to mount a small file system: {done.stderr.strip()}")
  try:
    yield path
  finally:
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: pathlib.Path) -> None:
  """Makes a file that takes all the space there is."""
  with open(path, "wb", buffering=0) as file:
    for size in (1 << 16, 1 << 10, 1):
      with contextlib.suppress(OSError):
        while True:
          file.write(b"x" * size)


def journal(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """What the launcher has noted so far."""
  path = workdir / "launch.jsonl"
  if not path.exists():
    return []
  whole, _, _ = path.read_text().rpartition("\n")
  return [json.loads(line) for line in whole.splitlines()]


def newest_round(workdir: pathlib.Path) -> int:
  """The newest commit in a workdir's exchange; -1 if there is none."""
  folder = workdir / "exchange/commit"
  names = os.listdir(folder) if folder.is_dir() else []
  return max((int(name) for name in names if name.isdigit()), default=-1)


def logs(workdir: pathlib.Path) -> str:
  """The roles' logs."""
  return "\n".join(
    f"--- {path.name}\n{path.read_text()}"
    for path in sorted((workdir / "logs").glob("*.log"))
  )
