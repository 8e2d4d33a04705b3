"""A decoder of the Gemma line, and where its tensors live on a mesh.

RMSNorm, rotary positions, grouped-query attention with QK-norm, GeGLU, tied
embedding, local and global attention layers, optional logit soft-cap. The paper
trains Gemma models (arXiv 2604.21428, Sec. 4); this is the dense text decoder.

Shape letters: B batch, L positions, D width, N query heads, K key-value heads,
H head width, F hidden width, V padded vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ConfigError, ModelConfig

BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRules:
  """Mesh axis of each logical axis; None: not split.

  Tensors name what their dimensions mean, and this one table says where that
  goes: every matrix is split once over `fsdp` (by width, gathered when used)
  and once over `tensor` (by heads, hidden units or vocabulary, so that each
  layer needs one all-reduce per sub-layer). Norm scales are too small to be
  worth splitting.
  """

  width: str | None = "fsdp"
  heads: str | None = "tensor"
  kv_heads: str | None = "tensor"
  hidden: str | None = "tensor"
  vocab: str | None = "tensor"
  head_width: str | None = None
  scale: str | None = None

  def sharding(
    self, mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]
  ) -> NamedSharding:
    """The sharding of one tensor; `ConfigError` if the mesh does not fit.

    Uneven axes are refused, not replicated: replicating a large matrix because
    of one odd size would cost memory and time without a word.
    """
    spec = tuple(getattr(self, axis) for axis in axes)
    for axis, size, mesh_axis in zip(axes, shape, spec, strict=True):
      ways = 1 if mesh_axis is None else mesh.shape[mesh_axis]
      if size % ways:
        raise ConfigError(
          f"the model's {axis} axis has size {size}, but the mesh splits it "
          f"{ways} ways (axis {mesh_axis!r}). Choose a multiple of {ways}, or "
          f"a smaller {mesh_axis!r} axis in learners.mesh."
        )
    return NamedSharding(mesh, PartitionSpec(*spec))


def padded_vocab(vocab_size: int) -> int:
  """Rows of the embedding: a multiple of 32, so that meshes divide it."""
  return -(-vocab_size // 32) * 32


def _matrix(
  axes: tuple[str, ...], shape: tuple[int, ...], fan_in: int
) -> nnx.Param:
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


class Attention(nnx.Module):
  """Causal grouped-query attention; `window` tokens back, 0: all of them."""

  def __init__(self, config: ModelConfig, window: int):
    d, n, k, h = config.width, config.heads, config.kv_heads, config.head_width
    self.base, self.window = config.rope_base, window
    self.query = _matrix(("width", "heads", "head_width"), (d, n, h), d)
    self.key = _matrix(("width", "kv_heads", "head_width"), (d, k, h), d)
    self.value = _matrix(("width", "kv_heads", "head_width"), (d, k, h), d)
    self.out = _matrix(("heads", "head_width", "width"), (n, h, d), n * h)
    self.query_norm, self.key_norm = RMSNorm(h), RMSNorm(h)

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """[B, L, D] to [B, L, D]."""
    dtype = x_BxLxD.dtype

    def project(w):
      return jnp.einsum("bld,dnh->blnh", x_BxLxD, w[...].astype(dtype))

    query = rotate(self.query_norm(project(self.query)), self.base)
    key = rotate(self.key_norm(project(self.key)), self.base)
    # A window of w tokens is the token itself and the w - 1 before it.
    mixed = jax.nn.dot_product_attention(
      query,
      key,
      project(self.value),
      is_causal=True,
      local_window_size=(self.window - 1, 0) if self.window else None,
      implementation="xla",
    )
    return jnp.einsum("blnh,nhd->bld", mixed, self.out[...].astype(dtype))


class GeGLU(nnx.Module):
  """The gated feed-forward layer."""

  def __init__(self, config: ModelConfig):
    d, f = config.width, config.hidden
    self.gate = _matrix(("width", "hidden"), (d, f), d)
    self.up = _matrix(("width", "hidden"), (d, f), d)
    self.down = _matrix(("hidden", "width"), (f, d), f)

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """[B, L, D] to [B, L, D]."""
    gate, up, down = (
      w[...].astype(x_BxLxD.dtype) for w in (self.gate, self.up, self.down)
    )
    return (jax.nn.gelu(x_BxLxD @ gate) * (x_BxLxD @ up)) @ down


class Block(nnx.Module):
  """Attention and feed-forward, each behind a norm, each added."""

  def __init__(self, config: ModelConfig, window: int):
    self.attention_norm = RMSNorm(config.width)
    self.attention = Attention(config, window)
    self.mlp_norm = RMSNorm(config.width)
    self.mlp = GeGLU(config)

  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    """[B, L, D] to [B, L, D]."""
    x_BxLxD = x_BxLxD + self.attention(self.attention_norm(x_BxLxD))
    return x_BxLxD + self.mlp(self.mlp_norm(x_BxLxD))


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
  """The attention window of each layer, in tokens; 0: global."""
  period = config.local_per_global + 1
  return tuple(
    0 if (layer + 1) % period == 0 else config.local_window
    for layer in range(config.layers)
  )


class Decoder(nnx.Module):
  """Token ids to next-token logits.

  The embedding is the only tensor whose path contains "embed": merge rules
  find it by that name.
  """

  def __init__(self, config: ModelConfig, vocab_size: int, mesh: Mesh):
    self.config = config
    self.activations = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    self.embedding = _matrix(
      ("vocab", "width"),
      (padded_vocab(vocab_size), config.width),
      config.width,
    )
    # String keys: the parameters are plain nested dicts that survive JSON.
    self.blocks = nnx.Dict(
      {
        str(layer): Block(config, window)
        for layer, window in enumerate(layer_windows(config))
      }
    )
    self.final_norm = RMSNorm(config.width)

  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    """Logits [B, L, V] in f32 of int32 tokens [B, L]."""
    dtype = jnp.dtype(self.config.compute_dtype)
    place = functools.partial(
      jax.lax.with_sharding_constraint, shardings=self.activations
    )
    table_VxD = self.embedding[...].astype(dtype)
    x_BxLxD = place(table_VxD[tokens_BxL] * math.sqrt(self.config.width))
    for layer in range(self.config.layers):
      x_BxLxD = place(self.blocks[str(layer)](x_BxLxD))
    x_BxLxD = self.final_norm(x_BxLxD)
    logits = jnp.einsum(
      "bld,vd->blv", x_BxLxD, table_VxD, preferred_element_type=jnp.float32
    )
    cap = self.config.logit_soft_cap
    return cap * jnp.tanh(logits / cap) if cap else logits
