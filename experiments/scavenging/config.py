"""Scavenging: two v5p islands train; two v6e ones join and leave again.

The quickstart's model and data. After a colon, what becomes of the batch:

  growing  whoever joins adds its samples to every step (default)
  fixed    all who are there share the same global batch

  python -m launch.simulate --config=experiments/scavenging/config.py:fixed \
    --workdir=runs/scavenging

Expected: about the quickstart's loss; the report shows who was there when.
"""

import ml_collections

from experiments.quickstart import config as quickstart
from experiments.scavenging import hardware

JOIN, LEAVE = 100, 300  # rounds


def get_config(batch: str = "growing") -> ml_collections.ConfigDict:
  """The config; `batch` is growing or fixed."""
  if batch not in ("growing", "fixed"):
    raise ValueError(f"batch {batch!r}: choose growing or fixed")
  config = quickstart.get_config()
  config.learners.update(
    hardware.islands(
      [("v5p", 16, 8), ("v5p", 16, 8), ("v6e", 8, 8), ("v6e", 16, 16)]
    )
  )
  if batch == "fixed":
    config.learners.global_batch = 16
  config.faults = "; ".join(
    f"at round {t} {what} learner {m}"
    for m in (2, 3)
    for t, what in ((JOIN, "start"), (LEAVE, "stop"))
  )
  return config
