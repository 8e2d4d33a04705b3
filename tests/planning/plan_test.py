"""The planner: batches, rounds, failures, what it suggests and warns of."""

import dataclasses
import itertools
import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from ddiloco.config import ConfigError, from_dict
from ddiloco.engine import loading
from ddiloco.planning import (
  advice,
  aot,
  cautions,
  island,
  plan,
  plan_page,
  planner,
  tpus,
)
from ddiloco.planning.plan import Assumptions
from ddiloco.types import Wait
from experiments.quickstart import config as quickstart
from experiments.tpu import config as tpu
from tests.configs import override

TWO_KINDS = tpus.parse_islands("2*v5p:4x4x4,2*v6e:8x8")
FAST = Assumptions(wan_gbps=50.0)


def large(**groups):
  """The config for TPUs, single keys replaced."""
  return override(tpu.get_config("dense_2b").to_dict(), groups)


@pytest.fixture(scope="module", name="model")
def model_fixture():
  return plan.model_of(large())


def placed(config, model, slices=TWO_KINDS, assumed=FAST, floors=None):
  return plan.balance(config, slices, model, assumed, floors or {})


# --- Batches ----------------------------------------------------------------


def test_unlike_slices_finish_together(model):
  islands = placed(large(), model)
  times = [made.step_s for made in islands]
  assert max(times) / min(times) < 1.01
  # A v6e chip is twice as fast as a v5p chip.
  assert islands[2].batch == 2 * islands[0].batch
  assert islands[0].step_s == pytest.approx(
    islands[0].batch * model.flops_per_sample / (64 * 459e12 * 0.4)
  )


@hypothesis.given(
  units=st.lists(st.sampled_from([1, 4, 16, 64]), min_size=1, max_size=5),
  speeds=st.lists(st.floats(0.2, 5.0), min_size=5, max_size=5),
  total=st.integers(64, 4096),
)
def test_batches_are_multiples_that_end_together(units, speeds, total):
  sample_s = [1 / s for s in speeds[: len(units)]]
  batches = plan._batches(total, units, sample_s)
  assert all(b > 0 and b % u == 0 for b, u in zip(batches, units, strict=True))
  times = [b * s for b, s in zip(batches, sample_s, strict=True)]
  # Nobody is further from the others than rounding to a unit can be.
  rounding = max(u * s for u, s in zip(units, sample_s, strict=True))
  assert max(times) - min(times) <= 2 * rounding


def test_a_compiled_step_can_only_be_slower(model):
  floors = {"v6e:8x8": 1.0}
  islands = placed(large(), model, floors=floors)
  assert [made.compiled for made in islands] == [False, False, True, True]
  assert islands[2].step_s == islands[2].batch * 1.0
  same = placed(large(), model, floors={"v6e:8x8": 1e-9})
  assert same[2].step_s == placed(large(), model)[2].step_s


# --- Rounds -----------------------------------------------------------------


