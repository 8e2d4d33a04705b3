"""`python -m launch.report`: one message for whoever names the wrong thing."""

import subprocess
import sys

import pytest

from ddiloco.live.exchange import TensorStoreExchange
from tests.report.history import killed_run

pytestmark = pytest.mark.live


def report(*flags):
  command = [sys.executable, "-m", "launch.report", *flags]
  return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
  "flag, says",
  [
    (None, "--workdir is missing"),
    ("--workdir={}/absent", "is no directory"),
    ("--workdir={}", "there is no run in"),
  ],
)
def test_user_errors(flag, says, tmp_path):
  done = report(*([flag.format(tmp_path)] if flag else []))
  assert done.returncode == 2
  assert done.stderr.startswith("error: ") and says in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
  assert list(tmp_path.iterdir()) == []


def test_reports_on_a_real_exchange(tmp_path):
  history = killed_run(tmp_path)
  exchange = TensorStoreExchange(str(tmp_path / "exchange"))
  for key, value in history.objects.items():
    exchange.put(key, value)
  done = report(f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert "Learner 1 was killed at 6.0 s" in done.stdout
  for name in ("summary.json", "report.html"):
    assert (tmp_path / name).stat().st_size > 1000
    assert name == "summary.json" or str(tmp_path / name) in done.stdout
