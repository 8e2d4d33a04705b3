"""The run key's file, and the door of runs with another key or none."""

import os

import pytest

from ddiloco.live import run_key
from ddiloco.live.exchange import TensorStoreExchange
from ddiloco.live.workdir import open_exchange
from ddiloco.protocol import keys
from tests.launch.commands import assert_user_error, contents
from tests.live.processes import run_flags


def make_key(path, secret=b"0123456789abcdef0123456789abcdef", mode=0o600):
  path.write_bytes(secret)
  path.chmod(mode)
  return path


def make_directory(path):
  path.mkdir()


def make_pipe(path):
  os.mkfifo(path, 0o600)


BAD_KEYS = {
  "missing": (lambda path: None, ["No such file", "head -c 32 /dev/urandom >"]),
  "a directory": (make_directory, ["is not a file", "chmod 600"]),
  "a pipe": (make_pipe, ["is not a file", "chmod 600"]),
  "empty": (lambda path: make_key(path, b""), ["holds 0 bytes", "32 to 4096"]),
  "short": (
    lambda path: make_key(path, b"x" * 31),
    ["holds 31 bytes; a key has 32", "head -c 32 /dev/urandom >"],
  ),
  "long": (
    lambda path: make_key(path, b"x" * 5000),
    ["holds 4097 bytes or more", "32 to 4096"],
  ),
  "for the world": (
    lambda path: make_key(path, mode=0o604),
    ["open to others (mode 604)", "chmod 600"],
  ),
  "for the group": (
    lambda path: make_key(path, mode=0o660),
    ["open to others (mode 660)", "make another key"],
  ),
}


@pytest.mark.parametrize("make, words", BAD_KEYS.values(), ids=BAD_KEYS.keys())
def test_a_key_that_is_none_or_no_secret(command, tmp_path, make, words):
  path = tmp_path / "key"
  make(path)
  result = command(
    "local", *run_flags(tmp_path / "run"), f"--run_key_file={path}"
  )
  assert_user_error(result, f"--run_key_file={path}", *words)
  assert not (tmp_path / "run/exchange").exists()


def test_a_key_of_any_bytes_is_taken_whole(tmp_path):
  stored, digests = b"\0\n" * 16, set()
  for number, secret in enumerate([stored, stored + b"\n", stored[:-1] + b"x"]):
    path = make_key(tmp_path / f"key-{number}", secret, mode=0o400)
    digests.add(run_key.read(str(path)).fingerprint)
  assert len(digests) == 3


@pytest.fixture
def run(tmp_path):
  """Starts a run with or without a key, as far as its first commit."""

  def start(key):
    url = str(tmp_path / "run/exchange")
    exchange = open_exchange(url, key and run_key.read(str(key)))
    exchange.put_if_absent(keys.commit(0), b"genesis")
    return tmp_path / "run"

  return start


@pytest.mark.parametrize("module", ["local", "report", "replay", "simulate"])
@pytest.mark.parametrize(
  "theirs, ours, words",
  [
    ("a", None, ["is sealed by a run key", "Give --run_key_file"]),
    (None, "a", ["not sealed by a run key", "leave out --run_key_file="]),
    ("a", "b", ["another run key than", "that the run was started with"]),
  ],
)
def test_a_run_is_for_those_with_its_key(
  command, tmp_path, run, module, theirs, ours, words
):
  made = {name: make_key(tmp_path / name, name.encode() * 32) for name in "ab"}
  workdir = run(made.get(theirs))
  before = contents(workdir)
  flags = (
    run_flags(workdir)
    if module in ("local", "simulate")
    else [f"--workdir={workdir}"]
  )
  if ours:
    flags.append(f"--run_key_file={made[ours]}")
  result = command(module, *flags)
  assert_user_error(result, str(workdir), "commit/000000000", *words)
  left = {
    path: x for path, x in contents(workdir).items() if path.name != "lock"
  }
  assert left == before


def test_a_swarm_has_no_key(command, tmp_path):
  path = make_key(tmp_path / "key")
  result = command("simulate", "--compute=none", f"--run_key_file={path}")
  assert_user_error(result, "--run_key_file means nothing for a swarm")


def test_the_first_commit_of_a_run_is_sealed(tmp_path, run):
  workdir = run(make_key(tmp_path / "key"))
  raw = TensorStoreExchange(str(workdir / "exchange"))
  assert raw.get(keys.commit(0)).value.startswith(b"ddiloco-sealed 1 ")
