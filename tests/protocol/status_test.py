"""The message for the person on call names the round and everybody."""

from ddiloco.protocol import status
from ddiloco.types import Refusal
from tests.protocol.scenario import STEP_NS, Syncer, make_rules


def _message(syncer):
  return status.waiting_for(syncer.state, syncer.now_ns, syncer.rules)


def test_a_missing_quorum_names_who_is_there_and_who_is_not():
  syncer = Syncer(make_rules(quorum_min=3))
  for learner in range(3):
    syncer.member(learner)
  syncer.answers(1, learner=0)
  syncer.now_ns += 150 * STEP_NS
  syncer.member(0, beat=2)
  syncer.member(2, beat=2, left=True)
  message = _message(syncer)
  assert "round 1 waits for 2 more answers (quorum 3)" in message
  assert "answered: learner 0" in message
  assert "alive without an answer: none" in message
  assert "learner 1 (silent for 15 s), learner 2 (left)" in message


def test_refused_answers_are_named_with_their_reason():
  syncer = Syncer(make_rules())
  syncer.offers(1, learner=4, run_id="another")
  assert f"refused: learner 4: {Refusal.FOREIGN_RUN}" in _message(syncer)


def test_a_round_that_closes_says_what_it_is_doing():
  syncer = Syncer(make_rules())
  syncer.answers(1)
  assert "round 1 is closed and being merged" in _message(syncer)
