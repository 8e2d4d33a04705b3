"""Questions about images, and their answers.

A directory holds `train` and `test`, each with `questions.json`, a list of
[question, answer, image], and `images/<image>.png`. The package `easy-vqa`
holds one: synthetic shapes, 38,575 questions about 4,000 images to train on
and 9,673 about 1,000 others held out.

A sample is an image and the tokens of
`<separator> question <separator> answer <separator>`. Its targets are the
answer and the separator that ends it.
"""

import functools
import importlib.util
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from ddiloco.config import Config, ConfigError, DataConfig
from ddiloco.lm import evaluation
from ddiloco.lm.data import Batch, SampleReader
from ddiloco.lm.partition import Mix
from ddiloco.lm.tokenizer import (
  BpeTokenizer,
  ByteTokenizer,
  Tokenizer,
  train_bpe,
)
from ddiloco.lm.train_step import Trainer
from ddiloco.lm.vision import CHANNELS

_INSTALL = "Run: pip install 'ddiloco[vqa]'"


class Split(NamedTuple):
  """Samples, in the order of the file."""

  tokens: np.ndarray  # [N, L + 1] int32
  targets: np.ndarray  # [N, L] f32, 1 where a target belongs to the answer
  image: np.ndarray  # [N], the row of `images`
  images: np.ndarray  # [I, H, W, 3] uint8

  def batch(self, samples: list[int], rows: int) -> Batch:
    """The given samples as a batch of `rows` rows."""
    blank = rows - len(samples)

    def padded(values: np.ndarray) -> np.ndarray:
      return np.pad(values, ((0, blank), *[(0, 0)] * (values.ndim - 1)))

    return Batch(
      tokens=padded(self.tokens[samples]),
      mask=padded(np.ones(len(samples), np.float32)),
      images=padded(self.images[self.image[samples]]),
      targets=padded(self.targets[samples]),
    )


class Vqa(NamedTuple):
  """The questions of a directory."""

  train: Split
  heldout: Split
  tokenizer: Tokenizer


class Question(NamedTuple):
  """One entry of questions.json."""

  question: str
  answer: str
  image: str


def folder(data: DataConfig) -> pathlib.Path:
  """Where the questions are; `ConfigError` if there are none."""
  if data.path:
    path = pathlib.Path(data.path)
    if not path.is_dir():
      raise ConfigError(
        f"data.path = {data.path!r} is not a directory. Name one that holds "
        "train/questions.json, train/images, and the same under test."
      )
    return path
  # Found, not imported: only its files are read.
  spec = importlib.util.find_spec("easy_vqa")
  if spec is None or spec.origin is None:
    raise ConfigError(
      "data.source = 'easy_vqa' needs the package 'easy-vqa', which is not "
      f"installed. {_INSTALL}"
    )
  return pathlib.Path(spec.origin).parent / "data"


def read_questions(path: pathlib.Path) -> list[Question]:
  """The entries of a questions.json; `ConfigError` if it is not one."""
  try:
    entries = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"{path} cannot be read: {error}. It must be a JSON list of "
      "[question, answer, image]."
    ) from error
  questions = []
  for i, entry in enumerate(entries if isinstance(entries, list) else []):
    if (
      not isinstance(entry, list)
      or len(entry) != 3
      or not all(isinstance(text, str) and text for text in entry[:2])
      or type(entry[2]) not in (int, str)
    ):
      raise ConfigError(
        f"{path}: entry {i} is {entry!r:.80}, but each must be "
        "[question, answer, image], a text, a text and the image's name."
      )
    questions.append(Question(entry[0], entry[1], str(entry[2])))
  if not questions:
    raise ConfigError(f"{path} holds no list of questions: write some.")
  return questions


def read_image(path: pathlib.Path, size: int) -> np.ndarray:
  """An image as uint8 [size, size, 3]; `ConfigError`, with its name."""
  try:
    from PIL import Image
  except ModuleNotFoundError as error:
    raise ConfigError(
      f"Images need the package 'pillow'. {_INSTALL}"
    ) from error
  try:
    with Image.open(path) as image:
      image.verify()  # reading them does not look at checksums
    with Image.open(path) as image:
      pixels = np.asarray(image.convert("RGB"))
  except (OSError, SyntaxError, ValueError) as error:
    raise ConfigError(
      f"the image {path} cannot be read: {error}. Replace it, or remove its "
      "questions."
    ) from error
  if pixels.shape != (size, size, CHANNELS):
    raise ConfigError(
      f"the image {path} has {pixels.shape[1]} x {pixels.shape[0]} pixels, but "
      f"model.image_size = {size}. Scale it, or change model.image_size."
    )
  return pixels


