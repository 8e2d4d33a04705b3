"""Runs a whole run in virtual time.

  python -m launch.simulate --config=experiments/quickstart/config.py \
    --workdir=runs/s --seed=7

trains as `launch.local` does and leaves what that leaves; only time is
virtual. With --compute=none it leaves the history alone, within seconds, and

  python -m launch.simulate --config=... --history=runs/h --workdir=runs/t

trains along one: who stepped, was counted or died there does so again.
Without a workdir, many small worlds test the protocol under drawn faults:

  python -m launch.simulate --compute=none --seeds=1000 [--seed=N] \
    --output=swarm.json [--config=...] [--until=EVENT]
"""

import pathlib

from absl import flags

from ddiloco.config import ConfigError
from launch import command, faults, swarm
from launch import flags as common

COMPUTE = flags.DEFINE_enum(
  "compute", "jax", ["jax", "none"], "Train, or run the protocol alone."
)
HISTORY = flags.DEFINE_string(
  "history", None, "Train along what the run in this workdir has recorded."
)
SEED = flags.DEFINE_integer(
  "seed", 0, "Of every chance; the first one of a swarm.", lower_bound=0
)
_OF_ONE_RUN = ("faults", "exchange", "run_key_file")


def main() -> int:
  """Trains in virtual time, or runs the protocol alone, once or often."""
  if HISTORY.value is not None:
    _refuse(
      "with --history: it decides", "compute", "faults", "seed", *swarm.FLAGS
    )
  elif COMPUTE.value == "jax" or common.WORKDIR.value:
    _refuse("for one run: it is for a swarm, without --workdir", *swarm.FLAGS)
  else:
    _refuse("for a swarm: name a --workdir for one run", *_OF_ONE_RUN)
    return swarm.run(SEED.value)
  return _run()


def _refuse(why: str, *names: str) -> None:
  for name in names:
    if flags.FLAGS[name].present:
      raise ConfigError(f"--{name} means nothing {why}.")


def _run() -> int:
  from ddiloco.live import workdir as workdir_lib

  workdir, history = common.workdir(), HISTORY.value
  config = common.config(workdir)
  script = () if history else faults.script(config, live=False)
  if history is not None and not pathlib.Path(history).is_dir():
    raise ConfigError(f"--history={history} is no directory: name a workdir.")
  command.prepare_simulation(config, workdir / "cache")
  from ddiloco.sim import follow, train  # import JAX

  with workdir_lib.lock(workdir):
    store = common.open_exchange(workdir)
    if workdir_lib.has_run(store):
      raise ConfigError(
        f"{store.url} holds a run already, and a simulation starts a new one: "
        "choose another --workdir."
      )
    workdir_lib.settle_config(workdir, config, started=False)
    where = {"workdir": workdir, "store": store}
    if history is None:
      arrays, seed = COMPUTE.value == "jax", SEED.value
      return train.simulate(
        config, **where, seed=seed, faults=script, arrays=arrays
      )
    source = pathlib.Path(history)
    url = workdir_lib.exchange_url(source, "")
    recorded = workdir_lib.open_exchange(url, common.run_key())
    return follow.follow(config, recorded, source, **where)


if __name__ == "__main__":
  command.run(main)
