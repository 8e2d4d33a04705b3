"""What every role does first: open the exchange, lay out the model."""

import dataclasses
import json
import pathlib
import threading
import time
from typing import Any

import jax

from ddiloco.algo import codecs
from ddiloco.algo.fragments import Layout
from ddiloco.config import Config, ConfigError
from ddiloco.engine import loading, startup
from ddiloco.engine.downlink import make_downlink, read_params
from ddiloco.engine.ports import ExchangeError, ExchangeRefused
from ddiloco.engine.records import place_params
from ddiloco.engine.sealing import RunKey, SealedExchange
from ddiloco.live.driver import run_job
from ddiloco.live.log import logger
from ddiloco.live.workdir import exchange_url, open_exchange, store_options
from ddiloco.protocol.messages import Commit
from ddiloco.protocol.rules import Rules, make_rules
from ddiloco.protocol.schedule import Schedule, make_schedule


@dataclasses.dataclass
class Setup:
  """A role's view of the run before it takes part."""

  config: Config
  workdir: pathlib.Path
  exchange: SealedExchange
  interrupt: threading.Event
  program: Any
  state: Any  # the program's initial state
  layout: Layout
  codec: codecs.Codec
  learner: int | None  # whose view it is

  @property
  def model(self) -> loading.Model:
    """The program, its initial state, and how they are exchanged."""
    return loading.Model(
      self.program, self.state, self.layout, self.codec, self.learner
    )

  def run(self, job: Any) -> Any:
    """Runs a start-up job; `KeyboardInterrupt` once asked to stop."""
    return run_job(job, self.exchange, self.interrupt)

  def schedule(self) -> Schedule:
    """The schedule of rounds."""
    return make_schedule(self.config.sync)

  def rules(self, run_id: str) -> Rules:
    """The machines' rules."""
    return make_rules(
      self.config,
      run_id=run_id,
      layout=self.layout.digest,
      answer_bytes=loading.answer_bytes(self.layout, self.codec),
    )


def open_setup(
  config: Config,
  learner: int | None,
  *,
  workdir: pathlib.Path,
  exchange: str,
  interrupt: threading.Event,
  run_key: RunKey | None = None,
) -> Setup:
  """Builds the program and opens the exchange; raises `ConfigError`."""
  store = open_exchange(
    exchange_url(workdir, exchange),
    run_key,
    **store_options(config.live),
    interrupt=interrupt,
  )
  model = loading.load_model(config, learner, str(workdir / "cache"))
  return Setup(config, workdir, store, interrupt, *model)


def wait_for_run(setup: Setup) -> startup.Newest:
  """The run's newest commit, once there is one; `ConfigError` if never.

  Raises `KeyboardInterrupt` if this process is asked to stop meanwhile.
  """
  deadline_s = time.monotonic() + setup.config.live.start_deadline_s
  while True:
    newest, cause = None, ""
    try:
      newest = setup.run(startup.find_newest(setup.schedule()))
    except ExchangeRefused:
      raise
    except ExchangeError as error:
      cause = f" ({error})"
      logger.warning("the exchange is away: %s", error)
    if newest is not None:
      return newest
    if setup.interrupt.is_set():
      raise KeyboardInterrupt
    if time.monotonic() > deadline_s:
      raise ConfigError(
        f"no run was started in {setup.exchange.url}{cause} within "
        f"live.start_deadline_s = {setup.config.live.start_deadline_s} s. "
        "Start its syncer (python -m launch.syncer), or check --exchange."
      )
    setup.interrupt.wait(0.1)


def log_changes(changes: dict[str, Any], workdir: pathlib.Path) -> None:
  """Records what a resumed run changed."""
  if not changes:
    return
  for key, (old, new) in changes.items():
    logger.info("resumed with %s = %r (was %r)", key, new, old)
  with open(workdir / "config_changes.jsonl", "a") as file:
    file.write(json.dumps({k: list(v) for k, v in changes.items()}) + "\n")


def load_params(setup: Setup, commit: Commit, state: Any) -> Any:
  """The parameters as of a commit; `ValueError` if one is gone or damaged.

  Frozen ones are those of `state`.
  """
  downlink = make_downlink(setup.config, setup.layout)
  objects = [
    setup.run(read_params(p, ref, downlink))
    for p, ref in enumerate(commit.fragments)
  ]
  own = setup.program.params(state)
  return place_params(setup.layout, own, commit.fragments, objects)


def host_leaves(params: Any) -> list[Any]:
  """Parameters as NumPy arrays, in the layout's order."""
  return [jax.device_get(leaf) for leaf in jax.tree.leaves(params)]
