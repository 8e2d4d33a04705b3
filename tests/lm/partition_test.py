"""Shards: disjoint, complete, as unlike as asked, the same in every process."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import ConfigError, DataConfig
from ddiloco.lm import partition as lib
from ddiloco.lm.corpus import Corpus, load_corpus
from ddiloco.lm.tokenizer import ByteTokenizer

LENGTH = 4


def corpus_of(*documents: tuple[str, int]) -> Corpus:
  """Documents of so many windows each; a label, and its separator first."""
  tokenizer = ByteTokenizer()
  texts = [b"x" * (windows * LENGTH - 1) for _, windows in documents]
  texts[-1] += b"x"  # the last window has a last target
  train = tokenizer.encode(texts)
  return Corpus(train, train[:0], tokenizer, tuple(n for n, _ in documents))


def config_of(partition: str, shards: int, **keys) -> DataConfig:
  return DataConfig(
    partition=partition, shards=shards, sequence_length=LENGTH, **keys
  )


def lists(shards: lib.Shards) -> list[list[int]]:
  return [list(map(int, shard)) for shard in shards]


def test_a_window_has_the_label_of_its_first_target():
  tokenizer = ByteTokenizer()
  train = tokenizer.encode([b"abcdef", b"g", b"hijkl"])
  # |abc def |g| h ijk l: targets 1-4, 5-8, 9-12
  labels = lib.window_labels(
    Corpus(train, train[:0], tokenizer, ("b", "c", "a")), LENGTH
  )
  assert labels.names == ("a", "b")
  assert labels.of_window.tolist() == [1, 1, 0]


def test_labels_are_none_if_the_text_has_none():
  corpus = corpus_of(("a", 3))._replace(labels=())
  assert lib.window_labels(corpus, LENGTH) is None


def test_iid_deals_windows_out_in_turn():
  corpus = corpus_of(("a", 5), ("b", 2))
  shards = lib.make_shards(corpus, config_of("iid", 3), 0)
  assert lists(shards) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("kind", ["domain", "language"])
def test_whole_labels_are_packed_the_largest_first(kind):
  corpus = corpus_of(("a", 2), ("b", 5), ("c", 3), ("d", 1), ("b", 1))
  shards = lib.make_shards(corpus, config_of(kind, 2), 0)
  # b (6) | c (3), a (2), d (1)
  assert lists(shards) == [[2, 3, 4, 5, 6, 11], [0, 1, 7, 8, 9, 10]]
  assert lists(lib.make_shards(corpus, config_of(kind, 4), 7)) == [
    [2, 3, 4, 5, 6, 11],
    [7, 8, 9],
    [0, 1],
    [10],
  ]


def test_time_cuts_the_sorted_windows_into_equal_spans():
  corpus = corpus_of(("1950", 3), ("1800", 2), ("1950-02", 1), ("1799", 2))
  shards = lib.make_shards(corpus, config_of("time", 3), 0)
  # 1799: 6 7, 1800: 3 4, 1950: 0 1 2, 1950-02: 5
  assert lists(shards) == [[3, 6, 7], [0, 1, 4], [2, 5]]


@pytest.mark.parametrize("kind", ["domain", "language", "time"])
def test_fewer_labels_than_shards_are_refused(kind):
  corpus = corpus_of(("1900", 9), ("1901", 9))
  with pytest.raises(ConfigError) as error:
    lib.make_shards(corpus, config_of(kind, 3), 0)
  for word in ("data.shards = 3", "2 labels", kind, "(1900, 1901)", "Lower"):
    assert word in str(error.value)


def dirichlet(corpus, shards, alpha, seed=0):
  data = config_of("dirichlet", shards, dirichlet_alpha=alpha)
  return lib.make_shards(corpus, data, seed)


def test_dirichlet_counts_are_these():
  """A change here changes the data of every such run."""
  corpus = corpus_of(("a", 40), ("b", 30), ("c", 20), ("d", 10))
  labels = lib.window_labels(corpus, LENGTH)
  found = lib.mix(labels, dirichlet(corpus, 3, 1.0)).counts.tolist()
  assert found == [[0, 24, 0, 10], [19, 5, 9, 0], [21, 1, 11, 0]]
  assert [len(s) for s in dirichlet(corpus, 3, 1.0)] == [34, 33, 33]
  assert lists(dirichlet(corpus, 3, 1.0))[0][:6] == [41, 42, 43, 44, 45, 46]


def test_a_large_alpha_gives_the_proportions_of_the_whole():
  corpus = corpus_of(("a", 400), ("b", 300), ("c", 200), ("d", 100))
  labels = lib.window_labels(corpus, LENGTH)
  mix = lib.mix(labels, dirichlet(corpus, 4, 1e9))
  assert np.abs(mix.counts - [100, 75, 50, 25]).max() <= 3
  assert mix.shared_bits < 1e-3


def test_a_tiny_alpha_gives_each_shard_as_few_labels_as_it_can():
  corpus = corpus_of(*((name, 100) for name in "abcdef"))
  labels = lib.window_labels(corpus, LENGTH)
  mix = lib.mix(labels, dirichlet(corpus, 6, 1e-9, seed=4))
  assert sorted(map(tuple, mix.counts), reverse=True) == [
    tuple(100 * (i == k) for i in range(6)) for k in range(6)
  ]
  assert mix.shared_bits == pytest.approx(math.log2(6))


@given(
  sizes=st.lists(st.integers(1, 12), min_size=3, max_size=8),
  kind=st.sampled_from(["iid", "domain", "time", "dirichlet"]),
  shards=st.integers(1, 3),
  alpha=st.sampled_from([1e-6, 0.1, 1.0, 100.0]),
  seed=st.integers(0, 2**40),
)
def test_shards_are_disjoint_complete_and_repeatable(
  sizes, kind, shards, alpha, seed
):
  corpus = corpus_of(*((str(1900 + i), size) for i, size in enumerate(sizes)))
  data = config_of(kind, shards, dirichlet_alpha=alpha)
  found = lists(lib.make_shards(corpus, data, seed))
  windows = lib.num_windows(corpus.train, LENGTH)
  assert windows == sum(sizes)
  assert sorted(sum(found, [])) == list(range(windows))
  assert all(shard and shard == sorted(shard) for shard in found)
  assert found == lists(lib.make_shards(corpus, data, seed))
  if kind != "domain":
    assert {len(shard) - windows // shards for shard in found} <= {0, 1}
  mix = lib.mix(lib.window_labels(corpus, LENGTH), found)
  assert mix.counts.sum(0).tolist() == sizes
  assert -1e-9 <= mix.shared_bits <= math.log2(shards) + 1e-9


def test_only_dirichlet_depends_on_the_seed():
  corpus = corpus_of(*((str(1900 + i), 9) for i in range(9)))
  for kind in ("iid", "domain", "time", "dirichlet"):
    data = config_of(kind, 3)
    a, b = (lists(lib.make_shards(corpus, data, seed)) for seed in (0, 1))
    assert (a == b) == (kind != "dirichlet")


def test_mix_is_entropy_and_mutual_information():
  labels = lib.Labels(("a", "b"), np.array([0, 0, 0, 1, 0, 0, 1, 1]))
  mix = lib.mix(labels, (range(4), range(4, 8)))
  assert mix.counts.tolist() == [[3, 1], [2, 2]]
  within = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
  total = -(5 / 8 * math.log2(5 / 8) + 3 / 8 * math.log2(3 / 8))
  assert mix.entropy_bits == pytest.approx((within, 1.0))
  assert mix.total_bits == pytest.approx(total)
  assert mix.shared_bits == pytest.approx(total - (within + 1.0) / 2)
  assert lib.describe(mix).splitlines() == [
    "shard  windows  entropy  labels",
    "    0        4    0.811  a 75%, b 25%",
    "    1        4    1.000  a 50%, b 50%",
    "  all        8    0.954  2 labels; a window's shard tells 0.049 bits of "
    "its label",
  ]


def test_entropy_of_nothing_and_of_one_label_is_zero():
  assert lib.entropy_bits(np.array([0, 0])) == 0
  assert lib.entropy_bits(np.array([0, 7])) == 0


def test_speeches_by_time_and_by_president():
  mixes = {}
  for kind in ("iid", "domain", "time"):
    data = DataConfig(partition=kind, shards=3)
    corpus = load_corpus(data)
    labels = lib.window_labels(corpus, data.sequence_length)
    shards = lib.make_shards(corpus, data, 0)
    mixes[kind] = lib.mix(labels, shards)
  assert mixes["iid"].shared_bits < 1e-3
  domain = mixes["domain"]
  assert ((domain.counts > 0).sum(0) == 1).all()  # each president in one shard
  assert np.ptp(domain.counts.sum(1)) < 0.01 * domain.counts.sum()
  assert domain.shared_bits == pytest.approx(math.log2(3), abs=1e-3)
  names, counts = mixes["time"].names, mixes["time"].counts
  spans = [[n for n, c in zip(names, row, strict=True) if c] for row in counts]
  assert spans[0][0] == "1790" and spans[2][-1] == "2002"
  assert spans[0][-1] <= spans[1][0] and spans[1][-1] <= spans[2][0]
