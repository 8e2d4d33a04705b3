"""A live run, a second one from its snapshot, and both again from tapes."""

import json

import pytest

from ddiloco.types import Exit
from tests.launch.commands import assert_user_error, contents, launch
from tests.live.processes import environment, run_flags

pytestmark = [pytest.mark.live, pytest.mark.slow]


def run(command, *arguments):
  result = launch(command, *arguments)
  assert result.code == Exit.OK, result
  return result


def replayed(workdir, *arguments):
  output = workdir / "replay.json"
  run("replay", f"--workdir={workdir}", f"--output={output}", *arguments)
  result = json.loads(output.read_text())
  assert result["first_mismatch"] is None
  assert result["matched"] == result["commits"]
  return result


def test_a_run_is_restored_with_one_learner_more(tmp_path, monkeypatch):
  for name, value in environment().items():
    monkeypatch.setenv(name, value)
  old, new = tmp_path / "old", tmp_path / "new"
  key = tmp_path / "key"
  key.write_bytes(b"0123456789abcdef0123456789abcdef")
  key.chmod(0o600)
  sealed = f"--run_key_file={key}"
  flags = run_flags(old, stop_rounds=300, snapshot_every_rounds=50)
  run("local", *flags, sealed)

  header, *rows = run("restore", f"--workdir={old}", sealed).out.splitlines()
  assert header.split() == ["round", "tokens", "MB", "learners"]
  assert all(row.endswith("  0, 1") for row in rows)
  t = int(rows[0].split()[0])
  assert t in range(50, 300, 50)
  assert replayed(old, f"--from_round={t}", sealed)["commits"] == 300 - t

  restore = ("restore", f"--workdir={old}", f"--round={t}", f"--into={new}")
  assert_user_error(launch(*restore), "run_key")
  assert not new.exists() or not contents(new / "exchange")
  run(*restore, "--learners=3", sealed)
  for learner in (0, 1):
    log = (new / f"logs/learner-{learner}.log").read_text()
    assert f"goes on where the snapshot of round {t} was taken, at step" in log
    assert f"learner {learner}, life 2, joins after round {t}" in log
  log = (new / "logs/learner-2.log").read_text()
  assert "learner 2, life 1, joins after round" in log
  summary = json.loads((new / "summary.json").read_text())
  assert (summary["status"], summary["rounds"]) == ("completed", 300)
  origin = json.loads((old / "summary.json").read_text())["run_id"][:8]
  sentence = f"It goes on from the snapshot of round {t} of run {origin}."
  assert sentence in summary["story"]
  assert summary["warnings"] == [] or "stepped" in summary["warnings"][0]
  result = replayed(new, sealed)
  assert (result["commits"], result["lives"]) == (300 - t, 4)
