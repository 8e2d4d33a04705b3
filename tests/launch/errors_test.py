"""Bad input: one clear message, and nothing half-written."""

import pathlib
import signal
import subprocess

import pytest

from ddiloco.config import ConfigError, from_dict
from ddiloco.live.syncer import run_syncer
from tests.launch.commands import assert_user_error, contents
from tests.live import processes
from tests.live.processes import run_flags, small_disk
from tests.live.tiny import get_config

# --- Flags and configs -------------------------------------------------------

CONFIG_ERRORS = {
  "unknown flag": (
    ["--workdirr=x"],
    ["flag 'workdirr'", "Did you mean: workdir"],
  ),
  "typo in a key": (["--config.sync.quorumm=2"], ["quorumm", "quorum_min"]),
  "typo in a group": (["--config.syncc.quorum_min=2"], ["syncc", "sync"]),
  "word for a number": (
    ["--config.sync.quorum_min=two"],
    ["--config.sync.quorum_min=two"],
  ),
  "fraction for a count": (
    ["--config.learners.count=1.5"],
    ["--config.learners.count=1.5"],
  ),
  "value for a group": (["--config.sync=9"], ["--config.sync=9"]),
  "fraction in a tuple": (
    ["--config.learners.devices=(2.5,)"],
    ["learners.devices[0] = 2.5", "int"],
  ),
  "unknown choice": (
    ["--config.sync.wait=maybe"],
    ["sync.wait = 'maybe'", "never, exact"],
  ),
  "unknown codec": (["--config.codec.up=int3"], ["codec.up = 'int3'", "int4"]),
  "K above the count": (
    ["--config.sync.quorum_min=3"],
    ["sync.quorum_min = 3", "learners.count = 2", "Lower the quorum"],
  ),
  "tau of H": (
    ["--config.sync.overlap_steps=6"],
    ["sync.overlap_steps = 6", "sync.interval_steps = 6"],
  ),
  "no overlap without waiting": (
    ["--config.sync.overlap_steps=0"],
    ["sync.overlap_steps = 0", "sync.wait='exact'"],
  ),
  "more learners than shards": (
    ["--config.learners.count=5", "--config.sync.quorum_min=1"],
    ["learners.count = 5", "data.shards = 4", "raise data.shards"],
  ),
  "slices that only a simulation has": (
    ["--config.elastic.slices=2"],
    ["elastic.slices = 2", "launch.simulate"],
  ),
  "a batch that a script of its own does not share": (
    [
      "--config.learners.global_batch=4",
      "--faults=at round 3 stop learner 1",
    ],
    ["--faults", "learners.global_batch = 4", "--config.faults"],
  ),
  "a start that everybody waits for": (
    [
      "--config.sync.quorum_min=2",
      "--config.faults=at round 3 start learner 1",
    ],
    ["'at round 3 start learner 1'", "needs 2 learners, and 1 are there"],
  ),
  "a mesh that does not fit": (
    ["--config.learners.devices=(4,)", "--config.learners.mesh=(3,1,1)"],
    ["learners.mesh = (3, 1, 1)", "4 devices"],
  ),
  "a batch that does not divide": (
    ["--config.learners.devices=(4,)"],
    ["learners.batch_size = 2", "4 ways", "multiple of 4"],
  ),
  "no end": (["--config.stop.rounds=0"], ["stop.rounds = 0", "never end"]),
  "a negative": (["--config.seed=-1"], ["seed = -1", "at least 0"]),
  "words too many": (["extra", "words"], ["unexpected", "extra words"]),
  "no such store": (["--exchange=ftp://x/y"], ["--exchange", "'ftp://x/y'"]),
  "a store of one process": (
    ["--exchange=memory://x"],
    ["--exchange=memory://x", "one process"],
  ),
  "a fault that does not read": (
    ["--faults=at noon kill learner 1"],
    ["--faults: fault 1", "'noon' is no time", "Accepted:"],
  ),
  "a fault for nobody": (
    ["--faults=at round 3 kill learner 7"],
    ["--faults: fault 1", "learner 7", "0 to 1"],
  ),
  "a fault after the end": (
    ["--faults=at round 30 kill learner 1"],
    ["--faults: fault 1", "the run ends at round 30"],
  ),
  "a fault script that is none": (
    ["--faults=[{]"],
    ["--faults: the fault script is no JSON"],
  ),
  "a fault of the config": (
    ["--config.faults=at round 3 explode syncer"],
    ["--faults: fault 1", "'explode'", "kill"],
  ),
}


