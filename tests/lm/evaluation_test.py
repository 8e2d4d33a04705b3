"""Held-out loss: equal to a direct computation, per byte, fixed windows."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from ddiloco.config import ConfigError
from ddiloco.lm.corpus import load_corpus
from ddiloco.lm.evaluation import spread
from ddiloco.lm.program import build
from ddiloco.lm.tokenizer import vocab_size
from ddiloco.lm.train_step import abstract_decoder
from tests.lm.tiny import run, tiny_config, write_text


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_loss_equals_a_direct_computation(tmp_path, tokenizer):
  options = {"bpe": {"vocab_size": 320}}.get(tokenizer, {})
  config = tiny_config(
    write_text(tmp_path), data={"tokenizer": tokenizer, **options}
  )
  program = build(config, 0)
  state = program.init()
  corpus, length = load_corpus(config.data), config.data.sequence_length
  available = (len(corpus.heldout) - 1) // length
  windows = np.array(spread(available, config.eval.sequences))
  assert len(windows) == 20
  index = (windows * length)[:, None] + np.arange(length + 1)[None, :]
  tokens = np.asarray(corpus.heldout)[index].astype(np.int32)
  graph, _ = abstract_decoder(
    config.model, vocab_size(config.data), program.mesh
  )
  apply = jax.jit(lambda params, x: nnx.merge(graph, params)(x))
  logits = np.asarray(apply(state.params, tokens[:, :-1]), np.float64)
  log_z = np.log(np.exp(logits).sum(-1))
  chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
  num_bytes = sum(len(corpus.tokenizer.decode(row[1:])) for row in tokens)
  loss = (log_z - chosen).sum() / num_bytes
  result = program.evaluate(state.params)
  assert result["loss"] == pytest.approx(loss, rel=1e-5)
  assert result["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)


def test_an_evaluator_agrees_with_the_learner(tmp_path):
  config = tiny_config(write_text(tmp_path))
  program, state, _ = run(config, learner=1, steps=1)
  host = jax.tree.map(np.array, program.params(state))
  evaluator = build(config, None)
  assert evaluator.evaluate(host) == program.evaluate(state.params)
  assert evaluator.evaluate(host) == evaluator.evaluate(host)


@pytest.mark.parametrize(
  "available, wanted, expected",
  [(10, 5, [0, 2, 4, 6, 8]), (3, 5, [0, 1, 2]), (7, 3, [0, 2, 4])],
)
def test_windows_are_evenly_spread(available, wanted, expected):
  assert spread(available, wanted) == expected


def test_heldout_text_without_a_window_is_refused(tmp_path):
  write_text(tmp_path)
  (tmp_path / "zz.txt").write_text("short")
  config = tiny_config(str(tmp_path), data={"heldout_documents": 1})
  program = build(config, None)
  with pytest.raises(ConfigError, match="6 tokens.*17 of one window"):
    program.evaluate(program.init().params)
