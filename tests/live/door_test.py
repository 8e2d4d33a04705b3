"""Stores that a run would not be safe in."""

import pytest

from tests.live import processes, stores


@pytest.mark.live
def test_a_store_without_conditions_is_refused_at_the_door(tmp_path):
  workdir = tmp_path / "run"
  with processes.commands_in(tmp_path) as commands:
    run = commands.start(
      "local",
      *processes.run_flags(workdir, stop_rounds=5),
      f"--exchange={stores.new_url('gs', tmp_path)}",
      workdir=workdir,
    )
    assert run.finish() == 2, run.explain()
  assert "is not safe: an object that was there could be" in run.stderr
  assert run.stderr.count("error:") == 1
