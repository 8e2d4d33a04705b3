"""Bad luck of whole processes: one clear message, nothing lost."""

import json

import pytest

from tests.launch.commands import assert_user_error, contents
from tests.live import processes
from tests.live.processes import run_flags, small_disk, wait_for

pytestmark = pytest.mark.live


def test_the_launcher_passes_on_what_its_syncer_finds(tmp_path):
  workdir = tmp_path / "run"
  flags = run_flags(workdir, data_path=tmp_path / "nowhere")
  with processes.commands_in(tmp_path) as commands:
    run = commands.start("local", *flags, workdir=workdir)
    assert run.finish() == 2, run.explain()
    assert run.stderr.splitlines()[-1].startswith(
      f"error: data.path = '{tmp_path}/nowhere' does not exist. Name a"
    )
    assert processes.newest_round(workdir) == -1
    assert processes.processes_of(workdir) == {}


def test_a_learner_with_too_few_devices(tmp_path):
  flags = run_flags(
    tmp_path / "run", learners_devices="(4,)", learners_batch_size="(4,)"
  )
  one = "--xla_force_host_platform_device_count=1"
  with processes.commands_in(tmp_path) as commands:
    learner = commands.start(
      "learner",
      "--learner=1",
      *flags,
      workdir=tmp_path / "run",
      env=processes.environment(XLA_FLAGS=one),
    )
    assert learner.finish() == 2, learner.explain()
    assert learner.stderr.startswith("error: learner 1 needs 4 devices")
    assert "1 are present" in learner.stderr
    assert learner.stderr.count("\n") == 1


@pytest.mark.slow
def test_roles_started_by_hand(command, tmp_path):
  """A learner waits for a run, and not for ever; both can be told to leave."""
  workdir = tmp_path / "run"
  flags = run_flags(workdir)
  with processes.commands_in(tmp_path) as commands:
    learner = commands.start(
      "learner", *run_flags(workdir, live_start_deadline_s=1.0), workdir=workdir
    )
    assert learner.finish() == 2, learner.explain()
    assert "error: no run was started in" in learner.stderr

    learner = commands.start("learner", *flags, workdir=workdir)
    syncer = commands.start("syncer", *flags, workdir=workdir)
    wait_for(
      "first commit",
      lambda: processes.newest_round(workdir) == 0,
      processes.DEADLINE_S,
    )
    for process in (syncer, learner):
      process.process.terminate()
    assert (syncer.finish(), learner.finish()) == (4, 4), syncer.explain()

  assert command("report", f"--workdir={workdir}").code == 0
  # The launcher writes the config that decides; a hand-started role did not.
  assert_user_error(
    command("syncer", f"--workdir={workdir}"), "config.json is missing"
  )


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_nothing_that_was_committed(
  command, tmp_path
):
  """The run is held, or it ends, by what its syncer was about to do."""
  with (
    small_disk(tmp_path / "disk", "24m") as disk,
    processes.commands_in(tmp_path) as commands,
  ):
    workdir = disk / "run"
    brief = {
      "live_store_deadline_s": 0.5,
      "live_checkpoint_every_steps": 20,
      "live_restart_limit": 1,
    }
    flags = run_flags(workdir, stop_rounds=10**6, **brief)
    run = commands.start("local", *flags, workdir=workdir)
    wait_for(
      "some rounds",
      lambda: processes.newest_round(workdir) > 12,
      processes.DEADLINE_S,
    )
    processes.fill(disk / "filler")
    held = f"the disk of {workdir} is full. Free some space"
    wait_for(
      "message",
      lambda: held in run.stderr or run.process.poll() is not None,
      processes.DEADLINE_S,
    )
    reached = processes.newest_round(workdir)
    (disk / "filler").unlink()
    if run.process.poll() is None:  # Held: it goes on by itself.
      wait_for(
        "further rounds",
        lambda: processes.newest_round(workdir) > reached + 12,
        processes.DEADLINE_S,
      )
      run.process.terminate()
      assert run.finish() == 4, run.explain()
    else:
      assert run.process.returncode == 1, run.explain()
      assert "No space left on device" in run.stderr
    assert "Traceback" not in run.stderr
    assert processes.processes_of(workdir) == {}

    # Somebody else's config does not get in, and changes nothing.
    before = contents(workdir)
    other = command("local", *flags, "--config.seed=1")
    assert_user_error(other, "seed = 1", "started with 0", "new workdir")
    assert contents(workdir) == before

    end = processes.newest_round(workdir) + 12
    assert end > reached
    flags = run_flags(workdir, stop_rounds=end, **brief)
    again = commands.start("local", *flags, workdir=workdir)
    assert again.finish() == 0, again.explain()
    check_books(json.loads((workdir / "summary.json").read_text()), end)


def check_books(summary, rounds):
  """A run that completed, and whose ledger balances."""
  assert (summary["status"], summary["rounds"]) == ("completed", rounds)
  assert summary["params_digest"] is not None
  for account in summary["ledger"]["learners"].values():
    parts = account["merged"], account["pending"], *account["lost"].values()
    assert account["processed"] == sum(parts)
