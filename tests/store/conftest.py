"""The process that starts builders, shared by all tests that need it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_memmap.store.remote import files
from lightning_memmap.store.remote.cache import DIRECTORY
from tests.support.store.build_server import BuildServer


@pytest.fixture(scope="session")
def server() -> Iterator[BuildServer]:
    with BuildServer() as started:
        yield started


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where stores at URLs are kept. Who cannot be reached is asked again at once."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_FIRST_PAUSE_S", 0.001)
    return tmp_path / "cache"
