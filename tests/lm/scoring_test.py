"""Scores of tokens: equal to the training loss and to a direct computation."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.lm import scoring as lib
from ddiloco.lm.data import gather
from ddiloco.lm.program import build
from ddiloco.lm.train_step import make_trainer
from tests.lm.tiny import tiny_config, write_text

LENGTH = 16  # of tiny_config


@pytest.fixture(name="program", scope="module")
def program_fixture(tmp_path_factory):
  text = write_text(tmp_path_factory.mktemp("scoring") / "text")
  return build(tiny_config(text), None)


@pytest.fixture(name="scorer", scope="module")
def scorer_fixture(program):
  return lib.Scorer(program, program.params(program.init()))


def direct(program, tokens, first):
  """Log-probabilities and argmaxes of tokens[first:], one forward each."""
  params = program.params(program.init())
  total, greedy = 0.0, True
  for target in range(first, len(tokens)):
    seen = tokens[max(0, target - LENGTH) : target]
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(seen)] = seen
    logits = np.asarray(program.logits(params, row), np.float64)
    last = logits[0, len(seen) - 1]
    total += last[tokens[target]] - np.log(np.exp(last).sum())
    greedy &= int(np.argmax(last[:257])) == tokens[target]
  return total, greedy


@given(
  first=st.integers(1, 40),
  size=st.integers(0, 60),
  length=st.integers(1, 20),
  most=st.integers(1, 20),
)
def test_windows_have_every_target_once_and_all_that_fits(
  first, size, length, most
):
  most = min(most, length)
  found = lib.windows(first, first + size, length, most)
  targets = [t for w in found for t in range(w.first, w.end)]
  assert targets == list(range(first, first + size))
  for start, begin, end in found:
    assert end - begin <= most
    assert end - 1 - start <= length and start <= begin - 1
    assert start == 0 or end - 1 - start == length


def test_a_short_continuation_is_scored_in_one_window(program, scorer):
  pairs = [
    ([256, *b"the "], list(b"cat")),
    ([256, *b"a context of more than a window "], list(b"cat sat")),
    ([256], list(b"sixteen bytes ..")),
    ([256, *b"x"], []),
  ]
  found = scorer.continuations(pairs)
  params = program.params(program.init())
  for (context, continuation), score in zip(pairs, found, strict=True):
    tokens = [*context, *continuation][-(LENGTH + 1) :]
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(program.logits(params, row), np.float64)[0]
    log_z = np.log(np.exp(logits).sum(-1))
    places = range(len(tokens) - len(continuation) - 1, len(tokens) - 1)
    nats = math.fsum(logits[i, tokens[i + 1]] - log_z[i] for i in places)
    assert score.nats == pytest.approx(nats, rel=1e-5, abs=1e-6)


def test_a_long_continuation_keeps_half_a_window_of_context(program, scorer):
  tokens = [256, *b"an introduction: ", *b"and then a very long continuation"]
  (score,) = scorer.continuations([(tokens[:18], tokens[18:])])
  parts = lib.windows(18, len(tokens), LENGTH, LENGTH // 2)
  assert all(w.first - w.start >= LENGTH // 2 for w in parts[:-1])
  everything, _ = direct(program, tokens, 18)
  # Targets within a window see less than a window: near, but not the same.
  assert score.nats == pytest.approx(everything, rel=0.1)


def test_greedy_is_what_generation_chooses(program, scorer):
  context = [256, *b"speech"]
  (text,) = scorer.generate([context], lambda i, text: len(text) >= 5)
  tokens = list(text.encode())
  assert len(tokens) == 5 and scorer.decode(tokens) == text
  assert direct(program, [*context, *tokens], len(context))[1]
  other = [*tokens[:-1], (tokens[-1] + 1) % 256]
  found = scorer.continuations([(context, tokens), (context, other)])
  assert [score.greedy for score in found] == [True, False]


def test_generation_slides_its_window_and_stops_each_by_itself(scorer):
  contexts = [[256, *b"a" * n] for n in (1, 20, 3)]
  together = scorer.generate(contexts, lambda i, t: len(t) >= (3, 30, 9)[i])
  assert [len(text) for text in together] == [3, 30, 9]
  for context, text in zip(contexts, together, strict=True):
    size = len(text)
    alone = scorer.generate([context], lambda i, t, n=size: len(t) >= n)
    assert alone == [text]


def test_documents_equal_the_held_out_loss(tmp_path):
  """A stream of one document and no rest: the very windows of `evaluate`."""
  path = write_text(tmp_path, documents=3)
  text = "w" * 10 + " speech of exactly so many windows, and no more. " * 5
  text = text[: LENGTH * 15]
  (tmp_path / "99.txt").write_text(text)
  config = tiny_config(
    path, data={"heldout_documents": 1}, eval={"sequences": 100}
  )
  program = build(config, None)
  params = program.params(program.init())
  measured = program.evaluate(params)
  scorer = lib.Scorer(program, params)
  (nats,) = scorer.documents([scorer.encode(text)])
  assert -nats / len(text) == pytest.approx(measured["loss"], rel=1e-5)


def test_documents_equal_the_training_loss_of_their_windows(program, scorer):
  text = list(b"many words in a text " * 10)
  stream = np.array([256, *text], np.uint16)
  whole = (len(stream) - 1) // LENGTH * LENGTH
  batch = gather(stream, list(range(whole // LENGTH)), LENGTH, 16)
  config = tiny_config("unused")
  trainer = make_trainer(config.model, config.inner, 257, program.mesh)
  params = program.params(program.init())
  nats = float(trainer.measure(params, batch)["nats"])
  (found,) = scorer.documents([text[:whole]])
  assert -found == pytest.approx(nats, rel=1e-5)


def test_parameters_may_come_from_the_host(program, scorer):
  host = jax.tree.map(np.array, program.params(program.init()))
  pair = ([256, *b"abc"], list(b"def"))
  again = lib.Scorer(program, host).continuations([pair])
  assert again == scorer.continuations([pair])


def test_text_survives_and_parts_of_letters_show(scorer):
  assert scorer.decode(scorer.encode("naïve 猫")) == "naïve 猫"
  assert scorer.decode([0xC3]) == "\ufffd"
