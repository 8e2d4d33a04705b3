"""The project's own log: what its processes say while they run.

Libraries are heard from warnings on; ours say more.
"""

import logging

from absl import logging as absl_logging

logger = logging.getLogger("ddiloco")


def configure() -> None:
  """Sends our messages, and others' warnings, to standard error."""
  absl_logging.set_verbosity(absl_logging.WARNING)
  handler = logging.StreamHandler()
  handler.setFormatter(
    logging.Formatter(
      "%(levelname).1s %(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
  )
  logger.handlers = [handler]
  logger.setLevel(logging.INFO)
  logger.propagate = False
