"""The language model after a return: the learning rate that a step applies."""

import math

import pytest

from ddiloco.engine.learner_arrays import LearnerArrays
from ddiloco.protocol import keys, messages
from ddiloco.protocol.learner_types import Joined, Step
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.retention import SWEPT
from ddiloco.sim import history as history_lib
from tests.lm.tiny import tiny_config, write_text
from tests.sim import runs

WARMUP, DECAY = 2_000, 20_000
FAULTS = "at round 16 kill learner 1 for 0.2s"


def expected_rate(config, tokens):
  """Linear up to the peak, a cosine down to its tenth; written out again."""
  low, peak = config.final_fraction, config.learning_rate
  if tokens < WARMUP:
    return peak * (low + (1 - low) * tokens / WARMUP)
  done = min((tokens - WARMUP) / (DECAY - WARMUP), 1)
  return peak * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  "every_steps, donors, source",
  [(5, 0, "restored"), (0, 2, "donor")],
  ids=["own checkpoint", "a peer's state"],
)
def test_the_rate_is_right_from_the_first_step(
  tmp_path, monkeypatch, every_steps, donors, source
):
  """That of the run's tokens, as of the commit which the new life joins at."""
  applied, dispatch = {}, LearnerArrays.step

  def step(self, command):
    result = dispatch(self, command)
    rate = float(result.metrics["learning_rate"])
    applied.setdefault(id(self), (self, []))[1].append((command, rate))
    return result

  monkeypatch.setattr(LearnerArrays, "step", step)
  config = tiny_config(
    write_text(tmp_path / "text"),
    sync={"num_fragments": 4, "interval_steps": 4, "quorum_min": 1},
    inner={"warmup": WARMUP, "decay": DECAY},
    live={"checkpoint_every_steps": every_steps},
    recovery={"donors_max": donors},
    stop={"rounds": 45},
  )
  (tmp_path / "run").mkdir()
  _, store = runs.run(tmp_path / "run", config, faults=FAULTS, seed=4)
  tokens = {
    keys.commit_round(name): messages.decode(Commit, store.objects[name]).tokens
    for name in store.list(keys.COMMITS)
    if store.objects[name] != SWEPT
  }
  lives = {life.name: life for life in history_lib.load(store).lives}
  life = lives["learner-1, life 2"]
  assert getattr(life.header, source) is not None
  joined = life.records[0].event
  assert isinstance(joined, Joined)
  begun = next(
    command
    for record in life.records
    for command in record.commands
    if isinstance(command, Step)
  )
  (own,) = [steps for _, steps in applied.values() if steps[0][0] == begun]
  for command, rate in own:
    assert rate == pytest.approx(
      expected_rate(config.inner, command.run_tokens), rel=1e-5
    )
  first, rate = own[0]
  assert first.run_tokens == joined.run_tokens > WARMUP
  assert first.seen == joined.seen > 16
  assert tokens.get(joined.seen, joined.run_tokens) == joined.run_tokens
  assert rate != pytest.approx(expected_rate(config.inner, 0), rel=0.05)