@pytest.mark.parametrize(
  "extra, words", CONFIG_ERRORS.values(), ids=CONFIG_ERRORS.keys()
)
def test_bad_flags_and_configs(command, tmp_path, extra, words):
  workdir = tmp_path / "run"
  result = command("local", *run_flags(workdir), *extra)
  assert_user_error(result, *words)
  assert not workdir.exists() or set(contents(workdir)) <= {
    pathlib.Path("lock")
  }


CONFIG_FILES = {
  "raises": ("raise RuntimeError('boom')", ["RuntimeError: boom"]),
  "raises when called": (
    "def get_config():\n  return 1 / 0",
    ["ZeroDivisionError: division by zero"],
  ),
  "does not parse": (
    "def get_config(:\n  pass",
    ["SyntaxError", "config.py, line 1"],
  ),
  "defines no config": ("x = 1", ["has no attribute 'get_config'"]),
  "returns no config": (
    "def get_config():\n  return 3",
    ["get_config() returned 3", "ConfigDict"],
  ),
  "returns an unknown key": (
    "import ml_collections\n"
    "def get_config():\n"
    "  return ml_collections.ConfigDict({'sync': {'quorum': 2}})",
    ["unknown key sync.quorum = 2", "did you mean"],
  ),
  "imports what is not there": (
    "import no_such_package",
    ["ModuleNotFoundError", "no_such_package"],
  ),
}


@pytest.mark.parametrize(
  "source, words", CONFIG_FILES.values(), ids=CONFIG_FILES.keys()
)
def test_config_files_that_cannot_be_used(command, tmp_path, source, words):
  path = tmp_path / "config.py"
  path.write_text(source)
  workdir = tmp_path / "run"
  result = command("local", f"--config={path}", f"--workdir={workdir}")
  assert_user_error(result, "--config" if "unknown" not in words[0] else "")
  for word in words:
    assert word in result.err
  assert not workdir.exists() or contents(workdir) == {}


@pytest.mark.parametrize(
  "name", ["nowhere.py", ""], ids=["missing", "a folder"]
)
def test_a_config_that_is_no_file(command, tmp_path, name):
  path = tmp_path / name
  result = command("local", f"--config={path}", f"--workdir={tmp_path}/run")
  assert_user_error(result, "--config cannot be read", str(path).rstrip("/"))


@pytest.mark.parametrize("module", ["local", "syncer", "learner", "evaluate"])
def test_every_command_needs_a_workdir_and_a_config(command, tmp_path, module):
  assert_user_error(
    command(module, f"--config={processes.CONFIG}"), "--workdir is missing"
  )
  assert_user_error(
    command(module, f"--workdir={tmp_path}/empty"),
    f"{tmp_path}/empty holds no run",
    "give --config",
  )


@pytest.mark.parametrize("number", ["2", "-1"])
def test_shards_of_the_syncer_are_numbered(command, tmp_path, number):
  flags = run_flags(tmp_path / "run", syncer_shards=2)
  result = command("syncer", *flags, f"--shard={number}")
  assert_user_error(result, f"--shard={number}", "syncer.shards = 2", "0 to 1")


@pytest.mark.parametrize(
  "number, words",
  [
    ("4", ["--learner=4", "data.shards = 4", "from 0 to 3"]),
    ("-1", ["--learner=-1"]),
    ("one", ["--learner=one"]),
    ("40", ["--learner=40", "keeps the shards that it starts with"]),
  ],
)
def test_learners_are_numbered_by_shards(command, tmp_path, number, words):
  flags = run_flags(tmp_path / "run")
  assert_user_error(command("learner", *flags, f"--learner={number}"), *words)


@pytest.mark.parametrize(
  "changes, words",
  [
    (
      {"learners_global_batch": 4},
      ["learners.global_batch = 4", "learners.count = 2"],
    ),
    (
      {"learners_devices": "(1,1,4)"},
      ["learners.batch_size = 2", "learner 2's mesh", "4 ways"],
    ),
    (
      {
        "algorithm": "streaming_diloco",
        "sync_wait": "exact",
        "sync_apply": "at_overlap",
        "sync_grace": False,
      },
      ["algorithm = 'streaming_diloco'", "learners.count = 2", "nobody else"],
    ),
  ],
  ids=["global batch", "island", "algorithm"],
)
def test_a_run_has_no_place_for_an_unplanned_learner(
  command, tmp_path, changes, words
):
  flags = run_flags(tmp_path / "run", **changes)
  assert_user_error(command("learner", *flags, "--learner=2"), *words)


