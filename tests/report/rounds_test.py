"""Rounds, refusals and their reasons, from the syncer's tapes."""

import pytest

from ddiloco.protocol import messages, wire
from ddiloco.protocol import syncer_types as sy
from ddiloco.protocol.messages import Contribution, PartRef
from ddiloco.report.run import load
from ddiloco.types import Refusal
from tests.report.history import UNIX_NS, History, s


def opened(history=None, life=1, at=0.0, committed=0):
  history = history or History()
  commit = history.make_commit(committed)
  return history.syncer(life, at).open(at + 1, commit)


def syncer_of(tape, tmp_path):
  return load(tape.write(), tmp_path).syncer


def test_a_round_and_its_times(tmp_path):
  history = History(quorum=2)
  tape = opened(history).answer(2, 1, 0).answer(3, 1, 1)
  tape.checked(2.5, 1, 0).checked(3.5, 1, 1)
  merge = sy.Merge(
    1, (messages.Counted(0, 1, 1, ()), messages.Counted(1, 1, 1, ()))
  )
  tape.record(sy.Tick(tape.now(4)), merge).merged(5, 1).committed(6, 1)
  syncer = syncer_of(tape, tmp_path)
  round_ = syncer.rounds[1]
  times = [
    (ns - UNIX_NS) / s(1)
    for ns in (
      round_.opened_ns,
      round_.first_ns,
      round_.quorum_ns,
      round_.closed_ns,
      round_.merged_ns,
      round_.committed_ns,
    )
  ]
  assert times == [1, 2, 3.5, 4, 5, 6]
  assert round_.counted == ((0, 1, 1), (1, 1, 1))
  assert syncer.committed == 1


@pytest.mark.parametrize(
  "fields, reason",
  [
    (dict(contributions=(Contribution(1, 7, 1, 6),)), Refusal.STALE_ANCHOR),
    (dict(contributions=(Contribution(1, 0, 0, 6),)), Refusal.COUNTERS),
    (dict(layout="x"), Refusal.LAYOUT),
    (dict(codec="f32"), Refusal.CODEC),
    (dict(run_id="x"), Refusal.FOREIGN_RUN),
    (dict(step_ns=-1), Refusal.MALFORMED),
    (dict(parts=(PartRef(1, ""),)), Refusal.SIZE),
    (dict(parts=()), Refusal.SIZE),
  ],
)
def test_why_a_header_was_refused(fields, reason, tmp_path):
  tape = opened().answer(2, 1, 0)  # which shows what an answer's size is
  tape.answer(3, 1, 1, check=False, **fields)
  assert syncer_of(tape, tmp_path).refused == {(1, 1, 1, 1): reason}


def test_an_old_life_is_superseded(tmp_path):
  tape = opened()
  tape.record(sy.MemberSeen(tape.now(2), 1, 2, 1, False))
  tape.answer(3, 1, 1, life=1, check=False)
  assert syncer_of(tape, tmp_path).refused == {(1, 1, 1, 1): Refusal.SUPERSEDED}


def test_what_a_header_says_comes_before_whose_it_is(tmp_path):
  tape = opened()
  tape.record(sy.MemberSeen(tape.now(2), 1, 2, 1, False))
  tape.answer(3, 1, 1, life=1, check=False, codec="f32")
  assert syncer_of(tape, tmp_path).refused == {(1, 1, 1, 1): Refusal.CODEC}


def test_a_new_life_supersedes_the_checked_answer(tmp_path):
  tape = opened().answer(2, 1, 1).checked(3, 1, 1)
  tape.answer(4, 1, 1, life=2)
  drop = sy.Drop(1, 1, 1, 1)
  tape.checked(5, 1, 1, life=2, then=(drop,))
  assert syncer_of(tape, tmp_path).refused == {(1, 1, 1, 1): Refusal.SUPERSEDED}


@pytest.mark.parametrize("reason", [Refusal.CHECKSUM, Refusal.NON_FINITE])
def test_refused_parts(reason, tmp_path):
  drop = sy.Drop(1, 0, 1, 1)
  tape = opened().answer(2, 1, 0).checked(3, 1, 0, reason=reason, then=(drop,))
  assert syncer_of(tape, tmp_path).refused == {(1, 0, 1, 1): reason}


