"""summary.json: exact sums, strict JSON, and honest about what is missing."""

import dataclasses
import json

import pytest

from ddiloco.protocol import learner_types as lt
from ddiloco.protocol import messages
from ddiloco.report import summary
from ddiloco.types import Refusal
from tests.report.history import (
  RUN,
  History,
  apply,
  encode,
  journal,
  killed_run,
  ms,
)

KEYS = (
  "status config_hash seed run_id rounds tokens_processed tokens_merged"
  " tokens_pending tokens_lost ledger eval goodput uptime badput bytes"
  " participants_mean params_digest wall_s started faults warnings learners"
).split()


def balanced(result):
  """Asserts every sum that a summary promises."""
  lost = sum(result["tokens_lost"].values())
  parts = result["tokens_merged"] + result["tokens_pending"] + lost
  assert parts == result["tokens_processed"]
  ledger = result["ledger"]
  accounts = [*ledger["learners"].values(), ledger["total"]]
  for account in accounts:
    lost = sum(account["lost"].values())
    assert account["merged"] + account["pending"] + lost == account["processed"]
  for key in ("processed", "merged", "pending"):
    assert ledger["total"][key] == sum(a[key] for a in accounts[:-1])
  total = ledger["total"]["processed"]
  assert total == result["tokens_processed"] * ledger["fragments"]


def test_a_killed_learner(tmp_path):
  result = summary.write(killed_run(tmp_path), tmp_path)
  assert set(KEYS) <= result.keys()
  balanced(result)
  assert json.loads((tmp_path / "summary.json").read_text()) == result
  assert result["status"] == "completed"
  assert (result["run_id"], result["rounds"]) == (RUN, 4)
  assert (result["tokens_processed"], result["tokens_merged"]) == (84, 39)
  assert result["tokens_lost"] == {"died": 18, "overwritten": 21}
  assert result["ledger"]["learners"]["1"] == {
    "processed": 60,
    "merged": 6,
    "pending": 12,
    "lost": {"died": 36, "overwritten": 6},
  }
  assert result["eval"]["initial_loss"] == 5.5
  assert (result["eval"]["loss"], result["eval"]["round"]) == (2.25, 4)
  assert result["params_digest"] == "d4"
  assert result["participants_mean"] == 1.25
  assert result["started"] == "2027-01-15T08:00:00+00:00"
  (fault,) = result["faults"]
  assert fault["took_effect"] and fault["evidence"]["exit_code"] == -9
  learner = result["learners"]["1"]
  assert (learner["steps"], learner["tokens"]) == (5, 30)
  assert (learner["answers"], learner["accepted"]) == (2, 1)
  assert learner["rejected"] == {"late": 1}
  assert learner["incarnations"] == 2
  assert learner["fragments_never_merged"] == 1
  assert learner["step_ms_median"] == 1000
  assert result["warnings"] == []


def test_its_story(tmp_path):
  result = summary.write(killed_run(tmp_path), tmp_path)
  assert result["story"] == [
    "Completed: 4 rounds, 84 tokens in 10.1 s by 2 learners.",
    "Held-out loss went from 5.500 to 2.250 nats per byte.",
    "Learner 1 was killed at 6.0 s and was back after 3.0 s with a fresh inner "
    "optimizer; nobody else lost a step.",
  ]
  text = summary.text(result)
  assert str(tmp_path / "report.html") in text
  for part in (*result["story"], "goodput", "learner 1", "2.2500"):
    assert part in text
  assert len(text.splitlines()) <= 24
  assert max(len(line) for line in text.splitlines()[3:]) <= 110


def test_bytes_both_ways(tmp_path):
  history = History()
  syncer = history.syncer().open(1, history.make_commit(0))
  syncer.answer(2, 1, 0)
  header = messages.encode(syncer.records[-1].event.header)
  syncer.write()
  tape = history.learner(0, at=0).join(1).step(2, encode(1, 1))
  tape.written(2, 1).step(3, encode(1, 1, attempt=2)).written(3, 1, 2)
  tape.step(4, encode(1, 1, attempt=3))  # never written
  tape.seen(5, 1, fetch=[1]).fetched(6, 1).seen(7, 2, fetch=[0]).write()
  sizes = summary.summarise(history, tmp_path)["bytes"]
  # The second answer, which the syncer never saw, is as long as the first.
  assert sizes["up"] == 2 * (40 + len(header))
  assert sizes["down"] == 200 + 100  # joining, and one fetch that ended


def test_blocked_time_is_of_steps_with_exchange_work(tmp_path):
  history = History()
  tape = history.learner(0, at=0).join(1).step(2, encode(1, 1))
  tape.step(3, apply(1, 1), exchange=ms(5)).step(4, exchange=ms(3))
  tape.step(5, exchange=ms(100)).write()  # no apply, no encode before it
  learner = summary.summarise(history, tmp_path)["learners"]["0"]
  assert learner["blocked_ms_per_round"] == 4
  assert learner["blocked_ms_p99"] == pytest.approx(4.98)


