"""What a compiled program moves: to and from memory, and between chips.

Reads the text of an optimised HLO module. XLA's own cost analysis takes the
body of a loop once; here it counts as often as the loop runs it.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BYTES = {
  "pred": 1,
  **{f"{kind}{bits}": bits / 8 for kind in "su" for bits in (2, 4, 8, 16)},
  **{f"{kind}{bits}": bits / 8 for kind in "suf" for bits in (32, 64)},
  "f16": 2,
  "bf16": 2,
  "f8e4m3fn": 1,
  "f8e5m2": 1,
}
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(
  r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\("
)
_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_CALLED = re.compile(
  r"(?:body|calls|to_apply|condition|true_computation|false_computation)"
  r"=%([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ELSEWHERE = re.compile(r"S\([1-9]\)")  # memory on the chip, not beside it
COLLECTIVES = (
  "all-reduce",
  "all-gather",
  "reduce-scatter",
  "all-to-all",
  "collective-permute",
)
# They compute nothing, or what they wait for was counted at its start.
_FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast after-all partition-id"
  " replica-id while call conditional opt-barrier".split()
)


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  shape: str
  op: str
  operands: tuple[str, ...]
  rest: str  # operands and attributes, as written
  root: bool

  @property
  def called(self) -> tuple[str, ...]:
    """The computations that it names."""
    found = _CALLED.findall(self.rest)
    if branches := _BRANCHES.search(self.rest):
      found += re.findall(r"%([\w.-]+)", branches[1])
    return tuple(found)


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Collective:
  """All collectives of one kind and group size of a step."""

  kind: str
  group: int  # chips that take part in each
  count: int  # a step
  sent_bytes: int  # a step, by every chip


class Traffic(NamedTuple):
  """Of one step of one chip."""

  memory_bytes: int  # read and written
  collectives: tuple[Collective, ...]

  @property
  def sent_bytes(self) -> int:
    """By every chip to others."""
    return sum(item.sent_bytes for item in self.collectives)


def traffic(text: str) -> Traffic:
  """What the module's entry computation moves, loops and all.

  Of a condition's branches, all of them.
  """
  computations, entry = _parse(text)
  partitions = _PARTITIONS.search(text.partition("\n")[0])
  everybody = int(partitions[1]) if partitions else 1
  memory, found = 0.0, collections.Counter()
  sent = collections.Counter()
  for instruction, home, times in _executed(computations, entry, 1):
    kind = instruction.op.removesuffix("-start")
    if kind in COLLECTIVES:
      group, size = _collective(instruction, home, kind, everybody)
      found[kind, group] += times
      sent[kind, group] += times * size
    if not _inside(instruction, home):
      memory += times * _moved(instruction, home, computations)
  made = tuple(
    Collective(kind, group, found[kind, group], round(sent[kind, group]))
    for kind, group in sorted(found)
  )
  return Traffic(round(memory), made)


def _parse(text: str) -> tuple[dict[str, Computation], str]:
  computations: dict[str, Computation] = {}
  current, entry = {}, ""
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      current = computations.setdefault(match[2], {})
      entry = match[2] if match[1] else entry
    elif match := _INSTRUCTION.match(line):
      rest = line[match.end() :]
      operands = tuple(re.findall(r"%([\w.-]+)", rest[: _closing(rest)]))
      root = line.lstrip().startswith("ROOT")
      current[match["name"]] = Instruction(
        match["name"], match["shape"], match["op"], operands, rest, root
      )
  return computations, entry


def _closing(text: str) -> int:
  """Where the bracket that was open before `text` closes."""
  depth = 1
  for i, letter in enumerate(text):
    depth += (letter == "(") - (letter == ")")
    if not depth:
      return i
  return len(text)


def _executed(
  computations: Mapping[str, Computation], name: str, times: int
) -> Iterator[tuple[Instruction, Computation, int]]:
  """Every instruction, the computation it stands in, and how often it runs.

  Of what is fused only collectives come: the rest stays on the chip. One that
  runs beside other work stands in the fusions of its start, of that work and
  of its end; it comes once.
  """
  home, channels = computations[name], set()
  for instruction in home.values():
    yield instruction, home, times
    if instruction.op == "while":
      trips = times * _trips(instruction, computations)
      for called in instruction.called:
        yield from _executed(computations, called, trips)
    elif instruction.op in ("call", "conditional"):
      for called in instruction.called:
        yield from _executed(computations, called, times)
    elif instruction.op in ("fusion", "async-start"):
      for found in _fused(computations, instruction, times):
        channel = _CHANNEL.search(found[0].rest)
        if channel is None or channel[1] not in channels:
          channels.add(channel and channel[1])
          yield found


def _fused(
  computations: Mapping[str, Computation], fusion: Instruction, times: int
) -> Iterator[tuple[Instruction, Computation, int]]:
  for called in fusion.called:
    home = computations.get(called, {})
    for instruction in home.values():
      if instruction.op.removesuffix("-start") in COLLECTIVES:
        # A fused all-reduce of which each chip keeps a part.
        if "all-reduce-scatter" in called:
          instruction = instruction._replace(op="reduce-scatter")
        yield instruction, {**home, _FUSED: instruction}, times
      elif instruction.op == "fusion":
        yield from _fused(computations, instruction, times)


_FUSED = ""  # a mark in the home of what is fused; no instruction has no name


def _inside(instruction: Instruction, home: Computation) -> bool:
  return (
    _FUSED in home
    or instruction.op in _FREE
    or instruction.op.endswith("-done")
  )


def _trips(loop: Instruction, computations: Mapping[str, Computation]) -> int:
  """How often a loop that counts from 0 runs; 1 if nothing tells."""
  if match := _TRIPS.search(loop.rest):
    return int(match[1])
  condition = re.search(r"condition=%([\w.-]+)", loop.rest)[1]
  home = computations[condition]
  root = next(x for x in home.values() if x.root)
  for name in root.operands:
    if home[name].op == "constant" and "[]" in home[name].shape:
      return int(home[name].rest.split(")")[0])
  return 1


# --- Between chips ----------------------------------------------------------


def _collective(
  instruction: Instruction, home: Computation, kind: str, everybody: int
) -> tuple[int, float]:
  """Members of a group, and bytes that each chip sends, as rings would."""
  own = sum(_bytes(home[name].shape) for name in instruction.operands)
  group = _group(instruction.rest, everybody)
  share = {
    "all-reduce": 2 * (group - 1) / group,
    "all-gather": group - 1,
    "collective-permute": 1,
  }.get(kind, (group - 1) / group)
  return group, own * share


def _group(rest: str, everybody: int) -> int:
  """Members of a replica group, in any of the ways that XLA writes them."""
  if "replica_groups={}" in rest:
    return everybody
  if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
    return match[1].count(",") + 1
  if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
    return int(match[1])
  if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    names = re.findall(r"'(\w+)'", match[2])
    return math.prod(int(sizes[name]) for name in names)
  return 1


# --- To and from memory -----------------------------------------------------


def _bytes(shape: str, *, beside: bool = False) -> float:
  """Of all arrays of a shape; `beside`: of those beside the chip, in HBM."""
  total = 0.0
  for dtype, sides, layout in _ARRAY.findall(shape):
    if not (beside and _ELSEWHERE.search(layout)):
      count = math.prod(int(side) for side in sides.split(",") if side)
      total += count * _BYTES.get(dtype, 0)
  return total


def _moved(
  instruction: Instruction,
  home: Computation,
  computations: Mapping[str, Computation],
) -> float:
  """Bytes read and written by one run of an instruction."""
  shapes = [home[x].shape for x in instruction.operands]
  if instruction.op == "dynamic-update-slice":
    return 2 * _bytes(shapes[1], beside=True)
  if instruction.op in ("dynamic-slice", "slice", "gather"):
    return 2 * _bytes(instruction.shape, beside=True)
  if instruction.op in ("all-gather-start", "collective-permute-start"):
    return _bytes(instruction.shape, beside=True)  # (from, to, ...)
  if instruction.op == "copy-start":  # (to, from, what to wait for)
    to, source, *_ = _ARRAY.finditer(instruction.shape)
    return _bytes(to[0], beside=True) + _bytes(source[0], beside=True)
  fused: Computation = {}
  if instruction.op == "fusion":
    fused = computations[instruction.called[0]]
  read = sum(
    _read(shape, fused, i, computations) for i, shape in enumerate(shapes)
  )
  return read + _written(instruction, fused)


def _read(
  shape: str,
  fused: Computation,
  number: int,
  computations: Mapping[str, Computation],
) -> float:
  """Of an operand: where a fusion uses slices of it, only they are read."""
  whole = _bytes(shape, beside=True)
  if not whole or not fused:
    return whole
  return min(whole, _used(fused, number, computations, whole))


def _used(
  fused: Computation,
  number: int,
  computations: Mapping[str, Computation],
  whole: float,
) -> float:
  parameter = next(
    x.name
    for x in fused.values()
    if x.op == "parameter" and x.rest.startswith(f"{number})")
  )
  names, total = [parameter], 0.0
  while names:
    name = names.pop()
    for user in fused.values():
      if name not in user.operands:
        continue
      if user.op == "bitcast":
        names.append(user.name)
      elif user.op in ("dynamic-slice", "slice", "gather"):
        total += _bytes(user.shape)
      elif user.op == "dynamic-update-slice" and user.operands[0] == name:
        continue  # written in place
      elif user.op == "fusion":
        inner = computations[user.called[0]]
        for i in (i for i, x in enumerate(user.operands) if x == name):
          total += _used(inner, i, computations, whole)
      else:
        return whole
  return total


def _written(instruction: Instruction, fused: Computation) -> float:
  """What of a result is new: of an update in place, the update."""
  root = next((x for x in fused.values() if x.root), None)
  while root is not None and root.op == "bitcast":
    root = fused[root.operands[0]]
  if root is not None and root.op == "dynamic-update-slice":
    return _bytes(fused[root.operands[1]].shape)
  return _bytes(instruction.shape, beside=True)
