"""`python -m launch.fragments`: tables of models that need not exist."""

import json

import pytest

from tests.launch.commands import assert_user_error
from tests.live.processes import ROOT

QUICKSTART = f"--config={ROOT / 'experiments/quickstart/config.py'}"
OWN = f"--config={ROOT / 'tests/sim/small.py'}"


def test_it_compares_strategies_of_a_model_no_machine_here_could_hold(
  command, tmp_path
):
  output = tmp_path / "fragments.json"
  result = command(
    "fragments",
    QUICKSTART,
    "--config.model.preset=dense_12b",
    "--config.model.scan_layers=True",
    "--all",
    f"--output={output}",
  )
  assert result.code == 0, result
  tables = {
    table["strategy"]: table for table in json.loads(output.read_text())
  }
  assert list(tables) == [
    "balanced_tensor",
    "tensor",
    "layer_strided",
    "layer_sequential",
    "balanced_sub_tensor",
  ]
  for strategy, table in tables.items():
    assert strategy in result.out
    assert table["parameters"] > 10e9 and table["idle_steps"] == 0
    assert 4 * table["parameters"] == sum(
      item["bytes"]["f32"] for item in table["fragments"]
    )
  peaks = {name: table["peak_over_mean"] for name, table in tables.items()}
  assert peaks["balanced_sub_tensor"] < 1.01
  assert peaks["balanced_tensor"] < 1.05 < peaks["layer_strided"]


def test_it_shows_the_fragments_of_a_program_of_ones_own(command, tmp_path):
  output = tmp_path / "fragments.json"
  result = command(
    "fragments",
    OWN,
    "--config.sync.num_fragments=2",
    "--config.sync.frozen=^embed",
    f"--output={output}",
  )
  assert result.code == 0, result
  assert "out/kernel, hidden/bias, out/bias" in result.out
  assert "46 parameters in 5 tensors, 1 more frozen" in result.out
  table = json.loads(output.read_text())
  assert table["frozen"] == ["embed"] and table["idle_steps"] == 1
  assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
  "flags, words",
  [
    ([], ["--workdir", "--config"]),
    (
      [QUICKSTART, "--config.sync.fragmentation=layers"],
      ["'layers'", "tensor"],
    ),
    ([QUICKSTART, "--config.sync.layer_pattern=(a)(b)"], ["2 groups"]),
    ([QUICKSTART, "--config.sync.frozen=("], ["sync.frozen = '('", "regular"]),
    (
      [QUICKSTART, "--config.merge.embedding_pattern=("],
      ["merge.embedding_pattern = '('", "regular"],
    ),
    (
      [QUICKSTART, "--config.merge.embedding_pattern=wte"],
      ["merge.embedding_pattern = 'wte'", "no parameter's path", "embedding"],
    ),
    (
      [QUICKSTART + ":dilco"],
      ["algorithm = 'dilco'", "Did you mean diloco?"],
    ),
    ([QUICKSTART, "--output=/no/where.json"], ["--output=/no/where.json"]),
    (
      [OWN, "--config.sync.frozen=nothing"],
      ["'nothing'", "no path", "'embed'"],
    ),
    (
      [OWN, "--config.sync.fragmentation=layer_strided"],
      ["sync.layer_pattern", "no layer", "'out/bias'"],
    ),
  ],
)
def test_mistakes_are_told(command, flags, words):
  assert_user_error(command("fragments", *flags), *words)
