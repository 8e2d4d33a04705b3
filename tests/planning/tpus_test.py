"""Names of slices: what there is, and what is said of others."""

import pytest

from ddiloco.planning import tpus
from ddiloco.planning.roofline import roofline


@pytest.mark.parametrize(
  "name, chips",
  [
    ("v5e:1x1", 1),
    ("v5e:16x16", 256),
    ("v5p:2x2x1", 4),
    ("v5p:2x4x4", 32),
    ("v5p:4x4x4", 64),
    ("v5p:8x8x12", 768),
    ("v5p:16x16x24", 6144),
    ("v6e:8x16", 128),
  ],
)
def test_slices(name, chips):
  found = tpus.parse_slice(name)
  assert found.chips == chips and str(found) == name


@pytest.mark.parametrize(
  "name, words",
  [
    ("v7:2x2", ["'v7'", "v5e, v5p, v6e"]),
    ("v5x:2x2", ["'v5x'", "Did you mean v5"]),
    ("", ["''", "v5e, v5p, v6e"]),
    ("v5p", ["''", "no shape", "v5p:4x4x4"]),
    ("v5p:4xfour", ["'4xfour'", "no shape"]),
    ("v5p:-4x4x4", ["no shape"]),
    ("v5p:4x4", ["2 dimensions", "have 3", "v5p:4x4x4"]),
    ("v6e:4x4x4", ["3 dimensions", "have 2", "v6e:4x4"]),
    ("v6e:3x3", ["no such slice of v6e", "8x16"]),
    ("v6e:16x32", ["no such slice of v6e"]),
    ("v5p:8x4x4", ["no such slice of v5p", "ascending multiples of 4"]),
    ("v5p:0x4x4", ["no such slice of v5p"]),
    ("v5p:4x4x28", ["up to 16x16x24"]),
  ],
)
def test_what_is_no_slice(name, words):
  with pytest.raises(ValueError) as error:
    tpus.parse_slice(name)
  for word in (name, *words):
    assert word in str(error.value)


def test_islands():
  found = tpus.parse_islands("2*v5p:4x4x4, v6e:8x8")
  assert list(map(str, found)) == ["v5p:4x4x4", "v5p:4x4x4", "v6e:8x8"]


@pytest.mark.parametrize(
  "text", ("0*v6e:8x8", "x*v6e:8x8", "2*", "", "v6e:8x8,")
)
def test_what_are_no_islands(text):
  with pytest.raises(ValueError):
    tpus.parse_islands(text)


def test_a_roofline_is_its_highest_part():
  v5p = tpus.GENERATIONS["v5p"]
  parts = {"flops": 459e12, "memory_bytes": 2765e9, "sent_bytes": 600e9}
  assert roofline(v5p, **parts) == (1.0, 1.0, 1.0)
  names = {"flops": "compute", "memory_bytes": "memory"}
  for key, bound in names.items():
    found = roofline(v5p, **{**parts, key: 2 * parts[key]})
    assert (found.bound, found.step_s) == (bound, 2.0)
