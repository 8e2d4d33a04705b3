"""From a run to an export to a run that starts from it; and refusals."""

import json
import shutil

import pytest

from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.protocol import keys, messages
from ddiloco.protocol.messages import Commit
from ddiloco.types import Exit
from tests.launch.commands import assert_user_error, launch, server
from tests.lm.tiny import write_text

pytestmark = pytest.mark.slow

CONFIG = "--config=tests/live/tiny.py"


@pytest.fixture(name="run", scope="module")
def run_fixture():
  with server() as run:
    yield run


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory):
  """A run in `first`, its export in `export`, one from it in `second`."""
  folder = tmp_path_factory.mktemp("export")
  # What one command compiles, the others find.
  monkeypatch = pytest.MonkeyPatch()
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))
  text = write_text(folder / "text")
  common = (CONFIG, f"--config.data.path={text}", "--config.stop.rounds=6")
  for command, *arguments in (
    ("simulate", *common, f"--workdir={folder / 'first'}"),
    (
      "export",
      f"--workdir={folder / 'first'}",
      f"--output={folder / 'export'}",
    ),
    (
      "simulate",
      *common,
      f"--workdir={folder / 'second'}",
      f"--config.init.path={folder / 'export'}",
    ),
  ):
    code, _, errors = launch(command, *arguments)
    assert code == Exit.OK, errors
  monkeypatch.undo()
  return folder


def test_a_run_starts_where_another_ended(folder):
  first, second = (
    lines(folder / name / "eval.jsonl") for name in ("first", "second")
  )
  about = json.loads((folder / "export" / "export.json").read_text())
  assert first[-1]["round"] == about["round"] == 6
  digest = first[-1]["params_digest"]
  assert digest == about["params_digest"] == second[0]["params_digest"]
  assert second[0]["loss"] == first[-1]["loss"] != first[0]["loss"]
  assert second[-1]["params_digest"] != digest


def test_the_digest_of_its_start_is_part_of_a_run(folder):
  config = json.loads((folder / "second" / "config.json").read_text())["config"]
  exchange = TensorStoreExchange(str(folder / "second" / "exchange"))
  commit = messages.decode(Commit, exchange.get(keys.commit(0)).value)
  exchange.close()
  init = json.loads(commit.genesis.config)["init"]
  assert init == config["init"]
  assert init["path"] == str(folder / "export") and len(init["sha256"]) == 64


def test_another_checkpoint_is_refused_on_resume(folder, run, tmp_path):
  """The same files elsewhere are fine; other bytes are not."""
  shutil.copytree(folder / "second", tmp_path / "run")
  shutil.copytree(folder / "export", tmp_path / "export")
  about = tmp_path / "export" / "export.json"
  about.write_text(about.read_text() + " ")
  result = run(
    "local",
    CONFIG,
    f"--config.data.path={folder / 'text'}",
    "--config.stop.rounds=9",
    f"--workdir={tmp_path / 'run'}",
    f"--config.init.path={tmp_path / 'export'}",
  )
  assert_user_error(result, "init.sha256 = ", "cannot change on resume")


def test_what_cannot_be_exported_is_said_at_once(folder, run, tmp_path):
  result = run("export", f"--workdir={folder / 'first'}")
  assert_user_error(result, "--output is missing")
  result = run("export", f"--workdir={tmp_path}", "--output=x")
  assert_user_error(result, "holds no run")
  for command in (["export", f"--output={tmp_path}/deep/x"], ["evaluate"]):
    result = run(*command, f"--workdir={tmp_path}/typo")
    assert_user_error(result, f"{tmp_path}/typo holds no run")
  assert list(tmp_path.iterdir()) == []
  result = run("export", "--output=x", "--format=pickle")
  assert result.code == 2 and "orbax|safetensors" in result.err
  result = run(
    "simulate", CONFIG, "--config.data.path=x", "--config.init.path=/no/where",
    f"--workdir={tmp_path}",
  )  # fmt: skip
  assert_user_error(result, "init.path = '/no/where' does not exist")


@pytest.mark.parametrize(
  "arguments, words",
  [
    (["--of=learner:4"], ["--of=learner:4", "learner:0 to learner:3"]),
    (["--of=average"], ["--of=average", "syncer, mean"]),
    (["--of=mean", "--follow"], ["--follow", "leave out --of"]),
    (["--tasks=piqa", "--follow"], ["--follow", "--tasks"]),
    (["--task_dir=x"], ["--task_dir", "need --tasks"]),
    (["--limit=3"], ["--limit", "need --tasks"]),
  ],
)
def test_evaluations_that_make_no_sense_are_refused(
  folder, run, arguments, words
):
  result = run("evaluate", f"--workdir={folder / 'first'}", *arguments)
  assert_user_error(result, *words)


def test_shards_and_how_unlike_they_are(folder, run, tmp_path):
  for path in (folder / "text").iterdir():
    shutil.copy(path, tmp_path / f"19{path.name}")
  text = f"--config.data.path={tmp_path}"
  result = run("shards", CONFIG, text, "--config.data.partition=time")
  assert result.code == 0, result
  head, *shards, everybody = result.out.splitlines()
  assert head.split() == ["shard", "windows", "entropy", "labels"]
  windows = [int(line.split()[1]) for line in shards]
  assert len(shards) == 4 and sum(windows) == int(everybody.split()[1])
  assert "a window's shard tells" in everybody


def test_shards_without_labels_are_refused(folder, run):
  text = f"--config.data.path={folder / 'text'}"
  result = run("shards", CONFIG, text, "--config.data.dirichlet_alpha=0.5")
  assert_user_error(result, "data.dirichlet_alpha", "'iid' does not use it")
  result = run("shards")
  assert_user_error(result, "--workdir", "--config")
