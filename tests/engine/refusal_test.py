"""Whatever is written where an answer is looked for: refused by reason."""

import dataclasses
import math

import numpy as np
import pytest

from ddiloco.engine import startup
from ddiloco.protocol import keys, learner, learner_types, messages, wire
from ddiloco.types import Refusal
from tests.engine.lockstep import RUN_ID, Lockstep
from tests.engine.recovery_test import assert_one_history
from tests.engine.regression import Regression, make_config

FORGER = 2  # a third learner, of which only the answers exist
QUIET_ROUNDS = 18  # enough norms of every fragment to know an outlier


@pytest.fixture(scope="module")
def quorate():
  """Two learners that close rounds by themselves, and a forger's life."""
  return make_world()


def make_world(**codec):
  config = make_config(
    3,
    sync={"quorum_min": 2, "grace": False},
    stop={"rounds": 0, "tokens": 10**6},
    codec={"up": "f32"} | codec,
  )
  world = Lockstep(config, [Regression(m) for m in range(3)])
  world.start_syncer()
  for m in (0, 1):
    world.join(m)
  world.run_job(startup.claim_member(RUN_ID, FORGER, "forger", "host", 1))
  world.run_to_round(QUIET_ROUNDS)
  return world


class Forgery:
  """A good answer to the next round, for tests to spoil."""

  def __init__(self, world, attempt=1):
    self.world = world
    t = self.round = world.committed + 1
    self.key = (t, FORGER, 1, attempt)
    (p,) = world.schedule.fragments(t)
    self.values = np.full(world.rules.answer_bytes[p] // 4, 1e-3, np.float32)
    self.part = self.values.tobytes()
    self.contribution = messages.Contribution(
      p, world.commit(world.committed).fragments[p].version, 3, 36
    )
    self.header = messages.AnswerHeader(
      run_id=RUN_ID,
      round=t,
      learner=FORGER,
      incarnation=1,
      attempt=attempt,
      contributions=(self.contribution,),
      layout=world.rules.layout,
      codec=world.rules.codec,
      parts=(messages.PartRef(len(self.part), wire.sha256(self.part)),),
      step_ns=1,
      fetch_ns=1,
      life_steps=100,
      life_tokens=1200,
      vector_clock=(),
      metrics=(),
      mac="",
    )

  def change(self, **fields):
    self.header = dataclasses.replace(self.header, **fields)

  def contribute(self, **fields):
    changed = dataclasses.replace(self.contribution, **fields)
    self.change(contributions=(changed,))

  def carry(self, values):
    """Other values, with everything about them in order."""
    self.part = np.asarray(values, np.float32).tobytes()
    digest = wire.sha256(self.part)
    self.change(parts=(messages.PartRef(len(self.part), digest),))

  def write(self, data=None):
    plant = self.world.exchange.plant
    if self.part is not None:
      plant(keys.answer_part(*self.key, 0), self.part)
    data = messages.encode(self.header) if data is None else data
    plant(keys.answer_header(*self.key), data)

  def outcome(self):
    """What became of it: counted, or why not."""
    self.world.run_to_round(self.round)
    commit = self.world.commit(self.round)
    if any(item.learner == FORGER for item in commit.counted):
      return "counted"
    found = [
      str(r.reason)
      for r in commit.refused
      if (self.round, r.learner, r.incarnation, r.attempt) == self.key
    ]
    assert len(found) == 1, commit.refused
    return found[0]


def part_ref(**fields):
  return lambda f: f.change(
    parts=(dataclasses.replace(f.header.parts[0], **fields),)
  )


def truncate(forgery):
  forgery.part = forgery.part[:-4]


def flip(forgery):
  forgery.part = bytes([forgery.part[0] ^ 1]) + forgery.part[1:]


def drop(forgery):
  forgery.part = None


def value(number):
  def spoil(forgery):
    forgery.values[0] = number
    forgery.carry(forgery.values)

  return spoil


def overflow(forgery):
  forgery.carry(np.full_like(forgery.values, 3e38))


SPOILED = {
  "another run": ("foreign_run", lambda f: f.change(run_id="other")),
  "another round": ("malformed", lambda f: f.change(round=f.round + 1)),
  "another learner": ("malformed", lambda f: f.change(learner=0)),
  "another life": ("malformed", lambda f: f.change(incarnation=9)),
  "another attempt": ("malformed", lambda f: f.change(attempt=7)),
  "negative time": ("malformed", lambda f: f.change(step_ns=-1)),
  "another layout": ("layout", lambda f: f.change(layout="other")),
  "another fragment": ("layout", lambda f: f.contribute(fragment=9)),
  "no fragment": ("layout", lambda f: f.change(contributions=())),
  "another codec": ("codec", lambda f: f.change(codec="int4/64")),
  "no parts": ("size", lambda f: f.change(parts=())),
  "stated too large": ("size", part_ref(bytes=1 << 40)),
  "stated negative": ("size", part_ref(bytes=-1)),
  "part cut off": ("size", truncate),
  "part altered": ("checksum", flip),
  "part absent": ("missing_part", drop),
  "no steps": ("counters", lambda f: f.contribute(steps=0)),
  "no tokens": ("counters", lambda f: f.contribute(tokens=0)),
  "more than its life": ("counters", lambda f: f.contribute(tokens=10**9)),
  "old anchor": (
    "stale_anchor",
    lambda f: f.contribute(anchor=f.contribution.anchor - 3),
  ),
  "anchor to come": (
    "stale_anchor",
    lambda f: f.contribute(anchor=f.contribution.anchor + 3),
  ),
  "a NaN": ("non_finite", value(math.nan)),
  "an infinity": ("non_finite", value(-math.inf)),
  "a norm beyond f32": ("non_finite", overflow),
  "an outlier": ("outlier", value(1e6)),
  "nothing wrong": ("counted", lambda f: None),
}


@pytest.mark.parametrize("what", SPOILED)
def test_answer_is_judged(quorate, what):
  reason, spoil = SPOILED[what]
  forgery = Forgery(quorate)
  spoil(forgery)
  forgery.write()
  assert forgery.outcome() == reason
  before = quorate.committed
  quorate.run_to_round(before + 2)
  for params in quorate.params_at(quorate.committed):
    assert np.all(np.isfinite(params))
  assert_one_history(quorate)


@pytest.mark.parametrize(
  "reason, garble",
  [
    ("malformed", lambda data: b"junk"),
    ("malformed", lambda data: b""),
    ("size", lambda data: data[:-1]),
    ("checksum", lambda data: data.replace(b'"codec"', b'"cadec"')),
    ("malformed", lambda data: data.replace(b" answer ", b" commit ", 1)),
    ("malformed", lambda data: data.replace(b"ddiloco ", b"ddiloco 9", 1)),
  ],
)
def test_garbage_is_no_answer(quorate, reason, garble):
  forgery = Forgery(quorate)
  good = messages.encode(forgery.header)
  assert garble(good) != good
  forgery.write(garble(good))
  assert forgery.outcome() == reason


def test_the_next_attempt_is_judged_by_itself(quorate):
  bad, good = Forgery(quorate), Forgery(quorate, attempt=2)
  value(math.nan)(bad)
  bad.write()
  quorate.settle()
  good.write()
  assert good.outcome() == "counted"
  assert bad.outcome() == "counted"  # by the other attempt, and yet named:
  refused = [r for r in quorate.refusals if r[0] == bad.round]
  assert refused == [(*bad.key, "non_finite")]


def test_a_life_that_was_overtaken_is_not_looked_for(quorate):
  forgery = Forgery(quorate)
  claim = startup.claim_member(RUN_ID, FORGER, "again", "host", 1)
  member, _ = quorate.run_job(claim)
  assert member.incarnation == 2
  quorate.settle()
  forgery.write()
  quorate.run_to_round(forgery.round)
  counted = quorate.commit(forgery.round).counted
  assert FORGER not in [item.learner for item in counted]


def test_int4_scales_that_are_not_numbers_are_refused():
  world = make_world(up="int4")
  forgery = Forgery(world)
  (p,) = world.schedule.fragments(forgery.round)
  # Every byte 0xff: codes of -1, and bf16 scales that are NaN.
  forgery.part = b"\xff" * world.rules.answer_bytes[p]
  ref = messages.PartRef(len(forgery.part), wire.sha256(forgery.part))
  forgery.change(parts=(ref,))
  forgery.write()
  assert forgery.outcome() == "non_finite"


def test_a_learner_whose_numbers_are_lost_answers_nothing():
  """It says so on its tape and ends, with no checkpoint of it."""
  programs = [Regression(0), Regression(1, nan_at=20)]
  config = make_config(
    2, sync={"wait": "never", "quorum_min": 1, "grace": False}
  )
  world = Lockstep(config, programs).start().run()
  assert world.committed == 30
  log = world.learners[1].log
  failed = [e for e, _ in log if isinstance(e, learner_types.AnswerFailed)]
  assert [e.refusal for e in failed[-3:]] == [Refusal.NON_FINITE] * 3
  *earlier, last = [command for _, given in log for command in given]
  assert last == learner_types.Stop(learner.DIVERGED)
  saved = [c for c in earlier if isinstance(c, learner_types.Checkpoint)]
  assert not [c for c in saved if c.step > failed[0].round]
  for params in world.params_at(30):
    assert np.all(np.isfinite(params))
