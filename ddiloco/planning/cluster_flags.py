"""From what a user says of a cluster to the model's parameters, and back."""

import pathlib
from typing import Any

from ddiloco.planning import failure_log, returns
from ddiloco.planning.goodput import YEAR_S, Cluster

_SLICES = 128  # unless told: as many as fit the paper's Table 1


def cluster(
  *,
  chips: float,
  mtbi_years: float,
  slice_chips: float = 0,
  return_form: str | None = None,  # see `returns.parse`
  **given: Any,
) -> Cluster:
  """A cluster; what is None has its default. `ValueError` for the absurd."""
  if chips != int(chips):
    raise ValueError(f"chips = {chips}: a whole number is needed")
  if slice_chips < 0 or (slice_chips and chips % slice_chips):
    raise ValueError(
      f"slice_chips = {slice_chips:g} does not divide chips = {chips:,.0f}"
    )
  slices = round(chips / slice_chips) if slice_chips else _SLICES
  options = {k: value for k, value in given.items() if value is not None}
  if return_form is not None:
    options["returns"] = returns.parse(return_form)
  return Cluster(
    chips=int(chips), mtbi_s=mtbi_years * YEAR_S, slices=slices, **options
  )


def read_log(path: str, chips: int) -> list[failure_log.Outage] | None:
  """The outages of a log; None without one."""
  if not path:
    return None
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8-sig")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"--failures={path} cannot be read: {error}") from error
  return failure_log.parse(text, chips=chips)


def note(made: Cluster, hours: float, seeds: int, log: str = "") -> str:
  """What a result was made with, and whose parameters those are."""
  speed = f"; chips' speeds +-{made.speed_std:.1%}" if made.speed_std else ""
  fails = (
    f"a chip fails every {made.mtbi_s / YEAR_S:g} years on average, takes its "
    f"slice with it and is back after {made.returns} s"
  )
  if log:
    fails = f"what fails, and when it is back, is of {log}"
  return (
    f"Simulated {hours:g} h with {seeds} seeds: {fails}; {made.slices} slices "
    f"in all; steps of {made.step_s:g} s, {made.down_s:g} s to scale down, "
    f"{made.up_s:g} s to scale up{speed}. Defaults are our fit to the paper's "
    "Table 1 (experiments/goodput), not its authors' parameters."
  )
