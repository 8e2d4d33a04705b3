"""Learners that come back, or join late, and what they go on from."""

import jax
import numpy as np
import pytest

from ddiloco.algo import codecs
from ddiloco.algo.fragments import take
from ddiloco.engine.loading import lay_out
from ddiloco.protocol import keys, wire
from ddiloco.protocol.learner_types import (
  ApplyFragments,
  Encode,
  Give,
  Joined,
  Step,
)
from ddiloco.sim import history as history_lib
from ddiloco.sim import replay
from ddiloco.types import Exit
from tests.engine.regression import Regression
from tests.sim import program, runs
from tests.sim.small import make_config

KILL = "at round 20 kill learner 1 for 1s"


def played(workdir, *, faults=KILL, count=2, live=None, sync=None, **options):
  """The history of a run whose learner 1 has no checkpoint of its own."""
  config = make_config(
    learners={"count": count, "slowdown": (1.0, 1.5, 1.2)},
    live={"checkpoint_every_steps": 0} | (live or {}),
    sync=sync or {},
    recovery=options,
  )
  code, store = runs.run(workdir, config, seed=3, faults=faults)
  assert code is Exit.OK
  return store, history_lib.load(store)


def play(workdir, **options):
  """The same, once its replay has given the same bits."""
  store, history = played(workdir, **options)
  result = runs.replay(store)
  assert result["matched"] == result["commits"] == 60
  return store, history


def life_of(history, name):
  (life,) = [life for life in history.lives if life.name == name]
  return life


def commands(life, kind):
  return [
    command
    for record in life.records
    for command in record.commands
    if isinstance(command, kind)
  ]


def joined(life):
  event = life.records[0].event
  assert isinstance(event, Joined)
  return event


@pytest.fixture(scope="module")
def revived(tmp_path_factory):
  return play(tmp_path_factory.mktemp("revived"))


# --- Whose state ------------------------------------------------------------


def test_a_learner_without_a_checkpoint_goes_on_from_a_peer(revived):
  store, history = revived
  life = life_of(history, "learner-1, life 2")
  assert life.header.restored is None
  donor, incarnation, step = life.header.donor
  assert (donor, incarnation) == (0, 1)
  (give,) = commands(life_of(history, "learner-0, life 1"), Give)
  assert (give.recipient, give.step) == (1, step)
  # Both had seen that commit, and nothing of the transfer is left.
  assert give.seen <= joined(life).seen
  assert store.list(keys.TRANSFERS) == []


def test_its_own_checkpoint_is_preferred_while_it_is_fresh(tmp_path):
  _, history = play(tmp_path, live={"checkpoint_every_steps": 5})
  life = life_of(history, "learner-1, life 2")
  assert life.header.donor is None and life.header.restored[0] == 1


def test_an_old_checkpoint_is_not(tmp_path):
  """But the data position that it tells is."""
  _, history = play(
    tmp_path,
    live={"checkpoint_every_steps": 5},
    checkpoint_rounds_max=2,
  )
  life = life_of(history, "learner-1, life 2")
  assert life.header.restored is None and life.header.donor[0] == 0
  assert joined(life).next_sample > 0


@pytest.mark.parametrize("options", [{"donors_max": 0}, {}])
def test_else_it_starts_with_a_fresh_one(tmp_path, options):
  """Nobody is asked, or nobody is there to be asked."""
  faults = KILL if options else f"{KILL}; at round 20 kill learner 0 for 1s"
  _, history = play(tmp_path, faults=faults, **options)
  life = life_of(history, "learner-1, life 2")
  assert (life.header.restored, life.header.donor) == (None, None)


def test_a_late_joiner_goes_on_from_a_peer(tmp_path):
  faults = "at round 30 start learner 2"
  _, history = play(tmp_path, faults=faults, count=3)
  life = life_of(history, "learner-2, life 1")
  assert life.header.donor is not None
  assert commands(life, Encode)  # within the run's last 30 rounds


def test_in_the_first_interval_nobody_is_asked(tmp_path):
  _, history = play(tmp_path, faults="")
  assert joined(life_of(history, "learner-1, life 1")).seen < 3
  assert life_of(history, "learner-1, life 1").header.donor is None


