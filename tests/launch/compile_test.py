"""launch.compile: what is refused before anything is compiled."""

import json
import subprocess
import sys

import pytest

from ddiloco.planning import aot
from tests.launch.commands import assert_user_error, tiny_config
from tests.live import processes


@pytest.mark.parametrize(
  "given, words",
  [
    (tiny_config(), ["--topology is missing", "v5p:4x4x4"]),
    (("--topology=v5p:4x4x4",), ["--workdir", "--config"]),
    (tiny_config("--topology=v9:2x2"), ["'v9'", "v5e, v5p, v6e"]),
    (tiny_config("--topology=v5p:5x5x5"), ["no such slice of v5p"]),
    (tiny_config("--topology=v5p:8x8"), ["2 dimensions", "have 3"]),
    (
      tiny_config("--topology=v5e:2x2", "--config.learners.mesh=(3,-1,1)"),
      ["learners.mesh", "does not fit"],
    ),
    (
      tiny_config("--topology=v5e:2x4", "--config.learners.batch_size=(6,)"),
      ["learners.batch_size = 6", "8 ways", "multiple of 8"],
    ),
    (
      tiny_config("--topology=v5e:2x2", "--output=/nowhere/at/all.json"),
      ["--output=/nowhere/at/all.json", "cannot be written"],
    ),
  ],
)
def test_bad_input_is_refused(command, given, words):
  assert_user_error(command("compile", *given), *words)


@pytest.mark.skipif(aot.available(), reason="libtpu is installed")
def test_without_the_compiler(command):
  batch = "--config.learners.batch_size=(4,)"
  result = command("compile", *tiny_config("--topology=v5e:2x2", batch))
  assert_user_error(result, "pip install '.[tpu]'", "no TPU is needed")


@pytest.mark.skipif(not aot.available(), reason=f"no libtpu: {aot.INSTALL}")
def test_a_small_model_for_a_slice(command, tmp_path):
  output = tmp_path / "compile.json"
  result = command(
    "compile",
    *tiny_config("--topology=v5e:2x2", "--config.learners.batch_size=(4,)"),
    "--nolargest_batch",
    f"--output={output}",
  )
  assert result.code == 0, result.err
  made = json.loads(output.read_text())
  assert (made["chips"], made["memory"]["fits"]) == (4, True)
  for words in ("fits: ", "no step shorter", "exchange", "moved by a chip"):
    assert words in result.out


@pytest.mark.skipif(not aot.available(), reason=f"no libtpu: {aot.INSTALL}")
def test_several_at_once():
  """libtpu takes a lock, which would end the second one."""
  argv = tiny_config("--topology=v5e:2x2", "--config.learners.batch_size=(4,)")
  running = [
    subprocess.Popen(
      [sys.executable, "-m", "launch.compile", *argv, "--nolargest_batch"],
      cwd=processes.ROOT,
      env=processes.environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  for process in running:
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "fits: " in out
