"""The fault script: what fails, when, and for how long.

Live runs, simulations and failure logs share it. It has two forms that parse
to the same records, a line of text

  at round 60 kill learner 1 for 5s; at 12.5s slow learner 0 by 3x for 10s

and JSON

  [{"at": {"round": 60}, "who": "learner 1", "what": "kill", "for": {"s": 5}},
   {"at": {"s": 12.5}, "who": "learner 0", "what": "slow", "factor": 3,
    "for": {"s": 10}}]

`at` counts from the run's start, or is the first commit that reaches that
round. `fault_kinds` lists what can fail.
"""

import itertools
import json
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from ddiloco.protocol import presence
from ddiloco.protocol.fault_kinds import (
  FACTOR_PERMILLE_MAX,
  KINDS,
  LIMIT,
  Fault,
)
from ddiloco.types import SECOND_NS

__all__ = [
  "FACTOR_PERMILLE_MAX",
  "FORMS",
  "KINDS",
  "Fault",
  "check",
  "from_json",
  "parse",
  "to_json",
  "to_text",
]

FORMS = (
  "'at round 60 kill learner 1 for 5s', 'at 12.5s pause syncer for 2s',"
  " 'at 3s slow learner 2 by 3x for 10s', 'at round 100 stop learner 2',"
  " 'at round 40 start learner 3', separated by ';'; or a JSON list of"
  ' {"at": {"round": 60}, "who": "learner 1", "what": "kill", "for": {"s": 5}},'
  ' where "at" may be {"s": 12.5} and slow has "factor": 3'
)
_UNITS_NS = {
  "ns": 1,
  "us": 1_000,
  "ms": 1_000_000,
  "s": SECOND_NS,
  "m": 60 * SECOND_NS,
  "h": 3600 * SECOND_NS,
}
_TEXT = re.compile(
  r"at (?:round (?P<round>\S+)|(?P<time>\S+)) (?P<what>\S+)"
  r" (?P<who>learner \S+|syncer [0-9-]\S*|\S+)"
  r"(?: by (?P<factor>\S+))?(?: for (?P<span>\S+))?"
)
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?")


def parse(text: str) -> tuple[Fault, ...]:
  """Reads a script in its text form, or as JSON if it starts with '['.

  Raises:
    ValueError: Names the record, counted from 1, what is wrong with it and the
      accepted forms.
  """
  if text.lstrip().startswith("["):
    try:
      records = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f"the fault script is no JSON: {error}. Accepted: {FORMS}"
      ) from error
    return from_json(records)
  lines = [" ".join(line.split()) for line in re.split(r"[;\n]", text)]
  return _read_all(_from_line, [line.lower() for line in lines if line])


def from_json(records: list) -> tuple[Fault, ...]:
  """Reads records already decoded from JSON; raises as `parse` does."""
  return _read_all(_from_record, records)


def to_json(faults: Iterable[Fault]) -> list[dict[str, Any]]:
  """The inverse of `from_json`: plain JSON values."""
  records = []
  for fault in faults:
    at = (
      _json_time(fault.at_ns)
      if fault.at_round is None
      else {"round": fault.at_round}
    )
    record = {"at": at, "who": fault.actor, "what": fault.what}
    if fault.factor_permille is not None:
      whole, rest = divmod(fault.factor_permille, 1000)
      record["factor"] = fault.factor_permille / 1000 if rest else whole
    if fault.for_ns is not None:
      record["for"] = _json_time(fault.for_ns)
    records.append(record)
  return records


def to_text(faults: Iterable[Fault]) -> str:
  """The script's text form; `parse` gives the same records back."""
  lines = []
  for fault in faults:
    if fault.at_round is None:
      at = f"{_decimal(fault.at_ns, 9)}s"
    else:
      at = f"round {fault.at_round}"
    line = f"at {at} {fault.what} {fault.actor}"
    if fault.factor_permille is not None:
      line += f" by {_decimal(fault.factor_permille, 3)}x"
    if fault.for_ns is not None:
      line += f" for {_decimal(fault.for_ns, 9)}s"
    lines.append(line)
  return "; ".join(lines)


