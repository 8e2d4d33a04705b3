"""What can fail: the kinds of fault, and the record of one.

Performed by live runs and simulations alike:

  kill   SIGKILL. `for`: until the restart; without it the supervisor decides.
  pause  SIGSTOP, and SIGCONT after `for`.
  slow   a learner steps `factor` times slower; without `for` to the end.
  stop   leaves, for good unless it is made to start later.
  start  joins, or comes back: this learner is absent until then.

Only by simulations, which own the network, the clocks and the store:

  shrink     the learner's island is without one of its slices for `for`.
  partition  for `for`, nothing that the actor asks of the exchange arrives.
  clog       it is held back for `for`, then arrives all at once.
  jump       the actor's clock leaps ahead by `for`.
  nan        the learner's next answer holds no numbers,
  outlier    ... is `factor` times too large,
  layout     ... is cut by another layout,
  outdated   ... is measured from a version before its anchor.
  rival      for `for` a second syncer works; both believe in their lease.
  outage     for `for`, the exchange answers nobody.
  full       for `for`, the exchange takes no writes.
"""

import dataclasses

FACTOR_PERMILLE_MAX = 1_000_000
LIMIT = 2**63  # Of rounds, learners and nanoseconds.


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
  """What a kind of fault may hit and say, and who can perform it."""

  actors: tuple[str, ...]
  span: str = "refused"  # The field `for`: refused, optional or required.
  has_factor: bool = False
  live: bool = True  # False: only a simulation can.


_ROLES = ("learner", "syncer")

KINDS = {
  "kill": Kind(_ROLES, span="optional"),
  "pause": Kind(_ROLES, span="required"),
  "slow": Kind(("learner",), span="optional", has_factor=True),
  "stop": Kind(_ROLES),
  "start": Kind(("learner",)),
  "shrink": Kind(("learner",), span="required", live=False),
  "partition": Kind(_ROLES, span="required", live=False),
  "clog": Kind(_ROLES, span="required", live=False),
  "jump": Kind(_ROLES, span="required", live=False),
  "nan": Kind(("learner",), live=False),
  "outlier": Kind(("learner",), has_factor=True, live=False),
  "layout": Kind(("learner",), live=False),
  "outdated": Kind(("learner",), live=False),
  "rival": Kind(("syncer",), span="optional", live=False),
  "outage": Kind(("exchange",), span="required", live=False),
  "full": Kind(("exchange",), span="required", live=False),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
  """One record of the script. Exactly one of `at_round`, `at_ns` is given.

  Raises `ValueError` if the fields contradict each other.
  """

  at_round: int | None
  at_ns: int | None
  who: str  # learner | syncer | exchange
  learner: int | None
  what: str
  for_ns: int | None = None
  factor_permille: int | None = None  # 3000: three times slower
  shard: int = 0  # of the syncer

  def __post_init__(self):
    """Refuses what no run could perform."""
    kind = KINDS.get(self.what)
    if kind is None:
      raise ValueError(
        f"unknown kind {self.what!r}; the kinds are {', '.join(KINDS)}"
      )
    if self.who not in kind.actors:
      raise ValueError(
        f"{self.what} of {self.who!r}; it applies to {' or '.join(kind.actors)}"
      )
    if (self.learner is None) == (self.who == "learner"):
      raise ValueError(f"{self.who} with learner number {self.learner}")
    if self.shard and self.who != "syncer":
      raise ValueError(f"{self.who} with shard number {self.shard}")
    if (self.at_round is None) == (self.at_ns is None):
      raise ValueError("'at' needs either a round or a time")
    self._check_amounts(kind)

  def _check_amounts(self, kind: Kind) -> None:
    for name, value in (
      ("the round", self.at_round),
      ("the time", self.at_ns),
      ("the learner", self.learner),
      ("the shard", self.shard),
    ):
      if value is not None and not 0 <= value < LIMIT:
        raise ValueError(f"{name} is {value}; it must be from 0 to 2**63 - 1")
    if self.for_ns is None and kind.span == "required":
      raise ValueError(f"{self.what} needs 'for', as in 'for 2s'")
    if self.for_ns is not None:
      if kind.span == "refused":
        raise ValueError(f"{self.what} takes no 'for'")
      if not 0 < self.for_ns < LIMIT:
        raise ValueError(f"'for' is {self.for_ns} ns; it must be positive")
    if (self.factor_permille is not None) != kind.has_factor:
      needs = (
        "needs a factor, as in 'by 3x'"
        if kind.has_factor
        else "takes no factor"
      )
      raise ValueError(f"{self.what} {needs}")
    if kind.has_factor and not (
      1000 < self.factor_permille <= FACTOR_PERMILLE_MAX
    ):
      raise ValueError(
        f"the factor is {self.factor_permille} / 1000; it must be above 1 and"
        f" at most {FACTOR_PERMILLE_MAX // 1000}"
      )

  @property
  def actor(self) -> str:
    """The name: 'learner 1', 'syncer', 'syncer 1' or 'exchange'."""
    number = self.shard or None if self.learner is None else self.learner
    return self.who if number is None else f"{self.who} {number}"
