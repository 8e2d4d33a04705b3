"""Arrays that are not there: for simulating the protocol alone.

Every object keeps its place and its checks; its content says only what it
is, so that a mix-up is found like any other damage.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from ddiloco.engine.downlink import Held
from ddiloco.engine.parts import check_object
from ddiloco.engine.ports import StepResult
from ddiloco.protocol.learner_types import ApplyFragments, Encode, Settle, Step
from ddiloco.protocol.messages import Contribution, Counted, FragmentState
from ddiloco.protocol.snapshots import Attempt

ANSWER_BYTES = 8  # of every fragment: its norm in 1e-9, big-endian
NORM = 1_000_000_000
NON_FINITE = b"\xff" * ANSWER_BYTES
STATE = b"a state"
STEP_BYTES = 8  # where an encoded step starts and where it leads


class NullDownlink:
  """Stands in for `ArrayDownlink`: a step fits one version alone."""

  def payload_bytes(self, p: int) -> int:
    """See `Downlink`."""
    del p
    return STEP_BYTES

  def add(self, p: int, params: bytes, payload: bytes) -> bytes:
    """See `Downlink`."""
    half = STEP_BYTES // 2
    start, end = (int.from_bytes(payload[i:][:half]) for i in (0, half))
    if params != _words(p, start):
      raise ValueError(f"{params} is not {_words(p, start)}")
    return _words(p, end)


class NullStateBytes:
  """Stands in for `StateBytes`."""

  digest = "null"
  num_bytes = len(STATE)

  def pack(self, state: None) -> bytes:
    """Something to carry."""
    del state
    return STATE


class NullCaptured(NamedTuple):
  """Stands in for `Captured`."""

  encoded: dict[tuple[int, int], tuple[Contribution, ...]]
  state: None = None

  @property
  def attempts(self) -> tuple[Attempt, ...]:
    """See `Captured`."""
    return tuple(Attempt(*key, self.encoded[key]) for key in self.encoded)


class NullLearnerBytes:
  """Stands in for `LearnerBytes`."""

  digest = "null"

  def __init__(self, num_fragments: int):
    self.num_fragments = num_fragments

  def num_bytes(self, attempts: Sequence[Attempt]) -> int:
    """Something for each of them."""
    return len(STATE) + len(attempts)

  def pack(self, captured: NullCaptured) -> bytes:
    """Something to carry."""
    return STATE + bytes(len(captured.encoded))


class NullLearnerArrays:
  """Stands in for `LearnerArrays`."""

  def __init__(
    self,
    *,
    samples_per_step: int,
    tokens: Callable[[int, int], int],
    num_fragments: int,
    downlink: NullDownlink | None = None,
  ):
    """Takes what `Program` says of (first sample, how many)'s batch."""
    self.downlink = downlink
    self._held: dict[int, Held] = {}
    self._samples, self._tokens = samples_per_step, tokens
    self._fetched: set[tuple[int, int]] = set()
    self.last_metrics: dict[str, float] = {}
    self.travel = NullStateBytes()
    self.bytes = NullLearnerBytes(num_fragments)
    self._encoded: dict[tuple[int, int], tuple[Contribution, ...]] = {}

  def step(self, command: Step) -> StepResult:
    """Nothing is computed."""
    samples = command.samples or self._samples
    tokens = self._tokens(command.first_sample, samples)
    return StepResult({}, tokens, samples)

  def prefetch(self, first_sample: int) -> None:
    """Nothing is read."""

  def finish(self, result: StepResult) -> float:
    """No loss."""
    del result
    return 0.0

  def copy_state(self) -> None:
    """Nothing to copy."""

  def resume(self, attempts: Sequence[Attempt]) -> None:
    """Takes over the open answers of a snapshot."""
    for item in attempts:
      self._encoded[item.round, item.attempt] = item.contributions

  def capture(self) -> NullCaptured:
    """The open answers are all there is."""
    return NullCaptured(dict(self._encoded))

  def place(
    self, t: int, p: int, ref: FragmentState, data: bytes | None
  ) -> None:
    """Checks the object as `LearnerArrays` does."""
    what = f"parameters of {ref.version}"
    check_object(data, ref.params_bytes, ref.params_sha256, what)
    known = self._held.get(p)
    newer = known is None or ref.version >= known.ref.version
    if self.downlink is not None and newer:
      self._held[p] = Held(ref, data)
    self._fetched.add((t, p))

  def hold(self, refs: Sequence[FragmentState]) -> None:
    """They were placed."""

  def held(self, p: int) -> Held | None:
    """What steps can be added to."""
    return self._held.get(p)

  def add(
    self,
    t: int,
    p: int,
    ref: FragmentState,
    held: Held,
    payloads: Sequence[bytes],
  ) -> None:
    """What comes of it is checked, as if it had been fetched."""
    data = held.tensors
    for payload in payloads:
      data = self.downlink.add(p, data, payload)
    self.place(t, p, ref, data)

  def apply(self, command: ApplyFragments) -> None:
    """What is applied must have been placed."""
    for p in command.fragments:
      self._fetched.remove((command.round, p))
    self._fetched = {
      (t, p)
      for t, p in self._fetched
      if p not in command.fragments or t > command.round
    }

  def encode(self, command: Encode) -> Encode:
    """The command itself stands for its arrays."""
    self._encoded[command.round, command.attempt] = command.contributions
    return command

  def is_finite(self, copy: None) -> bool:
    """There is nothing that is not."""
    return True

  def norms(self, encoded: Encode) -> tuple[int, ...]:
    """Of every fragment, in 1e-9."""
    return (NORM,) * len(encoded.contributions)

  def part(self, encoded: Encode) -> bytes:
    """Nothing but a norm for every fragment."""
    return NORM.to_bytes(ANSWER_BYTES) * len(encoded.contributions)

  def settle(self, command: Settle) -> None:
    """No residual."""
    for key in [key for key in self._encoded if key[0] == command.round]:
      del self._encoded[key]


