"""A mixture of experts in place of a feed-forward layer.

A router gives every token to its k best experts (Shazeer et al.,
arXiv 1701.06538), each of which takes at most a fixed number of tokens of every
sequence (Switch, arXiv 2101.03961); what does not fit is passed over. An
expert's places go to earlier tokens first, so no token sees a later one, and
rows of a batch do not compete.

The load-balance loss is that of one learner's batch: learners balance their
experts on their own (paper, Sec. 4.1).

Shape letters, besides those of `layers`: K experts a token goes to, C tokens of
a sequence that an expert takes.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ModelConfig
from ddiloco.lm.layers import GeGLU, batch_axes, matrix


class Routing(NamedTuple):
  """How one layer's tokens were spread over its experts, f32."""

  load: jax.Array  # [E], the share of the choices that fell on each; sums to 1
  balance: jax.Array  # Switch's loss: 1 if even, E if all choose alike
  z: jax.Array  # mean squared log-partition of the router
  dropped: jax.Array  # the share of the choices that found an expert full


class Places(NamedTuple):
  """Where the choices of one sequence go; E * C and L * K mean nowhere."""

  of_choice: jax.Array  # [L * K], the place of each choice
  choice: jax.Array  # [E * C], the choice in each place


def capacity(config: ModelConfig, length: int) -> int:
  """The tokens of a sequence that one expert takes."""
  even = length * config.experts_per_token / config.experts
  return min(length, math.ceil(even * config.capacity_factor))


