"""Items are written in a thread, while those that come next are read."""

import errno
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from lightning_memmap.store import build_store, range_writer
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.samples import probe_rows
from tests.datasets import Counting, Numbered, Wrapped, holds

_PATIENCE_S = 60.0


class Announced(Wrapped):
    """Tells when a row is read."""

    def __init__(self, dataset: Any, row: int, is_read: Event) -> None:
        super().__init__(dataset)
        self.row, self.is_read = row, is_read

    def __getitem__(self, row: int) -> Any:
        if row == self.row:
            self.is_read.set()
        return super().__getitem__(row)


def test_items_are_read_while_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_writer, "_MAX_ITEM_ROWS", 20)
    is_read, was_read, write = Event(), list[bool](), FixedColumn.write

    def wait(self: FixedColumn, *arguments: Any) -> None:
        was_read.append(is_read.wait(_PATIENCE_S))
        write(self, *arguments)

    monkeypatch.setattr(FixedColumn, "write", wait)
    # No probe row. It is of the second range, and nothing of the first one is written before.
    dataset = Announced(Numbered(50), 25, is_read)
    store = build_store(dataset, tmp_path / "s", progress=False, fingerprint="one")
    assert all(was_read)
    assert holds(store, Numbered(50))


def test_rows_that_could_not_be_written_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_writer, "_MAX_ITEM_ROWS", 20)
    monkeypatch.setattr(range_writer, "_MAX_ITEM_BLOCKS", 1)
    firsts, write = list[int](), FixedColumn.write

    def fail_once(self: FixedColumn, files: Any, rows: Any, values: Any) -> None:
        firsts.append(rows.start)
        if rows.start == 60:
            raise OSError(errno.ENOSPC, "full")
        write(self, files, rows, values)

    with monkeypatch.context() as patch:
        patch.setattr(FixedColumn, "write", fail_once)
        with pytest.raises(OSError, match="full"):
            build_store(Numbered(100), tmp_path / "s", progress=False, fingerprint="one")
    assert max(firsts) == 60
    counting = Counting(Numbered(100))
    store = build_store(counting, tmp_path / "s", progress=False, fingerprint="one")
    assert set(counting.rows) == {*probe_rows(100), *range(60, 100)}
    assert holds(store, Numbered(100))