@pytest.mark.parametrize("fragments, interval", [(24, 24), (24, 96), (6, 4)])
def test_a_round_is_what_its_fragments_take(model, fragments, interval):
  sync = {
    "num_fragments": fragments,
    "interval_steps": interval,
    "fragmentation": "balanced_sub_tensor",
  }
  config = large(sync=sync, codec={"up": "int4", "down": "none"})
  layout = loading.lay_out(config, model.params)
  model = model._replace(layout=layout)
  assumed = Assumptions(
    wan_gbps=8.0, latency_s=0.5, syncer_latency_s=0.1, syncer_cores=2
  )
  islands = placed(config, model, assumed=assumed)
  made = plan.exchange(config, model, islands, assumed)
  up, down = loading.traffic_bytes(config, layout)
  due = [
    [p for p in range(fragments) if p * interval // fragments == t]
    for t in range(interval)
  ]
  seconds = [
    sum(up[p] + down[p] for p in now) / 1e9
    + 4 * sum(down[p] for p in now) / 4 / (2 * plan.MERGED_PER_CORE_S)
    + (5 * 0.5 + 11 * 0.1)
    for now in due
    if now
  ]
  assert made.round_s == pytest.approx(max(seconds))
  assert min(seconds) <= made.usual_s <= max(seconds)
  step_s = min(other.step_s for other in islands)
  assert made.mean_gbps == pytest.approx(
    8 * sum(down) / 1e9 / interval / step_s
  )
  assert made.slack_s == pytest.approx(2 * step_s - max(seconds))


def test_grace_is_the_protocols(model):
  config = large()
  islands = placed(config, model)
  made = plan.exchange(config, model, islands, Assumptions(wan_gbps=1e6))
  step_s = islands[0].step_s
  expected = min(max(0.9 * made.slack_s, 0), step_s)
  assert made.grace_s == pytest.approx(expected)
  off = large(sync={"grace": False})
  none = plan.exchange(off, model, islands, Assumptions(wan_gbps=1e6))
  assert none.grace_s == 0.0


# --- Failures ---------------------------------------------------------------


@pytest.mark.parametrize("share", (0.0, 0.3, 0.9, 1.0))
@pytest.mark.parametrize("count, quorum", [(1, 1), (4, 1), (4, 3), (4, 4)])
def test_a_quorum_is_there_by_enumeration(count, quorum, share):
  expected = sum(
    math.prod(share if up else 1 - share for up in states)
    for states in itertools.product((True, False), repeat=count)
    if sum(states) >= quorum
  )
  assert plan.quorum_up(count, quorum, share) == pytest.approx(expected)


def test_decoupled_islands_outlast_one_run(model):
  found = {}
  for years in (0.01, 1.0):
    assumed = Assumptions(wan_gbps=2, mtbi_years=years, restart_s=600)
    islands = placed(large(), model, assumed=assumed)
    found[years] = plan.failures(islands, assumed)
    rows = found[years]
    assert rows["decoupled"]["goodput"] > rows["data_parallel"]["goodput"]
    assert rows["decoupled"]["uptime"] >= rows["decoupled"]["goodput"]
  worse, better = (found[y]["decoupled"]["goodput"] for y in (0.01, 1.0))
  assert worse < better < 1.0


def test_a_budget_is_tokens_over_speed(model):
  islands = placed(large(), model)
  due = plan.budget(10**12, islands, 2048, 0.5)
  per_s = sum(made.batch * 2048 / made.step_s for made in islands)
  assert due["days"] == pytest.approx(10**12 / (per_s * 0.5) / 86_400)
  assert due["chip_hours"] == pytest.approx(due["days"] * 24 * 256)


# --- Suggestions and warnings -----------------------------------------------


def advised(config, model, assumed, slices=TWO_KINDS):
  islands = placed(config, model, slices, assumed)
  return islands, advice.advise(config, model, islands, assumed)


@pytest.mark.parametrize("gbps", (0.5, 2.0, 20.0))
def test_what_is_suggested_works(model, gbps):
  assumed = Assumptions(wan_gbps=gbps)
  islands, made = advised(large(), model, assumed)
  assert made.exchange.slack_s > 0 and made.exchange.grace_s > 0
  assert made.exchange.mean_gbps <= gbps
  model = model._replace(layout=loading.lay_out(made.config, model.params))
  left = cautions.warnings(made.config, model, islands, assumed, 0.999)
  assert left == []
  keys = {item.key for item in made.suggestions}
  assert keys <= set(advice._KEYS) and "sync.overlap_steps" in keys
  assert all(item.why for item in made.suggestions)


def test_less_bandwidth_asks_for_less(model):
  kept = []
  for gbps in (0.3, 3.0, 300.0):
    _, made = advised(large(), model, Assumptions(wan_gbps=gbps))
    kept.append(made)
  intervals = [made.config.sync.interval_steps for made in kept]
  assert (
    intervals == sorted(intervals, reverse=True) and len(set(intervals)) > 1
  )
  assert [made.config.codec.down for made in kept] == ["int4", "int4", "none"]


def test_other_algorithms_keep_their_schedule(model):
  config = from_dict(quickstart.get_config("diloco").to_dict())
  model = plan.model_of(config)
  slices = tpus.parse_islands("3*v5e:2x2")
  _, made = advised(config, model, FAST, slices)
  keys = [item.key for item in made.suggestions]
  learners = ["learners.count", "learners.devices", "learners.batch_size"]
  assert keys == [*learners, "sync.quorum_min"]
  assert made.config.sync == config.sync


@pytest.mark.parametrize(
  "groups, assumed",
  [
    ({"codec": {"up": "topk", "down": "none", "topk_fraction": 0.1}}, {}),
    ({"codec": {"down_full_every": 4}}, {"wan_gbps": 300.0}),
    ({"codec": {"down_error_feedback": False}}, {"wan_gbps": 300.0}),
    ({"syncer": {"shards": 8}}, {"syncer_latency_s": 0.05}),
    ({"learners": {"global_batch": 512}}, {}),
    ({"sync": {"apply": "own", "anchor": "any", "num_fragments": 1}}, {}),
    ({"elastic": {"slices": 2}}, {}),
    ({}, {"wan_gbps": 0.002}),
    ({}, {"latency_s": 100.0}),
  ],
  ids=str,
)
def test_any_valid_config_gets_valid_advice(groups, assumed):
  config = large(**groups)
  model = plan.model_of(config)
  _, made = advised(config, model, dataclasses.replace(FAST, **assumed))
  found = {item.key: item for item in made.suggestions}
  total = sum(found["learners.batch_size"].value)
  if "global_batch" in groups.get("learners", {}):
    assert found["learners.global_batch"].value == total
  if made.exchange.slack_s <= 0 and "sync.overlap_steps" in found:
    assert "all there can be" in found["sync.overlap_steps"].why


def test_a_small_model_has_fewer_fragments():
  config = override(tpu.get_config("dense_tiny").to_dict(), {})
  model = plan.model_of(config)
  few = {"w": model.params["embedding"]}
  config = dataclasses.replace(
    config, sync=dataclasses.replace(config.sync, num_fragments=1)
  )
  layout = loading.lay_out(config, few)
  model = model._replace(params=few, layout=layout)
  _, made = advised(config, model, FAST, tpus.parse_islands("2*v5e:1x1"))
  assert loading.lay_out(made.config, few).num_fragments >= 1


def test_the_asked_exchange_is_of_the_asked_batches(model):
  config = large(learners={"batch_size": (64,)}, sync={"overlap_steps": 23})
  assumed = Assumptions(wan_gbps=3.0)
  islands = placed(config, model, assumed=assumed)
  found = cautions.warnings(config, model, islands, assumed, 1.0)
  assert any("fall ever further behind" in line for line in found)


def test_shards_of_the_syncer_count():
  assumed = Assumptions(wan_gbps=50.0, syncer_latency_s=0.02)
  for shards, told in ((1, True), (8, False)):
    config = large(syncer={"shards": shards})
    model = plan.model_of(config)
    islands = placed(config, model, assumed=assumed)
    found = cautions.warnings(config, model, islands, assumed, 1.0)
    assert any("a syncer takes" in line for line in found) == told


def test_data_parallel_training_has_one_island():
  values = quickstart.get_config("data_parallel").to_dict()
  config = from_dict(values)
  slices = tpus.parse_islands("v5e:2x2")
  made = planner.make_plan(config, slices, FAST, compiling=False)
  assert not any("contribute nothing" in line for line in made["warnings"])
  with pytest.raises(ConfigError, match="has one learner"):
    planner.make_plan(config, slices * 2, FAST, compiling=False)


@pytest.mark.parametrize(
  "groups, assumed, words",
  [
    ({}, {"wan_gbps": 0.01}, "rounds fall ever further behind"),
    ({}, {"syncer_latency_s": 0.5}, "a syncer takes"),
    ({}, {"latency_s": 5.0}, "K = 1 merges one learner a round"),
    (
      {"sync": {"quorum_min": 0}},
      {"latency_s": 5.0},
      "no slack, so no grace. Raise the overlap",
    ),
    (
      {"sync": {"wait": Wait.EXACT, "grace": False}},
      {"latency_s": 5.0},
      "everybody waits for it",
    ),
    ({"sync": {"quorum_min": 4}}, {}, "a quorum of 4 of 4 islands is there"),
    ({"learners": {"batch_size": (64, 6400)}}, {}, "contribute nothing"),
    ({"learners": {"batch_size": (64, 128)}}, {}, "steps take"),
    ({"learners": {"count": 3}}, {}, "learners.count = 3"),
    ({"stop": {"tokens": 10**8}}, {}, "merges; with so few"),
    (
      {"learners": {"mesh": (-1, 1, 1)}, "model": {"preset": "dense_12b"}},
      {},
      "training state, anchors and residuals alone",
    ),
  ],
)
def test_what_cannot_work_is_told(groups, assumed, words):
  config = large(**groups)
  model = plan.model_of(config)
  assumed = dataclasses.replace(FAST, **assumed)
  islands = placed(config, model, assumed=assumed)
  found = cautions.warnings(config, model, islands, assumed, 0.9)
  assert any(words in line for line in found), found


def test_small_islands_among_large_ones(model):
  slices = tpus.parse_islands("v5p:2x2x1,v6e:16x16")
  islands = placed(large(), model, slices)
  found = cautions.warnings(large(), model, islands, FAST, 1.0)
  assert any("hardly matter" in line for line in found)
  alone = placed(large(), model, slices[:1])
  found = cautions.warnings(large(), model, alone, FAST, 1.0)
  assert any("nobody to be decoupled from" in line for line in found)


# --- The whole plan ---------------------------------------------------------


def test_a_plan_is_json_text_and_page(monkeypatch):
  monkeypatch.setattr(aot, "available", lambda: False)
  made = planner.make_plan(large(), TWO_KINDS, FAST, compiling=False)
  assert json.loads(json.dumps(made)).keys() == made.keys()
  text = planner.text(made)
  for words in (
    "v6e:8x8",
    "analytic step times: without libtpu no step was compiled",
    "sync.overlap_steps",
    "tokens a day",
  ):
    assert words in text
  html = plan_page.render(made)
  assert "v6e:8x8" in html and "data-parallel" in html
  weights = sum(row["merge_weight"] for row in made["islands"])
  assert weights == pytest.approx(1.0)


def test_slices_are_compiled_once_each(monkeypatch):
  asked = []

  def study(config, of, learner=0, *, exchange, search, say):
    asked.append((str(of), config.learners.batch_size))
    fits = str(of) == "v6e:8x8"
    memory = {"fits": fits, "needed_bytes": None if fits else 2**37}
    roofline = {"roofline": {"step_s": 100.0}} if fits else {}
    return {"memory": memory, **roofline}

  monkeypatch.setattr(island, "study", study)
  made = planner.make_plan(large(), TWO_KINDS, FAST, compiling=True)
  assert [name for name, _ in asked] == ["v5p:4x4x4", "v6e:8x8"]
  assert [row["compiled"] for row in made["islands"]] == [False] * 2 + [
    True
  ] * 2
  slow = made["islands"][3]
  assert slow["step_s"] == pytest.approx(slow["batch"] * 100.0 / asked[1][1][0])
  assert any("128 GiB needed" in line for line in made["warnings"])


def test_more_islands_than_shards():
  slices = tpus.parse_islands("17*v5p:4x4x4")
  with pytest.raises(ConfigError, match="data.shards = 16"):
    planner.make_plan(large(), slices, FAST, compiling=False)


@pytest.mark.parametrize(
  "values",
  [
    {"wan_gbps": 0.0},
    {"wan_gbps": 1e-310},
    {"wan_gbps": math.nan},
    {"latency_s": -1.0},
    {"syncer_latency_s": -1.0},
    {"mfu": 1.1},
    {"mfu": 0.0},
    {"syncer_cores": -2},
    {"mtbi_years": 0.0},
    {"restart_s": math.inf},
  ],
)
def test_absurd_assumptions(values):
  (name,) = values
  with pytest.raises(ValueError, match=name):
    Assumptions(**{"wan_gbps": 1.0, **values})
