"""Parameters out of a run, and into another one as its initial values.

An export is a directory: `export.json` (the model's config, the tokenizer, and
which commit it was), the tensors as an Orbax checkpoint or as safetensors, by
their paths, and `tokenizer.json` if the tokenizer was trained.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ddiloco.algo.fragments import tensor_path
from ddiloco.config import Config, ConfigError, InitConfig, ModelConfig
from ddiloco.lm import gemma, weights

_SHOWN = 3  # tensors named in a message
# What may differ between a model and its continuation.
_FREE = frozenset(["preset", "compute_dtype", "remat"])


def write(
  output: pathlib.Path,
  params: Any,
  *,
  format: str,
  config: Config,
  tokenizer: Any | None,
  facts: Mapping[str, Any],
) -> None:
  """Writes an export, whole or not at all.

  Args:
    output: a directory that does not exist yet, or is empty.
    params: a pytree of f32 arrays.
    format: one of `weights.FORMATS`.
    config: of the run.
    tokenizer: of the run's text; None if the program has none.
    facts: more for export.json, such as the round.
  """
  check_output(output)
  named = {name: np.asarray(jax.device_get(x)) for name, x in _named(params)}
  about = {
    "format": format,
    "program": config.program,
    **facts,
    "model": dataclasses.asdict(config.model),
    "tokenizer": tokenizer and _tokenizer_facts(config, tokenizer),
    "tensors": {name: list(x.shape) for name, x in named.items()},
    "sha256": {name: _digest(x) for name, x in named.items()},
  }
  with _beside(output) as tmp:
    made = pathlib.Path(tmp) / "export"
    made.mkdir()
    (made / weights.ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    if tokenizer is not None and tokenizer.definition:
      (made / weights.TOKENIZER).write_text(
        tokenizer.definition, encoding="utf-8"
      )
    if format == "safetensors":
      safetensors = weights.import_safetensors()
      file = made / weights.SAFETENSORS
      safetensors.numpy.save_file(named, file)
      shutil.copymode(made / weights.ABOUT, file)  # else the owner's alone
    else:
      _write_orbax(made / weights.ORBAX, params)
    os.replace(made, output)  # an empty directory may be replaced


@contextlib.contextmanager
def _beside(output: pathlib.Path) -> Iterator[str]:
  """A temporary directory on the same file system; `ConfigError`."""
  try:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      dir=output.parent, prefix=".export-"
    ) as tmp:
      yield tmp
  except OSError as error:
    raise ConfigError(
      f"--output={output} cannot be written: {error.strerror or error}. Free "
      "space there, fix its permissions, or choose another."
    ) from error


def check_output(output: pathlib.Path) -> None:
  """`ConfigError` unless an export may be written there."""
  if output.exists() and (not output.is_dir() or any(output.iterdir())):
    raise ConfigError(
      f"--output={output} exists already. Name a new directory, or remove it."
    )


def _write_orbax(path: pathlib.Path, params: Any) -> None:
  import orbax.checkpoint as ocp

  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path.absolute(), jax.device_get(params))


def _named(tree: Any) -> list[tuple[str, Any]]:
  return [
    (tensor_path(path), leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  ]


def _tokenizer_facts(config: Config, tokenizer: Any) -> dict[str, Any]:
  return {
    "kind": config.data.tokenizer,
    "vocab_size": len(tokenizer.token_bytes),
    "sha256": hashlib.sha256(tokenizer.definition.encode()).hexdigest(),
  }


def load(init: InitConfig, model: ModelConfig, like: Any) -> Any:
  """The parameters of a checkpoint as host arrays; raises `ConfigError`.

  Args:
    init: where it is, and the digest that it must have, if any.
    model: what an export must have been of.
    like: the parameters as `jax.ShapeDtypeStruct`s.
  """
  path = pathlib.Path(init.path)
  if init.sha256 and (found := weights.digest(path)) != init.sha256:
    raise ConfigError(
      f"init.path = {init.path!r} has changed: its SHA-256 is {found[:12]}, "
      f"but the run was started with {init.sha256[:12]}. Restore it, or start "
      "a new run."
    )
  opened = weights.open_weights(path)
  present = opened.shapes
  pick = gemma.source if gemma.is_gemma(present) else _own_source
  sources = [pick(name, x.shape, present) for name, x in _named(like)]
  _check_tensors(path, sources, present)
  _check_model(path, model)
  digests, leaves = weights.about(path).get("sha256") or {}, []
  for source in sources:
    parts = []
    for name in source.names:
      tensor = opened.read(name)
      _check_numbers(path, name, tensor, digests.get(name))
      parts.append(source.convert(tensor))
    leaves.append(np.stack(parts) if source.stacked else parts[0])
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _digest(tensor: np.ndarray) -> str:
  numbers = np.ascontiguousarray(tensor, np.dtype("<f4")).reshape(-1)
  return hashlib.sha256(numbers.view(np.uint8)).hexdigest()


def _check_numbers(
  path: pathlib.Path, name: str, tensor: np.ndarray, digest: str | None
) -> None:
  if digest is not None and digest != _digest(tensor):
    raise ConfigError(
      f"init.path = {str(path)!r} is damaged: {name} is not what was exported "
      f"(its SHA-256 should be {digest[:12]}). Export again."
    )
  if not np.isfinite(tensor).all():
    raise ConfigError(
      f"init.path = {str(path)!r} has numbers in {name} that are not finite, "
      "and a run cannot start from them. Export an earlier state."
    )


def _own_source(name: str, shape: tuple[int, ...], _: Any) -> gemma.Source:
  return gemma.Source((name,), shape, lambda tensor: tensor)


def _check_tensors(
  path: pathlib.Path,
  sources: list[gemma.Source],
  present: Mapping[str, tuple[int, ...]],
) -> None:
  expected = {name: s.shape for s in sources for name in s.names}
  wrong = {
    "missing": [n for n in expected if n not in present],
    "not part of the model": [n for n in present if n not in expected],
    "of another shape": [
      f"{n} is {tuple(present[n])}, must be {tuple(shape)}"
      for n, shape in expected.items()
      if n in present and tuple(present[n]) != tuple(shape)
    ],
  }
  said = [
    f"{len(names)} {what}: {', '.join(names[:_SHOWN])}"
    + ", ..." * (len(names) > _SHOWN)
    for what, names in wrong.items()
    if names
  ]
  if said:
    raise ConfigError(
      f"init.path = {str(path)!r} does not fit the model. Of its tensors, "
      + "; ".join(said)
      + ". Set model.* and data.vocab_size to what the checkpoint was made for."
    )


def _check_model(path: pathlib.Path, model: ModelConfig) -> None:
  """What shapes do not tell: windows, caps, bases."""
  theirs = weights.about(path).get("model") or {}
  defaults = dataclasses.asdict(type(model)())
  for key, ours in dataclasses.asdict(model).items():
    value = theirs.get(key, defaults[key]) if theirs else ours
    if key not in _FREE and value != ours:
      raise ConfigError(
        f"model.{key} = {ours!r}, but init.path = {str(path)!r} is an export "
        f"of a model with {value!r}. Set it to that."
      )


def check_tokenizer(config: Config, tokenizer: Any) -> None:
  """`ConfigError` if an export's embedding is of another tokenizer's ids."""
  path = pathlib.Path(config.init.path)
  theirs = weights.about(path).get("tokenizer")
  ours = _tokenizer_facts(config, tokenizer)
  if not theirs or theirs == ours:
    return
  keys = collections.ChainMap(ours, theirs)
  key = next(k for k in sorted(keys) if ours.get(k) != theirs.get(k))
  raise ConfigError(
    f"init.path = {str(path)!r} was trained with another tokenizer: its "
    f"{key} is {theirs.get(key)!r}, here it is {ours.get(key)!r}. Use the data "
    "and data.tokenizer of that run, or drawn initial values."
  )
