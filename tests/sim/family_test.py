"""Every algorithm of the family, simulated; and the options of some."""

import json

import pytest

from ddiloco.config import algorithms, from_dict
from ddiloco.protocol import faults as fault_script
from ddiloco.protocol.learner_types import Encode, Resized, Step, StepDone
from ddiloco.sim.compute import NullCompute
from ddiloco.sim.faults import FaultRunner
from ddiloco.sim.world import SYNCER, World
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.small import get_config

ROUNDS = 24


def make_config(algorithm, **changes):
  config = get_config()
  config.stop.rounds = ROUNDS
  config.update_from_flattened_dict(algorithms.preset(algorithm))
  if algorithm == "elastic_data_parallel":
    config.elastic = {"slices": 4, "down_s": 2.0, "up_s": 1.0}
  config.update_from_flattened_dict(changes)
  return from_dict(config.to_dict())


@pytest.mark.parametrize("algorithm", algorithms.ALGORITHMS)
def test_each_trains_and_comes_out_the_same_again(algorithm, tmp_path):
  """Its loss falls, its ledger balances, its tapes give the same bits."""
  config = make_config(algorithm)
  code, store = runs.run(tmp_path, config, seed=5)
  assert code is Exit.OK
  lines = (tmp_path / "eval.jsonl").read_text().splitlines()
  first, *_, last = (json.loads(line) for line in lines)
  assert last["loss"] < 0.9 * first["loss"]
  result = runs.replay(store)
  assert result["first_mismatch"] is None
  assert result["matched"] == result["commits"] > 0


def test_decoupled_with_everybody_waiting_is_streaming(tmp_path):
  """K = M under wait = exact: the same parameters after every round."""
  streaming = make_config("streaming_diloco")
  decoupled = make_config(
    "decoupled_diloco",
    **{
      "sync.quorum_min": streaming.learners.count,
      "sync.grace": False,
      "sync.wait": "exact",
      "sync.apply": "at_overlap",
      "sync.blend": 0.5,
      "merge.rule": "average",
    },
  )
  digests = []
  for config in (streaming, decoupled):
    code, _ = runs.run(tmp_path / config.algorithm, config, seed=5)
    assert code is Exit.OK
    lines = (tmp_path / config.algorithm / "eval.jsonl").read_text()
    evaluations = [json.loads(line) for line in lines.splitlines()]
    digests.append([e["params_digest"] for e in evaluations])
  assert digests[0] == digests[1] and len(set(digests[0])) > 1


# --- Without arrays -----------------------------------------------------------


def play(config, script="", *, seed=3):
  """A world without arrays, run to its end; every life's decisions."""
  world = World(
    config, NullCompute(config), seed=seed, code_version="test", logs=True
  )
  faults = fault_script.parse(script) if script else ()
  runner = FaultRunner(world, faults)
  world.start(SYNCER)
  for i in range(config.learners.count):
    if not runner.absent_at_first(f"learner-{i}"):
      world.start(f"learner-{i}")
  assert world.run(lambda: world.ended, events_max=100_000)
  return world, runner


def log(world, learner):
  return [
    entry
    for life in world.lives
    if life.who == f"learner-{learner}"
    for entry in life.log
  ]