def choose(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The experts of each token and their weights, both [..., K].

  Weights sum to one; a single expert's is its probability, so that the router
  learns from the loss.
  """
  top, experts = jax.lax.top_k(jax.nn.softmax(logits), count)
  if count > 1:
    top = top / jnp.sum(top, -1, keepdims=True)
  return experts, top


def assign(experts_LxK: jax.Array, num_experts: int, capacity: int) -> Places:
  """Gives each choice of a sequence a place at its expert, in order."""
  flat = experts_LxK.reshape(-1)
  onehot = jax.nn.one_hot(flat, num_experts, dtype=jnp.int32)
  before = jnp.sum((jnp.cumsum(onehot, 0) - onehot) * onehot, -1)
  nowhere = num_experts * capacity
  place = jnp.where(before < capacity, flat * capacity + before, nowhere)
  choice = jnp.full((nowhere,), flat.size, jnp.int32)
  choice = choice.at[place].set(jnp.arange(flat.size), mode="drop")
  return Places(place, choice)


def _take(x_NxD: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of `x_NxD`; zeros where the index is N."""
  return x_NxD.at[index].get(mode="fill", fill_value=0)


class MoE(nnx.Module):
  """Experts, their router and, if there is one, the expert of all tokens."""

  def __init__(self, config: ModelConfig, mesh: Mesh):
    d, f, e = config.width, config.hidden, config.experts
    self.config = config
    rows = tuple(axis for axis in batch_axes(mesh) if axis != "expert")
    spread = "expert" if "expert" in mesh.axis_names else None
    self.at_experts = NamedSharding(mesh, PartitionSpec(rows, spread))
    self.at_tokens = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    self.router = matrix(("width", "choice"), (d, e), d)
    self.gate = matrix(("expert", "width", "hidden"), (e, d, f), d)
    self.up = matrix(("expert", "width", "hidden"), (e, d, f), d)
    self.down = matrix(("expert", "hidden", "width"), (e, f, d), f)
    if config.shared_hidden:
      self.shared = GeGLU(d, config.shared_hidden)

  def __call__(
    self, x_BxLxD: jax.Array, counted_BxL: jax.Array
  ) -> tuple[jax.Array, Routing]:
    """[B, L, D] to [B, L, D], and the routing of the counted tokens."""
    config, (b, length, d) = self.config, x_BxLxD.shape
    e, k = config.experts, config.experts_per_token
    c = capacity(config, length)
    # In f32: rounding a router's inputs changes what it chooses.
    logits_BxLxE = jnp.einsum(
      "bld,de->ble", x_BxLxD.astype(jnp.float32), self.router[...]
    )
    experts_BxLxK, weights_BxLxK = choose(logits_BxLxE, k)
    places = jax.vmap(lambda experts: assign(experts, e, c))(experts_BxLxK)
    # One row for each choice: gathers of distinct rows have gradients that do
    # not depend on the order of a sum.
    choices = jnp.repeat(x_BxLxD, k, axis=1)
    inputs = jax.vmap(_take)(choices, places.choice).reshape(b, e, c, d)
    outputs = self._experts(inputs).reshape(b, e * c, d)
    returned = jax.vmap(_take)(outputs, places.of_choice)
    mixed_BxLxD = jnp.einsum(
      "blkd,blk->bld",
      returned.reshape(b, length, k, d),
      weights_BxLxK.astype(x_BxLxD.dtype),
    )
    if config.shared_hidden:
      mixed_BxLxD = mixed_BxLxD + self.shared(x_BxLxD)
    full = (places.of_choice == e * c).reshape(b, length, k)
    return mixed_BxLxD, _routing(logits_BxLxE, experts_BxLxK, full, counted_BxL)

  def _experts(self, x_BxExCxD: jax.Array) -> jax.Array:
    """Every expert on its own places; they travel there and back."""
    gate, up, down = (
      w[...].astype(x_BxExCxD.dtype) for w in (self.gate, self.up, self.down)
    )
    place = jax.lax.with_sharding_constraint
    x_BxExCxD = place(x_BxExCxD, self.at_experts)
    hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", x_BxExCxD, gate))
    hidden = hidden * jnp.einsum("becd,edf->becf", x_BxExCxD, up)
    out = place(jnp.einsum("becf,efd->becd", hidden, down), self.at_experts)
    return place(out, self.at_tokens)


def _routing(
  logits_BxLxE: jax.Array,
  experts_BxLxK: jax.Array,
  full_BxLxK: jax.Array,
  counted_BxL: jax.Array,
) -> Routing:
  num_experts, k = logits_BxLxE.shape[-1], experts_BxLxK.shape[-1]
  share_BxL = counted_BxL / jnp.sum(counted_BxL)

  def mean(x_BxL_):
    return jnp.einsum("bl...,bl->...", x_BxL_, share_BxL)

  chosen = jax.nn.one_hot(experts_BxLxK, num_experts, dtype=jnp.float32)
  load = mean(jnp.sum(chosen, 2)) / k
  return Routing(
    load=load,
    balance=num_experts * jnp.sum(load * mean(jax.nn.softmax(logits_BxLxE))),
    z=mean(jnp.square(jax.nn.logsumexp(logits_BxLxE, -1))),
    dropped=mean(jnp.sum(full_BxLxK.astype(jnp.float32), 2)) / k,
  )


def load_entropy(load_E: jax.Array) -> jax.Array:
  """The entropy of the experts' loads over its largest value.

  1 if all have the same load, log k / log E if all tokens go to the same k.
  """
  nats = -jnp.sum(jax.scipy.special.xlogy(load_E, load_E), -1)
  return nats / math.log(load_E.shape[-1])


def penalty(config: ModelConfig, layers: Routing) -> jax.Array:
  """What routing adds to the loss, the mean over the layers [layers, ...]."""
  return config.balance_loss * jnp.mean(
    layers.balance
  ) + config.router_z_loss * jnp.mean(layers.z)


def metrics(layers: Routing) -> dict[str, jax.Array]:
  """Scalars of a step, means over the layers [layers, ...]."""
  return {
    "balance_loss": jnp.mean(layers.balance),
    "router_z_loss": jnp.mean(layers.z),
    "dropped_share": jnp.mean(layers.dropped),
    "load_entropy": jnp.mean(load_entropy(layers.load)),
  }
