"""summary.json: a run in numbers, for people and for scripts."""

import collections
import dataclasses
import datetime
import gzip
import json
import os
import pathlib
from typing import Any

import numpy as np

from ddiloco.protocol import ledger
from ddiloco.report import accounting as accounting_lib
from ddiloco.report import page, story, trace
from ddiloco.report.accounting import Accounting
from ddiloco.report.lives import LearnerLife
from ddiloco.report.run import NoRun, Run, load
from ddiloco.report.tapes import Exchange
from ddiloco.report.traffic import traffic
from ddiloco.types import MILLISECOND_NS, SECOND_NS, Status

__all__ = ["NoRun", "summarise", "text", "write"]

SUMMARY = "summary.json"
REPORT = "report.html"
TRACE = "trace.json"
_TRACE_BYTES_MAX = 20_000_000  # beyond, it is compressed


def summarise(
  exchange: Exchange, workdir: str | os.PathLike[str]
) -> dict[str, Any]:
  """The summary of a run, all plain JSON values; `NoRun` if there is none."""
  workdir = pathlib.Path(workdir)
  run = load(exchange, workdir)
  return _summary(run, accounting_lib.account(run), workdir)


def write(
  exchange: Exchange, workdir: str | os.PathLike[str]
) -> dict[str, Any]:
  """Writes summary.json, report.html and a trace; returns the summary."""
  workdir = pathlib.Path(workdir)
  run = load(exchange, workdir)
  accounting = accounting_lib.account(run)
  summary = _summary(run, accounting, workdir)
  _replace(workdir / SUMMARY, json.dumps(summary, indent=2) + "\n")
  _replace(workdir / REPORT, page.render(run, accounting, summary))
  _write_trace(workdir, trace.render(run, accounting))
  return summary


def text(summary: dict[str, Any]) -> str:
  """The summary on one screen."""
  return story.screen(summary)


def _write_trace(workdir: pathlib.Path, content: str) -> None:
  """trace.json, or trace.json.gz if it is long; Perfetto opens both."""
  plain, packed = workdir / TRACE, workdir / f"{TRACE}.gz"
  if len(content) > _TRACE_BYTES_MAX:
    _replace(packed, gzip.compress(content.encode()))
    plain.unlink(missing_ok=True)
  else:
    _replace(plain, content)
    packed.unlink(missing_ok=True)