def commands(world, learner, kind):
  return [
    c for _, given in log(world, learner) for c in given if isinstance(c, kind)
  ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamic_steps_let_slow_learners_answer_as_often(dynamic):
  """Three times slower: a third of H steps, or of the answers."""
  world, _ = play(
    make_config(
      "async_local_sgd",
      **{
        "learners.slowdown": (1.0, 3.0),
        "sync.interval_steps": 12,
        "sync.dynamic_steps": dynamic,
        "stop.rounds": 12 * 40,
      },
    )
  )
  fast, slow = (commands(world, m, Encode)[5:-2] for m in (0, 1))
  steps = {c.contributions[0].steps for c in slow}
  assert {c.contributions[0].steps for c in fast} == {12}
  if dynamic:
    assert steps <= {3, 4, 5}  # of speeds that jitter
    assert abs(len(slow) - len(fast)) <= 0.4 * len(fast)
  else:
    assert steps == {12}
    assert len(slow) <= 0.5 * len(fast)


def test_delayed_momentum_and_dynamic_steps_go_together(tmp_path):
  """Both of the ways of arXiv 2401.09135; it comes out the same again."""
  config = make_config(
    "async_local_sgd",
    **{
      "learners.slowdown": (1.0, 3.0),
      "sync.dynamic_steps": True,
      "outer.name": "delayed_nesterov",
      "outer.momentum": 0.5,
      "outer.momentum_delay": 2,
    },
  )
  code, store = runs.run(tmp_path, config, seed=5)
  assert code is Exit.OK
  result = runs.replay(store)
  assert result["first_mismatch"] is None and result["matched"] > 0


def test_a_learner_comes_and_goes_and_the_others_share_the_batch():
  script = (
    "at round 20 stop learner 1; at round 40 start learner 1;"
    "at round 100 stop learner 1; at round 120 start learner 1"
  )
  config = make_config(
    "decoupled_diloco",
    **{"learners.global_batch": 4, "faults": script, "stop.rounds": 180},
  )
  world, runner = play(config, script)
  assert not runner.idle
  took = {0: set(), 1: set()}
  for learner in took:
    steps = commands(world, learner, Step)
    took[learner] = {step.samples for step in steps}
  assert took == {0: {2, 4}, 1: {2}}
  counted = {
    t for t, c in world.commits.items() if 1 in [a.learner for a in c.counted]
  }
  per_span = [
    len(counted.intersection(range(begin, end)))
    for begin, end in ((0, 20), (26, 40), (40, 100), (106, 120), (120, 180))
  ]
  assert [n > 0 for n in per_span] == [True, False, True, False, True]


def test_a_fixed_global_batch_is_shared_by_those_who_are_there():
  script = "at round 10 start learner 1; at round 30 stop learner 0"
  config = make_config(
    "decoupled_diloco",
    **{
      "learners.global_batch": 4,
      "faults": script,
      "stop.rounds": 40,
      "recovery.donors_max": 0,  # it need not wait for anybody
    },
  )
  world, runner = play(config, script)
  assert not runner.idle
  first, second = (commands(world, m, Step) for m in (0, 1))
  assert {c.samples for c in first if c.seen < 10} == {4}
  assert {c.samples for c in first if 10 <= c.seen < 30} == {2}
  assert {c.samples for c in second if c.seen < 30} == {2}
  assert {c.samples for c in second if c.seen >= 30} == {4}
  taken = [e.samples for e, _ in log(world, 0) if isinstance(e, StepDone)]
  assert taken == [c.samples for c in first][: len(taken)]


def test_a_slice_less_makes_a_smaller_batch_and_costs_a_standstill():
  config = make_config("elastic_data_parallel", **{"stop.rounds": 200})
  world, runner = play(
    config,
    "at 5s shrink learner 0 for 8s; at 9s shrink learner 0 for 8s",
  )
  assert not runner.idle
  resized = [e for e, _ in log(world, 0) if isinstance(e, Resized)]
  assert [e.samples for e in resized] == [3, 2, 3, 0]
  steps = [e for e, _ in log(world, 0) if isinstance(e, StepDone)]
  begun = steps[5:]  # the syncer has found it
  pauses = sorted(
    (b.now_ns - a.now_ns for a, b in zip(begun, begun[1:], strict=False)),
    reverse=True,
  )
  assert all(1e9 < pause < 2.6e9 for pause in pauses[:4])
  assert pauses[4] < 0.3e9
  assert {e.samples for e in steps} == {2, 3, 4}


def test_without_any_slice_it_waits_for_one():
  config = make_config(
    "elastic_data_parallel",
    **{"elastic.slices": 1, "stop.rounds": 100},
  )
  world, runner = play(config, "at 3s shrink learner 0 for 30s")
  assert not runner.idle
  steps = [e.now_ns for e, _ in log(world, 0) if isinstance(e, StepDone)]
  longest = max(b - a for a, b in zip(steps, steps[1:], strict=False))
  assert 31e9 < longest < 31.5e9


def test_commits_tell_the_fastest_step():
  world, _ = play(make_config("decoupled_diloco"))
  told = [world.commits[t].step_ns for t in sorted(world.commits) if t > 5]
  assert all(0.08e9 < step_ns < 0.12e9 for step_ns in told)
