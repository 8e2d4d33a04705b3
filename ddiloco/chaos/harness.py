"""A live run under chaos, from its first process to its verdict."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddiloco import config as config_lib
from ddiloco.chaos import check as check_lib
from ddiloco.chaos import kinds as kinds_lib
from ddiloco.chaos import measure, mounts, s3
from ddiloco.chaos.proxy import Proxy, proxy_of
from ddiloco.chaos.runner import Ended, told
from ddiloco.chaos.session import Plan, Session
from ddiloco.chaos.stage import Stage
from ddiloco.config import Config, ConfigError, seconds_to_ns
from ddiloco.engine.ports import Exchange
from ddiloco.engine.sealing import SealedExchange
from ddiloco.live import restore
from ddiloco.live import workdir as workdir_lib
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.report import accounting, summary
from ddiloco.report import run as report_run
from ddiloco.types import SECOND_NS, Exit, Status

_ENDLESS = 10**9  # rounds
_SNAPSHOTS_EVERY = 50  # rounds, if the config takes none
_LOOK_S = 2.0  # for an onlooker's operation
_UNFLUSHED_NS = SECOND_NS  # a write of a tape takes, at most, and a step


@dataclasses.dataclass(frozen=True)
class Place:
  """A store of a run's own, as far as faults can get at it."""

  url: str  # for those who take part
  direct: str  # for those who watch
  directory: pathlib.Path | None = None
  proxy: Proxy | None = None
  read_only: mounts.ReadOnly | None = None
  unavailable: dict[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def place_of(store: str, workdir: pathlib.Path) -> Iterator[Place]:
  """Makes a store; the run's objects are in the workdir afterwards."""
  folder = workdir / "exchange"
  folder.mkdir(exist_ok=True)
  if store == kinds_lib.FILE:
    try:
      mounts.enter()
      read_only, unavailable = mounts.ReadOnly(folder), {}
    except mounts.Unavailable as error:
      read_only, unavailable = None, {"read_only": error.strerror}
    yield Place(
      str(folder),
      str(folder),
      directory=folder,
      read_only=read_only,
      unavailable=unavailable,
    )
    return
  server = s3.Server()
  try:
    bucket = server.new_bucket()
    with proxy_of(server.port) as between:
      direct = server.url(bucket)
      yield Place(server.url(bucket, port=between.port), direct, proxy=between)
      copy(TensorStoreExchange(direct), TensorStoreExchange(str(folder)))
  finally:
    server.close()


def draw_plan(
  config: Config,
  *,
  seed: int,
  minutes: float,
  every_s: float,
  store: str,
  unavailable: dict[str, str],
) -> Plan:
  """Draws the faults of a run; `unavailable` kinds, with why, are not."""
  left_out = kinds_lib.missing(store) | unavailable
  try:
    config_lib.check_learner(config, config.learners.count)
  except ConfigError as error:
    left_out["join"] = str(error)
  if config.learners.count < 2:
    why = "it takes two learners: raise learners.count"
    for kind in ("late", "kill_in_transfer", "garble_transfer"):
      left_out[kind] = why
  if not config.recovery.donors_max:
    for kind in ("kill_in_transfer", "garble_transfer"):
      left_out[kind] = "recovery.donors_max = 0"
  if not config.live.checkpoint_every_steps:
    left_out["garble_checkpoint"] = "live.checkpoint_every_steps = 0"
  drawn = [kind for kind in kinds_lib.KINDS if kind not in left_out]
  draws = kinds_lib.draw(seed, 60 * minutes, every_s, drawn)
  return Plan(seed, minutes, every_s, store, draws, left_out)


def endless(config: Config) -> Config:
  """That of a run that ends when chaos does, with a standby and snapshots."""
  values = config.to_dict()
  values["faults"] = ""
  values["stop"] = {"rounds": _ENDLESS, "tokens": 0}
  values["snapshot"]["every_rounds"] = (
    config.snapshot.every_rounds or _SNAPSHOTS_EVERY
  )
  live = values["live"]
  live["standbys"] = max(live["standbys"], 1)
  return config_lib.from_dict(values)


def run(
  config: Config,
  workdir: pathlib.Path,
  *,
  seed: int,
  minutes: float,
  every_s: float,
  store: str,
  open_at: Callable[..., SealedExchange],
  flags_of: Callable[[SealedExchange], Sequence[str]],
  prepare: Callable[[], None],
) -> dict[str, Any] | Exit:
  """Runs chaos; the verdict, or the exit code of a run that never began.

  Args:
    config: of the run; when it ends is chaos's affair.
    workdir: a fresh one.
    seed: what draws the faults.
    minutes: for how long they are injected.
    every_s: from one to the next, on average.
    store: of `kinds.STORES`.
    open_at: opens an exchange, with the run's key if there is one.
    flags_of: the flags that bring a process there.
    prepare: sets up JAX, before it is imported.
  """
  config = endless(config)
  with workdir_lib.lock(workdir), contextlib.ExitStack() as stack:
    local = open_at(str(workdir / "exchange"))
    if workdir_lib.has_run(local):
      raise ConfigError(
        f"--workdir={workdir} holds a run already, and chaos wants one of its "
        "own. Choose another."
      )
    place = stack.enter_context(place_of(store, workdir))
    plan = draw_plan(
      config,
      seed=seed,
      minutes=minutes,
      every_s=every_s,
      store=store,
      unavailable=place.unavailable,
    )
    workdir_lib.settle_config(workdir, config, started=False)
    flags = flags_of(open_at(place.url))
    stage = Stage(
      config=config,
      workdir=workdir,
      store=open_at(place.direct, deadline_s=_LOOK_S),
      raw=TensorStoreExchange(place.direct, deadline_s=_LOOK_S),
      arguments=(f"--workdir={workdir}", *flags),
      directory=place.directory,
      proxy=place.proxy,
      read_only=place.read_only,
    )
    session = Session(plan, stage, open_at(place.direct, deadline_s=_LOOK_S))
    status = session.run()
    stack.close()
    if session.exit is Exit.USER_ERROR or not workdir_lib.has_run(local):
      return session.exit
    result = verdict(plan, session, status, local, prepare)
    with contextlib.suppress(report_run.NoRun):
      result["report"] = summary.write(local, workdir)["report"]
    return result


def copy(source: Exchange, target: Exchange) -> None:
  """Copies all objects of an exchange, sealed or not."""
  for name in source.list(""):
    item = source.get(name)
    if item is not None:
      target.put(name, item.value)


# --- The verdict --------------------------------------------------------------


def verdict(
  plan: Plan,
  session: Session,
  status: Status,
  exchange: SealedExchange,
  prepare: Callable[[], None],
) -> dict[str, Any]:
  """Checks what a session has left; all plain JSON values."""
  workdir = session.workdir
  seen = check_lib.Seen(session.digests, session.calm_round, session.alive)
  found = check_lib.check(
    exchange,
    seen,
    cache_dir=str(workdir / "cache"),
    prepare=prepare,
    say=session.say,
  )
  ended = session.runner.ended
  violations = [*map(told, ended), *found.violations]
  if status is Status.FAILED:
    violations.append({"what": f"the run failed: {session.reason}"})
  return {
    "seed": plan.seed,
    "minutes": plan.minutes,
    "every_s": plan.every_s,
    "store": plan.store,
    "config_hash": session.config.digest,
    "status": str(status),
    "faults": session.runner.counts(),
    "left_out": plan.left_out,
    **_numbers(found, seen, ended, exchange, workdir),
    "violations": violations,
  }


def _numbers(
  found: check_lib.Found,
  seen: check_lib.Seen,
  ended: Sequence[Ended],
  exchange: SealedExchange,
  workdir: pathlib.Path,
) -> dict[str, Any]:
  history = found.history
  if history is None:  # then nothing that was seen can be shown to be there
    return {"commits": 0, "commits_lost": len(seen.digests)}
  read = report_run.load(exchange, workdir)
  lives = [life for own in read.learners.values() for life in own]
  return {
    "commits": len(found.commits),
    "commits_lost": len(check_lib.lost(history, found.commits, seen)),
    "snapshots": len(restore.listing(exchange)),
    "longest_commit_gap_s": round(measure.longest_gap_s(history), 3),
    "inner_steps": sum(life.steps for life in lives),
    "inner_steps_lost_to_others": measure.steps_lost(
      history, [end.pid for end in ended]
    ),
    "uptime": measure.uptime(
      lives, seconds_to_ns(read.config.live.tape_flush_s) + _UNFLUSHED_NS
    ),
    "goodput": accounting.account(read).goodput,
  }


def failed(result: dict[str, Any]) -> bool:
  """Whether a verdict is that something is wrong."""
  idle = any(
    entry["took_effect"] < entry["injected"]
    for entry in result["faults"].values()
  )
  return bool(result["violations"] or result["commits_lost"] or idle)
