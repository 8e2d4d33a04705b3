"""A program of one's own in plain JAX: no Flax, no Optax, no decoder."""
