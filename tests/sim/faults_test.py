"""Faults in a world: each is performed, has its effect, and proves it."""

import pathlib
import re

import pytest

from ddiloco.config import from_dict
from ddiloco.protocol import faults
from ddiloco.protocol.fault_kinds import KINDS
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.world import RIVAL, World
from ddiloco.types import Refusal

SCRIPTS = {
  "kill": "at 2s kill learner 1 for 2s",
  "pause": "at 2s pause learner 1 for 2s",
  "slow": "at 2s slow learner 1 by 5x for 2s",
  "stop": "at 2s stop learner 1",
  "start": "at 3s start learner 1",
  "shrink": "at 2s shrink learner 1 for 2s",
  "partition": "at 2s partition learner 1 for 2s",
  "clog": "at 2s clog syncer for 2s",
  "jump": "at 2s jump syncer for 30s",
  "nan": "at 2s nan learner 1",
  "outlier": "at 4s outlier learner 1 by 900x",
  "layout": "at 2s layout learner 1",
  "outdated": "at 4s outdated learner 1",
  "rival": "at 2s rival syncer for 3s",
  "outage": "at 2s outage exchange for 2s",
  "full": "at 2s full exchange for 2s",
}


def make_world(rounds=60, **groups):
  config = from_dict(
    {
      "stop": {"rounds": rounds},
      "sync": {"num_fragments": 4, "interval_steps": 4, "quorum_min": 1},
      "live": {"store_deadline_s": 1.0, "heartbeat_s": 0.5},
    }
    | groups
  )
  return World(config, NullCompute(config), seed=1, code_version="x", logs=True)


def play(script, **groups):
  """Runs a script to the end of the run."""
  world = make_world(**groups)
  script = faults.parse(script)
  faults.check(script, learners=3, stop_rounds=None, live=False)
  runner = FaultRunner(world, script)
  world.start("syncer")
  for i in range(3):
    if not runner.absent_at_first(f"learner-{i}"):
      world.start(f"learner-{i}")
  assert world.run(lambda: world.ended, events_max=20_000)
  runner.heal()
  world.audit.finish(world.lives, world.machines)
  return world, runner


def refusals(world):
  return {
    (item.learner, item.reason)
    for commit in world.commits.values()
    for item in commit.refused
  }


def test_every_kind_has_a_script():
  assert SCRIPTS.keys() == KINDS.keys()


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_fault_takes_effect_and_the_run_ends(what):
  _, runner = play(SCRIPTS[what])
  (outcome,) = runner.outcomes
  assert outcome.took_effect and runner.idle == []
  assert outcome.began_ns is not None


@pytest.mark.parametrize("what", ["kill", "nan", "outage"])
def test_a_fault_after_the_end_is_told_as_idle(what):
  text = SCRIPTS[what].replace("at 2s", "at 1h").replace("at 3s", "at 1h")
  text = text.replace("at 4s", "at 1h")
  _, runner = play(text)
  assert runner.idle == list(faults.parse(text))


@pytest.mark.parametrize(
  "what, reason",
  [
    ("nan", Refusal.NON_FINITE),
    ("outlier", Refusal.OUTLIER),
    ("layout", Refusal.LAYOUT),
    ("outdated", Refusal.STALE_ANCHOR),
  ],
)
def test_a_bad_answer_is_refused_by_its_cause(what, reason):
  # All are needed, so no round closes before the bad answer is there.
  sync = {"num_fragments": 4, "interval_steps": 4, "quorum_min": 3}
  world, _ = play(SCRIPTS[what], sync=sync)
  assert refusals(world) == {(1, reason)}


def test_a_killed_learner_comes_back_when_the_script_says():
  world, _ = play("at 2s kill learner 1 for 2s")
  assert [p.name for p in world.lives if p.who == "learner-1"] == [
    "learner-1/1",
    "learner-1/2",
  ]


def test_a_late_joiner_and_a_leaver():
  world, runner = play(
    "at round 10 start learner 1; at round 20 stop learner 2"
  )
  assert [item.began_round for item in runner.outcomes] == [10, 20]
  counted = {
    m: [t for t, c in world.commits.items() if c.counted_attempt(m, 1)]
    for m in (1, 2)
  }
  assert counted[1][0] > 10 and counted[2][-1] < 24
  assert world.stopped["learner-2"] == "stopped"


def test_two_syncers_share_no_round():
  world, _ = play(SCRIPTS["rival"])
  epochs = [world.commits[t].epoch for t in sorted(world.commits)]
  assert len(set(epochs)) > 1
  assert any(life.who == RIVAL and life.log for life in world.lives)


def test_faults_that_hit_nobody_wait():
  _, runner = play(
    "at 2s kill learner 1 for 1s; at round 18 pause learner 1 for 3s"
  )
  assert runner.idle == []


def test_the_documentation_has_every_kind():
  path = pathlib.Path(__file__).parents[2] / "docs/protocol.md"
  rows = re.findall(
    r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \| .*? \| (.*?) \|$",
    path.read_text().replace("| |", "|  |").replace("| |", "|  |"),
    re.M,
  )
  told = {
    what: (tuple(who.split(", ")), by.strip(), span.strip(), live.strip())
    for what, who, by, span, live in rows
    if what in KINDS
  }
  words = {"refused": "", "optional": "may", "required": "must"}
  assert told == {
    what: (
      kind.actors,
      "must" if kind.has_factor else "",
      words[kind.span],
      "yes" if kind.live else "",
    )
    for what, kind in KINDS.items()
  }
