"""An HTTP proxy before an object store, which makes requests fail as told."""

import contextlib
import dataclasses
import email.utils
import http.client
import http.server
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator

DEADLINE_S = 60.0  # far above what a server takes, on a busy machine too


@dataclasses.dataclass
class Fault:
  """What happens to the requests that it fits, and how many it has hit."""

  act: Callable[["_Handler"], None]
  fits: re.Pattern[str]  # "PUT /bucket/prefix/key?query"
  left: int | None  # None: until it is lifted
  hits: int = 0
  over: threading.Event = dataclasses.field(default_factory=threading.Event)


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
    """Ends a fault, and what it holds."""
    with self._lock:
      self._faults.remove(fault)
    fault.over.set()

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
  fault: Fault  # that this request has run into
  protocol_version = "HTTP/1.1"  # Connections are kept, as by a real server.
  disable_nagle_algorithm = True

  def do_GET(self):
    length = int(self.headers.get("content-length") or 0)
    self.body = self.rfile.read(length)
    fault = self.proxy.hit(f"{self.command} {self.path}")
    if fault is None:
      self.send(*self.forward())
    else:
      self.fault = fault
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


def stall(handler: _Handler) -> None:
  """Nothing moves until the fault is over; then it is done."""
  handler.fault.over.wait(DEADLINE_S)
  handler.send(*handler.forward())


def swallow(handler: _Handler) -> None:
  """Nothing moves until the fault is over, and it is never done."""
  handler.fault.over.wait(DEADLINE_S)
  handler.drop(reset=True)


def lossy(rng: random.Random, share: float) -> Callable:
  """Some requests, some replies and some ends of replies are lost."""
  losses = (reset, reset_in_body, truncate, lose_reply)
  return sometimes(rng, share, lambda handler: rng.choice(losses)(handler))


def sometimes(rng: random.Random, share: float, other: Callable) -> Callable:
  """A share of the requests suffers, the others are done."""

  def act(handler):
    if rng.random() < share:
      other(handler)
    else:
      handler.fault.hits -= 1
      handler.send(*handler.forward())

  return act


def dated(shift_s: float) -> Callable:
  """It is done, by a server whose clock is wrong."""

  def act(handler):
    status, headers, body = handler.forward()
    names = ("date", "last-modified")
    moved = [
      (name, _moved(value, shift_s) if name.lower() in names else value)
      for name, value in headers
    ]
    handler.send(status, moved, body)

  return act


def _moved(date: str, shift_s: float) -> str:
  then = email.utils.parsedate_to_datetime(date).timestamp()
  return email.utils.formatdate(then + shift_s, usegmt=True)


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
