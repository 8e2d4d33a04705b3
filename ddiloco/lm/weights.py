"""Tensors by name, from an export's directory or from safetensors files.

Also the digest of such a checkpoint's files: it stands in the config of a run
that starts from them, so that everybody starts from the same bits.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ddiloco.config import Config, ConfigError

FORMATS = ("orbax", "safetensors")
ABOUT = "export.json"  # beside the tensors of an export
ORBAX = "params"  # its directory, if Orbax wrote them
SAFETENSORS = "params.safetensors"
TOKENIZER = "tokenizer.json"
_DTYPES = ("F32", "BF16", "F16")
_CHUNK_BYTES = 1 << 24


class Weights(NamedTuple):
  """A checkpoint's tensors; `read` returns one as f32 on the host."""

  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]


def pinned(config: Config) -> Config:
  """The config with the digest of what it starts from, if it has none yet."""
  init = config.init
  if not init.path or init.sha256:
    return config
  path = pathlib.Path(init.path).absolute()
  if path.name == SAFETENSORS and (path.parent / ABOUT).is_file():
    path = path.parent  # an export tells more than its tensors
  init = dataclasses.replace(init, path=str(path), sha256=digest(path))
  return dataclasses.replace(config, init=init)


def digest(path: pathlib.Path) -> str:
  """SHA-256 over the names and contents of a checkpoint's files."""
  found = hashlib.sha256()
  for file in _files(path):
    name = str(file.relative_to(path)) if file != path else ""
    size = file.stat().st_size
    found.update(json.dumps([name, size]).encode())
    with open(file, "rb") as content:
      while chunk := content.read(_CHUNK_BYTES):
        found.update(chunk)
  return found.hexdigest()


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  """The files that matter to what is loaded, sorted; `ConfigError` if none."""
  if path.is_file():
    return [path]
  if not path.is_dir():
    raise ConfigError(
      f"init.path = {str(path)!r} does not exist. Name an export (see "
      "launch.export), or safetensors files or their directory."
    )
  files = sorted(path.glob("*.safetensors"))
  if (path / ORBAX).is_dir():
    files += sorted(f for f in (path / ORBAX).rglob("*") if f.is_file())
  if not files:
    raise ConfigError(
      f"init.path = {str(path)!r} holds neither *.safetensors files nor a "
      "directory of parameters that launch.export wrote."
    )
  beside = [path / name for name in (ABOUT, TOKENIZER)]
  return files + [file for file in beside if file.is_file()]


def about(path: pathlib.Path) -> dict[str, Any]:
  """What an export says of itself; empty for other checkpoints."""
  file = path / ABOUT
  if not file.is_file():
    return {}
  try:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
      raise ValueError("it holds no JSON object")
    for key in ("model", "tokenizer", "sha256"):
      if not isinstance(found.get(key), dict | None):
        raise ValueError(f"its {key!r} is no JSON object")
    return found
  except (ValueError, OSError) as error:
    raise ConfigError(f"{file} is damaged: {error}. Export again.") from error


def open_weights(path: pathlib.Path) -> Weights:
  """Opens a checkpoint; raises `ConfigError`."""
  files = _files(path)
  if path.is_dir() and (path / ORBAX).is_dir():
    return _open_orbax(path / ORBAX)
  if path.is_dir():
    files = [file for file in files if file.suffix == ".safetensors"]
  return _open_safetensors(files)


def import_safetensors() -> Any:
  """The package; `ConfigError` with the remedy if it is not installed."""
  try:
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise ConfigError(
      "safetensors files need the package safetensors, which is not installed. "
      "Run: pip install 'ddiloco[safetensors]'"
    ) from error
  return safetensors


def _open_safetensors(files: list[pathlib.Path]) -> Weights:
  safetensors = import_safetensors()
  shapes, where = {}, {}
  for path in files:
    try:
      with safetensors.safe_open(path, "np") as file:
        for name in file.keys():
          if name in where:
            raise ConfigError(f"{name} is in {where[name]} and in {path}.")
          tensor = file.get_slice(name)
          if tensor.get_dtype() not in _DTYPES:
            raise ConfigError(
              f"{name} in {path} has dtype {tensor.get_dtype()}, but "
              f"parameters must be one of {', '.join(_DTYPES)}."
            )
          shapes[name], where[name] = tuple(tensor.get_shape()), path
    except (safetensors.SafetensorError, OSError) as error:
      raise ConfigError(
        f"{path} cannot be read as a safetensors file: {error}. Copy it again."
      ) from error

  def read(name):
    with safetensors.safe_open(where[name], "np") as file:
      return np.array(file.get_tensor(name), np.float32)

  return Weights(shapes, read)


def _open_orbax(path: pathlib.Path) -> Weights:
  import jax
  import orbax.checkpoint as ocp

  from ddiloco.algo.fragments import tensor_path

  try:
    with ocp.StandardCheckpointer() as checkpointer:
      tree = checkpointer.restore(path.absolute())
  except (ValueError, KeyError, OSError) as error:
    reason = str(error).partition("\n")[0]
    raise ConfigError(
      f"{path} cannot be read as an Orbax checkpoint: {reason}. Export again."
    ) from error
  tensors = {
    tensor_path(key): np.asarray(leaf)
    for key, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }
  shapes = {name: tensor.shape for name, tensor in tensors.items()}
  return Weights(shapes, lambda name: np.array(tensors[name], np.float32))
