"""What a fragmentation costs, before a run (paper Sec. 3.3, Figs. 9-10).

Sizes are those of one learner's messages without their headers: f32 as the
syncer keeps a fragment, up as its outer gradient travels, down as a learner
fetches it. A step is a global step, of which H make a cycle; an idle one has
no fragment to send, and links sized for the largest step stand still on it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.algo.fragments import Layout, Piece
from ddiloco.config import ConfigError
from ddiloco.protocol.schedule import Schedule
from ddiloco.report.story import count, size

_NAMES_TOLD = 3
_WAYS = ("f32", "up", "down")


def describe(
  layout: Layout,
  schedule: Schedule,
  *,
  up: Sequence[int],
  down: Sequence[int],
) -> dict[str, Any]:
  """All numbers of a layout, as `json.dumps` takes them.

  Args:
    layout: the fragments.
    schedule: when they are due.
    up: bytes of each fragment's outer gradient, encoded.
    down: bytes of each fragment as learners fetch it.
  """
  fragments = []
  for p in range(layout.num_fragments):
    pairs = zip(layout.pieces(p), layout.shapes(p), strict=True)
    pieces = [_piece(layout, piece, shape) for piece, shape in pairs]
    nbytes = layout.fragment_bytes(p), up[p], down[p]
    fragments.append(
      {
        "fragment": p,
        "offset": schedule.offset(p),
        "bytes": dict(zip(_WAYS, nbytes, strict=True)),
        "pieces": pieces,
      }
    )
  steps = [
    [fragments[p] for p in schedule.fragments(t)]
    for t in range(schedule.interval, 2 * schedule.interval)
  ]
  f32 = [fragment["bytes"]["f32"] for fragment in fragments]
  return {
    "strategy": layout.strategy,
    "num_fragments": layout.num_fragments,
    "interval_steps": schedule.interval,
    "parameters": sum(f32) // 4,
    "tensors": len(layout.tensors),
    "frozen": [
      spec.path
      for spec, entry in zip(layout.tensors, layout.assignment, strict=True)
      if entry is None
    ],
    "peak_over_mean": max(f32) / (sum(f32) / len(f32)),
    "idle_steps": sum(not due for due in steps),
    "bytes_per_step": {way: _per_step(steps, way) for way in _WAYS},
    "fragments": fragments,
  }


def compare(
  strategies: Sequence[str], describe: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]]:
  """The table of each strategy; of one that is refused, the message."""
  tables = []
  for strategy in strategies:
    try:
      tables.append(describe(strategy))
    except ConfigError as error:
      tables.append({"strategy": strategy, "impossible": str(error)})
  return tables


def text(table: dict[str, Any]) -> str:
  """One layout for people: a line for each fragment, then the totals."""
  rows = [("fragment", "t_p", "pieces", "f32", "up", "down", "tensors")]
  for item in table["fragments"]:
    rows.append(
      (
        str(item["fragment"]),
        str(item["offset"]),
        str(len(item["pieces"])),
        *(size(item["bytes"][way]) for way in _WAYS),
        _names(item["pieces"]),
      )
    )
  per_step = table["bytes_per_step"]
  return "\n".join(
    [
      *_align(rows),
      "",
      f"{table['strategy']}: {_schedule(table)}, {_model(table)}",
      f"largest fragment  {table['peak_over_mean']:.3f} x the mean",
      f"idle steps        {table['idle_steps']} of {table['interval_steps']}",
      *(
        f"a step, {way:<4}      {size(per_step[way]['mean'])} on average, "
        f"{size(per_step[way]['peak'])} at most"
        for way in _WAYS
      ),
    ]
  )


def comparison(tables: Sequence[dict[str, Any]]) -> str:
  """Strategies side by side, for people; then what was impossible, and why."""
  head = ("strategy", "pieces", "peak/mean", "idle", "up/step", "up/step peak")
  rows, refused = [head], []
  for table in tables:
    if "impossible" in table:
      refused.append(
        f"{table['strategy']} is impossible: {table['impossible']}"
      )
      continue
    up = table["bytes_per_step"]["up"]
    rows.append(
      (
        table["strategy"],
        str(sum(len(item["pieces"]) for item in table["fragments"])),
        f"{table['peak_over_mean']:.3f}",
        f"{table['idle_steps']} of {table['interval_steps']}",
        size(up["mean"]),
        size(up["peak"]),
      )
    )
  made = [table for table in tables if "impossible" not in table]
  about = [f"{_model(made[0])}, {_schedule(made[0])}", ""] if made else []
  return "\n".join([*about, *_align(rows, left=(0,)), *refused])


def _model(table: dict[str, Any]) -> str:
  frozen = len(table["frozen"])
  return (
    f"{count(table['parameters'])} parameters in {table['tensors'] - frozen} "
    "tensors" + (f", {frozen} more frozen" if frozen else "")
  )


def _schedule(table: dict[str, Any]) -> str:
  return f"P = {table['num_fragments']}, H = {table['interval_steps']}"


def _per_step(
  steps: Sequence[Sequence[dict[str, Any]]], way: str
) -> dict[str, float]:
  totals = [sum(item["bytes"][way] for item in due) for due in steps]
  return {"mean": sum(totals) / len(totals), "peak": max(totals)}


def _piece(
  layout: Layout, piece: Piece, shape: tuple[int, ...]
) -> dict[str, Any]:
  told = {
    "tensor": layout.tensors[piece.tensor].path,
    "shape": list(shape),
    "bytes": 4 * math.prod(shape),
  }
  return told if piece.axis is None else piece._asdict() | told


def _names(pieces: Sequence[dict[str, Any]]) -> str:
  """The largest pieces by name; neighbours of one tensor as one."""
  merged: list[dict[str, Any]] = []
  for piece in pieces:
    last = merged[-1] if merged else {}
    if last.get("tensor") == piece["tensor"] and last["stop"] == piece["start"]:
      both = last["bytes"] + piece["bytes"]
      merged[-1] = last | {"stop": piece["stop"], "bytes": both}
    else:
      merged.append(piece)
  merged.sort(key=lambda piece: -piece["bytes"])
  names = [
    piece["tensor"]
    + (
      f"[{':, ' * piece['axis']}{piece['start']}:{piece['stop']}]"
      if "axis" in piece
      else ""
    )
    for piece in merged[:_NAMES_TOLD]
  ]
  more = len(merged) - len(names)
  return ", ".join(names) + (f" and {more} more" if more else "")


def _align(
  rows: Sequence[tuple[str, ...]], left: Sequence[int] = (6,)
) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(
      cell.ljust(width) if n in left else cell.rjust(width)
      for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]
