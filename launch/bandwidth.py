"""How much bandwidth between sites keeps their chips busy.

  python -m launch.bandwidth --table --output=t13.json       # as in Table 13
  python -m launch.bandwidth --config=experiments/quickstart/config.py \
    --step_s=1 --sites=8 --codec=int4 [--wan_gbps=2] [--latency_s=0.05]

Of a config its model's real fragments are taken, with the codec of its answers.
"""

import json
import os
import pathlib

from absl import flags

from ddiloco.config import ConfigError
from ddiloco.types import Exit
from launch import command
from launch import flags as common

TABLE = flags.DEFINE_boolean("table", False, "The paper's 60 numbers.")
STEP = flags.DEFINE_float("step_s", 1.0, "Compute of an inner step.")
SITES = flags.DEFINE_integer("sites", 2, "In the ring.")
CODEC = flags.DEFINE_string("codec", None, "Of answers, instead of codec.up.")
WAN = flags.DEFINE_list(
  "wan_gbps", None, "Of each link: the utilisation that the slowest gives."
)
LATENCY = flags.DEFINE_float("latency_s", 0.0, "Of the slowest link.")
LOSS = flags.DEFINE_float("loss", 0.0, "Share of what it sends again.")
OUTPUT = flags.DEFINE_string("output", None, "JSON.")
PAGE = flags.DEFINE_string("page", None, "HTML with the curves.")


def main() -> int:
  """Simulates, prints, and writes what is asked for."""
  from ddiloco.planning import bandwidth_table

  for flag in (OUTPUT, PAGE):
    command.write_output(flag, "")  # before the work, not after it
  if TABLE.value:
    found, report = bandwidth_table.both()
    print(report)
    _draw(
      {
        method: bandwidth_table.traffic(method, 2, bandwidth_table.STATED)
        for method in bandwidth_table.METHODS
      },
      1.0,
      "5e9 parameters, steps of 1 s, 2 sites, P = H = 24, tau = 2",
    )
  else:
    try:
      found = _of_config()
    except ValueError as error:
      raise ConfigError(str(error)) from error
  command.write_output(OUTPUT, json.dumps(found, indent=1) + "\n")
  return Exit.OK


def _of_config() -> dict:
  from ddiloco.planning import bandwidth_table
  from ddiloco.planning.bandwidth import Link, slowest_gbps, utilisation

  gbps = slowest_gbps(WAN.value or ())  # before the work
  if common.CONFIG.value is None and not common.WORKDIR.value:
    raise ConfigError("give --table, or name a model with --config.")
  config = common.config(pathlib.Path(common.WORKDIR.value or ""))
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  from ddiloco.planning import config_traffic  # imports JAX

  sent = config_traffic.traffic(config, SITES.value, CODEC.value)
  link = Link(LATENCY.value, LOSS.value)
  rows = bandwidth_table.of_traffic(sent, step_s=STEP.value, link=link)
  note = f"{SITES.value} sites, steps of {STEP.value:g} s"
  _draw(sent, STEP.value, note, link=link)
  print(bandwidth_table.text(rows))
  found = {"rows": rows}
  if gbps is not None:
    options = {"step_s": STEP.value, "link": link}
    shares = {n: utilisation(t, gbps, **options) for n, t in sent.items()}
    for name, share in shares.items():
      print(f"{name}: {share:.1%} at {gbps:g} Gbit/s")
    found["utilisation_at_wan"] = shares
  return found


def _draw(sent: dict, step_s: float, note: str, **options) -> None:
  if PAGE.value is not None:
    from ddiloco.planning import bandwidth_page

    made = bandwidth_page.render(sent, step_s=step_s, note=note, **options)
    command.write_output(PAGE, made)


if __name__ == "__main__":
  command.run(main)
