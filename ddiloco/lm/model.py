"""A decoder of the Gemma line.

RMSNorm, rotary positions, grouped-query attention with QK-norm, GeGLU or a
mixture of such experts, tied embedding, local and global attention layers,
optional logit soft-cap. The paper trains Gemma models (arXiv 2604.21428,
Sec. 4).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ModelConfig
from ddiloco.lm import moe
from ddiloco.lm.layers import (
  Attend,
  Attention,
  GeGLU,
  RMSNorm,
  batch_axes,
  causal,
  is_variable,
  masked,
  matrix,
)
from ddiloco.lm.vision import PatchEmbedding, num_patches


def padded_vocab(vocab_size: int) -> int:
  """Rows of the embedding: a multiple of 32, so that meshes divide it."""
  return -(-vocab_size // 32) * 32


class Block(nnx.Module):
  """Attention and feed-forward, each behind a norm, each added."""

  def __init__(self, config: ModelConfig, mesh: Mesh):
    self.attention_norm = RMSNorm(config.width)
    self.attention = Attention(config)
    self.mlp_norm = RMSNorm(config.width)
    if config.experts:
      self.moe = moe.MoE(config, mesh)
    else:
      self.mlp = GeGLU(config.width, config.hidden)

  def __call__(
    self, x_BxLxD: jax.Array, counted_BxL: jax.Array, attend: Attend
  ) -> tuple[jax.Array, moe.Routing | None]:
    """[B, L, D] to [B, L, D], and where counted tokens went."""
    mixed = self.attention(self.attention_norm(x_BxLxD), attend)
    x_BxLxD = x_BxLxD + mixed
    y_BxLxD, routing = self.mlp_norm(x_BxLxD), None
    if hasattr(self, "moe"):
      y_BxLxD, routing = self.moe(y_BxLxD, counted_BxL)
    else:
      y_BxLxD = self.mlp(y_BxLxD)
    return x_BxLxD + y_BxLxD, routing


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
  """The attention window of each layer, in tokens; 0: global."""
  period = config.local_per_global + 1
  return tuple(
    0 if (layer + 1) % period == 0 else config.local_window
    for layer in range(config.layers)
  )


def stacked(module: nnx.Module, layers: int) -> nnx.Module:
  """The module with all layers' tensors, along a new first axis."""

  def stack(variable: nnx.Variable) -> nnx.Variable:
    return variable.replace(
      jnp.broadcast_to(variable[...], (layers, *variable.shape)),
      logical=("layer", *variable.get_metadata()["logical"]),
    )

  graph, state = nnx.split(module)
  return nnx.merge(graph, jax.tree.map(stack, state, is_leaf=is_variable))


class Output(NamedTuple):
  """What a decoder computes."""

  logits: jax.Array  # [B, L, V] f32
  routing: moe.Routing | None  # of a mixture of experts, by layer


class Decoder(nnx.Module):
  """Token ids, and an image in front of them, to next-token logits.

  What turns tokens and patches into activations, and nothing else, has "embed"
  in its path: merge rules find it by that name.
  """

  def __init__(self, config: ModelConfig, vocab_size: int, mesh: Mesh):
    self.config = config
    self.activations = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    self.embedding = matrix(
      ("vocab", "width"),
      (padded_vocab(vocab_size), config.width),
      config.width,
    )
    if config.image_size:
      self.image_embedding = PatchEmbedding(config)
    # String keys: the parameters are plain nested dicts that survive JSON.
    if config.scan_layers:
      blocks = {"stacked": stacked(Block(config, mesh), config.layers)}
    else:
      blocks = {str(i): Block(config, mesh) for i in range(config.layers)}
    self.blocks = nnx.Dict(blocks)
    self.final_norm = RMSNorm(config.width)

  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    """Logits [B, L, V] in f32 of int32 tokens [B, L]."""
    counted_BxL = jnp.ones(tokens_BxL.shape, jnp.float32)
    return self.decode(tokens_BxL, counted_BxL).logits

  def decode(
    self,
    tokens_BxL: jax.Array,
    counted_BxL: jax.Array,
    images: jax.Array | None = None,
  ) -> Output:
    """The same, and the routing of the tokens whose count is 1, not 0.

    `images`, uint8 [B, H, W, 3], come in front of the text.
    """
    dtype = jnp.dtype(self.config.compute_dtype)
    table_VxD = self.embedding[...].astype(dtype)
    x_BxLxD = table_VxD[tokens_BxL] * math.sqrt(self.config.width)
    prefix = 0
    if images is not None:
      prefix = num_patches(self.config)
      x_BxLxD = jnp.concatenate([self.image_embedding(images), x_BxLxD], 1)
      with_image = jnp.repeat(counted_BxL[:, :1], prefix, 1)
      counted_BxL = jnp.concatenate([with_image, counted_BxL], 1)
    x_BxLxD, routing = self._layers(self._place(x_BxLxD), counted_BxL, prefix)
    logits = jnp.einsum(
      "bld,vd->blv",
      self.final_norm(x_BxLxD[:, prefix:]),
      table_VxD,
      preferred_element_type=jnp.float32,
    )
    cap = self.config.logit_soft_cap
    return Output(cap * jnp.tanh(logits / cap) if cap else logits, routing)

  def _place(self, x_BxLxD: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x_BxLxD, self.activations)

  def _layers(
    self, x_BxLxD: jax.Array, counted_BxL: jax.Array, prefix: int
  ) -> tuple[jax.Array, moe.Routing | None]:
    config, length = self.config, x_BxLxD.shape[1]

    def run(graph, tensors, x_BxLxD, attend):
      def layer(tensors, x_BxLxD):
        block = nnx.merge(graph, tensors)
        x_BxLxD, routing = block(x_BxLxD, counted_BxL, attend)
        return self._place(x_BxLxD), routing

      layer = jax.checkpoint(layer) if config.remat else layer
      return layer(tensors, x_BxLxD)

    if config.scan_layers:
      graph, tensors = nnx.split(self.blocks["stacked"])

      def body(x_BxLxD, layer):
        tensors, window = layer
        return run(graph, tensors, x_BxLxD, masked(window, length, prefix))

      windows = np.array(layer_windows(config))
      return jax.lax.scan(body, x_BxLxD, (tensors, windows))
    routings = []
    for i, window in enumerate(layer_windows(config)):
      graph, tensors = nnx.split(self.blocks[str(i)])
      attend = masked(window, length, prefix) if prefix else causal(window)
      x_BxLxD, routing = run(graph, tensors, x_BxLxD, attend)
      routings.append(routing)
    return x_BxLxD, jax.tree.map(lambda *x: jnp.stack(x), *routings)
