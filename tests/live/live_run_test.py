"""Whole runs of real processes: killed, interrupted, started twice, resumed."""

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import signal
import socket

import pytest

from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys, learner_types, messages, syncer_types, tape
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.retention import SWEPT
from ddiloco.protocol.schedule import Schedule
from tests.live import processes
from tests.live.processes import DEADLINE_S, STOP_DEADLINE_S, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROUNDS, MORE_ROUNDS = 30, 42
SCHEDULE = Schedule(num_fragments=6, interval=6, overlap=2)
FAULTS = "at round 8 kill learner 1 for 0.2s; at round 16 kill syncer"


@dataclasses.dataclass
class Life:
  """One life of an actor, from its tape."""

  header: tape.Header
  records: tuple[tape.Record, ...]

  def events(self, cls):
    return [r.event for r in self.records if isinstance(r.event, cls)]

  def commands(self, cls):
    given = itertools.chain.from_iterable(r.commands for r in self.records)
    return [command for command in given if isinstance(command, cls)]

  def unix_ns(self, now_ns):
    return now_ns - self.header.started_ns + self.header.started_unix_ns


class Evidence:
  """What a run left in its workdir, read without the project's report."""

  def __init__(self, workdir: pathlib.Path, exchange=None):
    self.workdir = workdir
    exchange = exchange or TensorStoreExchange(str(workdir / "exchange"))
    found = {
      keys.commit_round(key): exchange.get(key).value
      for key in exchange.list(keys.COMMITS)
    }
    # Of old commits only the names are kept.
    self.commits = {t: data for t, data in found.items() if data != SWEPT}
    assert set(found) == set(range(max(found) + 1))
    segments = collections.defaultdict(list)
    for key in exchange.list("tape/"):
      segment = tape.decode_segment(exchange.get(key).value)
      segments[segment.actor, segment.incarnation].append(segment)
    self.lives = collections.defaultdict(list)
    for (actor, _), found in sorted(segments.items()):
      self.lives[actor].append(Life(*tape.join(found)))
    newest = messages.decode(Commit, self.commits[max(self.commits)])
    digest = hashlib.sha256()
    for p, ref in enumerate(newest.fragments):
      digest.update(exchange.get(keys.params(ref.version, p, ref.epoch)).value)
    self.params_digest = digest.hexdigest()
    self.summary = json.loads((workdir / "summary.json").read_text())

  def check(self, rounds: int) -> None:
    """Everything that holds for every run which completed."""
    assert self.summary["status"] == "completed"
    assert self.summary["rounds"] == rounds == max(self.commits)
    assert self.summary["params_digest"] == self.params_digest
    assert (self.workdir / "report.html").stat().st_size > 1000
    assert processes.processes_of(self.workdir) == {}
    self._check_commits()
    self._check_counted()
    self.check_tokens()
    summary = self.summary
    total = summary["goodput"] + sum(summary["badput"].values())
    assert total == pytest.approx(1, abs=1e-9)

  def _check_commits(self) -> None:
    """Each commit names the one before; those kept are those recorded."""
    recorded = {
      command.round: command.sha256
      for life in self.lives["syncer"]
      for command in life.commands(tape.CommitDigest)
    }
    kept = sorted(self.commits)
    recent = range(kept[-1] - 2 * SCHEDULE.interval + 1, kept[-1])
    assert kept == [0, *recent, kept[-1]]
    for t in kept[1:]:
      commit = messages.decode(Commit, self.commits[t])
      assert recorded[t] == hashlib.sha256(self.commits[t]).hexdigest()
      if t - 1 in self.commits:
        before = hashlib.sha256(self.commits[t - 1]).hexdigest()
        assert (commit.round, commit.previous) == (t, before)

  def _check_counted(self) -> None:
    """Two learners a round, each measured from the current anchors."""
    merges = [
      merge
      for life in self.lives["syncer"]
      for merge in life.commands(syncer_types.Merge)
      if merge.round in range(1, max(self.commits) + 1)
    ]
    assert {m.round for m in merges} == set(range(1, max(self.commits) + 1))
    for merge in merges:
      assert [item.learner for item in merge.counted] == [0, 1]
      for item in merge.counted:
        assert [(c.fragment, c.anchor) for c in item.contributions] == [
          (p, SCHEDULE.version_before(p, merge.round))
          for p in SCHEDULE.fragments(merge.round)
        ]

  def check_tokens(self) -> None:
    """The ledger balances to the token, and with the tapes."""
    ledger = self.summary["ledger"]
    accounts = ledger["learners"]
    for i, account in accounts.items():
      assert account["processed"] == SCHEDULE.num_fragments * sum(
        event.tokens
        for life in self.lives[f"learner-{i}"]
        for event in life.events(learner_types.StepDone)
      )
    for account in [ledger["total"], *accounts.values()]:
      parts = (account["merged"], account["pending"], *account["lost"].values())
      assert account["processed"] == sum(parts) and min(parts) >= 0
    assert self.summary["tokens_processed"] == (
      self.summary["tokens_merged"]
      + self.summary["tokens_pending"]
      + sum(self.summary["tokens_lost"].values())
    )

  def check_never_waited(self, actor: str) -> None:
    """Each step's end began the next step, but for the last one of a life."""
    judged = 0
    for life in self.lives[actor]:
      ends = [
        record.commands
        for record in life.records
        if isinstance(record.event, learner_types.StepDone)
      ]
      judged += len(ends[:-1])
      for commands in ends[:-1]:
        assert any(isinstance(c, learner_types.Step) for c in commands)
    assert judged > 50  # a life may be short: the run ends when it ends

  def steps_between(self, actor: str, begin_ns: int, end_ns: int) -> int:
    """How many steps an actor ended between two moments, Unix time."""
    return sum(
      begin_ns < life.unix_ns(event.now_ns) < end_ns
      for life in self.lives[actor]
      for event in life.events(learner_types.StepDone)
    )


