"""The words every layer shares: policies, reasons and the wire format."""

import enum

WIRE_FORMAT = 4
SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


class Wait(enum.StrEnum):
  """When a learner waits for commits between its inner steps."""

  NEVER = "never"
  EXACT = "exact"


class Anchor(enum.StrEnum):
  """Which anchor an answer may be measured from."""

  CURRENT = "current"
  ANY = "any"


class Apply(enum.StrEnum):
  """When a learner applies a commit it has fetched."""

  WHEN_SEEN = "when_seen"
  AT_OVERLAP = "at_overlap"  # At the first boundary with step >= t + tau.
  OWN = "own"  # Only the commit that counts the learner's own answer.


class Status(enum.StrEnum):
  """How a run ended."""

  COMPLETED = "completed"
  STOPPED = "stopped"
  FAILED = "failed"


class Refusal(enum.StrEnum):
  """Why the syncer left an answer out."""

  LATE = "late"
  STALE_ANCHOR = "stale_anchor"
  SUPERSEDED = "superseded"
  MALFORMED = "malformed"
  UNAUTHENTIC = "unauthentic"
  FOREIGN_RUN = "foreign_run"
  LAYOUT = "layout"
  CODEC = "codec"
  SIZE = "size"
  CHECKSUM = "checksum"
  MISSING_PART = "missing_part"
  COUNTERS = "counters"
  NON_FINITE = "non_finite"
  OUTLIER = "outlier"


class Exit(enum.IntEnum):
  """Exit codes of every command of the project."""

  OK = 0
  FAILED = 1  # The run cannot go on.
  USER_ERROR = 2
  SUPERSEDED = 3  # A newer life of the same actor has taken over.
  STOPPED = 4  # Stopped on request, before the end of the run.
