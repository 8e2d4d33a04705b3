"""Bounds of the optimizers, and options that the chosen one does not read."""

import pytest

from ddiloco.config import ConfigError, from_dict

DELAYED = {"name": "delayed_nesterov", "momentum": 0.9, "momentum_delay": 4}


def config(**groups):
  return from_dict({"stop": {"rounds": 1}, **groups})


@pytest.mark.parametrize(
  "groups",
  [
    {"outer": {"name": "adam", "b1": 0.0, "eps": 1.0}},
    {"outer": DELAYED | {"momentum_activation": 0.25}},
    {"outer": DELAYED | {"restart_every": 8}},
    {"outer": {"name": "mine:make", "momentum": 0.5, "b1": 0.5}},
    {"outer": {"momentum": 0.9, "nesterov": False, "restart_every": 1}},
    {"outer": {"warmup": 10, "clock": "round"}},
    {"outer": {"schedule": "linear", "decay": 9, "final_fraction": 0.0}},
    {"inner": {"name": "muon", "momentum": 0.9, "b1": 0.8, "eps": 1e-7}},
    {"inner": {"name": "lion", "b2": 0.99}},
    {"inner": {"name": "sgd", "momentum": 0.0}},
    {"inner": {"on_overwrite": "scale", "overwrite_scale": 0.9}},
    {"merge": {"rda_scope": "row"}},
    {"merge": {"rule": "average", "embedding_rule": "rda", "rda_scope": "row"}},
  ],
  ids=str,
)
def test_what_works_is_taken(groups):
  config(**groups)


@pytest.mark.parametrize(
  "group, options, words",
  [
    ("outer", {"name": "adamm"}, "delayed_nesterov.*Did you mean adam"),
    ("outer", {"name": "zzz"}, "'module:function'. Choose one"),
    ("outer", {"learning_rate": 0.0}, "learning_rate = 0.0.*positive"),
    ("outer", {"momentum": 1.0}, "momentum = 1.0.*below 1"),
    ("outer", {"name": "adam", "momentum": 0.5}, "sgd or delayed_nesterov"),
    ("outer", {"name": "adam", "nesterov": False}, "'adam' does not use it"),
    ("outer", {"b1": 0.5}, "b1 = 0.5.*'sgd' does not use.*choose adam"),
    ("outer", {"eps": 0.5}, "eps = 0.5.*'sgd' does not use"),
    ("outer", {"name": "adam", "eps": 0.0}, "eps = 0.0.*positive"),
    ("outer", {"name": "adam", "b2": 1.0}, "b2 = 1.0"),
    ("outer", {"momentum_delay": 3}, "'sgd' does not use it"),
    ("outer", {"momentum_delay": 0}, "momentum_delay = 0.*at least 1"),
    ("outer", DELAYED | {"momentum_delay": 1}, "Use at least 2"),
    ("outer", DELAYED | {"momentum": 0.0}, "there is none"),
    ("outer", DELAYED | {"nesterov": False}, "does not use it"),
    ("outer", DELAYED | {"momentum_activation": 0.3}, "= 0.25. 0 uses"),
    ("outer", DELAYED | {"restart_every": 6}, "= 4 does not divide it"),
    ("outer", {"restart_every": 5}, "nothing to restart"),
    ("outer", {"restart_every": -1}, "restart_every = -1.*at least 0"),
    ("outer", {"schedule": "cosin"}, "the choices are constant, cosine"),
    ("outer", {"schedule": "cosine"}, "decay = 0.*merges of a fragment"),
    ("outer", {"schedule": "linear", "decay": 3, "warmup": 3}, "decay = 3"),
    ("outer", {"decay": 3}, "decay = 3.*is 'constant'"),
    ("outer", {"final_fraction": 0.5}, "is 'constant'"),
    ("outer", {"clock": "round"}, "without a warm-up"),
    ("outer", {"clock": "tokens"}, "choices are merges, round"),
    ("inner", {"name": "adam"}, "adamw, muon, sgd, lion"),
    ("inner", {"momentum": 0.9}, "'adamw' does not use it.*muon or sgd"),
    ("inner", {"name": "sgd", "b1": 0.5}, "'sgd' does not use it"),
    ("inner", {"name": "lion", "eps": 1e-6}, "'lion' does not use it"),
    ("inner", {"name": "muon", "momentum": 1.0}, "momentum = 1.0"),
    ("inner", {"b1": 1.0}, "b1 = 1.0"),
    ("inner", {"final_fraction": 1.5}, "final_fraction = 1.5"),
    ("inner", {"on_overwrite": "reset"}, "keep, zero, scale"),
    ("inner", {"overwrite_scale": 0.9}, "'keep' does not use it"),
    (
      "inner",
      {"on_overwrite": "scale", "overwrite_scale": 1.0},
      "overwrite_scale = 1.0",
    ),
    ("merge", {"rda_scope": "axis"}, "tensor, row, fragment"),
    (
      "merge",
      {"rule": "average", "rda_scope": "row"},
      "merge.rda_scope = .row. means nothing without",
    ),
  ],
)
def test_what_cannot_work_or_means_nothing_is_refused(group, options, words):
  with pytest.raises(ConfigError, match=words):
    config(**{group: options})


def test_the_clock_of_an_eager_learner_is_the_round():
  eager = {"eager": True, "wait": "exact", "apply": "at_overlap"}
  config(sync=eager, outer={"warmup": 5, "clock": "round"})
  with pytest.raises(ConfigError, match="Set outer.clock='round'"):
    config(sync=eager, outer={"warmup": 5})
