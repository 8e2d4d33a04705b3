"""Real object stores for tests, and a proxy that makes one fail as told."""

import contextlib
import dataclasses
import functools
import http.client
import http.server
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

from ddiloco.live.exchange import TensorStoreExchange

DEADLINE_S = 60.0  # Far above what anything here takes, on a busy machine too.
_names = itertools.count()

# Each server prints its port once it listens, and ends with its parent.
_S3 = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_GCS = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True)
server.start()
print(server._api._httpd.server_port, flush=True)
sys.stdin.read()
server.stop()
"""
_CREDENTIALS = {
  "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
  "AWS_SECRET_ACCESS_KEY": "no secret",
}


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


@functools.cache
def s3_port() -> int:
  """The port of this process's S3 server."""
  os.environ.update(_CREDENTIALS)
  return _serve(_S3)


@functools.cache
def gcs_port() -> int:
  """The port of this process's Google Cloud Storage."""
  port = _serve(_GCS)
  # Read whenever a store is opened, by the children of the tests too.
  os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{port}"
  return port


def new_bucket() -> str:
  """Makes a bucket on the S3 server; returns its name."""
  name = f"bucket-{os.getpid()}-{next(_names)}"
  _request_bucket("PUT", name)
  return name


def delete_bucket(name: str) -> None:
  """Deletes an empty bucket."""
  _request_bucket("DELETE", name)


def _request_bucket(method: str, name: str) -> None:
  url = f"http://127.0.0.1:{s3_port()}/{name}"
  request = urllib.request.Request(url, method=method)
  urllib.request.urlopen(request, timeout=DEADLINE_S).close()


def s3_url(bucket: str, prefix: str = "run", port: int | None = None) -> str:
  """Where an exchange is, on the S3 server or on a proxy of it."""
  endpoint = f"http://127.0.0.1:{port or s3_port()}"
  return f"s3://{bucket}/{prefix}?endpoint={endpoint}"


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


# --- The proxy ----------------------------------------------------------------


@dataclasses.dataclass
class Fault:
  """What happens to the requests that it fits, and how many it has hit."""

  act: Callable[["_Handler"], None]
  fits: re.Pattern[str]  # "PUT /bucket/prefix/key?query"
  left: int | None  # None: until it is lifted
  hits: int = 0


class Proxy:
  """Forwards requests to a server, but for those that a fault hits."""

  def __init__(self, target: int):
    self.target = target
    self.requests: list[str] = []
    self._faults: list[Fault] = []
    self._lock = threading.Lock()
    self.released = threading.Event()  # ends what `hang` holds
    handler = type("_Bound", (_Handler,), {"proxy": self})
    self._server = _Server(("127.0.0.1", 0), handler)
    self.port = self._server.server_address[1]
    self._thread = threading.Thread(
      target=self._server.serve_forever, kwargs={"poll_interval": 0.05}
    )
    self._thread.start()

  def inject(
    self,
    act: Callable[["_Handler"], None],
    fits: str = "",
    times: int | None = None,
  ) -> Fault:
    """Lets `act` happen to the next requests that `fits` is found in."""
    fault = Fault(act, re.compile(fits), times)
    with self._lock:
      self._faults.append(fault)
    return fault

  def lift(self, fault: Fault) -> None:
    """Ends a fault."""
    with self._lock:
      self._faults.remove(fault)

  def hit(self, request: str) -> Fault | None:
    """The fault that a request runs into."""
    with self._lock:
      self.requests.append(request)
      for fault in self._faults:
        if fault.left != 0 and fault.fits.search(request):
          fault.hits += 1
          if fault.left is not None:
            fault.left -= 1
          return fault
    return None

  def close(self) -> None:
    """Stops listening and lets go of what hangs."""
    self.released.set()
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


