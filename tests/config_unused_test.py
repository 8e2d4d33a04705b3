"""Options that nothing reads are refused: a sweep would compare equal runs."""

import pytest

from ddiloco.config import ConfigError, algorithms, from_dict
from experiments.quickstart.config import get_config


def make(algorithm, **changes):
  config = get_config(algorithm)
  config.update_from_flattened_dict(changes)
  return from_dict(config.to_dict())


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_the_quickstart_is_any_of_the_family(name):
  assert make(name).algorithm == name


def test_without_an_argument_it_is_decoupled():
  assert from_dict(get_config().to_dict()).algorithm == "decoupled_diloco"


@pytest.mark.parametrize(
  "algorithm, changes, words",
  [
    ("data_parallel", {"codec.down": "int4"}, "codec.down = 'int4', but alg"),
    ("data_parallel", {"merge.embedding_rule": "rda"}, "embedding_rule"),
    ("data_parallel", {"sync.fragmentation": "tensor"}, "fragmentation"),
    ("async_local_sgd", {"merge.rule": "rda"}, "merge.rule = 'rda', but alg"),
    ("diloco", {"codec.block_size": 128}, "a codec that has blocks"),
    (
      "decoupled_diloco",
      {"merge.embedding_pattern": "wte", "merge.embedding_rule": "rda"},
      "a merge.embedding_rule other than",
    ),
    ("decoupled_diloco", {"outer.nesterov": False}, "outer.momentum above 0"),
    (
      "decoupled_diloco",
      {
        "inner.schedule": "constant",
        "inner.warmup": 0,
        "inner.final_fraction": 0.5,
      },
      "'cosine' or a warm-up",
    ),
    (
      "decoupled_diloco",
      {
        "inner.name": "sgd",
        "inner.momentum": 0.0,
        "inner.on_overwrite": "zero",
      },
      "moments",
    ),
    ("decoupled_diloco", {"data.path": "text"}, "data.source = 'text'"),
    ("decoupled_diloco", {"data.vocab_size": 512}, "data.tokenizer = 'bpe'"),
    ("decoupled_diloco", {"model.local_per_global": 2}, "local_window"),
    ("decoupled_diloco", {"options.depth": 3}, "a program of your own"),
    (
      "decoupled_diloco",
      {"sync.apply": "own", "sync.num_fragments": 1, "sync.wait": "exact"},
      "wait='never'",
    ),
  ],
)
def test_it_is_refused(algorithm, changes, words):
  make(algorithm)
  with pytest.raises(ConfigError, match=words):
    make(algorithm, **changes)
