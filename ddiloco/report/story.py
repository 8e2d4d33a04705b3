"""A run in plain words, and its summary on one screen."""

import signal
from typing import Any

from ddiloco.protocol.ledger import Account
from ddiloco.report.accounting import Accounting, Death
from ddiloco.report.run import Run
from ddiloco.types import SECOND_NS, Status

_DEATHS_TOLD = 4
_BEGINNINGS = {
  Status.COMPLETED: "Completed",
  Status.STOPPED: "Not completed (stopped, or still under way)",
  Status.FAILED: "Failed",
}


def count(n: float) -> str:
  """A number for people: 1.51 M, 300 k, 9,999."""
  for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
    if n >= scale:
      return f"{n / scale:.3g} {unit}"
  return f"{n / 1e3:.3g} k" if n >= 1e5 else f"{n:,.0f}"


def size(n: float) -> str:
  """Bytes for people."""
  for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if n >= scale:
      return f"{n / scale:.3g} {unit}"
  return f"{n:.0f} B"


def duration(ns: float) -> str:
  """A stretch of time for people."""
  s = ns / SECOND_NS
  if s < 1:
    return f"{s * 1e3:.0f} ms"
  if s < 120:
    return f"{s:.1f} s"
  minutes, s = divmod(round(s), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"


def traffic(sizes: dict[str, int] | None) -> str:
  """What was sent both ways, for people."""
  if sizes is None:
    return "none, without arrays"
  return f"{size(sizes['up'])} up, {size(sizes['down'])} down"


def percent(share: float | None) -> str:
  """A share for people."""
  return "none" if share is None else f"{100 * share:.1f}%"


def sentences(run: Run, accounting: Accounting, head: Account) -> list[str]:
  """What happened, each sentence true by the tapes."""
  rounds = run.verdicts.committed
  learners = len(accounting.learners)
  told = [
    f"{_BEGINNINGS[run.status]}: {rounds:,} rounds, {count(head.processed)} "
    f"tokens in {duration(accounting.wall_ns)} by {learners} "
    f"learner{'s' if learners != 1 else ''}."
  ]
  if run.origin is not None:
    t, source = run.origin.round, run.origin.run_id[:8]
    told.append(f"It goes on from the snapshot of round {t:,} of run {source}.")
  if run.reason and run.status is not Status.COMPLETED:
    told.append(f"Reason: {run.reason.splitlines()[0].rstrip('.')}.")
  if not run.has_arrays:
    told.append("Simulated without arrays: nothing was trained.")
  told += _loss(run)
  if len(accounting.deaths) > _DEATHS_TOLD:
    told.append(_many_deaths(accounting))
  else:
    told += [_death(accounting, death) for death in accounting.deaths]
  for learner, time in accounting.learners.items():
    if time.left_ns:
      at = duration(time.left_ns - accounting.origin_ns)
      told.append(f"Learner {learner} left on request at {at}.")
  told += _stalls(accounting)
  return told


def _loss(run: Run) -> list[str]:
  if not run.evaluations:
    return []
  first, last = run.evaluations[0], run.evaluations[-1]
  if first is last:
    return [f"Held-out loss {last['loss']:.3f} nats per byte."]
  return [
    f"Held-out loss went from {first['loss']:.3f} to {last['loss']:.3f} nats "
    "per byte."
  ]


def _death(accounting: Accounting, death: Death) -> str:
  who = "The syncer" if death.learner is None else f"Learner {death.learner}"
  if death.shard is not None:
    who += f"'s shard {death.shard}"
  at = duration(death.at_ns - accounting.origin_ns)
  text = f"{who} {_cause(death)} at {at}"
  if not death.incarnation:
    text += ", before its first step,"
  if not death.back_ns:
    text += " and did not come back"
  else:
    back = duration(death.back_ns - death.at_ns)
    again = "committed again" if death.learner is None else "was back"
    text += f" and {again} after {back} {death.back_how}".rstrip()
  if _others_went_on(accounting, death):
    nobody = "no learner" if death.learner is None else "nobody else"
    text += f"; {nobody} lost a step"
  return text + "."


def _cause(death: Death) -> str:
  code = death.code
  if death.stopped:
    return f"stopped ({death.stopped})"
  if code is None:
    return "died"
  if code < 0:
    try:
      name = signal.Signals(-code).name
    except ValueError:
      name = f"signal {-code}"
    return "was killed" if name == "SIGKILL" else f"was ended by {name}"
  return f"failed with exit code {code}" if code else "ended"


def _others_went_on(accounting: Accounting, death: Death) -> bool:
  """Whether every other learner that was at work stepped on."""
  until_ns = death.back_ns or accounting.end_ns
  others = [t for i, t in accounting.learners.items() if i != death.learner]
  return bool(others) and not any(
    span.kind in ("stall", "held", "dead")
    and span.begin_ns < until_ns
    and span.end_ns > death.at_ns
    for time in others
    for span in time.spans
  )


def _many_deaths(accounting: Accounting) -> str:
  deaths = accounting.deaths
  back = sorted(d.back_ns - d.at_ns for d in deaths if d.back_ns)
  text = f"{len(deaths)} lives ended before the run did"
  if back:
    text += (
      f"; {len(back)} came back, after {duration(back[len(back) // 2])} in the "
      f"median and {duration(back[-1])} at most"
    )
  return text + "."


def _stalls(accounting: Accounting) -> list[str]:
  stalls = [
    (span.end_ns - span.begin_ns, learner, span.begin_ns)
    for learner, time in accounting.learners.items()
    for span in time.spans
    if span.kind == "stall"
  ]
  if not stalls:
    return []
  longest_ns, learner, at_ns = max(stalls)
  text = (
    f"Learner {learner} stood still for {duration(longest_ns)} at "
    f"{duration(at_ns - accounting.origin_ns)}"
  )
  if len(stalls) > 1:
    text += f", the longest of {len(stalls)} stalls"
  return [text + "."]


# --- The terminal -----------------------------------------------------------


def screen(summary: dict[str, Any]) -> str:
  """A summary for a terminal."""
  lines = [*summary["story"], ""]
  lines += [f"  {name:<12}{value}" for name, value in _rows(summary)]
  lines.append("")
  lines += _table(summary["learners"])
  if summary["warnings"]:
    lines += ["", *(f"warning: {w}" for w in summary["warnings"][:8])]
    if len(summary["warnings"]) > 8:
      lines.append(f"... and {len(summary['warnings']) - 8} more warnings")
  lines += ["", f"report: {summary['report']}"]
  # A terminal obeys control characters, wherever they came from.
  return "\n".join(
    "".join(c if c.isprintable() else "?" for c in line) for line in lines
  )


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
  evaluation = summary["eval"]
  loss = "not evaluated"
  if evaluation["loss"] is not None:
    loss = f"{evaluation['loss']:.4f} nats per byte, held out"
    if type(evaluation["bits_per_byte"]) in (int, float):
      loss += f" ({evaluation['bits_per_byte']:.3f} bits)"
    if evaluation["round"] != summary["rounds"]:
      loss += f", at round {evaluation['round']}"
  badput = [
    f"{cause.replace('_', ' ')} {percent(share)}"
    for cause, share in summary["badput"].items()
    if share >= 0.0005
  ]
  losses = ", ".join(
    f"{cause.replace('_', ' ')} {count(n)}"
    for cause, n in summary["tokens_lost"].items()
    if n
  )
  return [
    ("loss", loss),
    ("goodput", f"{percent(summary['goodput'])} ({', '.join(badput)})"),
    ("uptime", percent(summary["uptime"])),
    (
      "tokens",
      f"{count(summary['tokens_processed'])} processed: "
      f"{count(summary['tokens_merged'])} merged, "
      f"{count(summary['tokens_pending'])} pending",
    ),
    ("lost", losses or "nothing"),
    ("traffic", traffic(summary["bytes"])),
  ]


def _table(learners: dict[str, dict[str, Any]]) -> list[str]:
  head = f"  {'':<12}{'steps':>8}{'answers':>9}{'counted':>9}{'lives':>7}"
  lines = [f"{head}{'step ms':>10}{'blocked ms':>12}"]
  for learner, facts in learners.items():
    times = [facts["step_ms_median"], facts["blocked_ms_per_round"]]
    step, blocked = ("-" if t is None else f"{t:.1f}" for t in times)
    lines.append(
      f"  {'learner ' + learner:<12}{facts['steps']:>8,}"
      f"{facts['answers']:>9,}{facts['accepted']:>9,}"
      f"{facts['incarnations']:>7}{step:>10}{blocked:>12}"
    )
  return lines
