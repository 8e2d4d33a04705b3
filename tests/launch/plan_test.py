"""launch.plan: its files, and bad input."""

import json

import pytest

from tests.launch.commands import assert_user_error, tiny_config


def flags(*more):
  return tiny_config("--nocompile", *more)


SOUND = ("--islands=2*v5e:1x1", "--wan_gbps=2")


def test_a_plan(command, tmp_path):
  output, page = tmp_path / "plan.json", tmp_path / "plan.html"
  result = command(
    "plan",
    *flags(
      "--islands=v5e:1x1,v6e:1x1",
      "--wan_gbps=2",
      "--tokens=1000000000",
      f"--output={output}",
      f"--page={page}",
    ),
  )
  assert result.code == 0, result.err
  made = json.loads(output.read_text())
  assert [row["slice"] for row in made["islands"]] == ["v5e:1x1", "v6e:1x1"]
  assert made["budget"]["tokens"] == 10**9
  assert "suggested" in result.out and "assuming that" in result.out
  assert "Plan of a run" in page.read_text()


@pytest.mark.parametrize(
  "given, words",
  [
    (flags("--wan_gbps=2"), ["--islands is missing"]),
    (flags("--islands=v5e:1x1"), ["--wan_gbps is missing"]),
    (SOUND, ["--workdir", "--config"]),
    (flags("--islands=2*v9:1x1", "--wan_gbps=2"), ["'v9'"]),
    (flags("--islands=two*v5e:1x1", "--wan_gbps=2"), ["'two'"]),
    (flags(*SOUND, "--mfu=40"), ["mfu = 40"]),
    (flags(*SOUND, "--mtbi_years=-1"), ["mtbi_years = -1"]),
    (flags("--islands=99*v5e:1x1", "--wan_gbps=2"), ["data.shards"]),
    (
      flags(
        "--islands=v5e:4x4", "--wan_gbps=2", "--config.learners.mesh=(1,1,-1)"
      ),
      ["tensor", "16 ways"],
    ),
  ],
)
def test_bad_input_is_refused(command, given, words):
  assert_user_error(command("plan", *given), *words)