def check(
  faults: Iterable[Fault],
  *,
  learners: int,
  stop_rounds: int | None,
  shards: int = 1,
  quorum: int = 1,
  live: bool = True,
) -> None:
  """Refuses a script that contradicts itself or the run.

  A round and a time cannot be compared, so only contradictions between two
  rounds, or two times, are found.

  Args:
    faults: The script.
    learners: How many there can be, late joiners included.
    stop_rounds: The round at which the run ends, if it has one.
    shards: Of the syncer.
    quorum: The learners that a round needs.
    live: Whether it must be one that a live run can perform.

  Raises:
    ValueError: Names the record, counted from 1.
  """
  faults = tuple(faults)
  able = [what for what, kind in KINDS.items() if kind.live]
  for number, fault in enumerate(faults, 1):
    if live and fault.what not in able:
      raise _error(
        number,
        fault,
        f"a live run cannot perform {fault.what}, only {', '.join(able)}; a "
        "simulation can (launch.simulate)",
      )
    if fault.learner is not None and fault.learner >= learners:
      raise _error(number, fault, f"the run's learners are 0 to {learners - 1}")
    if fault.shard >= shards:
      raise _error(
        number, fault, f"syncer.shards = {shards}: they are 0 to {shards - 1}"
      )
    if stop_rounds and (fault.at_round or 0) >= stop_rounds:
      raise _error(
        number, fault, f"it never happens: the run ends at round {stop_rounds}"
      )
  numbered = list(enumerate(faults, 1))
  for (i, first), (j, second) in itertools.permutations(numbered, 2):
    problem = first.actor == second.actor and _conflict(first, second)
    if problem:
      raise _error(j, second, f"{problem} by record {i} ({to_text([first])!r})")
  for actor in dict.fromkeys(fault.actor for fault in faults):
    numbers, own = zip(
      *[x for x in numbered if x[1].actor == actor], strict=True
    )
    if found := presence.contradiction(own):
      at, why = found
      raise _error(numbers[at], own[at], why)
  if found := presence.unreachable(faults, learners, quorum):
    fault, present = found
    raise _error(
      faults.index(fault) + 1,
      fault,
      f"it never happens: a round needs {quorum} learners, and {present} are "
      "there to reach it. Start it at a time, as 'at 5s', or lower "
      "sync.quorum_min",
    )


def _conflict(first: Fault, second: Fault) -> str:
  """Why `second`, of the same actor, cannot follow `first`; or nothing."""
  if first.at_round is not None and second.at_round is not None:
    gap, span = second.at_round - first.at_round, 0
  elif first.at_ns is not None and second.at_ns is not None:
    gap, span = second.at_ns - first.at_ns, first.for_ns or 0
    if first.what == "jump":  # its `for` is a distance
      span = 0
  else:
    return ""
  if first.what == "slow" and first.for_ns is None:
    span = LIMIT
  down = {first.what, second.what} <= {"kill", "pause", "stop"}
  # Islands have many slices; who is there is looked at as a whole.
  same = first.what == second.what not in ("shrink", *presence.KINDS)
  if (down or same) and (gap == 0 or 0 < gap < span):
    return f"{second.actor} is already under {first.what}"
  return ""


def _error(number: int, fault: Any, reason: object) -> ValueError:
  shown = to_text([fault]) if isinstance(fault, Fault) else fault
  return ValueError(f"fault {number} ({shown!r}): {reason}")


def _read_all(read: Any, records: Iterable[Any]) -> tuple[Fault, ...]:
  faults = []
  for number, record in enumerate(records, 1):
    try:
      faults.append(read(record))
    except ValueError as error:
      raise ValueError(
        f"{_error(number, record, error)}. Accepted: {FORMS}"
      ) from error
  return tuple(faults)


def _from_line(line: str) -> Fault:
  match = _TEXT.fullmatch(line)
  if not match:
    raise ValueError("it does not read as 'at WHEN WHAT WHO [by Nx] [for T]'")
  field = match.groupdict()
  return Fault(
    at_round=_integer(field["round"]) if field["round"] else None,
    at_ns=_duration_ns(field["time"]) if field["time"] else None,
    what=field["what"],
    for_ns=_duration_ns(field["span"]) if field["span"] else None,
    factor_permille=_factor(field["factor"]),
    **_actor(field["who"]),
  )


