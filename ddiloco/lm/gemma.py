"""Where the decoder's tensors are in a checkpoint with the names of Gemma.

Names and layouts are those of the Hugging Face releases: matrices are stored
[out, in], heads side by side. The decoder has what Gemma 1 has, and the norms
of queries and keys of Gemma 3; a checkpoint with other tensors does not fit.
"""

import re
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from ddiloco.config import ConfigError

_PREFIX = "model."
_BLOCK = re.compile(r"blocks/(\w+)/(.+)")


class Source(NamedTuple):
  """The tensors of a checkpoint that make up one parameter.

  Of a parameter that holds all layers there are several, one each.
  """

  names: tuple[str, ...]
  shape: tuple[int, ...]  # of each in the checkpoint
  convert: Callable[[np.ndarray], np.ndarray]  # to the parameter's layout
  stacked: bool = False


def is_gemma(names: Collection[str]) -> bool:
  """Whether a checkpoint has Gemma's names."""
  return any(name.startswith(_PREFIX) for name in names)


def source(
  path: str, shape: tuple[int, ...], present: Collection[str]
) -> Source:
  """Where the parameter at `path` is; `ConfigError` if Gemma has none such."""
  if path == "embedding":
    return Source(("model.embed_tokens.weight",), shape, _same)
  if path == "final_norm/scale":
    return Source(("model.norm.weight",), shape, _same)
  found = _BLOCK.fullmatch(path)
  layer, rest = found.groups() if found else ("", path)
  stacked = bool(found) and not layer.isdecimal()
  # As many as the model has: one that the checkpoint lacks, or has besides, is
  # told by its name.
  layers = range(shape[0]) if stacked else [layer]
  shape = shape[1:] if stacked else shape
  suffix = _suffixes(present).get(rest)
  if suffix is None:
    raise ConfigError(
      "init.path names a Gemma-shaped checkpoint, which has no tensor for "
      f"{path}. Start from an export of such a model, or from drawn values."
    )
  names = tuple(f"model.layers.{i}.{suffix}.weight" for i in layers)
  return Source(names, *_layout(rest, shape), stacked)


def _suffixes(present: Collection[str]) -> dict[str, str]:
  """Where each tensor of a block is. Gemma 1 calls the second norm as Llama."""
  later = "pre_feedforward_layernorm"
  has_later = any(f".{later}." in name for name in present)
  return {
    "attention_norm/scale": "input_layernorm",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "attention/query_norm/scale": "self_attn.q_norm",
    "attention/key_norm/scale": "self_attn.k_norm",
    "mlp_norm/scale": later if has_later else "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
  }


def _same(tensor: np.ndarray) -> np.ndarray:
  return tensor


def _layout(
  rest: str, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]:
  """The shape in the checkpoint, and the way to the parameter's."""
  if len(shape) == 1:
    return shape, _same
  if rest == "attention/out":  # [N, H, D], from [D, N H]
    stored = (shape[2], shape[0] * shape[1])
  else:  # [D, N, H] from [N H, D], or [D, F] from [F, D]
    stored = (int(np.prod(shape[1:])), shape[0])
  return stored, lambda tensor: tensor.T.reshape(shape)
