"""What a fragmentation costs, against sums made by hand."""

import json

import numpy as np
import pytest

from ddiloco.algo.fragments import make_layout
from ddiloco.config import ConfigError
from ddiloco.protocol.schedule import Schedule
from ddiloco.report import fragments


def zeros(**sizes):
  return {name: np.zeros(shape, np.float32) for name, shape in sizes.items()}


PARAMS = zeros(a=(10, 4), b=(3, 4), c=(5,), frozen=(99,))


def describe(strategy="balanced_tensor", num_fragments=2, interval=6):
  layout = make_layout(PARAMS, num_fragments, strategy, frozen="frozen")
  count = range(layout.num_fragments)
  return fragments.describe(
    layout,
    Schedule(num_fragments, interval, 1),
    up=[10 + p for p in count],
    down=[100 + p for p in count],
  )


def test_numbers_by_hand():
  table = describe()  # a | b, c
  first, second = table["fragments"]
  assert first["bytes"] == {"f32": 160, "up": 10, "down": 100}
  assert second["bytes"] == {"f32": 68, "up": 11, "down": 101}
  assert (first["offset"], second["offset"]) == (0, 3)
  assert first["pieces"] == [{"tensor": "a", "shape": [10, 4], "bytes": 160}]
  assert [piece["tensor"] for piece in second["pieces"]] == ["b", "c"]
  assert table["parameters"] == 57 and table["frozen"] == ["frozen"]
  assert table["peak_over_mean"] == pytest.approx(160 / 114)
  assert table["idle_steps"] == 4
  assert table["bytes_per_step"] == {
    "f32": {"mean": 38, "peak": 160},
    "up": {"mean": 3.5, "peak": 11},
    "down": {"mean": 33.5, "peak": 101},
  }
  assert json.loads(json.dumps(table)) == table


def test_fragments_due_together_count_together():
  table = describe(num_fragments=3, interval=2)
  assert [item["offset"] for item in table["fragments"]] == [0, 0, 1]
  assert table["idle_steps"] == 0
  assert table["bytes_per_step"]["up"] == {"mean": 16.5, "peak": 21}


def test_cut_tensors_say_where():
  table = describe("balanced_sub_tensor", num_fragments=3)
  cut = [
    p for item in table["fragments"] for p in item["pieces"] if "axis" in p
  ]
  assert [(p["tensor"], p["axis"], p["start"], p["stop"]) for p in cut] == [
    ("a", 1, 0, 2),
    ("a", 1, 2, 4),
  ]
  assert sum(piece["bytes"] for piece in cut) == 160
  shown = fragments.text(table)
  assert "a[:, 0:2]" in shown and "a[:, 2:4]" in shown


def test_tables_for_people_name_the_largest_and_count_the_rest():
  params = zeros(**{f"t{n}": (n,) for n in range(1, 8)})
  layout = make_layout(params, 1)
  table = fragments.describe(layout, Schedule(1, 1, 1), up=[9], down=[12])
  lines = fragments.text(table).splitlines()
  assert lines[1].split() == (
    "0 0 7 112 B 9 B 12 B t7, t6, t5 and 4 more".split()
  )
  assert "28 parameters in 7 tensors" in lines[3]


def test_layers_next_to_each_other_are_named_as_one():
  params = zeros(**{"blocks/stacked/k": (6, 2)})
  layout = make_layout(params, 2, "layer_sequential")
  table = fragments.describe(layout, Schedule(2, 2, 1), up=[1, 1], down=[1, 1])
  lines = fragments.text(table).splitlines()
  assert lines[1].endswith(" blocks/stacked/k[0:3]")
  assert lines[2].endswith(" blocks/stacked/k[3:6]")


def test_comparisons_tell_what_is_impossible():
  def table(strategy):
    if strategy == "tensor":
      raise ConfigError("there are no layers")
    return describe(strategy)

  tables = fragments.compare(["balanced_tensor", "tensor"], table)
  assert tables[1] == {
    "strategy": "tensor",
    "impossible": "there are no layers",
  }
  lines = fragments.comparison(tables).splitlines()
  assert "P = 2, H = 6" in lines[0] and "1 more frozen" in lines[0]
  assert lines[3].split()[:5] == ["balanced_tensor", "3", "1.404", "4", "of"]
  assert lines[4] == "tensor is impossible: there are no layers"
  assert "there are no layers" in fragments.comparison(tables[1:])
