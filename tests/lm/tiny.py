"""A config, text and helpers small enough for every test of the model."""

import contextlib
import pathlib

import jax
import numpy as np
from jax import monitoring

from ddiloco.config import Config
from ddiloco.lm.program import build
from tests.configs import override

_compiled: list[str] = []
monitoring.register_event_duration_secs_listener(
  lambda event, seconds, **_: (
    _compiled.append(event) if event.endswith("backend_compile_duration") else 0
  )
)


@contextlib.contextmanager
def count_compilations():
  """Yields a list that grows by one with each compilation inside."""
  start, grown = len(_compiled), []
  yield grown
  grown += _compiled[start:]


def write_text(folder: pathlib.Path, documents: int = 12) -> str:
  """Distinct documents of about 600 bytes each; returns the folder."""
  folder.mkdir(parents=True, exist_ok=True)
  for i in range(documents):
    words = [f"{w}{(i * 7 + w * w) % 83}" for w in range(120)]
    text = f"Document {i}: " + " ".join(words) + ".\n"
    (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
  return str(folder)


def tiny_config(path: str, **groups: dict) -> Config:
  """A valid config on text under `path`; `groups` override single keys."""
  values = {
    "learners": {"count": 2, "batch_size": (8,)},
    "model": {
      "width": 32,
      "layers": 2,
      "heads": 4,
      "kv_heads": 2,
      "head_width": 8,
      "hidden": 64,
    },
    "data": {
      "source": "text",
      "path": path,
      "sequence_length": 16,
      "shards": 4,
      "heldout_documents": 2,
    },
    "eval": {"sequences": 20, "batch_size": 8},
    "inner": {"warmup": 10, "decay": 1000},
    "stop": {"rounds": 1},
  }
  return override(values, groups)


def preset(name: str, **keys) -> dict:
  """The model group of a preset, to override that of `tiny_config`."""
  unset = dict.fromkeys(tiny_config("x").to_dict()["model"])
  return {**unset, "preset": name, **keys}


def run(config: Config, learner: int = 0, steps: int = 3):
  """Trains a few steps; returns the program, its state and all metrics."""
  program = build(config, learner)
  state, metrics = program.init(), []
  size = program.samples_per_step
  for i in range(steps):
    batch = program.batch(i * size, size)
    state, step_metrics = program.step(state, batch, i * program.tokens(batch))
    metrics.append(step_metrics)
  return (
    program,
    state,
    [{key: float(value) for key, value in m.items()} for m in metrics],
  )


def flat(tree) -> dict[str, np.ndarray]:
  """Leaves as host arrays by path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in leaves
  }
