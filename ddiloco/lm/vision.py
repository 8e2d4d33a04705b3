"""Images as tokens: patches, projected, in front of the text.

Every patch becomes one token (ViT, arXiv 2010.11929), with a position of its
own besides the rotary one, since patches have rows and columns. Text sees the
image; patches see each other, whichever comes first.

Shape letters, besides those of `layers`: P patches.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.lm.layers import matrix

CHANNELS = 3


def num_patches(config: ModelConfig) -> int:
  """Tokens that an image becomes; 0 for a model of text."""
  return (config.image_size // config.patch_size) ** 2


def to_patches(images: jax.Array, patch_size: int) -> jax.Array:
  """uint8 [B, H, W, 3] to f32 [B, P, pixels] between -1 and 1, row by row."""
  b, height, width, channels = images.shape
  rows, columns = height // patch_size, width // patch_size
  grid = images.reshape(b, rows, patch_size, columns, patch_size, channels)
  flat = grid.transpose(0, 1, 3, 2, 4, 5).reshape(b, rows * columns, -1)
  return flat.astype(jnp.float32) / 127.5 - 1.0


class PatchEmbedding(nnx.Module):
  """A token for each patch of an image."""

  def __init__(self, config: ModelConfig):
    pixels, d = config.patch_size**2 * CHANNELS, config.width
    self.config = config
    self.projection = matrix(("pixel", "width"), (pixels, d), pixels)
    self.position = matrix(("patch", "width"), (num_patches(config), d), d)

  def __call__(self, images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, 3] to [B, P, D]."""
    dtype = jnp.dtype(self.config.compute_dtype)
    patches = to_patches(images, self.config.patch_size).astype(dtype)
    x_BxPxD = patches @ self.projection[...].astype(dtype)
    # Scaled as tokens are, to which it is added.
    position = self.position[...] * math.sqrt(self.config.width)
    return x_BxPxD + position.astype(dtype)[None]
