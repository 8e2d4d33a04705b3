"""launch.bandwidth: the table, a config's own fragments, and bad input."""

import json

import pytest

from tests.launch.commands import assert_user_error
from tests.live import processes


def test_the_table(command, tmp_path):
  output, page = tmp_path / "t13.json", tmp_path / "t13.html"
  result = command(
    "bandwidth", "--table", f"--output={output}", f"--page={page}"
  )
  assert result.code == 0, result.err
  found = json.loads(output.read_text())
  assert len(found["rows"]) == 60 and len(found["rows_as_stated"]) == 40
  keys = {"step_s", "sites", "method", "utilisation", "gbps", "printed"}
  assert keys <= found["rows"][0].keys()
  assert "P = 24, H = 24, tau = 2: as the text has it" in result.out
  assert "decoupled_int4" in page.read_text()


def test_a_configs_own_fragments(command, tmp_path):
  output = tmp_path / "b.json"
  flags = [
    f"--config={processes.CONFIG}",
    f"--config.data.path={processes.text()}",
    f"--output={output}",
  ]
  gbps = {}
  for codec in ("f32", "int4"):
    result = command("bandwidth", *flags, f"--codec={codec}", "--wan_gbps=9,1")
    assert result.code == 0, result.err
    found = json.loads(output.read_text())
    rows = {(row["method"], row["utilisation"]): row for row in found["rows"]}
    gbps[codec] = rows[f"decoupled_diloco, {codec}", 90]["gbps"]
    assert found["utilisation_at_wan"][f"decoupled_diloco, {codec}"] == 1.0
  # int4 has a scale of 16 bits for every block of 64 numbers.
  assert 0.13 < gbps["int4"] / gbps["f32"] < 0.16


@pytest.mark.parametrize(
  "flags, words",
  [
    ((), ["--table", "--config"]),
    (("--codec=int3",), ["codec.up = 'int3'"]),
    (("--sites=1",), ["sites = 1", "at least 2"]),
    (("--step_s=-1",), ["step_s = -1"]),
    (("--loss=2",), ["loss = 2"]),
    (("--wan_gbps=2,fast",), ["wan_gbps = 'fast'", "each link"]),
    (("--latency_s=100",), ["no bandwidth gives", "Raise the overlap"]),
  ],
)
def test_bad_input_is_refused(command, flags, words):
  config = (
    f"--config={processes.CONFIG}",
    f"--config.data.path={processes.text()}",
  )
  given = (*config, *flags) if flags else ()
  assert_user_error(command("bandwidth", *given), *words)