@contextlib.contextmanager
def proxy_of(port: int) -> Iterator[Proxy]:
  """A `Proxy` for the block."""
  proxy = Proxy(port)
  try:
    yield proxy
  finally:
    proxy.close()


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def shutdown_request(self, request):
    self.close_request(request)  # No orderly end, where a reset is wanted.

  def handle_error(self, request, client_address):
    pass  # Clients that give up are part of the play.


class _Handler(http.server.BaseHTTPRequestHandler):
  proxy: Proxy
  protocol_version = "HTTP/1.1"  # Connections are kept, as by a real server.
  disable_nagle_algorithm = True

  def do_GET(self):
    length = int(self.headers.get("content-length") or 0)
    self.body = self.rfile.read(length)
    fault = self.proxy.hit(f"{self.command} {self.path}")
    if fault is None:
      self.send(*self.forward())
    else:
      fault.act(self)

  do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

  def log_message(self, *args):
    pass

  def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
    """Has the request done; returns the reply."""
    connection = http.client.HTTPConnection(
      "127.0.0.1", self.proxy.target, timeout=DEADLINE_S
    )
    with contextlib.closing(connection):
      connection.putrequest(
        self.command, self.path, skip_host=True, skip_accept_encoding=True
      )
      for name, value in self.headers.items():
        connection.putheader(name, value)
      connection.endheaders(self.body)
      reply = connection.getresponse()
      return reply.status, reply.getheaders(), reply.read()

  def send(
    self,
    status: int,
    headers: list[tuple[str, str]],
    body: bytes,
    share: float = 1.0,
  ) -> None:
    """Replies, with the first `share` of the body only."""
    self.send_response_only(status)
    for name, value in headers:
      if name.lower() not in ("content-length", "connection"):
        self.send_header(name, value)
    length = dict((k.lower(), v) for k, v in headers).get("content-length")
    if self.command != "HEAD" or length is None:
      length = str(len(body))
    self.send_header("Content-Length", length)
    self.end_headers()
    self.wfile.write(body[: round(share * len(body))])
    self.wfile.flush()

  def drop(self, *, reset: bool) -> None:
    """Ends the connection, in good order or not."""
    if reset:
      linger = struct.pack("ii", 1, 0)
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    self.close_connection = True


# --- What a fault does --------------------------------------------------------


def error(status: int, code: str, **headers: str) -> Callable:
  """Replies with an error as S3 words it, and does nothing."""
  body = f"<Error><Code>{code}</Code><Message>as told</Message></Error>"
  listed = [(name.replace("_", "-"), value) for name, value in headers.items()]

  def act(handler):
    handler.send(status, listed, body.encode())

  return act


def reset(handler: _Handler) -> None:
  """The connection breaks before anything is done."""
  handler.drop(reset=True)


def reset_in_body(handler: _Handler) -> None:
  """It is done, and the connection breaks in the middle of the reply."""
  handler.send(*handler.forward(), share=0.5)
  handler.drop(reset=True)


def truncate(handler: _Handler) -> None:
  """It is done, and the reply ends early, in good order."""
  handler.send(*handler.forward(), share=0.5)
  handler.drop(reset=False)


def lose_reply(handler: _Handler) -> None:
  """It is done, and nobody is told."""
  handler.forward()
  handler.drop(reset=True)


def hang(handler: _Handler) -> None:
  """It is done, and the reply never comes."""
  handler.forward()
  handler.proxy.released.wait(DEADLINE_S)
  handler.drop(reset=True)


def expired(*valid: str) -> Callable:
  """Refuses every access key but the valid ones, as AWS does."""
  refuse = error(400, "ExpiredToken")

  def act(handler):
    signed = handler.headers.get("authorization", "")
    found = re.search(r"Credential=(\w+)/", signed)
    if found and found[1] in valid:
      handler.send(*handler.forward())
    else:
      refuse(handler)

  return act


def open_new(kind, directory):
  """A store that no other test has seen."""
  options = {"file_locking": kind} if kind == "lockfile" else {}
  return TensorStoreExchange(new_url(kind, directory), **options)