def test_refusals_by_reason(tmp_path):
  history = History()
  syncer = history.syncer().open(1, history.make_commit(0))
  syncer.answer(2, 1, 0).checked(2, 1, 0, reason=Refusal.CHECKSUM)
  syncer.whole_round(1, 3, [1]).write()
  tape = history.learner(0, at=0).join(1).step(2, encode(1, 1))
  tape.written(2, 1).seen(4, 1, fetch=[1]).fetched(4, 1)
  tape.step(5, apply(1, 1)).step(6, encode(2, 0, tokens=18)).write()
  result = summary.summarise(history, tmp_path)
  balanced(result)
  assert result["learners"]["0"]["rejected"] == {"checksum": 1}
  lost = result["ledger"]["learners"]["0"]["lost"]
  assert lost == {"refused:checksum": 6, "overwritten": 6}


def test_a_damaged_tape_is_told(tmp_path):
  history = killed_run(tmp_path)
  history.objects["tape/learner-0.1/000000001"] = b"x"
  result = summary.write(history, tmp_path)
  balanced(result)
  (warning,) = result["warnings"]
  assert warning.startswith("tape of learner-0, life 1: segment 1 is damaged: ")
  assert warning in summary.text(result)
  assert "segment 1 is damaged" in (tmp_path / "report.html").read_text()


def test_no_tapes_at_all(tmp_path):
  result = summary.write(History(), tmp_path)
  balanced(result)
  assert (result["status"], result["rounds"]) == ("stopped", 0)
  assert result["goodput"] is None and result["uptime"] is None
  assert result["eval"]["loss"] is None
  assert "not evaluated" in summary.text(result)


