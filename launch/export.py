"""Writes a run's newest parameters, for other programs and other runs.

  python -m launch.export --workdir=runs/a --output=DIR \
    [--format=orbax|safetensors]

A run that is given `--config.init.path=DIR` starts from them.
"""

import pathlib
import signal
import sys
import threading

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.lm import weights
from ddiloco.types import Exit
from launch import command
from launch import flags as common

OUTPUT = flags.DEFINE_string("output", None, "The directory to create.")
FORMAT = flags.DEFINE_enum(
  "format", "safetensors", weights.FORMATS, "How tensors are stored."
)


def main() -> int:
  """Exports the newest commit of the run in --workdir."""
  if not OUTPUT.value:
    raise ConfigError("--output is missing: name a directory to create.")
  workdir = common.workdir()
  config = common.config(workdir)
  command.prepare_jax(1, config.learners.threads, workdir / "cache")
  from ddiloco.engine import startup  # imports JAX
  from ddiloco.engine.records import params_digest
  from ddiloco.live import setup as setup_lib
  from ddiloco.live.evaluator import newest_params
  from ddiloco.lm import export

  # What is half-written is removed on the way out.
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(Exit.STOPPED))
  output = pathlib.Path(OUTPUT.value).absolute()
  export.check_output(output)
  setup = setup_lib.open_setup(
    config,
    None,
    workdir=workdir,
    exchange=common.EXCHANGE.value,
    run_key=common.run_key(),
    interrupt=threading.Event(),
  )
  genesis = setup_lib.wait_for_run(setup).genesis
  startup.check_genesis(genesis, config, setup.layout)
  commit, params = newest_params(setup)
  export.write(
    output,
    params,
    format=FORMAT.value,
    config=config,
    tokenizer=getattr(setup.program, "tokenizer", None),
    facts={
      "round": commit.round,
      "tokens": commit.tokens,
      "params_digest": params_digest(setup.layout, params),
    },
  )
  print(f"round {commit.round}, {commit.tokens} tokens: {output}")
  return Exit.OK


if __name__ == "__main__":
  command.run(main)
