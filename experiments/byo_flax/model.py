"""The next byte by a GRU of Flax's library, trained with Optax.

Flax modules are split into their structure and plain dicts of arrays once;
what the engine exchanges are the latter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ddiloco.lm.corpus import load_corpus

VOCAB = 257  # 256 bytes and the separator


class Reader(nnx.Module):
  """Embedding, GRU, readout."""

  def __init__(self, width: int, rngs: nnx.Rngs):
    self.embedding = nnx.Embed(VOCAB, width, rngs=rngs)
    self.memory = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))
    self.out = nnx.Linear(width, VOCAB, rngs=rngs)

  def __call__(self, tokens):
    """Logits [B, L, VOCAB] of int32 tokens [B, L]."""
    start = jnp.zeros((len(tokens), self.embedding.features))
    return self.out(self.memory(self.embedding(tokens), initial_carry=start))


@functools.cache  # the learners of a simulation share compiled functions
def functions(width, learning_rate, seed):
  """(init, train_step, loss) of one model and optimizer, jitted."""
  reader = Reader(width, nnx.Rngs(seed))
  # The rest are states of random generators, on which nothing here draws.
  graph, initial, rest = nnx.split(reader, nnx.Param, ...)
  adam = optax.adam(learning_rate)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)

  def init():
    params = jax.tree.map(jnp.copy, nnx.to_pure_dict(initial))
    return params, optimizer.init(params)

  def loss_fn(params, tokens):
    logits = nnx.merge(graph, params, rest)(tokens[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(loss(logits, tokens[:, 1:]))

  def train_step(state, tokens):
    params, moments = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), {"loss": loss}

  return init, jax.jit(train_step, donate_argnums=0), jax.jit(loss_fn)


def build(config, learner, *, cache_dir=None):
  """What `program = "experiments.byo_flax.model:build"` calls."""
  return Program(config, learner, load_corpus(config.data, cache_dir))


class Program:
  """What the engine asks for. The same seed gives the same initial bits."""

  def __init__(self, config, learner, corpus):
    options = config.options
    self.init, self._step, self._loss = functions(
      options["width"], options["learning_rate"], config.seed
    )
    self.samples_per_step = options["batch_size"]
    self._learner, self._shards = learner, config.data.shards
    self._length = config.data.sequence_length
    self._train, self._heldout = corpus.train, corpus.heldout

  def params(self, state):
    """What is exchanged; Adam's moments stay at home."""
    return state[0]

  def with_params(self, state, params):
    """The same moments, other parameters."""
    return params, state[1]

  def batch(self, first_sample, count):
    """Windows of the own shard, in an order that mixes the text."""
    windows = (len(self._train) - 1) // self._length
    samples = np.arange(first_sample, first_sample + count)
    # A prime that does not divide `windows` visits every window once.
    chosen = (samples * self._shards + self._learner) * 999_999_937 % windows
    return self._rows(self._train, chosen)

  def _rows(self, text, windows):
    index = (windows * self._length)[:, None] + np.arange(self._length + 1)
    return text[index].astype(np.int32)

  def tokens(self, batch):
    """Targets: all but the first token of each row."""
    return batch.shape[0] * (batch.shape[1] - 1)

  def step(self, state, batch, clock):
    """One step; `clock` would drive a schedule, and here there is none."""
    return self._step(state, batch)

  def evaluate(self, params):
    """Held-out nats per byte, on 128 windows."""
    windows = (len(self._heldout) - 1) // self._length
    chosen = np.linspace(0, windows - 1, 128).astype(int)
    rows = self._rows(self._heldout, chosen)
    return {"loss": float(self._loss(params, rows))}