def test_no_run(tmp_path):
  history = History()
  history.objects.clear()
  with pytest.raises(summary.NoRun, match="there is no run in"):
    summary.write(history, tmp_path)
  history.objects["commit/000000000"] = b"x"
  with pytest.raises(summary.NoRun, match="commit 0 of the run is damaged"):
    summary.write(history, tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_a_foreign_tape_is_left_out(tmp_path):
  history, other = History(), History()
  tape = other.learner(0, at=0).join(1).step(2)
  object.__setattr__(tape.header, "run_id", "other")
  tape.write()
  history.objects |= {k: v for k, v in other.objects.items() if "tape" in k}
  result = summary.summarise(history, tmp_path)
  assert result["tokens_processed"] == 0
  assert "belongs to another run" in result["warnings"][0]


def test_a_run_is_complete_whichever_shard_has_seen_it(tmp_path):
  history = History(syncer={"shards": 2})
  for life, stopped in ((1, True), (2, False)):
    shard = history.syncer(life=life).open(1, history.make_commit(0))
    (shard.stop(5) if stopped else shard).write()
  assert summary.summarise(history, tmp_path)["status"] == "completed"


@pytest.mark.parametrize(
  "stop, end, status",
  [
    ("completed", None, "completed"),
    ("SIGTERM", None, "stopped"),
    (None, None, "stopped"),
    ("SIGTERM", "failed", "failed"),
    (None, "completed", "completed"),
    ("completed", "nonsense", "completed"),
  ],
)
def test_status(stop, end, status, tmp_path):
  history = History()
  tape = history.syncer().open(1, history.make_commit(0))
  if stop:
    tape.stop(2, stop)
  tape.write()
  if end:
    journal(tmp_path, (3, "end", {"status": end, "reason": "two\nlines."}))
  result = summary.summarise(history, tmp_path)
  assert result["status"] == status
  if status == "failed":
    assert result["story"][1] == "Reason: two."


def test_what_somebody_should_look_at(tmp_path):
  history = killed_run(tmp_path)
  history.learner(2, at=1).join(2).step(3).stop(9).write()
  (tmp_path / "eval.jsonl").unlink()
  fault = {"fault": {"what": "kill"}, "evidence": {"why": "too late"}}
  journal(
    tmp_path,
    (20, "start", {"who": "syncer", "pid": 1}),
    (21, "give_up", {"who": "learner 3", "code": 1}),
    (22, "fault", {**fault, "took_effect": False}),
    (23, "end", {"status": "completed", "reason": ""}),
  )
  changed = history.config.to_dict() | {"faults": "at 5s stop learner 1"}
  stored = json.dumps({"config": changed})
  (tmp_path / "config.json").write_text(stored)
  warnings = summary.summarise(history, tmp_path)["warnings"]
  for part in (
    "learner 3 was given up",
    "took no effect: {'what': 'kill'} (too late)",
    "resumed with faults = 'at 5s stop learner 1', was ''",
    "learner 2 stepped 1 times and none of its answers was counted",
    "no evaluation ran",
  ):
    assert any(part in warning for warning in warnings), part


def test_others_that_lost_steps_are_not_praised(tmp_path):
  history = killed_run(tmp_path)
  stalled = history.learner(2, at=0.5).join(1)
  for i in range(20):
    stalled.step(1.1 + i / 10)
  stalled.step(9).stop(10).write()
  (death, stall) = summary.summarise(history, tmp_path)["story"][2:]
  assert death == (
    "Learner 1 was killed at 6.0 s and was back after 3.0 s with a fresh inner "
    "optimizer."
  )
  assert stall.startswith("Learner 2 stood still for 5.9 s at ")


@pytest.mark.parametrize(
  "header, words",
  [
    ({"restored": (1, 20)}, "from its checkpoint"),
    ({"donor": (2, 1, 40)}, "with the state of learner 2"),
  ],
)
def test_it_tells_what_a_learner_went_on_from(tmp_path, header, words):
  history = History()
  history.syncer(at=0).open(0, history.make_commit(0)).write()
  history.learner(1, at=0).join(1).step(2).write()
  again = history.learner(1, life=2, at=5)
  again.header = dataclasses.replace(again.header, **header)
  again.join(6).step(7).stop(9).write()
  (death,) = summary.summarise(history, tmp_path)["story"][1:]
  assert death.endswith(f"and was back after 4.0 s {words}.")


def test_it_tells_whose_place_a_standby_took(tmp_path):
  """Of two shards; the first goes on without a word of it."""
  history = History(syncer={"shards": 2})
  first, second, again = (
    history.syncer(life=life, at=at) for life, at in ((1, 0), (2, 0), (4, 4))
  )
  for tape, pid in ((first, 1), (second, 2), (again, 3)):
    tape.header = dataclasses.replace(tape.header, pid=pid)
  first.open(1, history.make_commit(0)).write()
  second.open(1, history.make_commit(0)).write()
  again.open(5, history.make_commit(0)).whole_round(1, 6, [0]).write()
  history.learner(0, at=0).join(1).step(8).write()
  journal(
    tmp_path,
    *(
      (0, "start", {"who": who, "pid": pid})
      for pid, who in enumerate(("syncer", "syncer 1", "standby 1"), 1)
    ),
    (2, "exit", {"who": "syncer 1", "pid": 2, "code": -9}),
  )
  told = summary.summarise(history, tmp_path)["story"]
  assert (
    "The syncer's shard 1 was killed at 2.0 s and committed again after 4.0 s "
    "by standby 1; no learner lost a step."
  ) in told


def test_many_deaths_are_summed_up(tmp_path):
  history = History()
  for life in range(1, 8):
    tape = history.learner(0, life=life, at=life * 10).join(life * 10 + 1)
    tape.step(life * 10 + 2).write()
  story = summary.summarise(history, tmp_path)["story"]
  assert (
    "6 lives ended before the run did; 6 came back, after 9.0 s in the median "
    "and 9.0 s at most." in story
  )


def test_control_characters_do_not_reach_the_terminal(tmp_path):
  history = killed_run(tmp_path)
  fault = {"fault": "\x1b[2Jboo", "took_effect": False}
  journal(tmp_path, (9, "fault", fault), (11, "end", {"status": "failed"}))
  text = summary.text(summary.summarise(history, tmp_path))
  assert "boo" in text and "\x1b" not in text


def test_loss_that_is_not_finite(tmp_path):
  history = killed_run(tmp_path)
  tape = history.learner(3, at=1).join(2)
  for i in range(5):
    tape.step(3 + i, loss=3.4e38)
  tape.stop(9).write()
  with open(tmp_path / "eval.jsonl", "a") as file:
    file.write('{"unix_ns": 1, "round": 4, "tokens": 9, "loss": NaN}\n')
  result = summary.write(history, tmp_path)
  assert "the evaluation of round 4 is left out" in result["warnings"][0]
  assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_a_life_missing_at_the_end_of_a_completed_run_died(tmp_path):
  history = History()
  sync = history.syncer().open(1, history.make_commit(0))
  sync.whole_round(1, 3, [0]).stop(3.1).write()
  for learner in (0, 1):
    tape = history.learner(learner, at=0).join(1).step(2, encode(1, 1))
    tape.written(2, 1).step(3)
    (tape.stop(3.1) if learner == 0 else tape).write()
  result = summary.summarise(history, tmp_path)
  balanced(result)
  accounts = result["ledger"]["learners"]
  assert accounts["0"]["lost"] == {} and accounts["0"]["pending"] == 18
  assert accounts["1"]["lost"] == {"died": 18, "late": 6}


@pytest.mark.parametrize("looked", [True, False])
def test_a_write_that_failed_may_have_succeeded(looked, tmp_path):
  history = History()
  syncer = history.syncer().open(1, history.make_commit(0))
  syncer.whole_round(1, 2, [1])
  if looked:
    syncer.answer(3, 1, 0, check=False)
  syncer.write()
  tape = history.learner(0, at=0).join(1).step(2, encode(1, 1))
  tape.record(lt.AnswerFailed(tape.now(2.5), 1, 1, "no reply"))
  tape.seen(4, 1, fetch=[1]).fetched(4, 1).step(5, apply(1, 1)).write()
  result = summary.summarise(history, tmp_path)
  reason, cause = ("late", "late") if looked else ("not_written", "unanswered")
  assert result["learners"]["0"]["rejected"] == {reason: 1}
  lost = result["ledger"]["learners"]["0"]["lost"]
  assert lost == ({"late": 6, "overwritten": 6} if looked else {cause: 12})
