"""What tests of commands share."""

import pytest

from tests.launch.commands import server


@pytest.fixture(scope="module")
def command():
  """A function that runs a command, in a process that a module keeps."""
  with server() as run:
    yield run
