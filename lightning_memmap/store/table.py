"""A table: a store whose rows several processes write, in any order.

One process makes the files (`TableBuild`), each process writes the rows that it has
(`TableWriter`), and the first one finishes the table: it checks that each row was written exactly
once, and commits as any build of a store does. If a process ends before that, there is no table, or
the old one.

Beside the fields there is a byte for each row, which is set with the row. Each row was written
exactly once if every byte is set and the processes have written as many rows as the table has.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field, RowList, Values
from lightning_memmap.store.building import Building, RowWriter, explained
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.directory import StoreDirectory, check_free, is_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.store import Store, open_directory


def _marks(shards: Shards) -> FixedColumn:
    """A byte for each row, set when it is written. No field's name begins with a dot."""
    return FixedColumn(Field(".written", torch.uint8, ()), shards)


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
        self._path, self._draft = path, draft
        check_place(path, overwrite=overwrite)
        with ExitStack() as stack:
            stack.enter_context(StoreDirectory(path).locked(wait=False))
            check_place(path, overwrite=overwrite)
            building = Building.begin(path, draft, resume=False)
            stack.callback(building.close)
            stack.callback(building.abandon)  # It spares what is committed.
            self._building, self.token = building, building.path.name
            self._marks = building.path / _marks(draft.shards).rows_name
            with open(self._marks, "wb") as file:
                file.truncate(draft.num_rows)
            self._cleanup = stack.pop_all()

    def finish(self, num_written: int, **source: str) -> Store:
        """Commit the table, once all processes have closed their writers."""
        with self._cleanup, explained(self._path, "nothing was changed"):
            self._check_written(num_written)
            self._marks.unlink()
            self._building.wrote(range(self._draft.num_rows))
            show = partial(show_progress, hidden=True)
            self._building.finish(num_threads=2, show=show, source=source)
        return open_directory(self._path)

    def abandon(self) -> None:
        """Remove what was written, and release the lock. A second call does nothing."""
        self._cleanup.close()

    def _check_written(self, num_written: int) -> None:
        num_rows = self._draft.num_rows
        missing = self._draft.shards.rows_at(np.flatnonzero(np.fromfile(self._marks, "u1") == 0))
        if len(missing):
            raise StoreError(
                f"{len(missing)} of {num_rows} rows were not written, the first of them is"
                f" row {missing.min()}"
            )
        if num_written != num_rows:
            raise StoreError(
                f"{num_written} rows were written, and the table has {num_rows}: some were"
                " written more than once"
            )


class TableWriter:
    """Writes rows into the files of a table that a `TableBuild` has made."""

    def __init__(self, path: Path, draft: Manifest, token: str) -> None:
        self._draft = draft
        # The marks last: a row with one has all its values.
        columns = (*draft.columns, _marks(draft.shards))
        self.num_written = 0
        try:
            self._writer = RowWriter(path / token, columns, None)
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
        marks = torch.ones(len(numbers), dtype=torch.uint8)
        self._writer.write(numbers, (*values, Values(marks)))
        self.num_written += len(numbers)

    def close(self) -> None:
        """Bring the rows to the disk and close the files."""
        self._writer.files.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files. A second call does nothing."""
        self._writer.close()
