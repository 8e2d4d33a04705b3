"""The fault script that a command is given."""

import pathlib

from absl import flags

from ddiloco.config import Config, ConfigError
from ddiloco.protocol import fault_kinds, presence
from ddiloco.protocol import faults as fault_script

FAULTS = flags.DEFINE_string(
  "faults",
  None,
  "A fault script, a file or its text, instead of the config's own: "
  + "at [round N|TIME] WHAT [learner N|syncer|exchange] [by FACTORx] [for TIME]"
  + "; ... "
  + fault_kinds.__doc__.partition("\n")[2],
)


def script(config: Config, *, live: bool) -> tuple[fault_script.Fault, ...]:
  """The checked script; `ConfigError` if no such run could perform it."""
  try:
    found = _read(config.faults if FAULTS.value is None else FAULTS.value)
    fault_script.check(
      found,
      learners=config.learners.count,
      stop_rounds=config.stop.rounds or None,
      shards=config.syncer.shards,
      quorum=config.quorum,
      live=live,
    )
    shared = _shared(config, found)
  except (ValueError, OSError) as error:
    raise ConfigError(f"--faults: {error}") from error
  if not shared:
    raise ConfigError(
      f"--faults starts or stops learners, but learners.global_batch = "
      f"{config.learners.global_batch} is shared by those whom --config.faults "
      "names, as every process must know them. Set that instead."
    )
  return found


def _read(text: str) -> tuple[fault_script.Fault, ...]:
  """A script, or that of the file of that name; `ValueError`, `OSError`."""
  path = pathlib.Path(text)
  if text and len(text) < 4096 and path.is_file():
    text = path.read_text()
  return fault_script.parse(text) if text.strip() else ()


def _shared(config: Config, script: tuple[fault_script.Fault, ...]) -> bool:
  """Whether a global batch, if any, is shared by whom this script has there."""
  if not config.learners.global_batch or FAULTS.value is None:
    return True
  mine, theirs = (
    {fault for fault in faults if fault.what in presence.KINDS}
    for faults in (script, _read(config.faults))
  )
  return mine == theirs
