"""Which answers may be counted: the checks at the syncer's door."""

from ddiloco.protocol.messages import AnswerHeader, FragmentState
from ddiloco.protocol.rules import PERMILLE, Rules
from ddiloco.types import Anchor, Refusal

NORMS_KEPT = 15  # of each fragment, for the running median
NORMS_NEEDED = 5  # before anything is called an outlier
PARTS_MAX = 256  # of an answer; each is a read


def check_header(
  header: AnswerHeader,
  key: tuple[int, int, int, int],
  rules: Rules,
  fragments: tuple[FragmentState, ...],
) -> Refusal | None:
  """The first reason to refuse an answer by its header; None: none.

  Args:
    header: a well-formed record from a process nobody vouches for.
    key: the (round, learner, incarnation, attempt) of where it was found.
    rules: what this run's answers must state.
    fragments: the newest version of every fragment.
  """
  if header.run_id != rules.run_id:
    return Refusal.FOREIGN_RUN
  stated = (header.round, header.learner, header.incarnation, header.attempt)
  if stated != key or header.step_ns < 0 or header.fetch_ns < 0:
    return Refusal.MALFORMED
  if header.layout != rules.layout:
    return Refusal.LAYOUT
  if header.codec != rules.codec:
    return Refusal.CODEC
  due = rules.schedule.fragments(header.round)
  if tuple(c.fragment for c in header.contributions) != due:
    return Refusal.LAYOUT
  sizes = [part.bytes for part in header.parts]
  expected = sum(rules.answer_bytes[p] for p in due)
  if sum(sizes) != expected or any(size < 0 for size in sizes):
    return Refusal.SIZE
  if len(sizes) > PARTS_MAX:
    return Refusal.SIZE
  for item in header.contributions:
    current = fragments[item.fragment].version
    if item.steps < 1 or item.tokens < 1 or item.anchor < 0:
      return Refusal.COUNTERS
    if item.steps > header.life_steps or item.tokens > header.life_tokens:
      return Refusal.COUNTERS
    if item.anchor > current:
      return Refusal.STALE_ANCHOR
    if rules.anchor is Anchor.CURRENT and item.anchor != current:
      return Refusal.STALE_ANCHOR
  return None


def is_outlier(norm: int, recent: tuple[int, ...], rules: Rules) -> bool:
  """Whether a norm is far above the running median of its fragment's.

  Norms of zero tell no scale: experts that were never chosen have them, and
  everything in a warm-up from zero.
  """
  known = sorted(norm for norm in recent if norm)
  if not rules.outlier_permille or len(known) < NORMS_NEEDED:
    return False
  median = known[len(known) // 2]
  return norm * PERMILLE > median * rules.outlier_permille


def remember_norm(recent: tuple[int, ...], norm: int) -> tuple[int, ...]:
  """Refused norms enter too: a lasting change of scale gets accepted."""
  return (*recent, norm)[-NORMS_KEPT:]
