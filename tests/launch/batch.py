"""Runs many commands from one warm process, each in a fork of it.

`python tests/launch/batch.py` reads argument lists from standard input, one
JSON list a line (`["local", "--workdir=..."]` is `python -m launch.local
--workdir=...`), and answers each with a line of JSON: exit code, stdout and
stderr. A fork costs milliseconds where a start would cost a second. For
commands that end before they import JAX, which must not be forked.
"""

import json
import os
import pathlib
import sys
import tempfile
import traceback

ROOT = pathlib.Path(__file__).parents[2]


def run(argv: list[str]) -> tuple[int, str, str]:
  """Exit code, standard output and standard error of one command."""
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    pid = os.fork()
    if pid == 0:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      os._exit(_command(argv))
    _, status = os.waitpid(pid, 0)
    texts = []
    for file in (out, err):
      file.seek(0)
      texts.append(file.read().decode())
  return os.waitstatus_to_exitcode(status), *texts


def _command(argv: list[str]) -> int:
  """What `python -m launch.<argv[0]>` would do, without leaving."""
  import importlib

  from launch import command

  module = importlib.import_module(f"launch.{argv[0]}")
  sys.argv = [module.__file__, *argv[1:]]
  try:
    command.run(module.main)
    code = 0
  except SystemExit as leaving:
    code = leaving.code or 0
  except BaseException:
    traceback.print_exc()
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  return int(code)


def main() -> None:
  """Serves until standard input ends."""
  sys.path.insert(0, str(ROOT))
  import ddiloco.live.supervisor  # noqa: F401 - warm for all forks
  import ddiloco.report.summary  # noqa: F401
  import launch.flags  # noqa: F401

  assert "jax" not in sys.modules, "JAX's threads do not survive a fork"
  for line in sys.stdin:
    print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
  main()
