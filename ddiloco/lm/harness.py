"""An adapter to lm-evaluation-harness, which must be installed.

Runs its tasks on a program's parameters: those it knows (their data comes from
a hub) and those that a directory defines (their data may lie beside them).
"""

import difflib
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.config import ConfigError
from ddiloco.lm.scoring import Scorer

try:
  from lm_eval import simple_evaluate
  from lm_eval.api.model import TemplateLM
  from lm_eval.tasks import TaskManager
except ImportError as error:
  raise ConfigError(
    f"--tasks needs the package lm_eval, which cannot be imported ({error}). "
    "Run: pip install 'ddiloco[lm_eval]'"
  ) from error

_NEW_TOKENS = 256  # that a task may generate, unless it says how many
_RESAMPLES = 1000  # for the standard errors of metrics that are no means


class Model(TemplateLM):
  """A program and its parameters, as the harness sees a model."""

  def __init__(self, program: Any, params: Any):
    """Raises `ConfigError` if the program is no language model."""
    super().__init__()
    if not hasattr(program, "logits"):
      raise ConfigError(
        "--tasks needs a program with logits(params, tokens), tokenizer, "
        "sequence_length, eval_batch_size and abstract_params() such as "
        f"ddiloco.lm.program has; this one is {type(program).__name__}."
      )
    self._scorer = Scorer(program, params)

  @property
  def eot_token_id(self) -> int:
    """The separator: documents start with it, and so does every context."""
    return self._scorer.tokenizer.separator

  @property
  def max_length(self) -> int:
    """The tokens that the model sees at once."""
    return self._scorer.length

  @property
  def tokenizer_name(self) -> str:
    """Names the tokenizer where requests are cached."""
    return type(self._scorer.tokenizer).__name__

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
  ) -> list[int]:
    """Token ids; the separator comes first unless told otherwise."""
    ids = self._scorer.encode(string)
    return ids if add_special_tokens is False else [self.eot_token_id, *ids]

  def _loglikelihood_tokens(
    self, requests: Sequence[Any], **kwargs: Any
  ) -> list[tuple[float, bool]]:
    scores = self._scorer.continuations([request[1:3] for request in requests])
    return [tuple(score) for score in scores]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """The log-probability of each whole text."""
    texts = [self._scorer.encode(request.args[0]) for request in requests]
    return self._scorer.documents(texts)

  def generate_until(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    """Greedy continuations, each cut before the first of its stop strings."""
    contexts, stops, limits = [], [], []
    for request in requests:
      context, options = request.args
      if options.get("do_sample") and options.get("temperature", 1.0):
        raise ConfigError(
          f"the task wants samples ({options}), and only greedy generation is "
          "implemented: set do_sample: false in its generation_kwargs."
        )
      until = options.get("until", [])
      stops.append([until] if isinstance(until, str) else list(until))
      limits.append(int(options.get("max_gen_toks", _NEW_TOKENS)))
      contexts.append(self.tok_encode(context))
    calls = [0] * len(contexts)

    def done(i: int, text: str) -> bool:
      calls[i] += 1
      return calls[i] >= limits[i] or any(stop in text for stop in stops[i])

    texts = self._scorer.generate(contexts, done)
    return [_cut(text, stop) for text, stop in zip(texts, stops, strict=True)]


def _cut(text: str, stops: Sequence[str]) -> str:
  ends = [text.find(stop) for stop in stops if stop and stop in text]
  return text[: min(ends, default=len(text))]


class Measure:
  """Called with a program and parameters: scores by task and metric."""

  def __init__(
    self, tasks: Sequence[str], *, task_dir: str | None, limit: int | None
  ):
    """Raises `ConfigError` for a task that there is none of."""
    if task_dir is not None and not os.path.isdir(task_dir):
      raise ConfigError(f"--task_dir={task_dir} is not a directory.")
    self._tasks, self._limit = list(tasks), limit
    self._manager = _manager(tasks, task_dir)

  def __call__(self, program: Any, params: Any) -> Mapping[str, float]:
    """The value of every number that was measured, as "task/metric"."""
    # Its pool of processes would fork one that runs JAX.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    found = simple_evaluate(
      model=Model(program, params),
      tasks=self._tasks,
      task_manager=self._manager,
      limit=self._limit,
      bootstrap_iters=_RESAMPLES,
      log_samples=False,
    )
    return {
      f"{task}/{key.removesuffix(',none')}": float(value)
      for task, metrics in found["results"].items()
      for key, value in metrics.items()
      if isinstance(value, numbers.Real) and math.isfinite(value)
    }


def _manager(tasks: Sequence[str], task_dir: str | None) -> TaskManager:
  """One that knows all the tasks; `ConfigError` if there is none such."""
  if task_dir is not None:
    # Those that come with the harness are many: reading them takes seconds.
    own = TaskManager(include_path=task_dir, include_defaults=False)
    if all(own.match_tasks([task]) for task in tasks):
      return own
  manager = TaskManager(include_path=task_dir)
  for task in tasks:
    if not manager.match_tasks([task]):
      near = difflib.get_close_matches(task, manager.all_tasks, n=3)
      raise ConfigError(
        f"--tasks: there is no task {task!r}"
        + (f"; did you mean {', '.join(near)}?" if near else ".")
        + " Tasks of your own are *.yaml files in --task_dir."
      )
  return manager
