"""A simulated cluster's failures as a script for a run of real training."""

import numpy as np

from ddiloco.planning.goodput import Outcome
from ddiloco.protocol.fault_kinds import Fault
from ddiloco.types import SECOND_NS


def faults(outcome: Outcome, index: int = 0) -> tuple[Fault, ...]:
  """Every lost slice of one seed: its learner's batch shrinks for as long.

  For `launch.simulate`, with `elastic.slices`, `down_s` and `up_s` as those of
  the cluster (`settings`), so that training meets what was simulated.
  """
  lost = outcome.outages
  found = []
  for i in np.flatnonzero(lost.seed == index):
    start_s, end_s = float(lost.start_s[i]), float(lost.end_s[i])
    found.append(
      Fault(
        at_round=None,
        at_ns=round(start_s * SECOND_NS),
        who="learner",
        learner=int(lost.learner[i]),
        what="shrink",
        for_ns=max(round((end_s - start_s) * SECOND_NS), 1),
      )
    )
  return tuple(sorted(found, key=lambda fault: (fault.at_ns, fault.learner)))


def settings(outcome: Outcome) -> dict[str, float]:
  """The keys of a config under which a run is like that cluster."""
  cluster = outcome.cluster
  return {
    "learners.count": cluster.learners,
    "elastic.slices": cluster.learner_slices,
    "elastic.down_s": cluster.down_s,
    "elastic.up_s": cluster.up_s,
    "sim.step_s": cluster.step_s,
  }
