"""Table 1 of the paper, as printed: %, for each kind of run and size."""

from ddiloco.planning.goodput_table import ROWS

_GOODPUT = (
  (72, 57, 38, 27, 18),
  (88, 80, 69, 58, 40),
  (94, 88, 80, 70, 54),
  (96, 93, 89, 82, 73),
  (98, 96, 94, 88, 80),
  (99, 98, 96, 93, 86),
)
_UPTIME = (
  (72, 57, 38, 27, 18),
  (88, 81, 69, 59, 42),
  (100, 97, 96, 90, 80),
  (100, 100, 99, 99, 99),
  (100, 100, 100, 100, 99),
  (100, 100, 100, 100, 99),
)
PRINTED = {
  "goodput": dict(zip(ROWS, _GOODPUT, strict=True)),
  "uptime": dict(zip(ROWS, _UPTIME, strict=True)),
}
