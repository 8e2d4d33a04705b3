"""The parts of a decoder, and where their tensors live on a mesh.

Shape letters: B batch, L positions, D width, N query heads, K key-value heads,
H head width, F hidden width, V padded vocabulary, E experts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ConfigError, ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRules:
  """Mesh axis of each logical axis; None: not split.

  Tensors name what their dimensions mean, and this one table says where that
  goes: every matrix is split once over `fsdp` (by width, gathered when used)
  and once over `tensor` (by heads, hidden units or vocabulary, so that each
  layer needs one all-reduce per sub-layer). Experts are spread over `expert`
  if the mesh has that axis. Norm scales and routers are too small to be worth
  splitting further.
  """

  width: str | None = "fsdp"
  heads: str | None = "tensor"
  kv_heads: str | None = "tensor"
  hidden: str | None = "tensor"
  vocab: str | None = "tensor"
  expert: str | None = "expert"
  head_width: str | None = None
  scale: str | None = None
  choice: str | None = None  # an expert, to a router
  layer: str | None = None  # of tensors that hold all layers
  pixel: str | None = None  # of a patch
  patch: str | None = None

  def sharding(
    self, mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]
  ) -> NamedSharding:
    """The sharding of one tensor; `ConfigError` if the mesh does not fit.

    Uneven axes are refused, not replicated: replicating a large matrix because
    of one odd size would cost memory and time without a word.
    """
    named = (getattr(self, axis) for axis in axes)
    spec = tuple(name if name in mesh.axis_names else None for name in named)
    for axis, size, mesh_axis in zip(axes, shape, spec, strict=True):
      ways = 1 if mesh_axis is None else mesh.shape[mesh_axis]
      if size % ways:
        raise ConfigError(
          f"the model's {axis} axis has size {size}, but the mesh splits it "
          f"{ways} ways (axis {mesh_axis!r}). Choose a multiple of {ways}, or "
          f"a smaller {mesh_axis!r} axis in learners.mesh."
        )
    return NamedSharding(mesh, PartitionSpec(*spec))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
  """The mesh axes that rows of a batch are split over.

  Devices that share experts also share the batch: else every layer without
  experts would be computed as often as experts are spread.
  """
  return tuple(x for x in ("data", "fsdp", "expert") if x in mesh.axis_names)


def is_variable(leaf: Any) -> bool:
  """Whether a leaf is a tensor with its metadata, for `jax.tree.map`."""
  return isinstance(leaf, nnx.Variable)


def matrix(
  axes: tuple[str, ...], shape: tuple[int, ...], fan_in: int
) -> nnx.Param:
  """An f32 parameter that starts with variance 1 / fan_in."""
  return nnx.Param(
    jnp.zeros(shape, jnp.float32),
    logical=axes,
    deviation=1.0 / math.sqrt(fan_in),
  )


def initial_value(
  shape: tuple[int, ...], deviation: float, seed: Sequence[int]
) -> np.ndarray:
  """A uniform f32 tensor of this standard deviation; 0 gives zeros.

  Made on the host from raw generator bits, by exact operations and one rounded
  product: the same bits in every process, on every mesh, backend and version,
  and nothing to compile (a jitted initialiser took longer to compile than the
  train step).
  """
  if not deviation:
    return np.zeros(shape, np.float32)
  generator = np.random.Philox(np.random.SeedSequence(seed))
  bits = generator.random_raw(math.prod(shape)) >> np.uint64(40)
  centred = bits.astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
  return (centred * np.float32(math.sqrt(12.0) * deviation)).reshape(shape)


class RMSNorm(nnx.Module):
  """x / rms(x) * (1 + scale) over the last axis, computed in f32."""

  def __init__(self, width: int):
    self.scale = nnx.Param(
      jnp.zeros((width,), jnp.float32), logical=("scale",), deviation=0.0
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    """Same shape and dtype as `x`."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-6)
    shape = (1,) * (x.ndim - 1) + self.scale.shape
    return (y * (1.0 + self.scale[...].reshape(shape))).astype(x.dtype)


def rotate(x_BxLxNxH: jax.Array, base: float) -> jax.Array:
  """Rotary position embedding over the two halves of the last axis."""
  length, width = x_BxLxNxH.shape[1], x_BxLxNxH.shape[3]
  frequency = base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
  position = jnp.arange(length, dtype=jnp.float32)
  angle = (position[:, None] * frequency[None, :])[None, :, None, :]
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  first, second = jnp.split(x_BxLxNxH.astype(jnp.float32), 2, axis=-1)
  turned = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(turned, axis=-1).astype(x_BxLxNxH.dtype)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def causal(window: int) -> Attend:
  """Attention to oneself and what came before; `window` tokens, 0: all.

  A window of w tokens is the token itself and the w - 1 before it.
  """
  return functools.partial(
    jax.nn.dot_product_attention,
    is_causal=True,
    local_window_size=(window - 1, 0) if window else None,
    implementation="xla",
  )


def masked(window: int | jax.Array, length: int, prefix: int) -> Attend:
  """The same with a window that may be known at run time only.

  The first `prefix` positions also see each other, whichever comes first.
  """
  position = jnp.arange(length)
  query, key = position[:, None], position[None, :]
  seen = (query >= key) | ((query < prefix) & (key < prefix))
  seen &= (window == 0) | (query - key < window)
  return functools.partial(
    jax.nn.dot_product_attention, mask=seen[None, None], implementation="xla"
  )


class Attention(nnx.Module):
  """Grouped-query attention with QK-norm."""

  def __init__(self, config: ModelConfig):
    d, n, k, h = config.width, config.heads, config.kv_heads, config.head_width
    self.base = config.rope_base
    self.query = matrix(("width", "heads", "head_width"), (d, n, h), d)
    self.key = matrix(("width", "kv_heads", "head_width"), (d, k, h), d)
    self.value = matrix(("width", "kv_heads", "head_width"), (d, k, h), d)
    self.out = matrix(("heads", "head_width", "width"), (n, h, d), n * h)
    self.query_norm, self.key_norm = RMSNorm(h), RMSNorm(h)

  def __call__(self, x_BxLxD: jax.Array, attend: Attend) -> jax.Array:
    """[B, L, D] to [B, L, D]."""
    dtype = x_BxLxD.dtype

    def project(w):
      return jnp.einsum("bld,dnh->blnh", x_BxLxD, w[...].astype(dtype))

    query = rotate(self.query_norm(project(self.query)), self.base)
    key = rotate(self.key_norm(project(self.key)), self.base)
    mixed = attend(query, key, project(self.value))
    return jnp.einsum("blnh,nhd->bld", mixed, self.out[...].astype(dtype))


class GeGLU(nnx.Module):
  """The gated feed-forward layer."""

  def __init__(self, width: int, hidden: int):
    self.gate = matrix(("width", "hidden"), (width, hidden), width)
    self.up = matrix(("width", "hidden"), (width, hidden), width)
    self.down = matrix(("hidden", "width"), (hidden, width), hidden)

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """[B, L, D] to [B, L, D]."""
    gate, up, down = (
      w[...].astype(x_BxLxD.dtype) for w in (self.gate, self.up, self.down)
    )
    return (jax.nn.gelu(x_BxLxD @ gate) * (x_BxLxD @ up)) @ down
