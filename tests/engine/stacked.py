"""A program with stacked layers on any mesh, trained element by element.

Its sums do not depend on how arrays are sharded, so neither do its bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHAPES = {
  "blocks/kernel": (4, 8, 16),
  "blocks/scale": (4, 6),
  "embed": (24, 16),
  "offset": (),
}
PATTERN = r"^blocks/(\d*)"
# Dimensions that a mesh (2, 4) splits, and some that it splits when whole only.
SPECS = {
  "blocks/kernel": PartitionSpec("x", None, "y"),
  "blocks/scale": PartitionSpec("y", "x"),
  "embed": PartitionSpec("y", "x"),
  "offset": PartitionSpec(),
}


def mesh() -> Mesh:
  return jax.make_mesh(
    (2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def nested(flat: dict[str, Any]) -> dict[str, Any]:
  return {
    "blocks": {
      "kernel": flat["blocks/kernel"],
      "scale": flat["blocks/scale"],
    },
    "embed": flat["embed"],
    "offset": flat["offset"],
  }


def values(seed: int) -> dict[str, Any]:
  draw = np.random.default_rng(seed)
  return nested(
    {n: draw.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
  )


class Stacked:
  """Moves every parameter a tenth of the way to its shard's target.

  Its state counts steps, which is nobody else's business.
  """

  samples_per_step = 2

  def __init__(self, shard: int, sharded: bool = False):
    self._targets = values(100 + shard)
    if sharded:
      here = mesh()
      self._where = nested(
        {n: NamedSharding(here, s) for n, s in SPECS.items()}
      )
    else:
      one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      self._where = nested(dict.fromkeys(SHAPES, one))
    self._step = jax.jit(
      _step, donate_argnums=0, out_shardings=((self._where, None), None)
    )

  def init(self) -> Any:
    return jax.device_put(values(0), self._where), jnp.zeros((), jnp.int32)

  def params(self, state: Any) -> Any:
    return state[0]

  def with_params(self, state: Any, params: Any) -> Any:
    return params, state[1]

  def batch(self, first_sample: int, count: int) -> Any:
    del first_sample, count
    return jax.device_put(self._targets, self._where)

  def tokens(self, batch: Any) -> int:
    del batch
    return 10

  def step(self, state: Any, batch: Any, clock: int) -> tuple[Any, dict]:
    del clock
    return self._step(state, batch)


def _step(state: Any, targets: Any) -> tuple[Any, dict[str, jax.Array]]:
  params, steps = state
  params = jax.tree.map(lambda x, y: 0.875 * x + 0.125 * y, params, targets)
  return (params, steps + 1), {"loss": jnp.square(params["offset"])}