def _replace(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file whole or not at all."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  data = content.encode() if isinstance(content, str) else content
  temporary.write_bytes(data)
  temporary.replace(path)


def _summary(
  run: Run, accounting: Accounting, workdir: pathlib.Path
) -> dict[str, Any]:
  accounts = {i: _account(run, i) for i in accounting.learners}
  total = ledger.total(accounts.values())
  head = ledger.headline(total, run.num_fragments)
  up, down = traffic(run)
  started = datetime.datetime.fromtimestamp(
    accounting.origin_ns / SECOND_NS, datetime.UTC
  )
  counted = [len(r.counted) for r in run.syncer.rounds.values() if r.counted]
  faults = [line for session in run.sessions for line in session.faults]
  return {
    "status": str(run.status),
    "reason": run.reason,
    "story": story.sentences(run, accounting, head),
    "run_id": run.run_id,
    "config_hash": run.config_sha256,
    "seed": run.config.seed,
    "started": started.isoformat(timespec="seconds"),
    "wall_s": round(accounting.wall_ns / SECOND_NS, 3),
    "rounds": run.verdicts.committed,
    "participants_mean": _mean(counted),
    "tokens_processed": head.processed,
    "tokens_merged": head.merged,
    "tokens_pending": head.pending,
    "tokens_lost": dict(sorted(head.lost.items())),
    "eval": _evaluation(run),
    "params_digest": _params_digest(run),
    "goodput": accounting.goodput,
    "uptime": accounting.uptime,
    "badput": accounting.badput,
    "bytes": {"up": sum(up.values()), "down": sum(down.values())}
    if run.has_arrays
    else None,
    "ledger": {
      "fragments": run.num_fragments,
      "total": _plain(total),
      "learners": {str(i): _plain(a) for i, a in accounts.items()},
    },
    "learners": {str(i): _learner(run, i) for i in accounting.learners},
    "faults": [
      {
        "fault": line.get("fault"),
        "took_effect": line.get("took_effect") is True,
        "evidence": line.get("evidence"),
      }
      for line in faults
    ],
    "warnings": run.warnings + _findings(run, accounting),
    "report": str(workdir / REPORT),
  }


def _account(run: Run, learner: int) -> ledger.Account:
  """A learner's ledger, balanced for every fragment, summed over them."""
  accounts = [ledger.Account() for _ in range(run.num_fragments)]
  for life in run.learners.get(learner, []):
    for segment in life.ledger.segments(died=run.died(life)):
      shares = life.ledger.shares(segment, run.verdicts)
      accounts[segment.fragment].book(segment.tokens, shares)
  return ledger.total(accounts)


def _plain(account: ledger.Account) -> dict[str, Any]:
  values = dataclasses.asdict(account)
  return values | {"lost": dict(sorted(account.lost.items()))}


def _evaluation(run: Run) -> dict[str, Any]:
  initial = [e for e in run.evaluations if e["round"] == 0]
  last = run.evaluations[-1] if run.evaluations else {}
  return {
    "initial_loss": initial[0]["loss"] if initial else None,
    "loss": last.get("loss"),
    "bits_per_byte": last.get("bits_per_byte"),
    "round": last.get("round"),
  }


def _params_digest(run: Run) -> str | None:
  """Of the last round's parameters, if they were evaluated."""
  for evaluation in run.evaluations:
    if evaluation["round"] == run.verdicts.committed:
      return evaluation.get("params_digest")
  return None


def _learner(run: Run, learner: int) -> dict[str, Any]:
  lives = run.learners.get(learner, [])
  fates = [
    fate
    for life in lives
    for fate in life.ledger.answer_fates(
      run.verdicts, died=run.died(life)
    ).values()
  ]
  rejected = collections.Counter(
    "not_written" if fate == ledger.UNANSWERED else fate.split(":")[-1]
    for fate in fates
    if fate not in (ledger.MERGED, ledger.PENDING)
  )
  merged = frozenset().union(
    *(life.ledger.fragments_counted(run.verdicts) for life in lives)
  )
  return {
    "steps": sum(life.steps for life in lives),
    "tokens": sum(life.ledger.tokens for life in lives),
    "answers": len(fates),
    "accepted": fates.count(ledger.MERGED),
    "rejected": dict(sorted(rejected.items())),
    "fragments_never_merged": run.num_fragments - len(merged),
    "incarnations": len(lives),
    **_blocked(lives),
  }


def _blocked(lives: list[LearnerLife]) -> dict[str, float | None]:
  blocked = [life.exchange_ns[life.with_exchange] for life in lives]
  steps = [life.step_ns for life in lives]
  return {
    "blocked_ms_per_round": _percentile_ms(blocked, 50),
    "blocked_ms_p99": _percentile_ms(blocked, 99),
    "step_ms_median": _percentile_ms(steps, 50),
  }


def _percentile_ms(parts: list[np.ndarray], q: int) -> float | None:
  values = np.concatenate(parts) if parts else np.zeros(0)
  if not len(values):
    return None
  return round(float(np.percentile(values, q)) / MILLISECOND_NS, 3)


def _mean(values: list[int]) -> float | None:
  return round(sum(values) / len(values), 3) if values else None


def _findings(run: Run, accounting: Accounting) -> list[str]:
  """What somebody should look at, besides unreadable records."""
  found = []
  for session in run.sessions:
    for who in session.given_up:
      found.append(f"{who} was given up after repeated failures")
    for line in session.faults:
      if line.get("took_effect") is not True:
        why = (line.get("evidence") or {}).get("why", "no proof that it did")
        found.append(f"a fault took no effect: {line.get('fault')} ({why})")
  for key, (before, after) in run.changes.items():
    found.append(f"resumed with {key} = {after!r}, was {before!r}")
  for learner, lives in run.learners.items():
    steps = sum(life.steps for life in lives)
    counted = any(life.ledger.fragments_counted(run.verdicts) for life in lives)
    if steps and not counted and run.verdicts.committed:
      found.append(
        f"learner {learner} stepped {steps} times and none of its answers was "
        "counted"
      )
  complete = run.status is Status.COMPLETED
  if complete and run.has_arrays and not run.evaluations:
    found.append("no evaluation ran, or eval.jsonl has none that can be read")
  return found
