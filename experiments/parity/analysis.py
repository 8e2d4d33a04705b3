"""The parity study: its grid of runs, and what it concludes from them."""

from typing import Any

from experiments import study
from experiments.parity import config

BOUNDS_PERCENT = {"int4_up": 0.3, "int4_both": 0.5}  # over f32 answers
GAP_BOUND_PERCENT = 4.0  # over data-parallel training, at the largest budget


def grid(budgets: list[int], seeds: int) -> list[study.Run]:
  """Every run: the gap at all budgets, the codecs at the largest."""
  runs = []
  for tokens in budgets:
    last = tokens == budgets[-1]
    for variant in config.VARIANTS if last else ("data_parallel", "int4_up"):
      runs += [
        study.Run(
          f"{variant}-{tokens}",
          seed,
          (
            f"--config=experiments/parity/config.py:{variant}",
            f"--config.stop.tokens={tokens}",
            f"--config.inner.decay={tokens}",
          ),
        )
        for seed in range(seeds)
      ]
  return runs


def conclude(losses: dict[str, Any], budgets: list[int]) -> dict[str, Any]:
  """Gaps in percent: to data-parallel, by budget; and of codecs to f32."""
  gaps = {
    tokens: study.gap_percent(
      losses[f"int4_up-{tokens}"], losses[f"data_parallel-{tokens}"]
    )
    for tokens in budgets
  }
  last = budgets[-1]
  codecs = {
    variant: study.gap_percent(
      losses[f"{variant}-{last}"], losses[f"decoupled-{last}"]
    )
    for variant in BOUNDS_PERCENT
  }
  return {"gap_percent": gaps, "codec_percent": codecs}


def report(losses: dict[str, Any], found: dict[str, Any]) -> str:
  """Both tables, each value beside its bound."""
  last = max(found["gap_percent"])
  gaps = study.table(
    ["tokens", "data-parallel", "decoupled, int4", "gap, %", "bound"],
    [
      (
        f"{tokens:,}",
        _mean(losses[f"data_parallel-{tokens}"]),
        _mean(losses[f"int4_up-{tokens}"]),
        gap,
        f"below {GAP_BOUND_PERCENT}" if tokens == last else "",
      )
      for tokens, gap in found["gap_percent"].items()
    ],
  )
  codecs = study.table(
    [f"at {last:,} tokens", "loss", "over f32, %", "bound"],
    [
      (
        variant,
        _mean(losses[f"{variant}-{last}"]),
        gap,
        BOUNDS_PERCENT[variant],
      )
      for variant, gap in found["codec_percent"].items()
    ],
  )
  return f"Held-out nats per byte; 95% intervals.\n\n{gaps}\n{codecs}"


def _mean(by_seed: dict[int, float]) -> str:
  return f"{study.interval(list(by_seed.values())).mean:.4f}"
