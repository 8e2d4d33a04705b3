"""Simulated runs of tests, from their start to their replay."""

import pathlib
from typing import Any

from ddiloco.config import Config
from ddiloco.protocol import faults as fault_script
from ddiloco.sim import history as history_lib
from ddiloco.sim import islands
from ddiloco.sim.train import simulate
from ddiloco.types import Exit
from tests.sim.small import MemoryStore


def run(
  workdir: pathlib.Path, config: Config, *, faults: str = "", **options: Any
) -> tuple[Exit, MemoryStore]:
  """The exit code, and the exchange that a simulated run has left.

  Args:
    workdir: made if need be.
    config: of the run.
    faults: the script.
    options: further ones of `simulate`.
  """
  workdir.mkdir(exist_ok=True)
  store = MemoryStore()
  script = fault_script.parse(faults) if faults else ()
  code = simulate(
    config, workdir=workdir, store=store, faults=script, **options
  )
  return code, store


def replay(
  store: MemoryStore,
  *,
  decisions_only: bool = False,
  since: int | None = None,
) -> dict:
  """What a replay of that exchange finds."""
  return islands.replay(
    history_lib.load(store, since),
    cache_dir="",
    decisions_only=decisions_only,
    say=lambda line: None,
  )
