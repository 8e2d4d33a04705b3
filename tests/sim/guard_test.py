"""What a learner's own guards keep from the others, in a simulated run."""

import json

import numpy as np

from ddiloco.config import from_dict
from ddiloco.protocol import keys
from ddiloco.protocol import learner as machine
from ddiloco.protocol.learner_types import AnswerFailed, StepDone, Stop
from ddiloco.sim import history as history_lib
from ddiloco.types import Exit, Refusal
from tests.sim import runs
from tests.sim.small import make_config


def train(tmp_path, **options):
  """A run of two learners to its end: the lives of learner 1, the summary."""
  values = make_config(learners={"slowdown": (1.0,)}).to_dict()
  config = from_dict(values | {"options": options})
  code, store = runs.run(tmp_path, config, seed=2)
  assert code is Exit.OK
  for key in store.list(keys.STATES):
    if key.endswith(".params"):
      assert np.isfinite(np.frombuffer(store.objects[key], "<f4")).all(), key
  lives = [x for x in history_lib.load(store).lives if x.learner == 1]
  return lives, json.loads((tmp_path / "summary.json").read_text())


def events(life, kind):
  return [r.event for r in life.records if isinstance(r.event, kind)]


def test_parameters_that_are_no_numbers_end_a_life_and_nothing_else(tmp_path):
  """The next one goes on from the last checkpoint that was sound."""
  lives, summary = train(tmp_path, nan_at=100)  # its step 26
  first, second = lives
  failed = events(first, AnswerFailed)
  assert [e.refusal for e in failed] == [Refusal.NON_FINITE] * 3
  (stop,) = [
    c for r in first.records for c in r.commands if isinstance(c, Stop)
  ]
  assert stop.reason == machine.DIVERGED
  assert second.header.restored == (1, 20)
  losses = [e.loss for e in events(second, StepDone)]
  assert len(losses) > 10 and max(losses) < 10
  assert summary["tokens_lost"]["refused:non_finite"] > 0


def test_an_answer_far_too_large_stays_at_home(tmp_path):
  lives, summary = train(tmp_path, spike_at=30)
  (life,) = lives
  failed = events(life, AnswerFailed)
  assert failed and {e.refusal for e in failed} == {Refusal.OUTLIER}
  assert summary["tokens_lost"]["refused:outlier"] > 0
