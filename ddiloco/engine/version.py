"""Which code this is: every tape, every commit 0 and every swarm says so."""

import functools
import hashlib
import pathlib

import ddiloco


@functools.cache
def code_version() -> str:
  """The release and a digest of the package's own source files."""
  root = pathlib.Path(ddiloco.__file__).parent
  digest = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    digest.update(path.relative_to(root).as_posix().encode())
    digest.update(path.read_bytes())
  return f"{ddiloco.__version__}+{digest.hexdigest()[:12]}"
