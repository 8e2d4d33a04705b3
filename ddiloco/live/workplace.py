"""What the live roles share: who we are, and what we run on."""

import os
import socket
import time
from typing import Any

from ddiloco.config import Config
from ddiloco.engine.facts import facts
from ddiloco.engine.version import code_version
from ddiloco.protocol import tape, wire


def host() -> str:
  """This machine's name."""
  return socket.gethostname()


def tape_header(
  config: Config, run_id: str, actor: str, incarnation: int, **more: Any
) -> tape.Header:
  """What this process is, as far as bits depend on it."""
  return tape.Header(
    run_id=run_id,
    actor=actor,
    incarnation=incarnation,
    seed=config.seed,
    config=wire.canonical_json(config.to_dict()).decode(),
    config_sha256=config.digest,
    code_version=code_version(),
    started_unix_ns=time.time_ns(),
    started_ns=time.monotonic_ns(),
    pid=os.getpid(),
    **facts(),
    **more,
  )
