"""The next byte from the eight before it: a perceptron in plain JAX.

Parameters are a dict of arrays, the optimizer is momentum written out, and
nothing of ddiloco.lm's model is used, only its text.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.lm.corpus import load_corpus

CONTEXT, VOCAB = 8, 257  # bytes seen; 256 bytes and the separator


def build(config, learner, *, cache_dir=None):
  """What `program = "experiments.byo_jax.model:build"` calls."""
  return Program(config, learner, load_corpus(config.data, cache_dir))


def loss_fn(params, tokens):
  """Mean nats of the last token of each row, int32 [B, CONTEXT + 1]."""
  x = params["embedding"][tokens[:, :-1]].reshape(len(tokens), -1)
  x = jax.nn.relu(x @ params["hidden"] + params["bias"][None])
  logits = x @ params["out"]
  chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, -1:], -1)
  return -jnp.mean(chosen)


held_out_loss = jax.jit(loss_fn)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, tokens, learning_rate):
  """Gradient descent with momentum 0.9."""
  loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
  velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
  params = jax.tree.map(
    lambda p, v: p - learning_rate * v, state["params"], velocity
  )
  return {"params": params, "velocity": velocity}, {"loss": loss}


class Program:
  """What the engine asks for, and nothing else."""

  def __init__(self, config, learner, corpus):
    self._seed, self._options = config.seed, config.options
    self._learner, self._shards = learner, config.data.shards
    self._train, self._heldout = corpus.train, corpus.heldout
    self.samples_per_step = self._options["batch_size"]

  def init(self):
    """The same for everybody: only the seed counts."""
    keys = jax.random.split(jax.random.key(self._seed), 3)
    width, hidden = self._options["width"], self._options["hidden"]
    inputs = CONTEXT * width
    params = {
      "embedding": jax.random.normal(keys[0], (VOCAB, width)),
      "hidden": jax.random.normal(keys[1], (inputs, hidden)) / inputs**0.5,
      "bias": jnp.zeros(hidden),
      "out": jax.random.normal(keys[2], (hidden, VOCAB)) / hidden**0.5,
    }
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}

  def params(self, state):
    """What is exchanged; momentum stays at home."""
    return state["params"]

  def with_params(self, state, params):
    """The same momentum, other parameters."""
    return {**state, "params": params}

  def batch(self, first_sample, count):
    """Rows of the own shard, in an order that mixes the text."""
    places = len(self._train) - CONTEXT
    samples = np.arange(first_sample, first_sample + count)
    # A prime that does not divide `places` visits every place once.
    starts = (samples * self._shards + self._learner) * 999_999_937 % places
    return self._rows(self._train, starts)

  def _rows(self, text, starts):
    index = np.asarray(starts)[:, None] + np.arange(CONTEXT + 1)
    return text[index].astype(np.int32)

  def tokens(self, batch):
    """A row trains one token."""
    return len(batch)

  def step(self, state, batch, clock):
    """One step; `clock` would drive a schedule, and here there is none."""
    return train_step(state, batch, self._options["learning_rate"])

  def evaluate(self, params):
    """Held-out nats per byte, at 4096 places spread over the text."""
    starts = np.linspace(0, len(self._heldout) - CONTEXT - 1, 4096).astype(int)
    rows = self._rows(self._heldout, starts)
    return {"loss": float(held_out_loss(params, rows))}