class NullSyncerArrays:
  """Stands in for `SyncerArrays`."""

  def __init__(self, num_fragments: int, downlink: NullDownlink | None = None):
    self.downlink = downlink
    self._versions = dict.fromkeys(range(num_fragments), 0)
    self._candidates: dict[int, list[int]] = {}
    self._answers: set[tuple[int, int, int, int]] = set()

  def load(
    self, p: int, ref: FragmentState, params: bytes | None, outer: bytes | None
  ) -> None:
    """Checks the objects as `SyncerArrays` does."""
    check_object(params, ref.params_bytes, ref.params_sha256, "parameters")
    check_object(outer, ref.outer_bytes, ref.outer_sha256, "outer state")
    self._versions[p] = ref.version

  def keep(self, fragments: Collection[int]) -> None:
    """Lets go of all others."""
    self._versions = {p: self._versions[p] for p in sorted(fragments)}

  def stored(self, p: int, t: int | None = None) -> tuple[bytes, bytes]:
    """The fragment and its version, in words."""
    return self.pack((p, self._versions[p] if t is None else t))

  def capture(self) -> dict[int, tuple[int, int]]:
    """The fragments, each by its version."""
    return {item[0]: item for item in self._versions.items()}

  def pack(self, fragment: tuple[int, int]) -> tuple[bytes, bytes]:
    """What is stored of one."""
    return _words(*fragment), b""

  def step(self, p: int, t: int) -> bytes | None:
    """From the version before to round t's candidate."""
    if self.downlink is None or not t:
      return None
    ends = (self._versions[p], t)
    return b"".join(end.to_bytes(STEP_BYTES // 2) for end in ends)

  def inspect(
    self, key: tuple[int, int, int, int], due: Sequence[int], data: bytes
  ) -> tuple[int, ...] | None:
    """The norms; None for an answer that holds no numbers."""
    size = ANSWER_BYTES
    norms = [data[i * size : (i + 1) * size] for i in range(len(due))]
    if NON_FINITE in norms:
      return None
    self._answers.add(key)
    return tuple(map(int.from_bytes, norms))

  def drop(self, key: tuple[int, int, int, int]) -> None:
    """Lets go of an answer."""
    self._answers.discard(key)

  def merge(
    self, t: int, p: int, index: int, counted: Sequence[Counted]
  ) -> Any:
    """What is merged must be held."""
    del index
    for item in counted:
      key = (t, item.learner, item.incarnation, item.attempt)
      assert key in self._answers, key
    self._candidates.setdefault(t, []).append(p)

  def close(self, t: int, won: bool) -> None:
    """The candidate becomes the truth, or not."""
    for p in self._candidates.pop(t):
      if won:
        self._versions[p] = t
    self._answers = {key for key in self._answers if key[0] > t}


def _words(p: int, version: int) -> bytes:
  return b"%d of %d" % (p, version)
