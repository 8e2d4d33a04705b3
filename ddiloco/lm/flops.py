"""How many floating-point operations an inner step takes, from the config.

Only matrix products count, two operations for each multiply-add; what the
program computes and then masks (attention to what comes later, places of
experts that nobody takes) counts too, and so do gradients of parameters that
`sync.frozen` names, though nobody needs them. A compiler's own count is no use
here: it takes the body of a scan over layers once.
"""

from typing import NamedTuple

from ddiloco.config import Config, ModelConfig
from ddiloco.lm import moe
from ddiloco.lm.model import padded_vocab
from ddiloco.lm.tokenizer import vocab_size
from ddiloco.lm.vision import CHANNELS, num_patches

_FORWARD_AND_BACKWARD = 3  # a product's gradients are two products


class Flops(NamedTuple):
  """Of one sequence."""

  model: int  # forward and backward, once: what counts in utilisation
  recomputed: int  # on top of it, if `model.remat`

  @property
  def all(self) -> int:
    """What a chip really computes."""
    return self.model + self.recomputed


def per_sequence(config: Config) -> Flops:
  """Of a sequence of the config's length and, if it has any, its image."""
  model, length = config.model, config.data.sequence_length
  positions = length + num_patches(model)
  vocab = padded_vocab(vocab_size(config.data))
  layer, kept = _layer(model, positions)
  patch = 2 * model.patch_size**2 * CHANNELS * model.width
  forward = model.layers * layer + 2 * length * model.width * vocab
  # Nobody asks for the gradient of an image.
  images = (_FORWARD_AND_BACKWARD - 1) * num_patches(model) * patch
  again = model.layers * (layer - kept) if model.remat else 0
  return Flops(_FORWARD_AND_BACKWARD * forward + images, again)


def _layer(model: ModelConfig, positions: int) -> tuple[int, int]:
  """Forward, all positions; and of that what no gradient asks for again."""
  width, heads = model.width, model.heads * model.head_width
  kv_heads = model.kv_heads * model.head_width
  project = 2 * width * (2 * heads + 2 * kv_heads)
  attend = 2 * 2 * positions * heads
  kept = 0
  if model.experts:
    places = model.experts * moe.capacity(model, positions)
    feed = (
      _geglu(width, model.hidden, places)
      + _geglu(width, model.shared_hidden, positions)
      + 2 * width * model.experts * positions
    )
    kept = _geglu(width, model.shared_hidden, positions) // 3
  else:
    feed = _geglu(width, model.hidden, positions)
    kept = feed // 3  # the way down: its result is in the next layer's input
  return positions * (project + attend) + feed, kept


def _geglu(width: int, hidden: int, tokens: int) -> int:
  return 3 * 2 * width * hidden * tokens
