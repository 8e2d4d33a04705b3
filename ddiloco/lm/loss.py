"""The loss of a batch: what steps minimise, and what evaluation measures."""

import jax
import jax.numpy as jnp
import optax

from ddiloco.config import ModelConfig
from ddiloco.lm import moe
from ddiloco.lm.data import Batch
from ddiloco.lm.model import Decoder, Output


def _decode(decoder: Decoder, batch: Batch) -> tuple[Output, jax.Array]:
  """Its output, and which tokens count in the routing of experts."""
  tokens_BxL = batch.tokens[:, :-1]
  counted_BxL = jnp.broadcast_to(batch.mask[:, None], tokens_BxL.shape)
  if batch.targets is not None:
    # What follows the last target fills the row up.
    later = jax.lax.cummax(batch.targets, 1, reverse=True)
    counted_BxL = counted_BxL * later
  return decoder.decode(tokens_BxL, counted_BxL, batch.images), counted_BxL


def _nats(logits: jax.Array, batch: Batch) -> jax.Array:
  """Of every target, [B, L]; 0 where the loss does not count."""
  nats = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch.tokens[:, 1:]
  )
  nats = nats * batch.mask[:, None]
  return nats if batch.targets is None else nats * batch.targets


def objective(
  model: ModelConfig, decoder: Decoder, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The scalar to minimise, and the metrics of a step.

  "loss" is the mean over the targets, without what routing adds: models with
  and without experts compare.
  """
  (logits, routing), _ = _decode(decoder, batch)
  nats = _nats(logits, batch)
  if batch.targets is None:
    num_targets = jnp.sum(batch.mask) * nats.shape[1]
  else:
    num_targets = jnp.sum(batch.mask[:, None] * batch.targets)
  loss = jnp.sum(nats) / num_targets
  if routing is None:
    return loss, {"loss": loss}
  return (
    loss + moe.penalty(model, routing),
    {"loss": loss, **moe.metrics(routing)},
  )


def measure(decoder: Decoder, batch: Batch) -> dict[str, jax.Array]:
  """Sums over the unmasked rows, to be added up over batches.

  "nats" of the targets; of answers, the number that are "exact", each token
  being the likeliest after those before it, which is what greedy decoding
  gives; of experts, the "load" of each, [layers, E].
  """
  (logits, routing), counted_BxL = _decode(decoder, batch)
  sums = {"nats": jnp.sum(_nats(logits, batch))}
  if batch.targets is not None:
    wrong = (jnp.argmax(logits, -1) != batch.tokens[:, 1:]) * batch.targets
    sums["exact"] = jnp.sum((jnp.sum(wrong, 1) == 0) * batch.mask)
  if routing is not None:
    sums["load"] = routing.load * jnp.sum(counted_BxL)
  return sums
