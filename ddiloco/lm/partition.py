"""Which windows of the training stream belong to which data shard.

Shards are fixed when a run starts: a pure function of the text, the seed and
the config. `iid` deals windows out in turn; the others make shards unlike by
the labels of the documents:

  domain, language  whole labels, packed into shards of about the same size
  time              equal spans of windows, the oldest in shard 0
  dirichlet         equal shards, each with label proportions drawn from
                    Dir(alpha p), p those of the whole text (arXiv 1909.06335)
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddiloco.config import ConfigError, DataConfig
from ddiloco.lm.corpus import Corpus

# The windows of each shard, ascending.
Shards = tuple[Sequence[int], ...]


class Labels(NamedTuple):
  """The label of each window: `names[of_window[i]]`. Names are sorted."""

  names: tuple[str, ...]
  of_window: np.ndarray  # [W] int


class Mix(NamedTuple):
  """How labels are spread over shards, and how unlike that makes the shards."""

  names: tuple[str, ...]
  counts: np.ndarray  # [S, K] windows of label k in shard s
  entropy_bits: tuple[float, ...]  # of the labels within each shard
  total_bits: float  # of the labels of all shards together
  shared_bits: float  # that a window's shard tells of its label; 0: alike


def num_windows(stream: np.ndarray, sequence_length: int) -> int:
  """Whole windows in a stream; neighbours share one token, no target."""
  return max(0, (len(stream) - 1) // sequence_length)


def window_labels(corpus: Corpus, sequence_length: int) -> Labels | None:
  """A window has the label of the document of its first target."""
  if not corpus.labels:
    return None
  starts = np.flatnonzero(corpus.train == corpus.tokenizer.separator)
  windows = np.arange(num_windows(corpus.train, sequence_length))
  targets = windows * sequence_length + 1
  document = np.searchsorted(starts, targets, side="right") - 1
  every = np.array(corpus.labels)[document]
  names, of_window = np.unique(every, return_inverse=True)
  return Labels(tuple(map(str, names)), of_window)


def make_shards(corpus: Corpus, data: DataConfig, seed: int) -> Shards:
  """The windows of every shard; `ConfigError` if labels are too few."""
  windows = num_windows(corpus.train, data.sequence_length)
  if data.partition == "iid":
    return tuple(range(s, windows, data.shards) for s in range(data.shards))
  labels = window_labels(corpus, data.sequence_length)
  if data.partition != "dirichlet" and len(labels.names) < data.shards:
    known = ", ".join(labels.names[:8]) + ", ..." * (len(labels.names) > 8)
    raise ConfigError(
      f"data.shards = {data.shards}, but the training text has "
      f"{len(labels.names)} labels for data.partition = {data.partition!r} "
      f"({known}), and every shard needs one of its own. Lower data.shards, or "
      "use data.partition='dirichlet'."
    )
  if data.partition == "time":
    # Names sort by date, and equal dates stay in the order of the text.
    order = np.argsort(labels.of_window, kind="stable")
    return tuple(np.sort(s) for s in np.array_split(order, data.shards))
  if data.partition == "dirichlet":
    counts = _draw_counts(labels, data.shards, data.dirichlet_alpha, seed)
    return _deal(labels, counts, seed)
  owner = _pack(np.bincount(labels.of_window), data.shards)[labels.of_window]
  return tuple(np.flatnonzero(owner == s) for s in range(data.shards))


def _pack(sizes: np.ndarray, shards: int) -> np.ndarray:
  """The shard of each label: the largest first, to the emptiest shard."""
  owner, filled = np.zeros(len(sizes), int), np.zeros(shards, int)
  for label in np.argsort(-sizes, kind="stable"):
    owner[label] = np.argmin(filled)
    filled[owner[label]] += sizes[label]
  return owner


def _random(seed: int, purpose: str) -> np.random.RandomState:
  # NumPy promises the draws of its older generator for ever.
  words = np.random.SeedSequence((seed, zlib.crc32(purpose.encode())))
  return np.random.RandomState(np.random.MT19937(words))


def _draw_counts(
  labels: Labels, shards: int, alpha: float, seed: int
) -> np.ndarray:
  """Windows of each label in each shard, [S, K]; every window is used once."""
  left = np.bincount(labels.of_window)
  shape = alpha * left / left.sum()
  counts = np.zeros((shards, len(left)), int)
  generator = _random(seed, "label proportions")
  sizes = [len(part) for part in np.array_split(labels.of_window, shards)]
  for shard, size in enumerate(sizes):
    # Logarithms of gamma variates: of a small shape most are 0 in floats.
    draws = np.log(generator.standard_gamma(shape + 1.0))
    draws += np.log1p(-generator.random_sample(len(shape))) / shape
    proportions = np.exp(draws - draws.max())
    counts[shard] = _apportion(size, proportions, left)
    left = left - counts[shard]
  return counts


def _apportion(
  size: int, proportions: np.ndarray, left: np.ndarray
) -> np.ndarray:
  """`size` windows in these proportions, as far as there are any left."""
  taken = np.zeros_like(left)
  while need := size - int(taken.sum()):
    weight = np.where(taken < left, proportions, 0.0)
    if not weight.sum():  # what the shard asks for is used up
      weight = left - taken
    wanted = need * (weight / weight.sum())
    more = np.minimum(wanted.astype(int), left - taken)
    if not more.sum():
      more[np.argmax(wanted)] = 1
    taken += more
  return taken


def _deal(labels: Labels, counts: np.ndarray, seed: int) -> Shards:
  """Deals each label's windows out in a drawn order."""
  generator = _random(seed, "order of windows")
  parts = [[] for _ in counts]
  for label in range(len(labels.names)):
    own = generator.permutation(np.flatnonzero(labels.of_window == label))
    cuts = np.cumsum(counts[:, label])[:-1]
    for part, some in zip(parts, np.split(own, cuts), strict=True):
      part.append(some)
  return tuple(np.sort(np.concatenate(part)) for part in parts)


