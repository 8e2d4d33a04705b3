"""What a config's learners send each other: its model's real fragments."""

import dataclasses

import jax
import numpy as np

from ddiloco import config as config_lib
from ddiloco.config import Config
from ddiloco.engine import loading
from ddiloco.planning import bandwidth
from ddiloco.planning.bandwidth import Traffic

_BITS = 8
_BF16_BYTES = 2  # of a gradient's number between data-parallel sites


def traffic(
  config: Config, sites: int, codec: str | None
) -> dict[str, Traffic]:
  """That of data-parallel training, and of the config's algorithm.

  Args:
    config: of the run; no array is made.
    sites: in the ring.
    codec: of the answers, instead of the config's.
  """
  if codec is not None:
    changed = dataclasses.replace(config.codec, up=codec)
    values = dataclasses.replace(config, codec=changed).to_dict()
    config = config_lib.from_dict(values)
  params = loading.abstract_params(loading.load_program(config, None, ""))
  layout = loading.lay_out(config, params)
  up, _ = loading.traffic_bytes(config, layout)
  numbers = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
  sync = config.sync
  return {
    "data_parallel, bf16": bandwidth.data_parallel(
      numbers * _BF16_BYTES * _BITS, sites
    ),
    f"{config.algorithm}, {config.codec.up}": bandwidth.decoupled(
      [size * _BITS for size in up],
      interval=sync.interval_steps,
      overlap=sync.overlap_steps,
      sites=sites,
    ),
  }
