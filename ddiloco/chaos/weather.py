"""Faults of a whole store, and of the way there."""

import os
import time
from collections.abc import Callable
from typing import Any

from ddiloco.chaos import proxy as proxies
from ddiloco.chaos.stage import (
  Job,
  Stage,
  Steps,
  TooLate,
  decode,
  wrong_hours_s,
)
from ddiloco.protocol import keys
from ddiloco.protocol.messages import Lease

_HOUR_S = 3600
_WRITES = "^(PUT|POST|DELETE) "
_UNABLE = proxies.error(503, "ServiceUnavailable")
_SLOW_DOWN = proxies.error(503, "SlowDown")
_TOO_MANY = proxies.error(429, "TooManyRequests")


def read_only(stage: Stage, job: Job) -> Steps:
  """No writes: as the kernel, or the server, tells each who tries one."""
  if stage.proxy is not None:
    yield from _requests(stage, job, _UNABLE, (3, 8), _WRITES)
    return
  span_s = job.span_s(3, 8)
  job.begin()
  stage.read_only.set(True)
  try:
    refused = stage.read_only.refuses()
    before = _beat(stage)
    yield from stage.wait(span_s)
    job.evidence["refused"] = refused and stage.read_only.refuses()
    # None: somebody garbles it.
    silent = before is None or _beat(stage) in (None, before)
    job.evidence["silent_s"] = span_s if silent else 0
    job.took_effect = bool(job.evidence["refused"] and job.evidence["silent_s"])
  finally:
    stage.read_only.set(False)


def _beat(stage: Stage) -> tuple[int, int] | None:
  lease = decode(Lease, stage.get(keys.lease(0)))
  return lease and (lease.epoch, lease.beat)


def outage(stage: Stage, job: Job) -> Steps:
  """Every request is answered with an error."""
  yield from _requests(stage, job, _UNABLE, (3, 12))


def throttle(stage: Stage, job: Job) -> Steps:
  """Most requests are, by a server that has too many of them."""
  act = job.rng.choice((_SLOW_DOWN, _TOO_MANY))
  share = job.evidence["share"] = job.span_s(0.5, 0.95)
  limited = proxies.sometimes(job.rng, share, act)
  yield from _requests(stage, job, limited, (4, 12))


def stall(stage: Stage, job: Job) -> Steps:
  """Requests are heard, and nothing comes back until it is over."""
  yield from _requests(stage, job, proxies.stall, (3, 12))


def lossy(stage: Stage, job: Job) -> Steps:
  """Requests, replies and the ends of replies are lost."""
  share = job.evidence["share"] = job.span_s(0.1, 0.4)
  yield from _requests(stage, job, proxies.lossy(job.rng, share), (5, 15))


def _requests(
  stage: Stage,
  job: Job,
  act: Callable[[Any], None],
  span_s: tuple[float, float],
  fits: str = "",
) -> Steps:
  """Lets it happen to requests for a while; proved by how many it hit."""
  span = job.span_s(*span_s)
  job.begin()
  fault = stage.proxy.inject(act, fits)
  try:
    yield from stage.wait(span)
  finally:
    stage.proxy.lift(fault)
    job.evidence |= {"span_s": span, "requests": fault.hits}
    job.took_effect = fault.hits > 0


def store_clock(stage: Stage, job: Job) -> Steps:
  """The store's times of what is written are hours wrong for a while."""
  shift_s = wrong_hours_s(job.rng)
  job.evidence["shift_s"] = shift_s
  if stage.proxy is not None:
    yield from _requests(stage, job, proxies.dated(shift_s), (4, 10))
    return
  end_s = time.monotonic() + job.span_s(4, 10)
  job.begin()
  moved = 0
  while time.monotonic() < end_s:
    for prefix in (keys.LEASES, keys.MEMBERS, keys.ANSWERS, keys.COMMITS):
      for name in stage.names(prefix)[-20:]:
        moved += _moved(stage.directory / name, shift_s)
    yield
  if not moved:
    raise TooLate("nothing was written")
  job.evidence["objects"] = moved
  job.took_effect = True


def _moved(path: os.PathLike, shift_s: int) -> bool:
  """Whether a file was new, and has a wrong time now."""
  try:
    found = os.stat(path)
    if abs(found.st_mtime - time.time()) > _HOUR_S / 2:
      return False
    os.utime(path, ns=(found.st_atime_ns, _later(found.st_mtime_ns, shift_s)))
    return abs(os.stat(path).st_mtime - time.time()) > _HOUR_S / 2
  except FileNotFoundError:
    return False


def _later(time_ns: int, shift_s: int) -> int:
  return time_ns + shift_s * 1_000_000_000
