"""Reads a run's records and arrays from the exchange, trusting nothing."""

import hashlib
from typing import Any

import jax
import numpy as np

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout
from ddiloco.engine.ports import DamagedRun
from ddiloco.protocol import keys, messages, wire
from ddiloco.protocol.messages import Commit, FragmentState


def fragment_shapes(layout: Layout, p: int) -> codecs.Shapes:
  """The tensor shapes of a fragment."""
  return tuple(layout.tensors[i].shape for i in layout.fragment(p))


def read_commit(data: bytes, t: int, run_id: str | None) -> Commit:
  """A commit from the exchange; `DamagedRun` if it cannot be round t's."""
  try:
    commit = messages.decode(Commit, data)
  except wire.WireError as error:
    raise DamagedRun(f"{keys.commit(t)} is damaged: {error}") from error
  if commit.round != t or run_id not in (None, commit.run_id):
    raise DamagedRun(
      f"{keys.commit(t)} belongs to round {commit.round} of run "
      f"{commit.run_id}, not to round {t} of {run_id}. Two runs share this "
      "exchange: give each its own."
    )
  return commit


def read_params(
  data: bytes | None, ref: FragmentState, shapes: codecs.Shapes
) -> tuple[np.ndarray, ...]:
  """A fragment's tensors from its object; `ValueError` says what is wrong."""
  check_object(
    data, ref.params_bytes, ref.params_sha256, f"parameters of {ref.version}"
  )
  specs = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
  return codecs.unpack(specs, data)


def params_digest(layout: Layout, params: Any) -> str:
  """SHA-256 over the fragments' f32 parameters, in order."""
  leaves, digest = jax.tree.leaves(params), hashlib.sha256()
  for p in range(layout.num_fragments):
    for i in layout.fragment(p):
      digest.update(np.asarray(leaves[i], "<f4").tobytes())
  return digest.hexdigest()


def check_object(
  data: bytes | None, size_bytes: int, sha256: str, what: str
) -> None:
  """`ValueError` unless these are the bytes that a record names."""
  if data is None:
    raise ValueError(f"the {what} are gone")
  found = wire.sha256(data)
  if (len(data), found) != (size_bytes, sha256):
    raise ValueError(
      f"the {what} are damaged: {len(data)} bytes with SHA-256 {found[:12]}, "
      f"where the record names {size_bytes} bytes with {sha256[:12]}"
    )
