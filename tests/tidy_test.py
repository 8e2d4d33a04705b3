"""Sizes, widths and habits that a reader, or a replay, depends on."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COLUMNS_MAX = 80
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = {"ddiloco": 400, "launch": 100, "experiments": 400}
PURE = ("ddiloco/types", "ddiloco/config", "ddiloco/algo", "ddiloco/protocol")
LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX)\b")
# Calls that keep the order of what they are given.
ORDERED = frozenset(["enumerate", "iter", "join", "list", "tuple"])


def call_name(node: ast.AST) -> str:
  """The last part of the name that a call calls; `` for anything else."""
  if not isinstance(node, ast.Call):
    return ""
  if isinstance(node.func, ast.Attribute):
    return node.func.attr
  return getattr(node.func, "id", "")


def is_set(node: ast.AST) -> bool:
  """Whether an expression is a set on the face of it."""
  if isinstance(node, ast.Set | ast.SetComp):
    return True
  return call_name(node) in ("set", "frozenset")


def text_violations(path: str, source: str) -> list[str]:
  """What is wrong with the lines of a file, as `line: why`."""
  lines = source.splitlines()
  found = []
  if len(lines) > (lines_max := FILE_LINES_MAX[path.split("/")[0]]):
    found.append(f"{len(lines)}: more than {lines_max} lines")
  for number, line in enumerate(lines, 1):
    if len(line) > COLUMNS_MAX:
      found.append(f"{number}: {len(line)} columns, more than {COLUMNS_MAX}")
    if match := LEFT_OVER.search(line):
      found.append(f"{number}: {match[0]} is left over")
  return found


def shape_violations(tree: ast.Module) -> list[str]:
  """Missing module docstring and functions that do not fit a screen."""
  found = [] if ast.get_docstring(tree) else ["1: no module docstring"]
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      lines = node.end_lineno - node.lineno + 1
      if lines > FUNCTION_LINES_MAX:
        found.append(f"{node.lineno}: {node.name} has {lines} lines")
  return found


def order_violations(tree: ast.Module) -> list[str]:
  """Uses of an order that differs from one process to the next."""
  found = []
  for node in ast.walk(tree):
    inner = []
    if isinstance(node, ast.For):
      inner = [node.iter]
    elif isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp):
      inner = [generator.iter for generator in node.generators]
    elif isinstance(node, ast.Starred):
      inner = [node.value]
    elif call_name(node) in ORDERED:
      inner = node.args
    elif call_name(node) == "hash" and isinstance(node.func, ast.Name):
      found.append(f"{node.lineno}: hash() of a str differs between processes")
    found += [f"{x.lineno}: order of a set" for x in inner if is_set(x)]
  return found


def violations(path: str, source: str) -> list[str]:
  """Everything untidy in a file, as `line: why`."""
  tree = ast.parse(source)
  found = text_violations(path, source) + shape_violations(tree)
  if path.startswith(PURE):
    found += order_violations(tree)
  return found


def files() -> list[str]:
  """Every Python file of the project, tests apart, from the root."""
  return [
    path.relative_to(ROOT).as_posix()
    for folder in FILE_LINES_MAX
    for path in sorted((ROOT / folder).rglob("*.py"))
  ]


@pytest.mark.parametrize("path", files())
def test_file_is_tidy(path):
  source = (ROOT / path).read_text(encoding="utf-8")
  assert violations(path, source) == []


def test_finds_the_files_of_the_project():
  assert "ddiloco/__init__.py" in files()


def function(lines: int) -> str:
  """The source of a function of that many lines."""
  return "def f():\n" + "  x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
  "path, body",
  [
    ("ddiloco/algo/merge.py", function(70)),
    ("ddiloco/live/process.py", "x = 1\n" * 399),
    ("launch/local.py", "x = 1\n" * 99),
    ("ddiloco/algo/merge.py", "#" * 80),
    ("ddiloco/algo/merge.py", "for x in sorted(set(y)):\n  pass"),
    ("ddiloco/algo/merge.py", "x = {f(z) for z in set(y)}"),
    ("ddiloco/algo/merge.py", "x = len(set(y)) + max({1, 2}) + x.hash(y)"),
    ("ddiloco/live/process.py", "for x in {1, 2}:\n  hash(x)"),
  ],
)
def test_accepts(path, body):
  assert violations(path, f'"""What it is."""\n{body}') == []


@pytest.mark.parametrize(
  "path, body, why",
  [
    ("ddiloco/live/process.py", function(71), "f has 71 lines"),
    ("ddiloco/live/process.py", "x = 1\n" * 400, "more than 400"),
    ("launch/local.py", "x = 1\n" * 100, "more than 100"),
    ("ddiloco/live/process.py", "#" * 81, "81 columns"),
    ("experiments/perf/plot.py", "x = 1  # TODO: y", "TODO is left over"),
    ("ddiloco/algo/merge.py", "for x in set(y):\n  pass", "set"),
    ("ddiloco/config.py", "x = [z for z in frozenset(y)]", "set"),
    ("ddiloco/types.py", "x = list({1, 2})", "set"),
    ("ddiloco/types.py", 'x = ",".join({z for z in y})', "set"),
    ("ddiloco/protocol/tape.py", "f(*set(y))", "set"),
    ("ddiloco/protocol/tape.py", "x = hash(y)", "hash()"),
  ],
)
def test_refuses(path, body, why):
  found = violations(path, f'"""What it is."""\n{body}')
  assert len(found) == 1 and why in found[0]


def test_refuses_a_module_without_docstring():
  assert violations("launch/local.py", "x = 1") == ["1: no module docstring"]