def _from_record(record: Any) -> Fault:
  if not isinstance(record, dict):
    raise ValueError("it is no JSON object")
  unknown = record.keys() - {"at", "who", "what", "for", "factor"}
  if unknown:
    raise ValueError(f"unknown fields {', '.join(sorted(map(str, unknown)))}")
  missing = [name for name in ("at", "who", "what") if name not in record]
  if missing:
    raise ValueError(f"it lacks {' and '.join(missing)}")
  at = record["at"]
  by_round = isinstance(at, dict) and list(at) == ["round"]
  factor = record.get("factor")
  return Fault(
    at_round=_integer(at["round"]) if by_round else None,
    at_ns=None if by_round else _json_ns(at),
    what=str(record["what"]),
    for_ns=_json_ns(record["for"]) if "for" in record else None,
    factor_permille=None if factor is None else _scaled(factor, 1000),
    **_actor(record["who"]),
  )


def _actor(name: Any) -> dict[str, Any]:
  if name in ("syncer", "exchange"):
    return {"who": name, "learner": None}
  words = name.split() if isinstance(name, str) else []
  if len(words) != 2 or words[0] not in ("learner", "syncer"):
    raise ValueError(
      f"{name!r} is no actor; write 'learner 1', 'syncer' (or one of its "
      "shards, 'syncer 1') or 'exchange'"
    )
  number = _integer(words[1])
  if words[0] == "syncer":
    return {"who": "syncer", "learner": None, "shard": number}
  return {"who": "learner", "learner": number}


def _integer(value: Any) -> int:
  if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
    return int(value)
  if isinstance(value, int) and not isinstance(value, bool):
    return value
  raise ValueError(f"{str(value)!r} is no whole number")


def _duration_ns(text: str) -> int:
  """'1.5s', '500ms', ... as nanoseconds, exactly."""
  amount, unit = re.fullmatch(r"(.*?)([a-z]*)", text).groups()
  if unit not in _UNITS_NS or not _NUMBER.fullmatch(amount):
    raise ValueError(
      f"{text!r} is no time; write a number and one of {', '.join(_UNITS_NS)}"
    )
  return _scaled(amount, _UNITS_NS[unit])


def _factor(text: str | None) -> int | None:
  if text is None:
    return None
  if not text.endswith("x") or not _NUMBER.fullmatch(text[:-1]):
    raise ValueError(f"{text!r} is no factor; write it as '3x' or '1.5x'")
  return _scaled(text[:-1], 1000)


def _json_ns(value: Any) -> int:
  if isinstance(value, dict) and list(value) in (["s"], ["ns"]):
    ((unit, amount),) = value.items()
    return _scaled(amount, _UNITS_NS[unit])
  raise ValueError(f'{value!r} is no time; write {{"s": 12.5}}')


def _json_time(time_ns: int) -> dict[str, int | float]:
  """Seconds if a JSON number holds them exactly, else nanoseconds."""
  whole, rest = divmod(time_ns, SECOND_NS)
  seconds = time_ns / SECOND_NS if rest else whole
  exact = Fraction(repr(seconds)) * SECOND_NS == time_ns
  return {"s": seconds} if exact else {"ns": time_ns}


def _number(text: str) -> Fraction:
  """A decimal number, exactly; bounded, since exponents could be huge."""
  if not _NUMBER.fullmatch(text):
    raise ValueError(f"{text[:40]!r} is no number of at most 20 digits")
  return Fraction(text)


def _scaled(value: Any, scale: int) -> int:
  """`value * scale`, refused unless it is whole."""
  if isinstance(value, bool) or not isinstance(
    value, int | float | str | Fraction
  ):
    raise ValueError(f"{value!r} is no number")
  if not isinstance(value, int | Fraction):
    value = _number(str(value))
  scaled = Fraction(value) * scale
  if scaled.denominator != 1:
    raise ValueError(f"{float(value)} is finer than 1/{scale}")
  return int(scaled)


def _decimal(value: int, digits: int) -> str:
  """`value / 10**digits` without rounding or trailing zeros."""
  whole, rest = divmod(value, 10**digits)
  return f"{whole}.{rest:0{digits}d}".rstrip("0").rstrip(".")
