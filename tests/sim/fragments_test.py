"""Simulated runs whose fragments are parts of tensors."""

import json

import pytest

from ddiloco.algo.fragments import Layout
from ddiloco.sim import history as history_lib
from ddiloco.sim import islands
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.small import make_config

FAULTS = (
  "at round 15 kill learner 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 35 kill learner 0 for 1s"
)
SYNC = {
  "sub_tensor": {
    "fragmentation": "balanced_sub_tensor",
    "num_fragments": 7,  # of six tensors
    "interval_steps": 7,
  },
  "stacked and frozen": {
    "fragmentation": "layer_sequential",
    "layer_pattern": "^hidden/()",  # as if its rows were layers
    "frozen": "^embed",
    "num_fragments": 3,
    "interval_steps": 3,
  },
}


@pytest.mark.parametrize("sync", SYNC.values(), ids=SYNC.keys())
def test_it_trains_survives_kills_and_replays_with_the_same_bits(
  tmp_path, sync
):
  config = make_config(
    sync=sync, codec={"up": "f32"}, merge={"rule": "average"}
  )
  code, store = runs.run(tmp_path, config, seed=5, faults=FAULTS)
  assert code is Exit.OK
  lines = (tmp_path / "eval.jsonl").read_text().splitlines()
  evaluations = [json.loads(line) for line in lines]
  assert [e["round"] for e in evaluations] == [0, 20, 40, 60]
  assert evaluations[-1]["loss"] < 0.95 * evaluations[0]["loss"]
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert [fault["took_effect"] for fault in summary["faults"]] == [True] * 3
  assert summary["params_digest"] == evaluations[-1]["params_digest"]

  history = history_lib.load(store)
  layout = Layout.from_json(json.loads(history.genesis.layout))
  pieces = [q for p in range(layout.num_fragments) for q in layout.pieces(p)]
  assert any(piece.axis is not None for piece in pieces)
  assert {life.name for life in history.lives} >= {
    "learner-0, life 2",
    "learner-1, life 2",
  }
  result = islands.replay(
    history, cache_dir="", decisions_only=False, say=lambda line: None
  )
  assert (result["commits"], result["matched"]) == (60, 60)
  assert result["compared"] == "parameters"
