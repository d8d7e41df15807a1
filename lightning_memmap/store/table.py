"""A table: a store whose rows several processes write, in any order.

One process makes the files (`TableBuild`), each process writes the rows that it has
(`TableWriter`) and marks them in the journal, and the first one finishes the table: each row was
written exactly once if all are marked, and the processes have written as many rows as the table
has. If a process ends before that, there is no table, or the old one.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import RowList, Values
from lightning_memmap.store.building import Building, RowWriter
from lightning_memmap.store.directory import JOURNAL, StoreDirectory, check_free, is_store
from lightning_memmap.store.files import write_rows
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.store import Store, open_directory


def check_place(path: Path, *, overwrite: bool) -> None:
    """Check that a table may be written to a path."""
    check_free(path, "path")
    if is_store(path) and not overwrite:
        raise StoreError(
            f"{path} exists: choose another path, or replace what is there with overwrite=True"
        )


class TableBuild:
    """The build of a table, in one process, which holds the lock until the table is committed."""

    def __init__(self, path: Path, draft: Manifest, *, overwrite: bool = False) -> None:
        self._path = path
        check_place(path, overwrite=overwrite)
        with ExitStack() as stack:
            stack.enter_context(StoreDirectory(path).locked(wait=False))
            check_place(path, overwrite=overwrite)
            self._building = stack.enter_context(Building.begin(path, draft, resume=False))
            self.token = self._building.path.name
            self._cleanup = stack.pop_all()

    def finish(self, num_written: int, **source: str) -> Store:
        """Commit the table, once all processes have closed their writers."""
        num_rows = self._building.draft.num_rows
        with self._cleanup:
            if missing := self._building.missing(range(num_rows)):
                raise StoreError(
                    f"{sum(map(len, missing))} of {num_rows} rows were not written, the first of"
                    f" them is row {missing[0].start}"
                )
            if num_written != num_rows:
                raise StoreError(
                    f"{num_written} rows were written, and the table has {num_rows}: some were"
                    " written more than once"
                )
            show = partial(show_progress, hidden=True)
            self._building.finish(num_threads=2, show=show, source=source)
        return open_directory(self._path)

    def abandon(self) -> None:
        """Remove what was written, and release the lock. A second call does nothing."""
        self._cleanup.close()


class TableWriter:
    """Writes rows into the files of a table that a `TableBuild` has made."""

    def __init__(self, path: Path, draft: Manifest, token: str) -> None:
        self._draft, self.num_written = draft, 0
        try:
            self._writer = RowWriter(path / token, draft.columns, JOURNAL)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"this process does not see the files of the table at {path}: all processes"
                " must share one file system there, also those of other machines"
            ) from None

    def write(self, rows: Sequence[int] | Integers, leaves: Sequence[Tensor | RowList]) -> None:
        """Write rows in any order."""
        numbers, num_rows = np.asarray(rows, np.int64), self._draft.num_rows
        if not len(numbers):
            return
        if numbers.min() < 0 or numbers.max() >= num_rows:
            raise IndexError(f"rows {numbers.min()} to {numbers.max()}: the table has {num_rows}")
        values = [
            Values.of_rows(field, leaf) if isinstance(leaf, RowList) else Values(leaf)
            for field, leaf in zip(self._draft.schema.fields, leaves, strict=True)
        ]
        self._writer.write(numbers, values)
        # The marks last: a row with one has all its values.
        write_rows(self._writer.journal, numbers, np.ones((len(numbers), 1), np.uint8))
        self.num_written += len(numbers)

    def close(self) -> None:
        """Bring the rows to the disk and close the files."""
        self._writer.files.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files. A second call does nothing."""
        self._writer.close()
