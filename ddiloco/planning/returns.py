"""How long a slice that has failed stays away."""

import dataclasses
import re

import numpy as np

_FORM = "exponweib(a=2, c=1.5, mean=75), or scale=... instead of mean"
_CALL = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_GRID = 200_000  # points of the quantile function that a mean is taken over


@dataclasses.dataclass(frozen=True)
class Returns:
  """An exponentiated Weibull distribution: F(x) = (1 - exp(-(x / scale)^c))^a.

  With a = 1 it is Weibull's, with c = 1 besides the exponential one.
  """

  a: float
  c: float
  scale_s: float

  def quantile_s(self, u: np.ndarray) -> np.ndarray:
    """The inverse of F, in seconds, for 0 <= u < 1."""
    return self.scale_s * (-np.log1p(-(u ** (1 / self.a)))) ** (1 / self.c)

  @property
  def mean_s(self) -> float:
    """The mean, in seconds."""
    u = (np.arange(_GRID) + 0.5) / _GRID
    return float(self.quantile_s(u).mean())

  def __str__(self) -> str:
    return f"exponweib(a={self.a:g}, c={self.c:g}, mean={self.mean_s:.3g})"


def with_mean(a: float, c: float, mean_s: float) -> Returns:
  """The distribution of these shapes that has this mean."""
  return Returns(a, c, mean_s / Returns(a, c, 1.0).mean_s)


def parse(text: str) -> Returns:
  """Reads `exponweib(a=2, c=1.5, mean=75)`; `ValueError` says what is wrong."""
  call = _CALL.fullmatch(text)
  if call is None or call[1] != "exponweib":
    raise ValueError(f"{text!r} is no distribution of returns: write {_FORM}")
  values: dict[str, float] = {}
  for item in filter(None, map(str.strip, call[2].split(","))):
    name, equals, number = map(str.strip, item.partition("="))
    try:
      value = float(number)
    except ValueError:
      value = float("nan")
    if not equals or not 0 < value < float("inf") or name in values:
      raise ValueError(
        f"{item!r} in {text!r}: each of a, c and mean (or scale) is given once "
        f"and positive: {_FORM}"
      )
    values[name] = value
  if values.keys() == {"a", "c", "mean"}:
    return with_mean(values["a"], values["c"], values["mean"])
  if values.keys() == {"a", "c", "scale"}:
    return Returns(values["a"], values["c"], values["scale"])
  raise ValueError(
    f"{text!r} gives {', '.join(values) or 'nothing'}: write {_FORM}"
  )
