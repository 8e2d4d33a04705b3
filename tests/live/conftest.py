"""Servers that the tests of live runs have started end with the tests."""

import pytest

from tests.live import stores


@pytest.fixture(scope="session", autouse=True)
def _servers():
  yield
  stores.stop_servers()