def when(journal, what, who, nth=0):
  """Unix time of the nth journal line of a kind."""
  lines = [e for e in journal if (e["what"], e.get("who")) == (what, who)]
  return lines[nth]["unix_ns"]


def test_a_run_outlives_its_processes_and_resumes(tmp_path):
  workdir = tmp_path / "run"
  with processes.commands_in(tmp_path) as commands:
    flags = processes.run_flags(workdir, stop_rounds=ROUNDS)
    run = commands.start("local", *flags, f"--faults={FAULTS}", workdir=workdir)
    assert run.finish() == 0, run.explain()
    first = Evidence(workdir)
    first.check(ROUNDS)
    check_faults(first, processes.journal(workdir))
    for line in ("as scripted", "syncer was killed by SIGKILL", "Completed"):
      assert line in run.stderr + run.stdout

    flags = processes.run_flags(workdir, stop_rounds=MORE_ROUNDS)
    again = commands.start("local", *flags, workdir=workdir)
    assert again.finish() == 0, again.explain()
    second = Evidence(workdir)
    second.check(MORE_ROUNDS)
  assert second.summary["run_id"] == first.summary["run_id"]
  assert len(second.lives["syncer"]) == 3
  assert second.summary["tokens_processed"] > first.summary["tokens_processed"]
  changes = (workdir / "config_changes.jsonl").read_text()
  assert json.loads(changes)["stop.rounds"] == [ROUNDS, MORE_ROUNDS]


def check_faults(evidence, journal):
  faults = evidence.summary["faults"]
  assert [fault["took_effect"] for fault in faults] == [True, True]
  for fault in faults:
    assert fault["evidence"]["exit_code"] == -signal.SIGKILL
  assert evidence.summary["learners"]["1"]["incarnations"] == 2
  assert evidence.summary["learners"]["0"]["incarnations"] == 1
  assert len(evidence.lives["syncer"]) == 2
  assert evidence.summary["ledger"]["total"]["lost"]["died"] > 0
  evidence.check_never_waited("learner-0")
  # Nobody else's death costs a step: it goes on while they are away.
  for who, actor in (("learner 1", "learner-1"), ("syncer", "syncer")):
    begin_ns = when(journal, "exit", who)
    end_ns = evidence.lives[actor][1].header.started_unix_ns
    assert evidence.steps_between("learner-0", begin_ns, end_ns) >= 5


