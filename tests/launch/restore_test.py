"""The door of launch.restore: what is wrong, and what to do."""

import shutil

import pytest

from ddiloco.protocol import keys
from tests.launch.commands import assert_user_error, contents, launch

CONFIG = "--config=tests/sim/small.py"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
  """A simulated run that took snapshots at rounds 20 and 40."""
  workdir = tmp_path_factory.mktemp("old")
  flags = (f"--workdir={workdir}", "--seed=7")
  result = launch(
    "simulate", CONFIG, *flags, "--config.snapshot.every_rounds=20"
  )
  assert result.code == 0, result
  return workdir


def test_the_list(command, old):
  result = command("restore", f"--workdir={old}")
  assert result.code == 0, result
  _, *rows = result.out.splitlines()
  assert [row.split()[0] for row in rows] == ["20", "40"]


def test_a_run_that_is_made_and_not_started(command, old, tmp_path):
  into = tmp_path / "new"
  flags = (f"--workdir={old}", "--round=20", f"--into={into}")
  result = command("restore", *flags, "--start=false", "--learners=3")
  assert result.code == 0, result
  assert "goes on from round 20" in result.out
  assert f"python -m launch.local --workdir={into}" in result.out
  assert (into / "exchange" / keys.commit(20)).exists()
  before = contents(into / "exchange")
  again = command("restore", *flags, "--start=false")
  assert_user_error(again, "holds a run already", "Choose another --into")
  assert contents(into / "exchange") == before


@pytest.mark.parametrize(
  "flags, words",
  [
    (["--round=20"], ["--into is missing"]),
    (["--round=20", "--into={old}"], ["--into is the --workdir"]),
    (
      ["--round=30", "--into={new}"],
      ["no complete snapshot", "complete ones of rounds 20, 40"],
    ),
    (
      [CONFIG, "--config.codec.up=int8", "--round=20", "--into={new}"],
      ["codec.up = 'int8'", "was started with 'int4'"],
    ),
    (
      [CONFIG, "--config.sync.num_fragments=2", "--round=20", "--into={new}"],
      ["sync.num_fragments = 2", "was started with 3"],
    ),
    (["--round=20", "--into={new}", "--learners=0"], ["learners.count", "0"]),
    (
      [CONFIG, "--round=20", "--into={new}", "--learners=3"],
      ["give --config.learners.count=3 instead of --learners"],
    ),
  ],
  ids=lambda x: str(x[-1]),
)
def test_what_does_not_fit(command, old, tmp_path, flags, words):
  new = tmp_path / "new"
  given = [flag.format(old=old, new=new) for flag in flags]
  result = command("restore", f"--workdir={old}", *given)
  assert_user_error(result, *words)
  assert not contents(new)


def test_a_run_without_snapshots(command, old, tmp_path):
  workdir = tmp_path / "run"
  shutil.copytree(old, workdir)
  shutil.rmtree(workdir / "exchange/snapshot")
  result = command("restore", f"--workdir={workdir}")
  assert_user_error(result, "no complete snapshot", "snapshot.every_rounds=100")


def test_no_run_at_all(command, tmp_path):
  result = command(
    "restore", f"--workdir={tmp_path}", "--round=3", f"--into={tmp_path}/b"
  )
  assert_user_error(result, "there is no run in")