def test_a_report_needs_a_run(command, tmp_path):
  assert_user_error(command("report"), "--workdir is missing")
  missing = tmp_path / "none"
  assert_user_error(command("report", f"--workdir={missing}"), str(missing))
  assert not missing.exists(), "asking for a report makes no workdir"
  assert_user_error(
    command("report", f"--workdir={tmp_path}"), f"no run in {tmp_path}"
  )


# --- Workdirs ----------------------------------------------------------------


def test_a_workdir_below_a_file(command, tmp_path):
  (tmp_path / "file").write_text("mine")
  result = command("local", *run_flags(tmp_path / "file/run"))
  assert_user_error(result, f"--workdir={tmp_path}/file/run", "Not a directory")
  assert (tmp_path / "file").read_text() == "mine"


def read_only(folder):
  """Makes a folder's file system read-only; skips where that is impossible."""
  remount = ["mount", "-o", "remount,ro", str(folder)]
  done = subprocess.run(remount, capture_output=True, text=True, check=False)
  if done.returncode:
    pytest.skip(f"needs to remount a file system: {done.stderr.strip()}")


def test_a_workdir_that_cannot_be_written(command, tmp_path):
  with small_disk(tmp_path / "disk", "1m") as disk:
    (disk / "run").mkdir()
    read_only(disk)
    result = command("local", *run_flags(disk / "run"))
    words = f"--workdir={disk}/run cannot be written: Read-only file system"
    assert_user_error(result, words, "permissions")


def test_a_workdir_on_a_full_disk(command, tmp_path):
  with small_disk(tmp_path / "disk", "1m") as disk:
    processes.fill(disk / "filler")
    result = command("local", *run_flags(disk / "run"))
    assert_user_error(result, f"--workdir={disk}/run", "No space", "Free space")


# --- Data: found by the syncer, before it creates anything -------------------


@pytest.fixture
def signals_kept():
  """A role sets handlers for signals; the tests' own come back."""
  numbers = (signal.SIGINT, signal.SIGTERM)
  handlers = {number: signal.getsignal(number) for number in numbers}
  yield
  for number, handler in handlers.items():
    signal.signal(number, handler)


def syncer_error(tmp_path, **changes):
  """What the syncer says of a config; it must leave no trace of a run."""
  values = get_config()
  for key, value in changes.items():
    group, _, name = key.partition("_")
    values[group][name] = value
  with pytest.raises(ConfigError) as caught:
    run_syncer(
      from_dict(values.to_dict()), workdir=tmp_path / "run", exchange=""
    )
  assert not (tmp_path / "run/exchange").exists()
  return str(caught.value)


DATA_ERRORS = {
  "missing": (None, "does not exist"),
  "a file": ("text", "is not a directory"),
  "an empty folder": ({}, "holds no *.txt files"),
  "files of another kind": ({"a.md": b"text"}, "holds no *.txt files"),
  "empty documents": ({f"{i}.txt": b"" for i in range(4)}, "holds no text"),
  "too few documents": (
    {"0.txt": b"text", "1.txt": b"text"},
    "data.heldout_documents = 2, 2 of them from",
  ),
  "less than a batch": (
    {f"{i}.txt": b"some text " * 3 for i in range(4)},
    "but a batch has 2. Add text",
  ),
  "not UTF-8": (
    {"0.txt": b"fine", "1.txt": b"caf\xe9", "2.txt": b"fine"},
    "1.txt is not UTF-8",
  ),
}


@pytest.mark.parametrize(
  "files, words", DATA_ERRORS.values(), ids=DATA_ERRORS.keys()
)
def test_data_that_cannot_be_used(tmp_path, signals_kept, files, words):
  path = tmp_path / "text"
  if isinstance(files, str):
    path.write_text(files)
  elif files is not None:
    path.mkdir()
    for name, text in files.items():
      (path / name).write_bytes(text)
  message = syncer_error(tmp_path, data_path=str(path))
  assert words in message and str(path) in message or "a batch" in words


def test_a_model_with_fewer_tensors_than_fragments(tmp_path, signals_kept):
  message = syncer_error(
    tmp_path,
    data_path=processes.text(),
    sync_num_fragments=99,
    sync_interval_steps=99,
  )
  assert "sync.num_fragments" in message and "99" in message


@pytest.mark.parametrize(
  "program", ["no_such_module:build", "ddiloco.lm.program:nothing", "ddiloco"]
)
def test_a_program_that_is_not_there(tmp_path, signals_kept, program):
  values = get_config()
  values.program, values.data.path = program, processes.text()
  with pytest.raises(ConfigError, match=f"program = '{program}' cannot be"):
    run_syncer(
      from_dict(values.to_dict()), workdir=tmp_path / "run", exchange=""
    )
