"""Real object stores for tests."""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.request

from ddiloco.chaos import s3
from ddiloco.live.exchange import TensorStoreExchange

DEADLINE_S = 60.0  # Far above what anything here takes, on a busy machine too.
_names = itertools.count()

# Prints its port once it listens, and ends with its parent.
_GCS = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True)
server.start()
print(server._api._httpd.server_port, flush=True)
sys.stdin.read()
server.stop()
"""


def _serve(program: str) -> int:
  """Starts a server for as long as this process lives; returns its port."""
  process = subprocess.Popen(
    [sys.executable, "-W", "ignore", "-c", program],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  )
  _SERVERS.append(process)
  line = process.stdout.readline()
  assert line, "the server did not start: pip install '.[test]'"
  return int(line)


_SERVERS: list[subprocess.Popen] = []


def stop_servers() -> None:
  """Ends what this process has started; a killed one ends it, too."""
  while _SERVERS:
    process = _SERVERS.pop()
    process.send_signal(signal.SIGTERM)
    process.communicate()
  if _s3.cache_info().currsize:
    _s3().close()
    _s3.cache_clear()


@functools.cache
def _s3() -> s3.Server:
  return s3.Server()


def s3_port() -> int:
  """The port of this process's S3 server."""
  return _s3().port


@functools.cache
def gcs_port() -> int:
  """The port of this process's Google Cloud Storage."""
  port = _serve(_GCS)
  # Read whenever a store is opened, by the children of the tests too.
  os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{port}"
  return port


def new_bucket() -> str:
  """Makes a bucket on the S3 server; returns its name."""
  return _s3().new_bucket()


def delete_bucket(name: str) -> None:
  """Deletes an empty bucket."""
  _s3().request("DELETE", name)


def s3_url(bucket: str, prefix: str = "run", port: int = 0) -> str:
  """Where an exchange is, on the S3 server or on a proxy of it."""
  return _s3().url(bucket, prefix, port)


def new_gs_url() -> str:
  """A new bucket: the emulator's listings know nothing of prefixes."""
  name = f"bucket-{next(_names)}"
  request = urllib.request.Request(
    f"http://127.0.0.1:{gcs_port()}/storage/v1/b?project=tests",
    data=json.dumps({"name": name}).encode(),
    headers={"Content-Type": "application/json"},
  )
  urllib.request.urlopen(request, timeout=DEADLINE_S).close()
  return f"gs://{name}/run"


def new_url(kind: str, directory: os.PathLike) -> str:
  """A store that no other test has seen: memory, file, s3 or gs."""
  match kind:
    case "memory":
      return f"memory://test{next(_names)}/"
    case "s3":
      return s3_url(new_bucket())
    case "gs":
      return new_gs_url()
  return str(directory)


def open_new(kind, directory):
  """A store that no other test has seen."""
  options = {"file_locking": kind} if kind == "lockfile" else {}
  return TensorStoreExchange(new_url(kind, directory), **options)
