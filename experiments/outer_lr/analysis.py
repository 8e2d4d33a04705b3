"""The sweep of the outer optimizer: its grid, and the best of it."""

import itertools
from typing import Any

from experiments import study

_GLOBAL_BATCH = 32


def grid(
  learners: list[str],
  rates: list[str],
  momenta: list[str],
  rules: list[str],
  *,
  tokens: int,
  seeds: int,
) -> list[study.Run]:
  """Every run. The batch of all learners together is the same."""
  return [
    study.Run(
      "-".join(point),
      seed,
      (
        "--config=experiments/parity/config.py:int4_up",
        f"--config.learners.count={point[0]}",
        f"--config.data.shards={point[0]}",
        f"--config.learners.batch_size=({_GLOBAL_BATCH // int(point[0])},)",
        f"--config.outer.learning_rate={point[1]}",
        f"--config.outer.momentum={point[2]}",
        f"--config.merge.rule={point[3]}",
        f"--config.stop.tokens={tokens}",
        f"--config.inner.decay={tokens}",
      ),
    )
    for point in itertools.product(learners, rates, momenta, rules)
    for seed in range(seeds)
  ]


def best(losses: dict[str, dict[int, float]]) -> dict[str, dict[str, Any]]:
  """The best rate and momentum of every (learners, rule)."""
  found: dict[str, dict[str, Any]] = {}
  for name, by_seed in losses.items():
    learners, rate, momentum, rule = name.split("-")
    loss = study.interval(list(by_seed.values())).mean
    key = f"{learners}-{rule}"
    if key not in found or loss < found[key]["loss"]:
      found[key] = {"loss": loss, "rate": rate, "momentum": momentum}
  return found


def report(losses: dict[str, dict[int, float]]) -> str:
  """A table of every (learners, rule): rates by momenta; then the best."""
  points: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
  for name, by_seed in losses.items():
    learners, rate, momentum, rule = name.split("-")
    mean = study.interval(list(by_seed.values())).mean
    points.setdefault((learners, rule), {})[rate, momentum] = f"{mean:.3f}"
  parts = ["Held-out nats per byte.\n"]
  for (learners, rule), cells in points.items():
    rates = list(dict.fromkeys(rate for rate, _ in cells))
    momenta = list(dict.fromkeys(momentum for _, momentum in cells))
    parts.append(f"M = {learners}, {rule}\n")
    parts.append(
      study.table(
        ["rate", *(f"momentum {m}" for m in momenta)],
        [(rate, *(cells[rate, m] for m in momenta)) for rate in rates],
      )
    )
  parts.append("The best of each\n")
  parts.append(
    study.table(
      ["M and rule", "rate", "momentum", "loss"],
      [
        (key, found["rate"], found["momentum"], f"{found['loss']:.3f}")
        for key, found in best(losses).items()
      ],
    )
  )
  return "\n".join(parts)