# A process that runs several learners (a simulation) reads them once.
@functools.lru_cache(maxsize=2)
def load_vqa(data: DataConfig, image_size: int) -> Vqa:
  """Reads everything at once; `ConfigError` if it cannot be used."""
  root = folder(data)
  train, heldout = (
    read_questions(root / split / "questions.json")
    for split in ("train", "test")
  )
  tokenizer = ByteTokenizer()
  if data.tokenizer == "bpe":
    texts = sorted({text for entry in train for text in entry[:2]})
    tokenizer = BpeTokenizer(
      train_bpe([text.encode() for text in texts], data.vocab_size)
    )
  return Vqa(
    *(
      _make_split(entries, root / name / "images", tokenizer, data, image_size)
      for entries, name in ((train, "train"), (heldout, "test"))
    ),
    tokenizer,
  )


def _make_split(
  entries: list[Question],
  images: pathlib.Path,
  tokenizer: Tokenizer,
  data: DataConfig,
  image_size: int,
) -> Split:
  names = sorted({entry.image for entry in entries})
  row = {name: i for i, name in enumerate(names)}
  pixels = [read_image(images / f"{name}.png", image_size) for name in names]

  @functools.cache
  def encode(text: str) -> np.ndarray:
    return tokenizer.encode([text.encode()])  # starts with the separator

  length = data.sequence_length
  tokens = np.full((len(entries), length + 1), tokenizer.separator, np.int32)
  targets = np.zeros((len(entries), length), np.float32)
  for i, entry in enumerate(entries):
    question, answer = encode(entry.question), encode(entry.answer)
    first, end = len(question), len(question) + len(answer)
    if end > length:
      raise ConfigError(
        f"data.sequence_length = {length}, but the question "
        f"{entry.question!r} and its answer {entry.answer!r} need {end}. Raise "
        "it to what the longest needs."
      )
    tokens[i, :end] = np.concatenate([question, answer])
    targets[i, first:end] = 1.0
  where = np.array([row[entry.image] for entry in entries])
  return Split(tokens, targets, where, np.stack(pixels))


class VqaData:
  """Questions about images, opened when they are first needed."""

  def __init__(self, config: Config):
    self._config = config

  @property
  def tokenizer(self) -> Tokenizer:
    """What turns text into token ids."""
    return self._vqa.tokenizer

  def reader(self, shard: int, batch_size: int) -> SampleReader:
    """The samples of a shard; raises `ConfigError`."""
    config, train = self._config, self._vqa.train
    total, shards = len(train.tokens), config.data.shards
    if total // shards < batch_size:
      raise ConfigError(
        f"there are {total} questions, {total // shards} in the smallest of "
        f"data.shards = {shards} shards, but a batch has {batch_size}. Lower "
        "data.shards or learners.batch_size."
      )
    return SampleReader(
      train.batch,
      range(shard, total, shards),
      seed=config.seed,
      shard=shard,
      batch_size=batch_size,
    )

  def evaluate(self, trainer: Trainer, params: Any) -> dict[str, float]:
    """On held-out questions: "vqa_accuracy", the share answered exactly.

    And the "loss" of the answers in nats per byte, and "bits_per_byte".
    """
    split, config = self._vqa.heldout, self._config.eval
    token_bytes = self._vqa.tokenizer.token_bytes
    samples = evaluation.spread(len(split.tokens), config.sequences)
    num_bytes = (token_bytes[split.tokens[:, 1:]] * split.targets)[
      samples
    ].sum()
    batches = (
      split.batch(samples[i : i + config.batch_size], config.batch_size)
      for i in range(0, len(samples), config.batch_size)
    )
    sums = evaluation.measure(trainer, params, batches)
    return {
      **evaluation.per_byte(sums, int(num_bytes)),
      "vqa_accuracy": float(sums["exact"]) / len(samples),
    }

  def label_mix(self) -> Mix | None:
    """Questions have no labels."""
    return None

  @property
  def _vqa(self) -> Vqa:
    return load_vqa(self._config.data, self._config.model.image_size)
