"""All histories of a small world keep every promise; wrong machines do not."""

import dataclasses
import types

import pytest

from ddiloco.protocol import learner as learner_machine
from ddiloco.protocol import syncer as syncer_machine
from ddiloco.protocol.fields import replace
from ddiloco.protocol.invariants import InvariantError
from ddiloco.protocol.learner_types import Settle, StepDone
from ddiloco.protocol.syncer_types import Committed, Sweep
from ddiloco.sim.explore import explore
from ddiloco.sim.small_world import small_rules


def like(machine, **changes):
  """A machine with some of its functions replaced."""
  return types.SimpleNamespace(**vars(machine) | changes)


@pytest.mark.slow
def test_every_history_with_a_crash(capsys):
  result = explore(small_rules(overlap=2, rounds=3), learners=2, crashes=1)
  with capsys.disabled():
    print(f"\nsmall world: {result}")
  assert result.ended > 0
  # Most of it is what a crash makes possible.
  assert result.states > 100_000


@pytest.mark.parametrize(
  "rules, steps_max",
  [
    (small_rules(), 3),
    (small_rules(quorum_min=2), 4),
    (small_rules(fragments=3, quorum_min=2), 3),
    (small_rules(fragments=1, interval=2, overlap=1), 4),
  ],
)
def test_every_history_without_crashes(rules, steps_max):
  result = explore(rules, crashes=0, steps_max=steps_max)
  assert result.ended > 0


def test_a_crash_adds_to_what_may_happen():
  calm = explore(small_rules(rounds=2), crashes=0, steps_max=2)
  assert calm == explore(small_rules(rounds=2), crashes=0, steps_max=2)
  rough = explore(small_rules(rounds=2), crashes=1, steps_max=2)
  assert rough.states > 10 * calm.states


def answers_before_applying():
  """A learner answers although it has seen a newer version."""

  def saw(view):
    return replace(view, seen=view.anchor)

  def step(state, event, rules):
    if isinstance(event, StepDone):
      blind = replace(state, fragments=tuple(map(saw, state.fragments)))
      after, commands = learner_machine.step(blind, event, rules)
      fragments = tuple(
        replace(new, seen=max(new.seen, old.seen))
        for old, new in zip(state.fragments, after.fragments, strict=True)
      )
      return replace(after, fragments=fragments), commands
    return learner_machine.step(state, event, rules)

  return {"learner": like(learner_machine, step=step)}


def small_quorum():
  """One answer less than K will do."""

  def step(state, event, rules):
    fewer = dataclasses.replace(rules, quorum_min=rules.quorum_min - 1)
    return syncer_machine.step(state, event, fewer)

  return {"syncer": like(syncer_machine, step=step)}


def lost_create_taken_for_won():
  """A create that another syncer was faster at counts as its own."""

  def step(state, event, rules):
    if isinstance(event, Committed):
      event = replace(event, won=True)
    return syncer_machine.step(state, event, rules)

  return {"syncer": like(syncer_machine, step=step)}


def swept_too_early():
  """The newest version goes, not the one before the one before it."""

  def step(state, event, rules):
    state, commands = syncer_machine.step(state, event, rules)
    for i, command in enumerate(commands):
      if isinstance(command, Sweep):
        due = rules.schedule.fragments(state.committed)
        newest = tuple((state.committed, p) for p in due)
        commands[i] = replace(command, states=newest)
    return state, commands

  return {"syncer": like(syncer_machine, step=step)}


def settled_uncounted():
  """The residual of an answer advances although it was not counted."""

  def step(state, event, rules):
    state, commands = learner_machine.step(state, event, rules)
    settled = [
      replace(c, attempt=1) if isinstance(c, Settle) else c for c in commands
    ]
    return state, settled

  return {"learner": like(learner_machine, step=step)}


def counters_not_reset():
  """What was stepped before an apply is answered for again."""

  def step(state, event, rules):
    after, commands = learner_machine.step(state, event, rules)
    fragments = tuple(
      replace(new, steps=max(new.steps, old.steps))
      for old, new in zip(state.fragments, after.fragments, strict=True)
    )
    return replace(after, fragments=fragments), commands

  return {"learner": like(learner_machine, step=step)}


CALM = {"crashes": 0}
PAIR = small_rules(quorum_min=2)
ROUGH = {"crashes": 1, "steps_max": 2}


@pytest.mark.parametrize(
  "mutant, rules, world, promise",
  [
    (answers_before_applying, PAIR, CALM, "measured from the current version"),
    (small_quorum, PAIR, CALM, "at least K = 2"),
    (lost_create_taken_for_won, small_rules(), ROUGH, "follows commit"),
    (swept_too_early, small_rules(), CALM, "exists"),
    (
      settled_uncounted,
      small_rules(),
      CALM,
      "residual advances only for what counts",
    ),
    (counters_not_reset, PAIR, CALM, "resets its counters"),
  ],
)
def test_finds_the_mutant(mutant, rules, world, promise):
  with pytest.raises(InvariantError, match=promise) as caught:
    explore(rules, machines=mutant(), **world)
  way = str(caught.value).partition("The way there:\n")[2].splitlines()
  assert way[0].startswith("step_learner")
