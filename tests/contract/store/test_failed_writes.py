"""Writes that fail in the middle of a change of a store."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store import (
    append_store,
    build_part,
    build_store,
    finish_store,
    open_store,
    verify_store,
)

pytestmark = pytest.mark.slow

NUM_ROWS = 3000
OPTIONS: dict[str, Any] = {"num_shards": 3, "progress": False}


def texts(edition: int) -> list[str]:
    return [f"{edition} " + f"{row} " * (row % 7) for row in range(NUM_ROWS)]


#: What is done to the store at a path: what was there has edition 1, what is new edition 2.
WAYS: dict[str, Callable[[Path], Any]] = {
    "new": lambda path: build_store(texts(2), path, **OPTIONS),
    "overwrite": lambda path: build_store(texts(2), path, overwrite=True, **OPTIONS),
    "stream": lambda path: build_store(iter(texts(2)), path, **OPTIONS),
    "append": lambda path: append_store(texts(2), path, progress=False),
    "finish": lambda path: finish_store(path, overwrite=True, progress=False),
}


def begin(way: str, path: Path) -> None:
    if way not in ("new", "stream"):
        build_store(texts(1), path, **OPTIONS)
    if way == "finish":
        build_part(texts(2), path, (0, 1), overwrite=True, **OPTIONS)


def rows_of(path: Path) -> list[str] | None:
    """The rows; None where there is no store."""
    try:
        store = open_store(path)
    except StoreNotFoundError:
        return None
    assert verify_store(path) == []
    return [store[row] for row in range(store.num_rows)]


def fail_at(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """Let some writes of an index fail, counted from 1."""
    seen, write = [0], os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("value.index"):
            seen[0] += 1
            if first <= seen[0] <= last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("way", WAYS)
def test_write_of_the_index_fails_and_the_store_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = tmp_path / "s"
    begin(way, path)
    before = rows_of(path)
    for number in range(1, 10):
        with monkeypatch.context() as patch:
            fail_at(patch, number, number)
            try:
                WAYS[way](path)
            except (OSError, StoreError):
                assert rows_of(path) == before
            else:  # It takes fewer writes.
                break
    assert number > 1
    assert rows_of(path) == (texts(1) if way == "append" else []) + texts(2)


def test_overwrite_that_fails_takes_no_more_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    begin("overwrite", path)
    before = {each for each in path.rglob("*") if each.stat().st_size}
    with monkeypatch.context() as patch:
        fail_at(patch, 1, 10**6)
        with pytest.raises(OSError, match="Free disk space"):
            WAYS["overwrite"](path)
    assert {each for each in path.rglob("*") if each.stat().st_size} == before
