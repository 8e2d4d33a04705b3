"""Shows how unlike the data shards are, by the labels of their text.

  python -m launch.shards --config=experiments/quickstart/config.py \
    --config.data.partition=time --config.data.shards=3

One line for each shard: windows, entropy of the labels in bits, and the
commonest labels.
"""

import pathlib
import tempfile

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command
from launch import flags as common


def main() -> int:
  """Prints the labels of every data shard."""
  with tempfile.TemporaryDirectory() as scratch:
    given = common.WORKDIR.value
    workdir = common.workdir() if given else pathlib.Path(scratch)
    if not given and common.CONFIG.value is None:
      raise ConfigError("name a run with --workdir, or give --config.")
    config = common.config(workdir)
    command.prepare_jax(1, config.learners.threads, workdir / "cache")
    from ddiloco.engine import loading  # imports JAX
    from ddiloco.lm import partition

    program = loading.load_program(config, None, str(workdir / "cache"))
    if not hasattr(program, "label_mix"):
      raise ConfigError(
        f"program = {config.program!r} has no label_mix(), so nothing is known "
        "about the labels of its data."
      )
    mix = program.label_mix()
    if mix is None:
      raise ConfigError(
        f"what data.source = {config.data.source!r} reads has no labels. Text "
        "has some, with data.source='text', where the documents of each label "
        "lie in a sub-directory of their own."
      )
    print(partition.describe(mix))
  return Exit.OK


if __name__ == "__main__":
  command.run(main)
