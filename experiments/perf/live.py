"""Measures the live system against its targets; prints, asserts nothing.

  python -m experiments.perf.live --output=live.json [--quickstart=WORKDIR]

Five measurements, about six minutes on two cores (with a finished quickstart
given, three and a half):
  1. what the exchange costs a learner's own thread, per round;
  2. the step time with the exchange on over off, in alternating blocks;
  3. last needed answer written to commit seen, learners asleep;
  4. a kill -9: the gap between commits, and steps lost by the others;
  5. the quickstart's held-out loss, its killed learner back and answering.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from experiments.perf import report, tapes

OUTPUT = flags.DEFINE_string("output", "", "Where the JSON goes.")
QUICKSTART = flags.DEFINE_string(
  "quickstart", "", "A finished quickstart's workdir; default: run one."
)
_CONFIG = "--config=experiments/perf/config.py"
_KILLS = (60, 140, 220, 300)  # rounds; each life needs some 50 to come back


def main(argv: list[str]) -> None:
  """Runs the measurements one after the other."""
  del argv
  targets = []
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    for measure in (_overhead, _round_trip, _kill, _quickstart):
      print(f"{measure.__doc__.splitlines()[0]}", file=sys.stderr)
      targets += measure(root / measure.__name__)
  report.publish(targets, OUTPUT.value)


def _overhead(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """1, 2: one learner on a core of its own, exchange on and off."""
  cores = sorted(os.sched_getaffinity(0))
  config = f"{_CONFIG}:model"
  syncer = _start(
    ["launch.syncer", config, f"--workdir={workdir}"], workdir, cores[-1:]
  )
  try:
    out = _start(
      ["experiments.perf.overhead", config, f"--workdir={workdir}"],
      workdir,
      cores[:1],
      stdout=subprocess.PIPE,
    ).communicate()[0]
  finally:
    syncer.terminate()
    syncer.wait()
  measured = json.loads(out.splitlines()[-1])
  pairs = zip(measured["on"], measured["off"], strict=True)
  medians = [
    report.median_interval(on)[0] / report.median_interval(off)[0]
    for on, off in pairs
  ]
  return [
    report.target(
      "own thread's exchange time per round, 0.5 M parameters",
      measured["exchange_ms"],
      "ms",
      10.0,
    ),
    report.target("step time, exchange on over off", medians, "ratio", 1.03),
  ]


def _round_trip(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """3: last needed answer written to commit seen, learners asleep."""
  _local(workdir, "--config.sync.quorum_min=2")
  syncer = _records(workdir, "syncer")
  learners = [_records(workdir, f"learner-{i}") for i in range(2)]
  written = [
    {e.round: e.now_ns for e in tapes.events(r, "AnswerWritten")}
    for r in learners
  ]
  seen = [
    {e.round: e.now_ns for e in tapes.events(r, "CommitSeen")} for r in learners
  ]
  trips_ms = []
  for merge in tapes.commands(syncer, "Merge")[20:]:
    t = merge.round
    answers = [written[c.learner].get(t) for c in merge.counted]
    if None in answers:
      continue
    trips_ms += [(s[t] - max(answers)) / 1e6 for s in seen if t in s]
  return [
    report.target(
      "last needed answer written to commit seen", trips_ms, "ms", 50.0
    )
  ]


def _kill(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """4: kill -9 of one of three sleeping learners, four times."""
  _local(
    workdir,
    "--config.learners.count=3",
    "--config.stop.rounds=380",
    "--faults="
    + ";".join(f"at round {t} kill learner 1 for 2s" for t in _KILLS),
  )
  # The journal has the wall clock; this machine's tapes the monotonic one.
  offset_ns = time.time_ns() - time.monotonic_ns()
  journal = map(json.loads, (workdir / "launch.jsonl").read_text().splitlines())
  kills = [
    line["unix_ns"] - offset_ns
    for line in journal
    if line["what"] == "exit" and line["code"] == -9
  ]
  committed = tapes.events(_records(workdir, "syncer"), "Committed")[20:]
  gaps = tapes.gaps_ms(committed)
  usual_ms = report.median_interval(gaps)[0]
  beyond, lost = [], []
  others = [_records(workdir, f"learner-{i}") for i in (0, 2)]
  steps = [tapes.events(records, "StepDone")[3:] for records in others]
  step_ms = report.median_interval(tapes.gaps_ms(steps[0]))[0]
  for kill_ns in kills:
    after = next(i for i, e in enumerate(committed) if e.now_ns > kill_ns)
    beyond.append(gaps[after - 1] - usual_ms)
    lost.append(sum(_steps_lost(done, kill_ns, step_ms) for done in steps))
  return [
    report.target(
      "commit gap around a kill -9, beyond the usual one",
      beyond,
      "ms",
      round(step_ms, 1),  # the longest grace there is
    ),
    report.target("inner steps the others lost to it", lost, "steps", 0),
  ]


def _steps_lost(done: list[Any], kill_ns: int, step_ms: float) -> int:
  """Steps missing within two seconds of a kill, by the gaps between them."""
  gaps = zip(tapes.gaps_ms(done), done[1:], strict=True)
  return sum(
    max(round(gap / step_ms) - 1, 0)
    for gap, event in gaps
    if abs(event.now_ns - kill_ns) < 2e9
  )


def _quickstart(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """5: the quickstart, its killed learner back and answering."""
  if QUICKSTART.value:
    workdir = pathlib.Path(QUICKSTART.value)
  else:
    _run(
      [
        "launch.local",
        "--config=experiments/quickstart/config.py",
        f"--workdir={workdir}",
      ]
    )
  summary = json.loads((workdir / "summary.json").read_text())
  killed = [f["fault"]["who"] for f in summary["faults"] if f["took_effect"]]
  number = killed[0].removeprefix("learner ")
  lives = tapes.read(workdir, f"learner-{number}")
  merges = [
    merge
    for records in tapes.read(workdir, "syncer").values()
    for merge in tapes.commands(records, "Merge")
  ]
  counted_again = sum(
    (c.learner, c.incarnation) == (int(number), max(lives))
    for merge in merges
    for c in merge.counted
  )
  return [
    report.target(
      "quickstart: held-out loss",
      [summary["eval"]["loss"]],
      "nats/B",
      2.0,
    ),
    # Stated as "not fewer than", hence the sign.
    report.target(
      "quickstart: minus answers counted of the killed learner's new life",
      [-counted_again],
      "answers",
      -1,
    ),
  ]


# --- Running things ---------------------------------------------------------


def _records(workdir: pathlib.Path, actor: str) -> tapes.Records:
  """The first life of an actor."""
  return tapes.read(workdir, actor)[1]


def _local(workdir: pathlib.Path, *arguments: str) -> None:
  _run(
    ["launch.local", f"{_CONFIG}:sleeping", f"--workdir={workdir}", *arguments]
  )


def _run(arguments: list[str]) -> None:
  subprocess.run(
    [sys.executable, "-m", *arguments], check=True, stdout=subprocess.DEVNULL
  )


def _start(
  arguments: list[str],
  workdir: pathlib.Path,
  cores: list[int],
  stdout: int | None = None,
) -> subprocess.Popen:
  """A command on these cores only."""
  workdir.mkdir(parents=True, exist_ok=True)
  pinned = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m"]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1"}
  return subprocess.Popen([*pinned, *arguments], stdout=stdout, env=environment)


if __name__ == "__main__":
  app.run(main)
