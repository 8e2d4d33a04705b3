"""What chaos there is, and which of it a seed draws."""

import dataclasses
from collections.abc import Sequence

from ddiloco.sim.clock import stream

FILE, S3 = "file", "s3"
STORES = (FILE, S3)
# What each does.
KINDS = {
  "kill": "SIGKILL of any role",
  "kill_in_write": "SIGKILL while an object of the exchange is being written",
  "kill_in_merge": "SIGKILL of the syncer between a round's state and commit",
  "kill_in_snapshot": "SIGKILL while a snapshot is taken and not complete",
  "kill_in_transfer": "SIGKILL of who gives a learner's state, or gets it",
  "pause": "SIGSTOP, and SIGCONT later",
  "slow": "a learner runs a part of the time only",
  "full": "a process cannot write a byte, as on a full disk",
  "read_only": "the exchange takes no writes",
  "garble_answer": "an answer is garbled before it is read",
  "garble_state": "a round's new parameters are garbled, and brought back",
  "garble_heartbeat": "a learner's heartbeat is garbled",
  "garble_lease": "the lease is garbled",
  "garble_checkpoint": "a killed learner's newest checkpoint is garbled",
  "garble_transfer": "what a peer gives is garbled",
  "outage": "the store answers every request with an error",
  "throttle": "the store answers most requests with 429 or 503",
  "stall": "the store answers nobody at all",
  "lossy": "requests, replies and the ends of replies are lost",
  "clock": "a process comes back with a wall clock that is hours wrong",
  "jump": "a process's wall clock jumps by hours",
  "store_clock": "the store's times are hours wrong",
  "nan": "a learner's parameters become no numbers",
  "late": "a planned learner first starts in mid-run",
  "join": "one that nobody planned joins from outside, and leaves",
}
ONCE = frozenset({"late"})
# What happens on the way to a store, and so to no disk.
_ONLY_S3 = frozenset({"outage", "throttle", "stall", "lossy"})


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
  """One fault to come. What else it needs it draws from `seed`."""

  number: int
  at_s: float  # since the first inner step
  kind: str
  seed: str


def missing(store: str) -> dict[str, str]:
  """The kinds that a store does not allow, and why."""
  if store == S3:
    return {}
  why = "a directory cannot be made to fail so: try --store=s3"
  return dict.fromkeys([k for k in KINDS if k in _ONLY_S3], why)


def draw(
  seed: int, horizon_s: float, every_s: float, kinds: Sequence[str]
) -> tuple[Draw, ...]:
  """Faults at random instants, one every `every_s` on average.

  Kinds are dealt from a shuffled deck, so that each comes before any comes
  twice.
  """
  if not kinds:
    raise ValueError("there is no kind of fault to draw")
  rng = stream(seed, "chaos")
  drawn: list[Draw] = []
  deck: list[str] = []
  at_s = rng.expovariate(1 / every_s)
  while at_s < horizon_s:
    if not deck:
      again = bool(drawn)
      deck = [k for k in kinds if not (again and k in ONCE)] or list(kinds)
      rng.shuffle(deck)
    number = len(drawn)
    drawn.append(Draw(number, at_s, deck.pop(), f"{seed}/{number}"))
    at_s += rng.expovariate(1 / every_s)
  return tuple(drawn)