def test_a_valid_answer_dropped_at_once_is_an_outlier(tmp_path):
  drop = sy.Drop(1, 0, 1, 1)
  tape = opened().answer(2, 1, 0).checked(3, 1, 0, then=(drop,))
  assert syncer_of(tape, tmp_path).refused == {(1, 0, 1, 1): Refusal.OUTLIER}


def test_an_older_attempt_dropped_for_a_newer_is_not_refused(tmp_path):
  tape = opened().answer(2, 1, 0, attempt=1).answer(3, 1, 0, attempt=2)
  tape.checked(4, 1, 0, attempt=2)
  tape.checked(5, 1, 0, attempt=1, then=(sy.Drop(1, 0, 1, 1),))
  assert syncer_of(tape, tmp_path).refused == {}


def test_garbage_is_refused_and_late_answers_are_not(tmp_path):
  tape = opened()
  tape.record(sy.AnswerGarbled(tape.now(2), (1, 1, 1, 1), Refusal.MALFORMED))
  tape.whole_round(1, 3, [0])
  tape.answer(4, 1, 1, attempt=2, check=False)
  tape.record(sy.AnswerGarbled(tape.now(5), (1, 1, 1, 3), Refusal.SIZE))
  syncer = syncer_of(tape, tmp_path)
  assert syncer.refused == {(1, 1, 1, 1): Refusal.MALFORMED}
  assert (1, 1, 1, 2) in syncer.seen


# --- Commits whose outcome no tape tells ------------------------------------


def died_committing(history):
  """A first life whose commit of round 1 was on its way when it died."""
  counted = (messages.Counted(0, 1, 1, ()),)
  tape = opened(history).answer(2, 1, 0)
  tape.checked(3, 1, 0, then=(sy.Merge(1, counted),))
  commit = history.make_commit(1, [(0, 1, 1)])
  digest = wire.sha256(messages.encode(commit))
  tape.merged(4, 1, digest).write()
  return commit


@pytest.mark.parametrize("proof", ["commit", "later life"])
def test_the_commit_was_made(proof, tmp_path):
  history = History()
  commit = died_committing(history)
  if proof == "commit":
    history.objects["commit/000000001"] = messages.encode(commit)
  else:
    opened(history, life=2, at=9, committed=2).write()
  syncer = load(history, tmp_path).syncer
  assert syncer.rounds[1].counted == ((0, 1, 1),)
  assert syncer.rounds[1].closed_ns == UNIX_NS + s(3)


@pytest.mark.parametrize("proof", ["none", "another commit", "another life"])
def test_the_commit_was_not_made(proof, tmp_path):
  history = History()
  died_committing(history)
  if proof == "another commit":
    history.commit(1, [(5, 1, 1)])
  if proof == "another life":
    second = opened(history, life=2, at=9)
    second.whole_round(1, 11, [5]).write()
  rounds = load(history, tmp_path).syncer.rounds
  expected = {} if proof == "none" else {1: ((5, 1, 1),)}
  assert {t: r.counted for t, r in rounds.items()} == expected


def test_commits_stand_in_for_lost_tapes(tmp_path):
  history = History()
  history.commit(1, [(0, 1, 1)], [(1, 1, 1, Refusal.OUTLIER)])
  history.commit(2, [(0, 1, 1)])
  history.objects["commit/000000002"] = b"damaged"
  run = load(history, tmp_path)
  assert run.syncer.rounds[1].counted == ((0, 1, 1),)
  assert run.verdicts.refused == {(1, 1, 1, 1): Refusal.OUTLIER}
  assert run.verdicts.committed == 2
  assert run.warnings[0].startswith("commit/000000002 is damaged")


def test_learners_stand_in_for_the_syncer(tmp_path):
  history = History()
  history.learner(0).join(1).step(2).seen(3, 1, counted=2).write()
  run = load(history, tmp_path)
  assert run.verdicts.counted == {(1, 0, 1): 2}
  assert run.verdicts.committed == 1
