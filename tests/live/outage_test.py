"""Whole runs whose store goes away, for a while or for good."""

import collections
import json
import time

import pytest

from ddiloco.chaos import proxy as proxies
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys, learner_types, tape
from tests.live import processes, stores
from tests.live.processes import DEADLINE_S, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]

STORE_DEADLINE_S = 0.5
OUTAGE_S = 6 * STORE_DEADLINE_S
ROUNDS = 12


def newest_round(exchange):
  rounds = map(keys.commit_round, exchange.list(keys.COMMITS))
  return max((t for t in rounds if t is not None), default=-1)


def lives(exchange):
  """(header, records) of every life that left a tape, by actor."""
  segments = collections.defaultdict(list)
  for key in exchange.list("tape/"):
    segment = tape.decode_segment(exchange.get(key).value)
    segments[segment.actor, segment.incarnation].append(segment)
  found = collections.defaultdict(list)
  for (actor, _), own in sorted(segments.items()):
    found[actor].append(tape.join(own))
  return found


def steps_between(life, begin_ns, end_ns):
  header, records = life
  offset_ns = header.started_unix_ns - header.started_ns
  return sum(
    begin_ns < record.event.now_ns + offset_ns < end_ns
    for record in records
    if isinstance(record.event, learner_types.StepDone)
  )


def exits(workdir):
  """The exit codes of every process so far, by role."""
  found = collections.defaultdict(list)
  for line in processes.journal(workdir):
    if line["what"] == "exit":
      found[line["who"]].append(line["code"])
  return found


def wait_for_rounds(run, exchange, rounds):
  def reached():
    assert run.process.poll() is None, run.explain()
    return newest_round(exchange) >= rounds

  wait_for(f"round {rounds}", reached, DEADLINE_S)


def test_an_outage_far_beyond_the_deadline_costs_no_process(tmp_path):
  workdir = tmp_path / "run"
  bucket = stores.new_bucket()
  with (
    proxies.proxy_of(stores.s3_port()) as proxy,
    processes.commands_in(tmp_path) as commands,
  ):
    flags = processes.run_flags(
      workdir, stop_rounds=ROUNDS, live_store_deadline_s=STORE_DEADLINE_S
    )
    url = stores.s3_url(bucket, port=proxy.port)
    run = commands.start("local", *flags, f"--exchange={url}", workdir=workdir)
    direct = TensorStoreExchange(stores.s3_url(bucket))
    wait_for_rounds(run, direct, 4)
    # It begins while the syncer stores or commits what it has merged.
    unable = proxy.inject(
      proxies.error(503, "SlowDown"), "PUT .*/run/(state|commit)/"
    )
    wait_for("write that fails", lambda: unable.hits, DEADLINE_S)
    away = proxy.inject(proxies.error(503, "SlowDown"))
    begin_ns, begin_s = time.time_ns(), time.monotonic()
    log = workdir / "logs/syncer.log"
    wait_for(
      "word from the syncer that its exchange is away",
      lambda: "the exchange has been away" in log.read_text(),
      DEADLINE_S,
    )
    wait_for(
      "end of the outage",
      lambda: time.monotonic() - begin_s > OUTAGE_S,
      DEADLINE_S,
    )
    before, end_ns = newest_round(direct), time.time_ns()
    proxy.lift(unable)
    proxy.lift(away)
    assert run.finish() == 0, run.explain()
  assert away.hits > 20
  assert 4 <= before < ROUNDS == newest_round(direct)
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["status"] == "completed" and summary["rounds"] == ROUNDS
  codes = exits(workdir)
  for name in ("syncer", "learner 0", "learner 1"):
    assert codes[name] == [0], f"{name} was restarted"
  assert codes["evaluator"][-1] == 0
  assert "the exchange is back: put" in log.read_text()
  found = lives(direct)
  assert {actor: len(own) for actor, own in found.items()} == {
    "syncer": 1,
    "learner-0": 1,
    "learner-1": 1,
  }
  for actor in ("learner-0", "learner-1"):
    # Some 20 ms a step; the machine may be busy.
    assert steps_between(found[actor][0], begin_ns, end_ns) > 20
  # Answers of before, and of during, the outage were not in vain.
  ledger = summary["ledger"]["total"]
  assert ledger["merged"] > 0 and not any(
    name.startswith("refused") for name in ledger["lost"]
  )


def test_an_emptied_exchange_ends_the_run_and_is_not_begun_anew(tmp_path):
  workdir = tmp_path / "run"
  folder, aside = workdir / "exchange", tmp_path / "aside"
  with processes.commands_in(tmp_path) as commands:
    flags = processes.run_flags(workdir, stop_rounds=10**6)
    run = commands.start("local", *flags, workdir=workdir)
    wait_for_rounds(run, TensorStoreExchange(str(folder)), 4)
    aside.mkdir()
    for name in ("commit", "state"):
      (folder / name).rename(aside / name)
    assert run.finish() == 1, run.explain()
  assert "the run is gone" in run.stderr and "restarted" not in run.stderr
  # Nobody has begun another run there, and what there was is whole.
  assert newest_round(TensorStoreExchange(str(folder))) != 0
  assert not (folder / keys.commit(0)).exists()
  assert newest_round(TensorStoreExchange(str(aside))) >= 4
