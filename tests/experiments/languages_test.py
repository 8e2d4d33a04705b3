"""Languages as labels, from real translations that are always installed."""

import pytest

from ddiloco.config import ConfigError, DataConfig
from ddiloco.lm import partition
from ddiloco.lm.corpus import load_corpus
from experiments.languages import prepare


def test_translations_become_shards_of_one_language_each(tmp_path):
  sizes = prepare.write("humanize", tmp_path / "text", ["de_DE", "ru_RU"])
  assert list(sizes) == ["de_DE", "ru_RU"]
  data = DataConfig(
    source="text",
    path=str(tmp_path / "text"),
    partition="language",
    shards=2,
    sequence_length=16,
    heldout_documents=2,
  )
  corpus = load_corpus(data)
  assert "год".encode() in corpus.tokenizer.decode(corpus.train)
  assert b"Monat" in corpus.tokenizer.decode(corpus.train)
  labels = partition.window_labels(corpus, 16)
  shards = partition.make_shards(corpus, data, 0)
  mix = partition.mix(labels, shards)
  assert mix.names == ("de_DE", "ru_RU")
  assert [(row > 0).sum() for row in mix.counts] == [1, 1]
  assert mix.entropy_bits == (0.0, 0.0)
  assert mix.shared_bits == pytest.approx(mix.total_bits)
  assert mix.total_bits > 0.8


def test_every_byte_is_written_once_and_in_order(tmp_path):
  prepare.write("humanize", tmp_path / "a")
  prepare.write("humanize", tmp_path / "b")
  known = prepare.messages("humanize")
  for language, texts in known.items():
    assert len(texts) == len(set(texts))
    for folder in ("a", "b"):
      files = sorted((tmp_path / folder / language).iterdir())
      written = "".join(file.read_text(encoding="utf-8") for file in files)
      assert written == "".join(text + "\n" for text in texts)


@pytest.mark.parametrize(
  "package, languages, words",
  [
    ("no_such_package", [], "no installed package"),
    ("iniconfig", [], "no translations"),
    ("humanize", ["xx"], "not translated to 'xx'. It is to"),
  ],
)
def test_what_is_not_there_is_refused(tmp_path, package, languages, words):
  with pytest.raises(ConfigError, match=words):
    prepare.write(package, tmp_path / "text", languages)
  assert not (tmp_path / "text").exists()
