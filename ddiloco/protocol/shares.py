"""Who takes which part of a fixed global batch, as learners come and go.

Learners join and leave at rounds of the config's fault script (`start`,
`stop`). Whoever is there by it shares `learners.global_batch` in proportion
to the batch sizes, exactly: no sample is left over, none is taken twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddiloco.config import Config, ConfigError, learner_value
from ddiloco.protocol import faults

_FOREVER = 2**63


class Share(NamedTuple):
  """What a learner counts for, and the global steps it is there for."""

  learner: int
  weight: int  # its batch size
  begin: int
  end: int  # it is there before this round


def make_shares(config: Config) -> tuple[Share, ...]:
  """Everybody's, ascending; none without a global batch.

  Raises `ConfigError` where a share exceeds the learner's batch size, which
  is what its island has memory for.
  """
  learners = config.learners
  if not learners.global_batch:
    return ()
  begin, end = {}, {}
  for fault in faults.parse(config.faults) if config.faults else ():
    if fault.what in faults.PRESENCE:
      if fault.at_round is None:
        raise ConfigError(
          f"learners.global_batch = {learners.global_batch}, but "
          f"{faults.to_text([fault])!r} is at a time: learners share the batch "
          "by rounds, which all of them know. Use 'at round N'."
        )
      (begin if fault.what == "start" else end)[fault.learner] = fault.at_round
  found = tuple(
    Share(
      m,
      learner_value(learners.batch_size, m),
      begin.get(m, 0),
      end.get(m, _FOREVER),
    )
    for m in range(learners.count)
  )
  for t in sorted({0, *begin.values(), *end.values()}):
    for share in found:
      taken = samples(found, learners.global_batch, share.learner, t)
      present = share.begin <= t < share.end
      if present and not 1 <= taken <= share.weight:
        raise ConfigError(
          f"learners.global_batch = {learners.global_batch}: from round {t} on "
          f"learner {share.learner} takes {taken} samples of it, but its "
          f"learners.batch_size is {share.weight}. Raise that, or change the "
          "global batch."
        )
  return found


def samples(
  shares: Sequence[Share], global_batch: int, learner: int, seen: int
) -> int:
  """The samples of the learner's next inner step; 0: its own batch size.

  Args:
    shares: everybody's.
    global_batch: samples that all of them together take per step.
    learner: its number; it counts as present.
    seen: the global step.
  """
  before = total = own = 0
  for share in shares:
    if share.learner == learner or share.begin <= seen < share.end:
      if share.learner < learner:
        before += share.weight
      elif share.learner == learner:
        own = share.weight
      total += share.weight
  if not total:
    return 0
  first, last = global_batch * before, global_batch * (before + own)
  return last // total - first // total
