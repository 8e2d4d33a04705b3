"""What a store's error message means: TensorStore has no error classes.

The status code opens the message, and an INVALID_ARGUMENT has none.
"""

import enum
import re

STORE_ERRORS = (ValueError, OSError, RuntimeError, LookupError)


class Remedy(enum.Enum):
  """What may help after an error."""

  RETRY = "retry"
  RENEW = "renew"  # retry with fresh credentials
  RENEW_ONCE = "renew once"  # they may be fresher by now; else nothing
  NONE = "none"


_CODE = re.compile(r"([A-Z_]+): ")
_ERRNO = re.compile(r"os_error_code='(\d+)'")
_STATUS = re.compile(r"http_response_code='(\d+)'")
# Details of a reply, in no order; some have tokens in them.
_DETAILS = re.compile(r" \[(?:http_response|x-amz)[\w-]*='.*", re.DOTALL)
_DRIVER_RETRIES = re.compile(r"All 0 retry attempts failed: ")

_TRANSIENT_CODES = frozenset(
  {
    "ABORTED",  # What gs and s3 say when a server or the network failed.
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "RESOURCE_EXHAUSTED",  # A full disk, too many requests.
    "UNAVAILABLE",
    "UNKNOWN",  # EIO among others.
  }
)
_TRANSIENT_ERRNOS = frozenset(
  {
    # Of a directory that another process cleans meanwhile:
    "2",  # ENOENT
    "16",  # EBUSY
    "39",  # ENOTEMPTY
    # Of a file system that is away, or takes no writes for now:
    "27",  # EFBIG, of a limit (ulimit -f) that can be lifted as a disk freed
    "30",  # EROFS
    "107",  # ENOTCONN
    "116",  # ESTALE
  }
)
_EXPIRED = re.compile(
  r"\b(ExpiredToken|RequestExpired|TokenRefreshRequired|UNAUTHENTICATED)"
)
# Amazon is asked where a bucket is before the first request; any failure of
# that says this.
_NO_REGION = "Failed to resolve aws_region"
_LOCK_HELD = "Failed to open lock file"  # of file_locking=lockfile, in time
_CANNOT_LOCK = re.compile(
  r"lock.*os_error_code='(?:22|37|38|95)'",  # EINVAL ENOLCK ENOSYS EOPNOTSUPP
  re.DOTALL | re.IGNORECASE,
)


def remedy(message: str) -> Remedy:
  """What may help after an error with this message."""
  if _EXPIRED.search(message) or _status(message) == "401":
    return Remedy.RENEW
  errno = _ERRNO.search(message)
  code = _CODE.match(message)
  if errno and errno[1] in _TRANSIENT_ERRNOS or _NO_REGION in message:
    return Remedy.RETRY
  if code and code[1] in _TRANSIENT_CODES:
    return Remedy.RETRY
  if code and code[1] == "PERMISSION_DENIED" and not errno:
    return Remedy.RENEW_ONCE
  return Remedy.NONE


def is_held_lock(message: str) -> bool:
  """Whether somebody, perhaps dead, holds the lock of the key."""
  return _LOCK_HELD in message and message.startswith("DEADLINE_EXCEEDED")


def cannot_lock(message: str) -> bool:
  """Whether the file system has no such locks."""
  return _CANNOT_LOCK.search(message) is not None


def readable(message: str) -> str:
  """The message without what only a debugger wants, and without tokens."""
  text = _DRIVER_RETRIES.sub("", _DETAILS.sub("", message))
  status = _status(message)
  return f"{text} (HTTP {status})" if status else text


def _status(message: str) -> str | None:
  found = _STATUS.search(message)
  return found[1] if found else None
