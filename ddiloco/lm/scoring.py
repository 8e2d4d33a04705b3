"""Log-likelihoods and greedy continuations of token sequences.

The model sees at most `sequence_length` tokens, those before the target. Every
sequence starts with the separator, as every document does in training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Window(NamedTuple):
  """Targets first .. end - 1, predicted from tokens start .. end - 2."""

  start: int
  first: int
  end: int


class Score(NamedTuple):
  """Of a continuation: its log-probability; is it what greed would choose?"""

  nats: float
  greedy: bool


def windows(first: int, end: int, length: int, most: int) -> list[Window]:
  """Every target once, `most` in a window, with all the context that fits."""
  found = []
  while first < end:
    last = min(first + most, end)
    found.append(Window(max(0, last - 1 - length), first, last))
    first = last
  return found


class Scorer:
  """A program's parameters at work on token ids."""

  def __init__(self, program: Any, params: Any):
    """`program` has `logits`, `tokenizer`, `sequence_length` and the like."""
    self.tokenizer = program.tokenizer
    self.length = program.sequence_length
    self._rows = program.eval_batch_size
    self._params = jax.tree.map(
      lambda x, like: jax.device_put(x, like.sharding),
      params,
      program.abstract_params(),
    )
    known = len(self.tokenizer.token_bytes)

    def score(params, tokens, mask):
      logits, targets = program.logits(params, tokens[:, :-1]), tokens[:, 1:]
      every = jax.nn.log_softmax(logits)
      chosen = jnp.take_along_axis(every, targets[..., None], -1)[..., 0]
      likeliest = jnp.argmax(logits[..., :known], -1)
      right = (likeliest == targets) | (mask == 0)
      return jnp.sum(chosen * mask, -1), jnp.all(right, -1)

    def likeliest(params, tokens, sizes):
      logits = program.logits(params, tokens)[..., :known]
      at = (sizes - 1)[:, None, None]
      return jnp.argmax(jnp.take_along_axis(logits, at, 1)[:, 0], -1)

    self._score, self._likeliest = jax.jit(score), jax.jit(likeliest)

  def encode(self, text: str) -> list[int]:
    """The ids of a text, without a separator."""
    return self.tokenizer.encode([text.encode()])[1:].tolist()

  def decode(self, tokens: Sequence[int]) -> str:
    """The text of ids; what is no UTF-8, such as a part of a letter, shows."""
    return self.tokenizer.decode(np.array(tokens, int)).decode(errors="replace")

  def continuations(
    self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
  ) -> list[Score]:
    """Scores each second part after its first, which must not be empty."""
    jobs = []
    for context, continuation in pairs:
      first, end = len(context), len(context) + len(continuation)
      # One that does not fit has at least half a window of context throughout.
      fits = len(continuation) <= self.length
      most = self.length if fits else max(self.length // 2, 1)
      parts = windows(first, end, self.length, most)
      jobs.append(([*context, *continuation], parts))
    return self._run(jobs)

  def documents(self, texts: Sequence[Sequence[int]]) -> list[float]:
    """The log-probability of each whole text, in windows as in training."""
    jobs = []
    for text in texts:
      tokens = [self.tokenizer.separator, *text]
      parts = windows(1, len(tokens), self.length, self.length)
      jobs.append((tokens, parts))
    return [score.nats for score in self._run(jobs)]

  def _run(self, jobs: list[tuple[list[int], list[Window]]]) -> list[Score]:
    scores = [Score(0.0, True)] * len(jobs)
    rows = [(i, job[0], part) for i, job in enumerate(jobs) for part in job[1]]
    for begin in range(0, len(rows), self._rows):
      some = rows[begin : begin + self._rows]
      tokens = np.zeros((self._rows, self.length + 1), np.int32)
      mask = np.zeros((self._rows, self.length), np.float32)
      for row, (_, sequence, (start, first, end)) in enumerate(some):
        tokens[row, : end - start] = sequence[start:end]
        mask[row, first - 1 - start : end - 1 - start] = 1.0
      nats, greedy = jax.device_get(self._score(self._params, tokens, mask))
      for row, (i, _, _) in enumerate(some):
        scores[i] = Score(
          scores[i].nats + float(nats[row]),
          scores[i].greedy and bool(greedy[row]),
        )
    return scores

  def generate(
    self, contexts: Sequence[Sequence[int]], done: Callable[[int, str], bool]
  ) -> list[str]:
    """Greedy continuations, each until `done(which, text)` or a separator."""
    texts = []
    for begin in range(0, len(contexts), self._rows):
      some = contexts[begin : begin + self._rows]
      texts += self._generate(some, lambda i, text, b=begin: done(b + i, text))
    return texts

  def _generate(
    self, contexts: Sequence[Sequence[int]], done: Callable[[int, str], bool]
  ) -> list[str]:
    sequences = [list(context) for context in contexts]
    texts, going = [""] * len(contexts), set(range(len(contexts)))
    while going:
      tokens = np.zeros((self._rows, self.length), np.int32)
      sizes = np.ones(self._rows, np.int32)
      for row in sorted(going):
        seen = sequences[row][-self.length :]
        tokens[row, : len(seen)], sizes[row] = seen, len(seen)
      chosen = jax.device_get(self._likeliest(self._params, tokens, sizes))
      for row in sorted(going):
        if chosen[row] == self.tokenizer.separator:
          going.discard(row)
          continue
        sequences[row].append(int(chosen[row]))
        texts[row] = self.decode(sequences[row][len(contexts[row]) :])
        if done(row, texts[row]):
          going.discard(row)
    return texts