def test_interrupted_doubled_and_orphaned(tmp_path):
  """One workdir, four sessions: all share what the first has compiled."""
  workdir = tmp_path / "run"
  flags = processes.run_flags(workdir, stop_rounds=10**6)
  with processes.commands_in(tmp_path) as commands:
    run = commands.start("local", *flags, workdir=workdir)
    wait_until_all_step(run)
    check_second_launcher(commands, flags, workdir)
    check_second_syncer(commands, flags, workdir)
    check_second_learner(commands, flags, run)

    run.process.kill()
    run.finish()
    wait_until_gone(workdir, DEADLINE_S)

    before = processes.newest_round(workdir)
    run = commands.start("local", *flags, workdir=workdir)
    wait_until_all_step(run)
    reached = wait_for_rounds(run, before + 5)
    run.interrupt_group()
    wait_until_gone(workdir, STOP_DEADLINE_S)
    assert run.finish() == 4, run.explain()
    assert "the same command goes on" in run.stdout.lower()
    assert json.loads((workdir / "summary.json").read_text())["status"] == (
      "stopped"
    )
    for i in range(2):
      saved = workdir / f"checkpoints/learner-{i}"
      assert any(path.name.isdigit() for path in saved.iterdir())

    # The end that the config names is not a matter of the workdir.
    flags = processes.run_flags(workdir, stop_rounds=reached + 30)
    last = commands.start("local", *flags, workdir=workdir)
    assert last.finish() == 0, last.explain()
  evidence = Evidence(workdir)
  evidence.check(reached + 30)
  evidence.check_never_waited("learner-1")


def wait_until_all_step(run):
  """Until both learners of this session have stepped."""

  def ready():
    assert run.process.poll() is None, run.explain()
    starts = [
      i
      for i, line in enumerate(processes.journal(run.workdir))
      if line["what"] == "start" and line["who"] == "syncer"
    ]
    lines = processes.journal(run.workdir)[starts[-1] if starts else 0 :]
    names = {line["who"] for line in lines if line["what"] == "ready"}
    return {"learner 0", "learner 1"} <= names

  wait_for("learner that steps", ready, DEADLINE_S)


def wait_for_rounds(run, rounds):
  def reached():
    assert run.process.poll() is None, run.explain()
    return processes.newest_round(run.workdir) >= rounds

  wait_for(f"round {rounds}", reached, DEADLINE_S)
  return processes.newest_round(run.workdir)


def wait_until_gone(workdir, deadline_s):
  wait_for(
    "end of all processes",
    lambda: not processes.processes_of(workdir),
    deadline_s,
  )


def started_pid(workdir, who):
  lines = processes.journal(workdir)
  return [
    e["pid"] for e in lines if (e["what"], e.get("who")) == ("start", who)
  ]


def check_second_launcher(commands, flags, workdir):
  second = commands.start("local", *flags, workdir=workdir)
  assert second.finish() == 2
  assert second.stderr.startswith(f"error: {workdir} is in use by another")
  assert second.stderr.count("\n") == 1


def check_second_syncer(commands, flags, workdir):
  second = commands.start("syncer", *flags, workdir=workdir)
  assert second.finish() == 2, second.stderr
  pid = started_pid(workdir, "syncer")[-1]
  assert second.stderr.startswith("error: a syncer is at work in")
  assert f"process {pid} on {socket.gethostname()}" in second.stderr
  assert second.stderr.count("\n") == 1
  os.kill(pid, 0)  # The first one was not disturbed.


def check_second_learner(commands, flags, run):
  """The younger life goes on; the older one says by whom it is replaced."""
  workdir = run.workdir
  log = workdir / "logs/learner-0.log"
  second = commands.start("learner", "--learner=0", *flags, workdir=workdir)
  ended = wait_for(
    "end of the older life",
    lambda: [
      line["code"]
      for line in processes.journal(workdir)
      if line["what"] == "exit" and line["who"] == "learner 0"
    ],
    DEADLINE_S,
  )
  assert ended == [3]
  assert (
    f"superseded by life 2 of learner 0 on {socket.gethostname()}, process "
    f"{second.process.pid}"
  ) in log.read_text()
  # With K = 2, rounds only close if the newer life answers.
  wait_for_rounds(run, processes.newest_round(workdir) + 3)
  assert len(started_pid(workdir, "learner 0")) == 1, "it is not restarted"
  second.process.terminate()
  assert second.finish() == 4, second.stderr
