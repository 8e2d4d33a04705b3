"""How every command starts and ends: environment, messages, exit codes."""

import os
import pathlib
import sys
from collections.abc import Callable

from absl import app, flags

from ddiloco.config import Config, ConfigError
from ddiloco.engine.ports import DamagedRun, ExchangeError
from ddiloco.live import children, log
from ddiloco.types import Exit


def run(main: Callable[[], int]) -> None:
  """Runs a command: one clear message and an exit code for every error."""

  def guarded(argv: list[str]) -> int:
    log.configure()
    try:
      if len(argv) > 1:
        raise ConfigError(f"unexpected arguments: {' '.join(argv[1:])}")
      return int(main())
    except ConfigError as error:
      print(f"error: {error}", file=sys.stderr)
      return Exit.USER_ERROR
    except (ExchangeError, DamagedRun, OSError) as error:
      print(f"the run cannot go on: {error}", file=sys.stderr)
      return Exit.FAILED
    except KeyboardInterrupt:
      return Exit.STOPPED
    except Exception:  # the last line of defence
      log.logger.exception("the run cannot go on")
      return Exit.FAILED

  children.die_with_parent()
  for module, own in flags.FLAGS.flags_by_module_dict().items():
    for flag in own if module.startswith("launch.") else ():
      # --help shows the flags that commands share, not only the command's.
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  app.run(guarded, flags_parser=_parse)


def prepare_jax(devices: int, threads: int, cache: pathlib.Path) -> None:
  """Sets what XLA reads when JAX is first imported. Environment wins."""
  assert "jax" not in sys.modules, "too late: JAX is imported already"
  os.environ.setdefault("PJRT_NPROC", str(threads))
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "xla"))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
  xla = os.environ.get("XLA_FLAGS", "")
  if "xla_force_host_platform_device_count" not in xla:
    count = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{xla} {count}".strip()


def prepare_simulation(config: Config, cache: pathlib.Path) -> None:
  """The devices of the largest island, and one for the syncer."""
  devices = max(config.learners.devices) + 1
  prepare_jax(devices, config.learners.threads, cache)


def write_output(flag: flags.FlagHolder, text: str) -> None:
  """Writes the file that a flag names, if it is given; `ConfigError`."""
  if flag.value is None:
    return
  try:
    pathlib.Path(flag.value).write_text(text)
  except OSError as error:
    raise ConfigError(
      f"--{flag.name}={flag.value} cannot be written: {error.strerror}."
    ) from error


def _parse(argv: list[str]) -> list[str]:
  try:
    return flags.FLAGS(argv)
  except flags.Error as error:
    reason = str(error)
    if "Traceback (most recent call last)" in reason:  # of the config file
      last = reason.rstrip().splitlines()[-1]
      reason = reason.partition("\n")[0] + " " + last
    print(f"error: {reason}", file=sys.stderr)
  except Exception as error:  # a config file may raise anything
    # A locked ConfigDict quotes its message, line breaks and all.
    reason = str(error).replace("\\n", ". ").replace("\\'", "'")
    if reason[:1] == reason[-1:] == "'":
      reason = reason[1:-1]
    print(f"error: --config: {type(error).__name__}: {reason}", file=sys.stderr)
  sys.exit(Exit.USER_ERROR)
