"""An S3 server on this machine, for as long as this process lives.

It keeps conditional writes, as a run needs them, and everything in memory.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
import urllib.request

from ddiloco.config import ConfigError

_DEADLINE_S = 60.0
_NEEDED = ("moto", "flask", "flask_cors")
CREDENTIALS = {
  "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
  "AWS_SECRET_ACCESS_KEY": "no secret",
  "AWS_CONFIG_FILE": os.devnull,
  "AWS_SHAREDCREDENTIALS_FILE": os.devnull,
}
# It prints its port once it listens, and ends with its parent.
_PROGRAM = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Server:
  """A server process, and buckets on it."""

  def __init__(self):
    """Starts it; `ConfigError` if what it takes is not installed."""
    missing = [n for n in _NEEDED if importlib.util.find_spec(n) is None]
    if missing:
      raise ConfigError(
        f"an S3 server to try takes {', '.join(missing)}, which is not "
        "installed: pip install '.[test]'"
      )
    os.environ.update(CREDENTIALS)  # of the children, too
    self._process = subprocess.Popen(
      [sys.executable, "-W", "ignore", "-c", _PROGRAM],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      start_new_session=True,  # Ctrl-C is for the run; this one comes last
    )
    self._names = itertools.count()
    line = self._process.stdout.readline()
    if not line:
      raise OSError("the S3 server did not start")
    self.port = int(line)

  def new_bucket(self) -> str:
    """Makes a bucket; returns its name."""
    name = f"bucket-{os.getpid()}-{next(self._names)}"
    self.request("PUT", name)
    return name

  def request(self, method: str, name: str) -> None:
    """Asks for something about a bucket."""
    url = f"http://127.0.0.1:{self.port}/{name}"
    request = urllib.request.Request(url, method=method)
    urllib.request.urlopen(request, timeout=_DEADLINE_S).close()

  def url(self, bucket: str, prefix: str = "run", port: int = 0) -> str:
    """Where an exchange is: here, or behind a proxy's port."""
    endpoint = f"http://127.0.0.1:{port or self.port}"
    return f"s3://{bucket}/{prefix}?endpoint={endpoint}"

  def close(self) -> None:
    """Ends the server, and all that it holds."""
    self._process.terminate()
    self._process.communicate()
