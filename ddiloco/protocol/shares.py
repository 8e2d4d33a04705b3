"""Who takes which part of a fixed global batch, as learners come and go.

Learners join and leave at rounds of the config's fault script (`start`,
`stop`). Whoever is there by it shares `learners.global_batch` in proportion
to the batch sizes, exactly: no sample is left over, none is taken twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ddiloco.config import Config, ConfigError, learner_value
from ddiloco.protocol import faults, presence


class Share(NamedTuple):
  """What a learner counts for, and the rounds it is there for."""

  learner: int
  weight: int  # its batch size
  rounds: tuple[tuple[int, int], ...]  # [begin, end), ascending

  def present(self, t: int) -> bool:
    """Whether it is there at that global step."""
    return any(begin <= t < end for begin, end in self.rounds)


def make_shares(config: Config) -> tuple[Share, ...]:
  """Everybody's, ascending; none without a global batch.

  Raises `ConfigError` where a share exceeds the learner's batch size, which
  is what its island has memory for.
  """
  learners = config.learners
  if not learners.global_batch:
    return ()
  try:
    script = faults.parse(config.faults) if config.faults.strip() else ()
  except ValueError as error:
    raise ConfigError(
      f"faults = {config.faults!r}, but learners.global_batch = "
      f"{learners.global_batch} is shared by the script's own text, which all "
      f"processes read: {error}"
    ) from error
  for fault in script:
    if fault.what in presence.KINDS and fault.at_round is None:
      raise ConfigError(
        f"learners.global_batch = {learners.global_batch}, but "
        f"{faults.to_text([fault])!r} is at a time: learners share the batch "
        "by rounds, which all of them know. Use 'at round N'."
      )
  found = tuple(
    Share(
      m,
      learner_value(learners.batch_size, m),
      presence.rounds(fault for fault in script if fault.learner == m),
    )
    for m in range(learners.count)
  )
  for t in sorted({0, *(t for share in found for t in sum(share.rounds, ()))}):
    for share in found:
      taken = samples(found, learners.global_batch, share.learner, t)
      if share.present(t) and not 1 <= taken <= share.weight:
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
    if share.learner == learner or share.present(seen):
      if share.learner < learner:
        before += share.weight
      elif share.learner == learner:
        own = share.weight
      total += share.weight
  if not total:
    return 0
  first, last = global_batch * before, global_batch * (before + own)
  return last // total - first // total
