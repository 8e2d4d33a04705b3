"""Tokenizers: round trips, sizes, determinism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import DataConfig
from ddiloco.lm import tokenizer as lib

TEXT = [f"the cat and the dog number {i} sat there".encode() for i in range(40)]
BYTE = lib.ByteTokenizer()
BPE = lib.BpeTokenizer(lib.train_bpe(TEXT, 300))
EDGE_DOCUMENTS = [
  b"the dog",
  "naïve 猫 🐈\n\t\0".encode(),
  b"<|separator|> x  y",
]


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
def test_streams_have_a_separator_before_each_document(tokenizer):
  stream = tokenizer.encode(EDGE_DOCUMENTS)
  assert stream.dtype == np.uint16
  starts = np.nonzero(stream == tokenizer.separator)[0]
  assert len(starts) == 3 and starts[0] == 0
  for document, part in zip(
    EDGE_DOCUMENTS, np.split(stream, starts[1:]), strict=True
  ):
    assert tokenizer.decode(part) == document
  assert tokenizer.decode(stream) == b"".join(EDGE_DOCUMENTS)


@pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
@given(text=st.text(max_size=40))
def test_any_text_survives(tokenizer, text):
  document = text.encode("utf-8", "ignore")
  stream = tokenizer.encode([document])
  assert tokenizer.decode(stream) == document
  assert tokenizer.token_bytes[stream].sum() == len(document)


def test_bpe_is_shorter_than_bytes_and_within_its_vocabulary():
  stream = BPE.encode(TEXT)
  assert len(stream) < 0.5 * len(BYTE.encode(TEXT))
  assert stream.max() == BPE.separator < 300
  assert len(BPE.token_bytes) == BPE.separator + 1


def test_training_bpe_is_deterministic():
  assert lib.train_bpe(TEXT, 300) == lib.train_bpe(list(TEXT), 300)


@pytest.mark.parametrize(
  "data, size",
  [
    (DataConfig(), 257),
    (DataConfig(tokenizer="bpe", vocab_size=2048), 2048),
  ],
)
def test_the_vocabulary_is_known_before_the_text(data, size):
  assert lib.vocab_size(data) == size


def test_large_vocabularies_get_wider_tokens():
  assert lib.token_dtype(2**16) == np.uint16
  assert lib.token_dtype(2**16 + 1) == np.uint32
