"""Rebuilds a run's report: `python -m launch.report --workdir=runs/a`.

Writes report.html and summary.json into the workdir and prints the summary.
It only reads the exchange, so it may be used while the run goes on.
"""

import pathlib

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command
from launch import flags as common


def main() -> int:
  """Writes the report of the run in --workdir."""
  from ddiloco.report import summary

  if not common.WORKDIR.value:
    raise ConfigError("--workdir is missing: name the directory of a run.")
  workdir = pathlib.Path(common.WORKDIR.value).absolute()
  if not workdir.is_dir():
    raise ConfigError(
      f"--workdir={common.WORKDIR.value} is no directory: name that of a run "
      "which has started."
    )
  exchange = common.open_exchange(workdir)
  try:
    written = summary.write(exchange, workdir)
  except OSError as error:
    raise ConfigError(
      f"the report cannot be written to {workdir}: {error.strerror}. Free "
      "space there, or fix its permissions."
    ) from error
  print(summary.text(written))
  return Exit.OK


if __name__ == "__main__":
  command.run(main)
