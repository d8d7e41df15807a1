"""The process that starts builders, shared by all tests that need it."""

from collections.abc import Iterator

import pytest

from tests.unit.store.build_server import BuildServer


@pytest.fixture(scope="session")
def server() -> Iterator[BuildServer]:
    with BuildServer() as started:
        yield started
