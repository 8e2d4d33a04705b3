"""For tests of commands: runs them, reads what they say and leave."""

import collections
import contextlib
import json
import subprocess
import sys

from tests.launch import batch
from tests.live import processes

Result = collections.namedtuple("Result", "code out err")


@contextlib.contextmanager
def server():
  """Yields a function that runs a command; see `tests/launch/batch.py`."""
  process = subprocess.Popen(
    [sys.executable, batch.__file__],
    cwd=processes.ROOT,
    env=processes.environment(),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )

  def run(*argv):
    process.stdin.write(json.dumps([str(arg) for arg in argv]) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the server of commands is gone"
    return Result(*json.loads(answer))

  try:
    yield run
  finally:
    process.communicate()


def launch(command, *argv):
  """Runs a command in a process of its own, to its end."""
  done = subprocess.run(
    [sys.executable, "-m", f"launch.{command}", *map(str, argv)],
    cwd=processes.ROOT,
    capture_output=True,
    text=True,
    timeout=240,  # a process that starts on a busy machine; it never hangs
    check=False,
  )
  return Result(done.returncode, done.stdout, done.stderr)


def assert_user_error(result, *words):
  """Exit code 2 and one message, which says all of these."""
  assert result.code == 2, result
  assert result.err.startswith("error: ") and result.err.count("\n") == 1
  assert "Traceback" not in result.err and result.out == ""
  for word in words:
    assert word in result.err


def contents(folder):
  """All files below a folder with their bytes."""
  return {
    path.relative_to(folder): path.read_bytes()
    for path in folder.rglob("*")
    if path.is_file()
  }


def tiny_config(*more):
  """The flags of a small config on a small text, and more of them."""
  return (
    f"--config={processes.CONFIG}",
    f"--config.data.path={processes.text()}",
    *more,
  )
