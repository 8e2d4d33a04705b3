"""What it costs that learners, or slices, come back or are added.

A newcomer needs the model's state: parameters and what the inner optimizer
keeps of each. Data-parallel training stands while it travels; decoupled
learners go on, and a newcomer has H steps for it beside the regular exchange
(paper, E.3 and Fig. 12). Extra compute for a share of a run shortens it by as
much as it is used (Table 4).
"""

import dataclasses

STATE_COPIES = 3.0  # of the model: parameters and AdamW's two moments
REGULAR_COPIES = 1.0  # that the exchange moves in H steps anyway


def downtime_steps(
  copy_steps: float,
  *,
  interval: int,
  decoupled: bool,
  state_copies: float = STATE_COPIES,
  regular_copies: float = REGULAR_COPIES,
) -> float:
  """Inner steps lost to one recovery or upsizing.

  Of data-parallel training everybody loses them, of decoupled learners the
  newcomer alone.

  Args:
    copy_steps: what sending one copy of the model takes, in inner steps.
    interval: H.
    decoupled: else data-parallel.
    state_copies: what a newcomer needs. Of our own learners what is not
      exchanged travels: 2 under AdamW.
    regular_copies: what else is sent in H steps: 1 if answers are as wide as
      the state, a quarter of that under int4 beside bf16.
  """
  for name, value in (
    ("copy_steps", copy_steps),
    ("state_copies", state_copies),
    ("regular_copies", regular_copies),
  ):
    if not 0 <= value < float("inf"):
      raise ValueError(f"{name} = {value}: must not be negative")
  if interval < 1:
    raise ValueError(f"interval = {interval}: at least 1")
  if not decoupled:
    return state_copies * copy_steps
  return max((state_copies + regular_copies) * copy_steps - interval, 0.0)


def free_copy_steps(
  *,
  interval: int,
  state_copies: float = STATE_COPIES,
  regular_copies: float = REGULAR_COPIES,
) -> float:
  """Up to this time for one copy a newcomer of decoupled learners is free."""
  return interval / (state_copies + regular_copies)


@dataclasses.dataclass(frozen=True)
class Scavenging:
  """Extra compute for a part of a run, at a fixed budget of FLOPs."""

  extra: float  # over what is always there: 0.25 is a quarter more
  share: float = 0.5  # of the FLOPs are done while it is there
  upsizes: int = 1  # times that it comes
  steps: int = 1  # inner steps of the run without it

  def __post_init__(self):
    """Refuses what cannot be; `ValueError`."""
    if not 0 <= self.extra < float("inf"):
      raise ValueError(f"extra = {self.extra}: must not be negative")
    if not 0 <= self.share <= 1:
      raise ValueError(f"share = {self.share}: from 0 to 1")
    for name in ("upsizes", "steps"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}: at least 1")

  @property
  def ideal_time(self) -> float:
    """Of the time without it, if coming and going cost nothing."""
    return 1 - self.share + self.share / (1 + self.extra)

  def time(self, downtime_steps: float, *, decoupled: bool) -> float:
    """Of the time without it, where each coming costs so many steps.

    Everybody's of data-parallel training; of decoupled learners the extra
    ones'. They have the rest of the share to make up for it.
    """
    lost = self.upsizes * downtime_steps / self.steps
    if not decoupled:
      return self.ideal_time + lost
    return self.ideal_time + lost * self.extra / (1 + self.extra)
