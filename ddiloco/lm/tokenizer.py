"""Tokenizers: bytes, or a byte-level BPE trained on the training documents."""

from collections.abc import Sequence

import numpy as np

from ddiloco.config import DataConfig

_BYTE_SEPARATOR = 256


def vocab_size(data: DataConfig) -> int:
  """Distinct token ids, the separator included; known before any text is."""
  if data.tokenizer == "byte":
    return _BYTE_SEPARATOR + 1
  return data.vocab_size


def token_dtype(size: int) -> np.dtype:
  """The smallest unsigned type that holds ids below `size`."""
  return np.dtype(np.uint16 if size <= 2**16 else np.uint32)


class ByteTokenizer:
  """Token i is the byte i; token 256 separates documents."""

  definition = ""  # nothing was trained
  separator = _BYTE_SEPARATOR
  token_bytes = np.array([1] * 256 + [0], np.int64)

  def encode(self, documents: Sequence[bytes]) -> np.ndarray:
    """One stream of ids, with a separator before each document."""
    sizes = np.array([len(document) + 1 for document in documents], np.int64)
    stream = np.full(sizes.sum(), self.separator, np.uint16)
    starts = np.cumsum(sizes) - sizes + 1
    for start, document in zip(starts, documents, strict=True):
      stream[start : start + len(document)] = np.frombuffer(document, np.uint8)
    return stream

  def decode(self, tokens: np.ndarray) -> bytes:
    """The bytes of a stream, without its separators."""
    kept = np.asarray(tokens)
    return kept[kept != self.separator].astype(np.uint8).tobytes()


class BpeTokenizer:
  """Byte-level BPE: any text has an encoding, and decoding returns its bytes.

  Built from the JSON that `train_bpe` returns.
  """

  def __init__(self, definition: str):
    # Imported here: runs on bytes need not have it loaded.
    import tokenizers

    self.definition = definition
    self._tokenizer = tokenizers.Tokenizer.from_str(definition)
    # The separator is no entry of the vocabulary, so no text can spell it.
    self.separator = self._tokenizer.get_vocab_size()
    # Each character of a byte-level token stands for one byte.
    names = map(self._tokenizer.id_to_token, range(self.separator))
    self.token_bytes = np.array([*map(len, names), 0], np.int64)

  def encode(self, documents: Sequence[bytes]) -> np.ndarray:
    """One stream of ids, with a separator before each document."""
    texts = [document.decode() for document in documents]
    parts = [np.zeros(0, np.uint32)]
    for encoding in self._tokenizer.encode_batch(texts):
      parts.append(np.array([self.separator, *encoding.ids], np.uint32))
    return np.concatenate(parts).astype(token_dtype(len(self.token_bytes)))

  def decode(self, tokens: np.ndarray) -> bytes:
    """The bytes of a stream, without its separators."""
    ids = [int(token) for token in tokens if token != self.separator]
    return self._tokenizer.decode(ids).encode()


Tokenizer = ByteTokenizer | BpeTokenizer


def train_bpe(documents: Sequence[bytes], size: int) -> str:
  """Trains a byte-level BPE; deterministic. Returns its JSON.

  `size` counts the separator, which is the last id and not part of the JSON.
  """
  import tokenizers

  byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = byte_level
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size - 1,
    initial_alphabet=byte_level.alphabet(),
    show_progress=False,
  )
  texts = (document.decode() for document in documents)
  tokenizer.train_from_iterator(texts, trainer, length=len(documents))
  return tokenizer.to_str()