def entropy_bits(counts: np.ndarray) -> float:
  """Of drawing a label with these counts; 0 if there are none."""
  p = counts[counts > 0] / max(counts.sum(), 1)
  return abs(math.fsum(-p * np.log2(p)))


def mix(labels: Labels, shards: Shards) -> Mix:
  """The labels within each shard."""
  counts = np.array(
    [
      np.bincount(labels.of_window[shard], minlength=len(labels.names))
      for shard in map(np.asarray, shards)
    ]
  )
  within, total = [entropy_bits(row) for row in counts], counts.sum(0)
  mean = math.fsum(counts.sum(1) * within) / max(int(total.sum()), 1)
  all_bits = entropy_bits(total)
  shared_bits = max(all_bits - mean, 0.0)
  return Mix(labels.names, counts, tuple(within), all_bits, shared_bits)


def describe(mix: Mix) -> str:
  """A line for each shard with its commonest labels, and one for all."""
  lines = ["shard  windows  entropy  labels"]
  for shard, row in enumerate(mix.counts):
    top = [k for k in np.argsort(-row, kind="stable")[:4] if row[k]]
    shown = [f"{mix.names[k]} {row[k] / row.sum():.0%}" for k in top]
    others = int((row > 0).sum()) - len(top)
    if others:
      shown.append(f"{others} more")
    lines.append(
      f"{shard:5}  {row.sum():7}  {mix.entropy_bits[shard]:7.3f}  "
      + ", ".join(shown)
    )
  lines.append(
    f"  all  {mix.counts.sum():7}  {mix.total_bits:7.3f}  {len(mix.names)} "
    f"labels; a window's shard tells {mix.shared_bits:.3f} bits of its label"
  )
  return "\n".join(lines)
