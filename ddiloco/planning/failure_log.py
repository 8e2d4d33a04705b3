"""A log of what failed on a real cluster: CSV of start, end, chips."""

import csv
import dataclasses
import datetime
import io
import math
from collections.abc import Iterable

_COLUMNS = ("start", "end", "chips")
_FORM = (
  "a header 'start,end,chips' (and 'learner', if it is known), then one line "
  "for each outage; times in seconds or as 2026-01-31T12:00:00"
)


@dataclasses.dataclass(frozen=True)
class Outage:
  """Chips that were away for a while. Times in s since the first one."""

  line: int
  start_s: float
  end_s: float
  chips: int
  learner: int | None = None


def parse(text: str, *, chips: int) -> list[Outage]:
  """Reads a log, ascending; `ValueError` names the line and what is wrong.

  Args:
    text: the file's content.
    chips: of the whole cluster; no more of them can be away at once.
  """
  rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
  names = [name.strip().lower() for name in rows.fieldnames or ()]
  unknown = set(names) - {*_COLUMNS, "learner"}
  if unknown or not set(_COLUMNS) <= set(names):
    raise ValueError(
      f"the log's first line is {', '.join(names) or 'empty'}: it needs {_FORM}"
    )
  rows.fieldnames = names
  found = [_outage(rows.line_num, row) for row in rows]
  if not found:
    raise ValueError("the log has no outage: nothing would ever fail")
  first_s = min(item.start_s for item in found)
  found = [
    dataclasses.replace(
      item, start_s=item.start_s - first_s, end_s=item.end_s - first_s
    )
    for item in sorted(found, key=lambda item: (item.start_s, item.line))
  ]
  _check_at_once(found, chips)
  return found


def _outage(line: int, row: dict[str | None, str | None]) -> Outage:
  if None in row or None in row.values():
    raise ValueError(
      f"line {line} of the log has not one value for each column"
    )
  for name in _COLUMNS:
    if not row[name].strip():
      raise ValueError(
        f"line {line} of the log has no {name}: an outage that is not over yet "
        "needs an end, such as that of the log"
      )
  start_s, end_s = (_time_s(line, name, row[name]) for name in ("start", "end"))
  if end_s <= start_s:
    raise ValueError(
      f"line {line} of the log ends at {row['end']}, not after its start "
      f"{row['start']}"
    )
  learner = row.get("learner", "").strip()
  return Outage(
    line,
    start_s,
    end_s,
    _count(line, "chips", row["chips"], 1),
    _count(line, "learner", learner, 0) if learner else None,
  )


def _time_s(line: int, name: str, text: str) -> float:
  text = text.strip()
  try:
    found = float(text)
  except ValueError:
    try:
      when = datetime.datetime.fromisoformat(text)
    except ValueError:
      found = math.nan
    else:
      zone = when.tzinfo or datetime.UTC
      found = when.replace(tzinfo=zone).timestamp()
  if not math.isfinite(found):
    raise ValueError(
      f"line {line} of the log: {name} = {text!r} is neither seconds nor a "
      "time such as 2026-01-31T12:00:00"
    )
  return found


def _count(line: int, name: str, text: str, minimum: int) -> int:
  try:
    found = int(text)
  except ValueError:
    found = -1
  if found < minimum:
    raise ValueError(
      f"line {line} of the log: {name} = {text.strip()!r} is no whole number "
      f"from {minimum} on"
    )
  return found


def _check_at_once(outages: Iterable[Outage], chips: int) -> None:
  """No more chips are away at once than there are: else lines overlap."""
  changes = [(item.start_s, 1, item) for item in outages]
  changes += [(item.end_s, 0, item) for item in outages]
  away = 0
  for _, begins, item in sorted(changes, key=lambda c: (c[0], c[1], c[2].line)):
    away += item.chips if begins else -item.chips
    if away > chips:
      raise ValueError(
        f"line {item.line} of the log makes {away:,} chips that are away at "
        f"once, and there are {chips:,}: lines overlap that tell of the same "
        "chips, or --chips is too small"
      )
