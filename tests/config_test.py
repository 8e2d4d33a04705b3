"""The configuration is checked once, at the door."""

import pytest

from ddiloco import config as config_lib
from ddiloco.config import ConfigError, from_dict
from ddiloco.types import Apply, Wait

STOP = {"stop": {"rounds": 10}}


def test_defaults_and_round_trip():
  config = from_dict(STOP)
  assert config.sync.num_fragments == config.sync.interval_steps == 24
  assert config.sync.wait is Wait.NEVER
  assert from_dict(config.to_dict()) == config
  assert from_dict(config.to_dict()).digest == config.digest
  assert from_dict({"stop": {"rounds": 11}}).digest != config.digest


def test_sequences_become_tuples_and_integers_floats():
  config = from_dict(
    {**STOP, "learners": {"devices": [2, 1], "slowdown": [1, 2.5]}}
  )
  assert config.learners.devices == (2, 1)
  assert config.learners.slowdown == (1.0, 2.5)


@pytest.mark.parametrize(
  ("values", "words"),
  [
    ({"stp": {}}, ["stp", "did you mean stop"]),
    ({"sync": {"quorum": 1}}, ["sync.quorum", "sync.quorum_min"]),
    ({"sync": 3}, ["sync", "3", "group"]),
    ({"seed": "7"}, ["seed", "'7'", "int"]),
    ({"seed": True}, ["seed", "True", "int"]),
    ({"seed": -1}, ["seed", "-1", "0"]),
    ({"outer": {"momentum": float("nan")}}, ["outer.momentum", "nan"]),
    ({"learners": {"devices": (1, "x")}}, ["learners.devices[1]", "'x'"]),
    ({"learners": {"devices": ()}}, ["learners.devices", "()"]),
    ({"sync": {"wait": "sometimes"}}, ["sync.wait", "sometimes", "exact"]),
    ({"sync": {"quorum_min": 4}}, ["sync.quorum_min", "4", "3", "add"]),
    ({"sync": {"overlap_steps": 24}}, ["sync.overlap_steps", "24"]),
    ({"sync": {"overlap_steps": 0}}, ["sync.overlap_steps", "exact"]),
    ({"sync": {"grace_margin": 1.0}}, ["sync.grace_margin", "1.0"]),
    ({"sync": {"apply": "own"}}, ["sync.apply", "own", "num_fragments"]),
    ({"sync": {"apply": "at_overlap"}}, ["sync.apply", "sync.wait", "exact"]),
    (
      {"sync": {"fragmentation": "layer"}},
      ["sync.fragmentation", "'layer'", "layer_strided"],
    ),
    (
      {"sync": {"layer_pattern": "blocks/("}},
      ["sync.layer_pattern", "'blocks/('", "regular expression"],
    ),
    (
      {"sync": {"layer_pattern": r"(h|block)/(\d+)"}},
      ["sync.layer_pattern", "2 groups instead of 1", "(?:...)"],
    ),
    ({"sync": {"frozen": "*"}}, ["sync.frozen", "'*'", "regular expression"]),
    ({"stop": {"rounds": 0}}, ["stop.rounds", "never end"]),
    ({"codec": {"up": "int3"}}, ["codec.up", "int3", "int4"]),
    ({"codec": {"block_size": 48}}, ["codec.block_size", "48", "power"]),
    ({"outer": {"learning_rate": 0.0}}, ["outer.learning_rate", "0.0"]),
    ({"outer": {"momentum": 1.0}}, ["outer.momentum", "1.0"]),
    ({"inner": {"decay": 10}}, ["inner.decay", "10", "inner.warmup"]),
    ({"inner": {"final_fraction": 2.0}}, ["inner.final_fraction", "2.0"]),
    ({"learners": {"count": 17}}, ["learners.count", "17", "data.shards"]),
    (
      {"learners": {"devices": (4,), "mesh": (3, -1, 1)}},
      ["learners.mesh", "(3, -1, 1)", "4 devices"],
    ),
    (
      {"learners": {"devices": (4,), "batch_size": (6,)}},
      ["learners.batch_size", "6", "4"],
    ),
    ({"learners": {"mesh": (1, 1)}}, ["learners.mesh", "three"]),
    ({"model": {"heads": 3}}, ["model.heads", "3", "kv_heads"]),
    ({"model": {"head_width": 5}}, ["model.head_width", "5", "even"]),
    ({"data": {"source": "text"}}, ["data.path", "directory"]),
    (
      {"data": {"tokenizer": "bpe", "vocab_size": 257}},
      ["data.vocab_size", "257"],
    ),
    ({"data": {"partition": "president"}}, ["data.partition", "domain, lan"]),
    (
      {"data": {"partition": "language"}},
      ["data.partition", "'language'", "all English", "'time'"],
    ),
    (
      {"data": {"partition": "time", "source": "array_record", "path": "x"}},
      ["data.partition", "'array_record' has no labels", "'text'"],
    ),
    (
      {"data": {"partition": "dirichlet", "dirichlet_alpha": 0.0}},
      ["data.dirichlet_alpha", "0.0", "positive"],
    ),
    (
      {"data": {"dirichlet_alpha": 0.1}},
      ["data.dirichlet_alpha", "0.1", "'iid' does not use it"],
    ),
    ({"init": {"sha256": "ab"}}, ["init.sha256", "'ab'", "init.path"]),
    ({"live": {"poll_min_s": 1.0}}, ["live.poll_max_s", "live.poll_min_s"]),
    ({"live": {"heartbeat_s": 10.0}}, ["live.dead_after_s", "heartbeat"]),
  ],
)
def test_what_cannot_work_is_refused_by_name(values, words):
  with pytest.raises(ConfigError) as error:
    from_dict({**STOP, **values})
  for word in words:
    assert word in str(error.value), str(error.value)


def test_every_schedule_is_legal():
  for fragments in (1, 5, 24, 60):
    for interval in (3, 24, 100):
      from_dict(
        {
          **STOP,
          "sync": {"num_fragments": fragments, "interval_steps": interval},
        }
      )
  from_dict(
    {
      **STOP,
      "sync": {
        "num_fragments": 1,
        "interval_steps": 1,
        "overlap_steps": 0,
        "wait": "exact",
      },
    }
  )


def test_own_needs_one_fragment_and_any_anchor():
  config = from_dict(
    {**STOP, "sync": {"num_fragments": 1, "anchor": "any", "apply": "own"}}
  )
  assert config.sync.apply is Apply.OWN


def test_resuming_allows_what_is_resumable_and_names_the_rest():
  old = from_dict(STOP)
  new = from_dict(
    {"stop": {"rounds": 99}, "sync": {"quorum_min": 2}, "faults": ""}
  )
  assert config_lib.check_resumable(old, new) == {
    "stop.rounds": (10, 99),
    "sync.quorum_min": (1, 2),
  }
  for change in ({"seed": 5}, {"sync": {"overlap_steps": 3}}):
    with pytest.raises(ConfigError) as error:
      config_lib.check_resumable(old, from_dict({**STOP, **change}))
    assert "cannot change on resume" in str(error.value)


def test_unlike_islands():
  config = from_dict(
    {
      **STOP,
      "learners": {
        "count": 3,
        "devices": (4, 1),
        "batch_size": (8, 2),
        "mesh": (-1, 1, 1),
      },
    }
  )
  assert config_lib.island_mesh(config, 0) == (4, 1, 1)
  assert config_lib.island_mesh(config, 1) == (1, 1, 1)
  assert config_lib.island_mesh(config, 2) == (4, 1, 1)
  assert config_lib.learner_value(config.learners.batch_size, 1) == 2