def test_a_donor_that_dies_is_replaced_by_another(tmp_path):
  """Learner 0 has seen most and is asked first; it never answers."""
  faults = f"{KILL}; at round 22 pause learner 0 for 60s"
  _, history = play(
    tmp_path,
    faults=faults,
    count=3,
    live={"heartbeat_s": 0.2, "dead_after_s": 3.0},
  )
  life = life_of(history, "learner-1, life 2")
  assert life.header.donor[0] == 2


# --- What the first steps are made of ---------------------------------------


class Recorded(program.Evaluated):
  """Keeps what every step was given, and what it gave."""

  def __init__(self, config, learner):
    super().__init__(config, learner)
    self.first_samples, self.given, self.results = {}, [], []

  def batch(self, first_sample, count):
    batch = super().batch(first_sample, count)
    self.first_samples[id(batch)] = first_sample, batch
    return batch

  def step(self, state, batch, clock):
    before = jax.tree.map(np.array, state)
    first_sample, _ = self.first_samples[id(batch)]
    self.given.append((before, first_sample, clock))
    state, metrics = super().step(state, batch, clock)
    self.results.append(jax.tree.map(np.array, state))
    return state, metrics


@pytest.fixture
def recorded(monkeypatch):
  """The programs of a run, by learner."""
  programs = {}

  def build(config, learner, *, cache_dir):
    del cache_dir
    return programs.setdefault(learner, Recorded(config, learner))

  monkeypatch.setattr(program, "build", build)
  return programs


def assert_equal(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(a, b)


def fragment_digests(config, params):
  layout = lay_out(config, params)
  leaves = jax.tree.leaves(params)
  return [
    wire.sha256(codecs.to_bytes(take(layout.pieces(p), leaves)))
    for p in range(layout.num_fragments)
  ]


def own_steps(life):
  """Its first steps, up to the first that a commit overwrites under."""
  for record in life.records:
    if any(isinstance(c, ApplyFragments) for c in record.commands):
      return
    yield from (c for c in record.commands if isinstance(c, Step))


@pytest.mark.parametrize("params", ["commit", "peer"])
def test_the_first_steps_are_as_computed(tmp_path, recorded, params):
  """From the peer's moments, the right parameters, samples and clock."""
  store, history = played(tmp_path, params=params)
  first, life = (life_of(history, f"learner-1, life {n}") for n in (1, 2))
  event, config = joined(life), history.config
  commits = {}
  assert replay.redecide_all(history, commits) is None
  (commit,) = [c for c in commits.values() if c.round == event.seen]
  _, _, donated = life.header.donor
  theirs = recorded[0].results[donated - 1]

  mine = recorded[1].given[len(commands(first, Step)) :]
  state, first_sample, clock = mine[0]
  assert_equal(state[1], theirs[1])
  assert event.borrowed == (params == "peer")
  if event.borrowed:
    # What the peer had after that step, but for what it applied before giving.
    assert_equal(state[0], recorded[0].given[donated][0][0])
  else:
    digests = [ref.params_sha256 for ref in commit.fragments]
    assert fragment_digests(config, state[0]) == digests
  assert clock == commit.tokens > 0
  assert first_sample == event.next_sample > 0

  steps = list(own_steps(life))
  assert steps
  expected, fresh = state, Regression(1)
  for step, (given, sample, at) in zip(steps, mine, strict=False):
    assert (sample, at) == (step.first_sample, step.run_tokens)
    assert_equal(given, expected)
    batch = fresh.batch(sample, fresh.samples_per_step)
    expected, _ = fresh.step(
      jax.tree.map(jax.numpy.asarray, expected), batch, at
    )


def test_a_round_that_needs_the_borrower_is_not_stuck(tmp_path):
  """After an interval of its own it takes the commit's parameters."""
  sync = {"quorum_min": 2}
  _, history = play(tmp_path, sync=sync, params="peer")
  life = life_of(history, "learner-1, life 2")
  first = commands(life, ApplyFragments)[0]
  assert joined(life).borrowed and first.round <= joined(life).seen


def test_nothing_borrowed_is_offered(tmp_path):
  _, history = play(tmp_path, params="peer")
  life = life_of(history, "learner-1, life 2")
  assert joined(life).borrowed
  applied, answered = set(), set()
  for record in life.records:
    for command in record.commands:
      if isinstance(command, ApplyFragments):
        applied |= set(command.fragments)
      if isinstance(command, Encode):
        due = {item.fragment for item in command.contributions}
        assert due <= applied
        answered |= due
  assert answered
