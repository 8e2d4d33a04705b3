"""Patches, what they see, and questions about images."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.lm import vision, vqa
from ddiloco.lm.layers import is_variable, masked
from ddiloco.lm.program import build
from ddiloco.lm.train_step import abstract_decoder
from experiments.vqa import baselines
from experiments.vqa.config import get_config
from tests.configs import override
from tests.lm.tiny import flat

SIZE, PATCH = 8, 4
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


def write_vqa(folder: pathlib.Path, train: int = 24, test: int = 6) -> str:
  """Squares of one colour in one of four corners; returns the folder."""
  for split, count in (("train", train), ("test", test)):
    (folder / split / "images").mkdir(parents=True)
    entries = []
    for i in range(count):
      colour = list(COLOURS)[i % 3]
      pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
      row, column = 4 * (i // 3 % 2), 4 * (i // 6 % 2)
      pixels[row : row + 4, column : column + 4] = COLOURS[colour]
      Image.fromarray(pixels).save(folder / split / "images" / f"{i}.png")
      where = ("top", "bottom")[row // 4]
      pair = [["which colour?", colour, i], ["where?", where, i]]
      entries += pair[:: (-1) ** i]  # both kinds in every second entry
    (folder / split / "questions.json").write_text(json.dumps(entries))
  return str(folder)


def vqa_config(path: str, **groups: dict) -> Config:
  values = {
    "learners": {"count": 2, "batch_size": (8,)},
    "model": {
      "width": 32,
      "layers": 2,
      "heads": 2,
      "kv_heads": 1,
      "head_width": 16,
      "hidden": 64,
      "image_size": SIZE,
      "patch_size": PATCH,
    },
    "data": {
      "source": "easy_vqa",
      "path": path,
      "tokenizer": "bpe",
      "vocab_size": 280,
      "sequence_length": 20,
      "shards": 2,
    },
    "eval": {"sequences": 12, "batch_size": 5},
    "inner": {"warmup": 100, "decay": 10_000},
    "stop": {"rounds": 1},
  }
  return override(values, groups)


@pytest.fixture(name="path", scope="module")
def path_fixture(tmp_path_factory) -> str:
  return write_vqa(tmp_path_factory.mktemp("vqa") / "data")


def test_patches_are_squares_row_by_row():
  image = np.arange(2 * 8 * 8 * 3).reshape(2, 8, 8, 3) % 251
  patches = np.asarray(vision.to_patches(jnp.asarray(image, jnp.uint8), 4))
  assert patches.shape == (2, 4, 48)
  for p, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
    square = image[:, row : row + 4, column : column + 4]
    expected = square.reshape(2, 48) / 127.5 - 1
    np.testing.assert_allclose(patches[:, p], expected, atol=1e-6)


def decoder_fn(config: Config):
  """Jitted logits of (images, tokens) under random parameters."""
  mesh = build(config, None).mesh
  graph, variables = abstract_decoder(config.model, 280, mesh)
  generator = np.random.default_rng(0)
  params = jax.tree.map(
    lambda v: jnp.asarray(generator.normal(size=v.shape) / 4, jnp.float32),
    variables,
    is_leaf=is_variable,
  )

  @jax.jit
  def apply(images, tokens):
    counted = jnp.ones(tokens.shape, jnp.float32)
    return nnx.merge(graph, params).decode(tokens, counted, images).logits

  return apply


@pytest.mark.parametrize("scan", [False, True])
def test_text_sees_every_patch_and_no_later_token(scan):
  apply = decoder_fn(vqa_config("unused", model={"scan_layers": scan}))
  generator = np.random.default_rng(1)
  images = generator.integers(0, 256, (1, SIZE, SIZE, 3), dtype=np.uint8)
  tokens = generator.integers(0, 280, (1, 6), dtype=np.int32)
  before = np.asarray(apply(images, tokens))
  assert before.shape == (1, 6, 288)
  for row, column in ((0, 0), (7, 7)):  # in the first and the last patch
    other = images.copy()
    other[0, row, column] ^= 255
    changed = np.asarray(apply(other, tokens)) != before
    assert changed.any(-1).all()
  other = tokens.copy()
  other[0, 3] ^= 1
  changed = np.asarray(apply(images, other)) != before
  assert changed.any(-1)[0].tolist() == [False] * 3 + [True] * 3


def test_patches_see_the_ones_after_them():
  attend = masked(0, 5, 2)
  value = np.eye(5, dtype=np.float32)[None, :, None, :]
  seen = attend(jnp.zeros_like(value), jnp.zeros_like(value), jnp.array(value))
  expected = [
    [1, 1, 0, 0, 0],
    [1, 1, 0, 0, 0],
    [1, 1, 1, 0, 0],
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1],
  ]
  assert (np.asarray(seen)[0, :, 0] > 0).astype(int).tolist() == expected


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_samples_are_questions_whose_answers_are_targets(path, tokenizer):
  options = {"byte": {"vocab_size": 1024}}.get(tokenizer, {})  # the default
  config = vqa_config(
    path, data={"tokenizer": tokenizer, "sequence_length": 24, **options}
  )
  data = vqa.load_vqa(config.data, SIZE)
  entries = vqa.read_questions(pathlib.Path(path) / "train/questions.json")
  assert len(data.train.tokens) == len(entries) == 48
  for i, entry in enumerate(entries):
    tokens, targets = data.train.tokens[i], data.train.targets[i]
    separators = np.nonzero(tokens == data.tokenizer.separator)[0]
    start, middle, end = separators[:3]
    assert start == 0
    decode = data.tokenizer.decode
    assert decode(tokens[1:middle]).decode() == entry.question
    assert decode(tokens[middle + 1 : end]).decode() == entry.answer
    # The target at j is the token at j + 1: the answer and its end.
    expected = [middle <= j < end for j in range(24)]
    assert targets.astype(bool).tolist() == expected


def test_batches_are_repeatable_and_shards_share_nothing(path):
  config = vqa_config(path)
  learners = [build(config, i) for i in range(2)]
  first, again = learners[0].batch(4, 8), build(config, 0).batch(4, 8)
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  ahead = learners[0].batch(0, 8)
  np.testing.assert_array_equal(ahead.images[4:], first.images[:4])
  short = learners[0].batch(4, 3)
  np.testing.assert_array_equal(short.tokens[:3], first.tokens[:3])
  assert short.mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
  assert learners[0].tokens(short) == int(short.targets[:3].sum())
  seen = []
  for program in learners:
    batches = [program.batch(8 * i, 8) for i in range(3)]
    seen.append(
      {
        tokens.tobytes() + image.tobytes()
        for batch in batches
        for tokens, image in zip(batch.tokens, batch.images, strict=True)
      }
    )
  # A shard has 24 questions, three batches; each image has two questions.
  assert len(seen[0] | seen[1]) == 12 * 2 and len(seen[0] & seen[1]) == 0


def test_only_answers_are_trained_on(path):
  program = build(vqa_config(path), 0)
  batch = program.batch(0, 5)
  state = program.init()
  # Nothing of the padding, and no question's token, is a target.
  garbage = batch.tokens.copy()
  last = batch.targets.shape[1] - np.argmax(batch.targets[:, ::-1], 1)
  for row in range(5):
    garbage[row, last[row] + 1 :] = 7
  results = []
  for tokens in (batch.tokens, garbage):
    copy = jax.tree.map(jnp.copy, state)
    after, metrics = program.step(copy, batch._replace(tokens=tokens), 1)
    results.append((flat(after.params), float(metrics["loss"])))
  assert results[0][1] == results[1][1]
  for name, value in results[0][0].items():
    np.testing.assert_array_equal(value, results[1][0][name], err_msg=name)


def test_a_model_learns_to_look(path):
  # Of two shards, each would lack half of the pairs of image and question.
  program = build(
    vqa_config(path, data={"shards": 1}, learners={"count": 1}), 0
  )
  state, clock = program.init(), 0
  before = program.evaluate(program.params(state))
  for i in range(80):
    batch = program.batch(8 * i, 8)
    state, _ = program.step(state, batch, clock)
    clock += program.tokens(batch)
  after = program.evaluate(program.params(state))
  # Colours and places cannot be guessed from the questions alone.
  assert before["vqa_accuracy"] < 0.5
  assert after["vqa_accuracy"] == 1.0
  assert after["loss"] < 0.2 * before["loss"]


def test_accuracy_is_that_of_greedy_decoding(path):
  config = vqa_config(path)
  program = build(config, None)
  params = program.params(program.init())
  # Random output, but not too far from the right one: half of the table.
  data = vqa.load_vqa(config.data, SIZE).heldout
  graph, _ = abstract_decoder(config.model, 280, program.mesh)

  @jax.jit
  def greedy(params, tokens, images):
    counted = jnp.ones(tokens.shape, jnp.float32)
    decoder = nnx.merge(graph, params)
    return jnp.argmax(decoder.decode(tokens, counted, images).logits, -1)

  exact = 0
  for i in range(len(data.tokens)):
    tokens = data.tokens[i : i + 1].copy()
    where = np.nonzero(data.targets[i])[0]
    tokens[0, where + 1] = 0
    for j in where:  # one token at a time, from its own output
      image = data.images[data.image[i]][None]
      tokens[0, j + 1] = greedy(params, tokens[:, :-1], image)[0, j]
    exact += np.array_equal(tokens[0], data.tokens[i])
  result = program.evaluate(params)
  assert result["vqa_accuracy"] == pytest.approx(exact / 12)


def break_image(folder: pathlib.Path) -> str:
  broken = folder / "train" / "images" / "5.png"
  broken.write_bytes(broken.read_bytes()[:60])
  return str(broken)


def flip_a_bit(folder: pathlib.Path) -> str:
  """Of its pixels; what decompresses them does not notice."""
  broken = folder / "train" / "images" / "5.png"
  content = bytearray(broken.read_bytes())
  content[content.index(b"IDAT") + 12] ^= 1
  broken.write_bytes(content)
  return str(broken)


def remove_image(folder: pathlib.Path) -> str:
  (folder / "test" / "images" / "2.png").unlink()
  return str(folder / "test" / "images" / "2.png")


def no_image(folder: pathlib.Path) -> str:
  (folder / "train" / "images" / "7.png").write_text("hello")
  return str(folder / "train" / "images" / "7.png")


def resize_image(folder: pathlib.Path) -> str:
  path = folder / "train" / "images" / "3.png"
  Image.new("RGB", (9, 8)).save(path)
  return f"{path} has 9 x 8 pixels"


def remove_questions(folder: pathlib.Path) -> str:
  (folder / "test" / "questions.json").unlink()
  return str(folder / "test" / "questions.json")


def malform_questions(folder: pathlib.Path) -> str:
  path = folder / "train" / "questions.json"
  path.write_text('[["where?", "top", 0], ["where?", 3, 0]]')
  return f"{path}: entry 1"


def long_question(folder: pathlib.Path) -> str:
  path = folder / "train" / "questions.json"
  path.write_text(json.dumps([["where? " * 30, "top", 0]]))
  return "data.sequence_length = 20"


@pytest.mark.parametrize(
  "damage",
  [
    break_image,
    flip_a_bit,
    remove_image,
    no_image,
    resize_image,
    remove_questions,
    malform_questions,
    long_question,
  ],
)
def test_what_cannot_be_read_is_named(tmp_path, damage):
  config = vqa_config(write_vqa(tmp_path / "data"))
  words = damage(tmp_path / "data")
  with pytest.raises(ConfigError) as error:
    build(config, None).check()
  assert words in str(error.value)


def test_too_few_questions_for_a_batch_are_refused(path):
  config = vqa_config(path, learners={"count": 2, "batch_size": (25,)})
  with pytest.raises(ConfigError, match="48 questions, 24 in the smallest"):
    build(config, None).check()


@pytest.mark.parametrize(
  "groups, words",
  [
    ({"model": {"image_size": 0, "patch_size": 8}}, ["image_size", "images"]),
    ({"model": {"patch_size": 3}}, ["patch_size = 3", "image_size = 8"]),
    ({"data": {"source": "sotu", "path": ""}}, ["image_size = 8", "none"]),
    ({"data": {"partition": "time"}}, ["data.partition", "easy_vqa"]),
  ],
)
def test_what_cannot_work_is_refused(groups, words):
  with pytest.raises(ConfigError) as error:
    vqa_config("unused", **groups)
  for word in words:
    assert word in str(error.value)


def test_the_package_is_read_as_it_is():
  pytest.importorskip("easy_vqa")
  folder = vqa.folder(vqa_config("").data)
  for split, count, images in (
    ("train", 38_575, 4_000),
    ("test", 9_673, 1_000),
  ):
    questions = vqa.read_questions(folder / split / "questions.json")
    assert len(questions) == count
    assert len({entry.image for entry in questions}) == images
  pixels = vqa.read_image(folder / "test" / "images" / "0.png", 64)
  assert pixels.shape == (64, 64, 3) and pixels.dtype == np.uint8


@pytest.mark.parametrize("algorithm", ["decoupled_diloco", "data_parallel"])
def test_the_experiment_is_valid(algorithm):
  config = from_dict(get_config(algorithm).to_dict())
  assert config.data.source == "easy_vqa"
  assert math.prod(config.learners.batch_size) * config.learners.count == 48
  params = build(config, None).abstract_params()
  assert sum(x.size for x in jax.tree.leaves(params)) == 224_800


def test_baselines_count_training_questions_only(tmp_path):
  for split, entries in (
    ("train", [["a?", "x", 0], ["b?", "y", 0], ["b?", "y", 0], ["b?", "x", 0]]),
    ("test", [["a?", "x", 0], ["b?", "x", 0], ["b?", "y", 0], ["c?", "z", 0]]),
  ):
    (tmp_path / split).mkdir()
    (tmp_path / split / "questions.json").write_text(json.dumps(entries))
  # x and y are as common; b? is answered y; c? is unknown.
  assert list(baselines.accuracies(tmp_path).values()) == [0.5, 0.5]
