"""Decoupled DiLoCo (arXiv 2604.21428) in JAX.

Many islands of accelerators train one language model and never wait for each
other: learners offer outer gradients, a syncer merges them round by round.
"""

__version__ = "0.1.0"
