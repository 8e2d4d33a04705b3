"""The swarm kills every mutant: what it finds right is right in that too."""

import pytest

from ddiloco.sim import swarm
from tests.sim.mutants import MUTANTS

SEEDS = 60


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_swarm_kills_mutant(mutate, monkeypatch):
  machines = mutate(monkeypatch)
  for seed in range(SEEDS):
    if swarm.run_seed(seed, machines=machines).violation:
      return
  pytest.fail(f"{SEEDS} seeds do not notice: {mutate.__name__}")
