"""Versions of fragments as they lie in the exchange: in full, or as steps.

With `codec.down`, the object of a version is the encoded outer step that led
to it, followed by a record of the version before; every R-th version
(`codec.down_full_every`) lies there in full as well. Each record has the
digest of what it names, so the commit vouches for the whole chain.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ddiloco.algo import codecs
from ddiloco.algo.downlink import step_adder
from ddiloco.algo.fragments import Layout
from ddiloco.config import Config
from ddiloco.engine.loading import make_down_codec
from ddiloco.engine.parts import check_object
from ddiloco.engine.ports import Call, Item, Job, drive
from ddiloco.engine.records import unpack_params
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import FragmentState, StepLink
from ddiloco.protocol.schedule import Schedule


class Held(NamedTuple):
  """A version that its holder can add steps to."""

  ref: FragmentState
  tensors: Any


class Downlink(Protocol):
  """How steps are added to parameters, in bytes."""

  def payload_bytes(self, p: int) -> int:
    """Size of an encoded step of fragment p."""

  def add(self, p: int, params: bytes, payload: bytes) -> bytes:
    """The version after the step; `ValueError` if it does not fit."""


class ArrayDownlink:
  """Adds on this process's default device."""

  def __init__(self, codec: codecs.Codec, layout: Layout):
    """Takes how steps are encoded and what the fragments are."""
    self.codec = codec
    self._shapes = [layout.shapes(p) for p in range(layout.num_fragments)]

  def payload_bytes(self, p: int) -> int:
    """See `Downlink`."""
    return codecs.payload_bytes(self.codec, self._shapes[p])

  def unpack(self, p: int, payload: bytes) -> codecs.Payload:
    """The arrays of an encoded step; `ValueError` if it is none."""
    return codecs.from_bytes(self.codec, self._shapes[p], payload)

  def add(self, p: int, params: bytes, payload: bytes) -> bytes:
    """See `Downlink`."""
    tensors = unpack_params(params, self._shapes[p])
    added = step_adder(self.codec)(tensors, self.unpack(p, payload))
    return codecs.to_bytes(added)


def make_downlink(config: Config, layout: Layout) -> ArrayDownlink | None:
  """How a run's steps are added; None if its versions lie there in full."""
  codec = make_down_codec(config)
  return None if codec is None else ArrayDownlink(codec, layout)


def step_object(
  payload: bytes, run_id: str, p: int, ref: FragmentState
) -> bytes:
  """What is stored of a step that starts from `ref`."""
  return payload + messages.encode(StepLink(run_id, p, ref))


def read_params(p: int, ref: FragmentState, downlink: Downlink | None) -> Job:
  """A version's f32 parameters, verified; `ValueError` if there are none."""
  data, payloads = yield from read_version(p, ref, downlink)
  for payload in payloads:
    data = downlink.add(p, data, payload)
  _check_params(data, ref)
  return data


def read_version(
  p: int,
  ref: FragmentState,
  downlink: Downlink | None,
  held: int | None = None,
  schedule: Schedule | None = None,
) -> Job:
  """What a version is made of; `ValueError` if a piece is gone or damaged.

  Returns (parameters in full, the steps that follow them), or (None, the
  steps that follow the version held). To whoever holds the version before,
  its step is enough; others take the newest full one.

  Args:
    p: the fragment.
    ref: its version, as a commit names it.
    downlink: None: versions lie there in full.
    held: the version that the reader can add steps to, if any.
    schedule: of the fragment's versions; where one is held.
  """
  payloads: list[bytes] = []
  while ref.version != held:
    follows = held is not None and held == schedule.version_before(
      p, ref.version
    )
    if ref.step is None or (ref.step.full and not follows):
      item = yield Call("get", (keys.params(ref.version, p, ref.epoch),))
      _check_params(item and item.value, ref)
      return item.value, payloads[::-1]
    payload, ref = yield from _read_step(p, ref, downlink)
    payloads.append(payload)
  return None, payloads[::-1]


def read_now(job: Job, peek: Callable[[str], bytes | None]) -> Any:
  """The result of one of these jobs, on a store that can be looked into."""

  def answer(request: Call) -> Item | None:
    data = peek(*request.args)
    return None if data is None else Item(data, b"")

  return drive(job, answer)


def _read_step(p: int, ref: FragmentState, downlink: Downlink) -> Job:
  """A step's payload, and the version it starts from."""
  item = yield Call("get", (keys.step(ref.version, p, ref.epoch),))
  what = f"step to version {ref.version} of fragment {p}"
  data = item and item.value
  check_object(data, ref.step.bytes, ref.step.sha256, what)
  size = downlink.payload_bytes(p)
  try:
    link = messages.decode(StepLink, data[size:])
  except wire.WireError as error:
    raise ValueError(f"the {what} names no version before: {error}") from error
  if link.fragment != p or link.previous.version >= ref.version:
    raise ValueError(f"the {what} does not lead to it: {link}")
  return data[:size], link.previous


def _check_params(data: bytes | None, ref: FragmentState) -> None:
  what = f"parameters of {ref.version}"
  check_object(data, ref.params_bytes, ref.params_sha256, what)
