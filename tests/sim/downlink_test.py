"""Training with a compressed way down, through deaths, and again from tapes."""

import json

import pytest

from ddiloco.engine import learner_plane
from ddiloco.engine.ports import Call
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit
from ddiloco.sim import learner_process
from ddiloco.types import Exit
from tests.sim import runs
from tests.sim.small import make_config

FAULTS = (
  "at round 15 kill learner 1 for 1s; at round 25 kill syncer for 0.5s;"
  " at round 35 partition learner 0 for 2s"
)
CODEC = {"up": "int4", "down": "int4", "down_full_every": 4}


def run(workdir, *, faults="", codec=CODEC):
  config = make_config(codec=codec)
  code, store = runs.run(workdir, config, seed=11, faults=faults)
  assert code is Exit.OK
  return store, json.loads((workdir / "summary.json").read_text())


@pytest.mark.parametrize(
  "codec",
  [
    CODEC,
    pytest.param(
      {
        "up": "e3m0",
        "down": "int2",
        "down_full_every": 3,
        "rounding": "stochastic",
      },
      marks=pytest.mark.slow,
    ),
  ],
  ids=["int4", "stochastic"],
)
def test_a_run_with_deaths_replays_bit_for_bit(tmp_path, codec):
  store, summary = run(tmp_path, faults=FAULTS, codec=codec)
  assert [fault["took_effect"] for fault in summary["faults"]] == [True] * 3
  assert summary["warnings"] == []
  assert summary["eval"]["loss"] < 0.9 * summary["eval"]["initial_loss"]
  newest = messages.decode(Commit, store.objects[keys.commit(60)])
  assert all(ref.step for ref in newest.fragments)
  # The evaluator's parameters come of steps; the replay compares the digests
  # of every commit with those of its own syncer.
  result = runs.replay(store)
  assert (result["commits"], result["matched"]) == (60, 60)
  assert result["compared"] == "parameters"


def count_reads(monkeypatch, module, name):
  """Bytes that learners read of states, by a function of a module."""
  sizes, read = [], getattr(module, name)

  def counted(*args, **kwargs):
    job, answer = read(*args, **kwargs), None
    try:
      while True:
        request = job.send(answer)
        answer = yield request
        assert isinstance(request, Call) and request.method == "get"
        sizes.append(len(answer.value))
    except StopIteration as stop:
      return stop.value

  monkeypatch.setattr(module, name, counted)
  return sizes


def test_bytes_down_are_reported_as_they_were_read(tmp_path, monkeypatch):
  read = [
    count_reads(monkeypatch, learner_process, "read_params"),
    count_reads(monkeypatch, learner_plane, "read_version"),
  ]
  faults = "at round 15 kill learner 1 for 1s"
  _, summary = run(tmp_path, faults=faults)
  joined, fetched = map(sum, read)
  assert summary["bytes"]["down"] == joined + fetched
  assert len(read[1]) > 60
