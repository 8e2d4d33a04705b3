"""The environment that every test, and every process of a test, runs in."""

import os
import sys

import hypothesis

assert "jax" not in sys.modules, "JAX is imported before its settings are made"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# XLA's thread count decides the order of its sums, hence the bits.
os.environ["PJRT_NPROC"] = "2"
# A silent broadcast of [n] to [m, n] hides mistakes in shapes.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

hypothesis.settings.register_profile(
  "ddiloco",
  derandomize=True,  # The same examples in every run ...
  database=None,  # ... whatever failed before.
  deadline=None,  # A first call compiles.
  max_examples=50,
)
hypothesis.settings.load_profile("ddiloco")
