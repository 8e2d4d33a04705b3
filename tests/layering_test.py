"""Imports go one way, and the pure layers stay pure.

types <- config <- {algo, protocol} <- {engine, report} <- {live, sim, lm,
planning} <- chaos <- launch: a module may import its own layer and layers to
the left.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
RANKS = {
  "ddiloco": -1,
  "types": 0,
  "config": 1,
  "algo": 2,
  "protocol": 2,
  "engine": 3,
  "report": 3,
  "live": 4,
  "sim": 4,
  "lm": 4,
  "planning": 4,
  "chaos": 5,
  "launch": 6,
  "experiments": 7,
}
# What a pure module may import from the standard library: nothing that reads
# a clock, draws a number, starts a thread or touches a file.
PURE_STDLIB = frozenset(
  "abc base64 binascii bisect collections copy dataclasses difflib enum"
  " fractions functools hashlib heapq itertools json math numbers operator re"
  " statistics string struct types typing zlib".split()
)
ARRAYS = frozenset(["jax", "numpy", "optax"])
PURE = {
  "ddiloco": frozenset(),  # Every import of any layer runs it.
  "types": PURE_STDLIB,
  "config": PURE_STDLIB,
  "protocol": PURE_STDLIB,
  "algo": PURE_STDLIB | ARRAYS,
}
# Reading these can run code of whoever wrote the bytes.
UNSAFE = frozenset("cloudpickle dill joblib marshal pickle shelve".split())


def layer_of(module: str) -> str:
  """The layer of a project module; the root package is one of its own."""
  root, *rest = module.split(".")
  if root != "ddiloco" or not rest or rest[0].startswith("__"):
    return root
  return rest[0]


def imports(tree: ast.AST) -> list[tuple[int, str]]:
  """Line and absolute name of everything that a module imports."""
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level:
      found.append((node.lineno, "." * node.level + (node.module or "")))
    elif isinstance(node, ast.ImportFrom) and node.module == "ddiloco":
      found += [(node.lineno, f"ddiloco.{alias.name}") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      found.append((node.lineno, node.module))
  return found


def import_error(module: str, name: str) -> str | None:
  """Why `module` may not import `name`; None if it may."""
  layer, root = layer_of(module), name.split(".")[0]
  if name.startswith("."):
    return "relative import: write the whole name"
  if root in UNSAFE:
    return f"{name} can run code that it reads"
  if root in ("ddiloco", "launch", "experiments", "tests"):
    target = layer_of(name)
    if target == layer or RANKS.get(target, 8) < RANKS.get(layer, 8):
      return None
    return f"layer {layer} may not import layer {target}"
  if layer in PURE and root not in PURE[layer]:
    return f"pure layer {layer} may not import {name}"
  return None


def violations(module: str, source: str) -> list[str]:
  """Every forbidden import of a module, as `line: why`."""
  tree = ast.parse(source)
  found = []
  if layer_of(module) not in RANKS:
    found.append(f"1: {layer_of(module)} is no known layer")
  for line, name in imports(tree):
    if why := import_error(module, name):
      found.append(f"{line}: {why}")
  for node in ast.walk(tree):
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
      if not (isinstance(node.value, ast.Constant) and not node.value.value):
        found.append(f"{node.value.lineno}: allow_pickle must be False")
  return found


def modules() -> list[tuple[str, pathlib.Path]]:
  """Name and path of every module of the project, tests apart."""
  found = []
  for folder in ("ddiloco", "launch", "experiments"):
    for path in sorted((ROOT / folder).rglob("*.py")):
      parts = path.relative_to(ROOT).with_suffix("").parts
      found.append((".".join(parts).removesuffix(".__init__"), path))
  return found


@pytest.mark.parametrize(
  "module, path", [pytest.param(m, p, id=m) for m, p in modules()]
)
def test_imports_go_one_way(module, path):
  assert violations(module, path.read_text(encoding="utf-8")) == []


def test_finds_the_modules_of_the_project():
  assert "ddiloco" in dict(modules())


def test_allowed_library_names_exist():
  assert PURE_STDLIB <= sys.stdlib_module_names


@pytest.mark.parametrize(
  "module, source",
  [
    ("ddiloco.config", "from ddiloco import types"),
    ("ddiloco.protocol.syncer", "from ddiloco.protocol import quorum"),
    ("ddiloco.algo.merge", "import jax.numpy as jnp\nimport optax"),
    ("ddiloco.engine.loop", "from ddiloco import algo, protocol\nimport time"),
    ("ddiloco.report.page", "from ddiloco.protocol.tape import Record"),
    ("ddiloco.lm.model", "from flax import nnx\nimport ddiloco.engine.ports"),
    ("ddiloco.live.events", "import ddiloco\nfrom ddiloco import __version__"),
    ("launch.local", "from ddiloco.sim import world\nimport launch.flags"),
    ("ddiloco.chaos.harness", "from ddiloco.live import log, supervisor"),
    ("experiments.perf.plot", "import ddiloco.report.page"),
    ("ddiloco.live.exchange", "np.load(f, allow_pickle=False)"),
  ],
)
def test_accepts(module, source):
  assert violations(module, source) == []


@pytest.mark.parametrize(
  "module, source, why",
  [
    ("ddiloco.types", "import ddiloco.config", "types may not import layer co"),
    ("ddiloco.algo.merge", "from ddiloco import protocol", "layer protocol"),
    ("ddiloco.protocol.tape", "import ddiloco.algo.codecs", "layer algo"),
    ("ddiloco.report.page", "from ddiloco.engine import loop", "layer engine"),
    ("ddiloco.engine.loop", "from ddiloco.live import exchange", "layer live"),
    ("ddiloco.sim.world", "from ddiloco.live import exchange", "layer live"),
    ("ddiloco.lm.data", "def f():\n  import ddiloco.sim.world", "layer sim"),
    ("ddiloco.live.process", "import launch.learner", "layer launch"),
    ("ddiloco.sim.world", "import ddiloco.chaos.proxy", "layer chaos"),
    ("ddiloco.chaos.harness", "from launch import flags", "layer launch"),
    ("ddiloco.lm.program", "import experiments.perf", "layer experiments"),
    ("ddiloco.engine.loop", "import ddiloco.utils", "layer utils"),
    ("ddiloco.utils", "import math", "no known layer"),
    ("ddiloco", "from ddiloco import types", "layer types"),
    ("ddiloco", "import math", "pure layer ddiloco may not import math"),
    ("launch.local", "from tests import fakes", "layer tests"),
    ("ddiloco.protocol.quorum", "import time", "import time"),
    ("ddiloco.protocol.quorum", "from random import random", "import random"),
    ("ddiloco.protocol.tape", "import numpy as np", "import numpy"),
    ("ddiloco.config", "import os.path", "import os.path"),
    ("ddiloco.algo.outer", "import flax", "import flax"),
    ("ddiloco.algo.outer", "from . import merge", "relative"),
    ("launch.local", "import pickle", "can run code"),
    ("experiments.perf.plot", "from pickle import load", "can run code"),
    ("ddiloco.live.exchange", "np.load(f, allow_pickle=x)", "must be False"),
  ],
)
def test_refuses(module, source, why):
  found = violations(module, source)
  assert len(found) == 1 and why in found[0]
