"""Tables: stores whose rows several processes compute and write, in any order.

One process makes the files (`TableBuild`). Each process writes its rows (`TableWriter`) and marks
them in the journal, and the first process finishes the table. Each row was written exactly once if
all are marked, and the processes have written as many rows as the table has. If a process ends
before that, the table is missing, or still the old one.

A table whose rows one process has in memory is written at once, by `write_table`.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.rows import Shards
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.building import (
    Building,
    RowWriter,
    describe_writer,
    raise_if_full,
)
from lightning_memmap.store.checksums import choose_chunk_bytes, hash_in_memory
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.directory import JOURNAL, StoreDirectory, check_store_path, is_store
from lightning_memmap.store.files import leaf_bytes, write_new, write_rows
from lightning_memmap.store.journal import WRITTEN
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.samples import choose_probe_rows, hash_row
from lightning_memmap.store.store import Store, open_directory


def check_table_path(path: Path, *, overwrite: bool) -> None:
    """Check that a table may be written to a path."""
    check_store_path(path, "path")
    if is_store(path) and not overwrite:
        raise StoreError(f"{path} exists: choose another path, or replace it with overwrite=True")


def write_table(path: Path, schema: Schema, columns: Sequence[Tensor], **source: str) -> None:
    """Write a table of one shard from memory, in place of an old one.

    Args:
        path: Directory of the table.
        schema: Its fields, whose rows have one shape.
        columns: The rows of each field, of shape (N, *field shape), on the CPU.
        source: Further values of the manifest's source.
    """
    num_rows = len(columns[0])
    fixed = [FixedColumn(field, Shards(num_rows, 1)) for field in schema.fields]
    chunk_bytes = choose_chunk_bytes(fixed)
    directory = StoreDirectory(path)
    with directory.locked(wait=False):
        check_table_path(path, overwrite=True)
        files = directory.begin()
        try:
            checksums = {}
            for column, rows in zip(fixed, columns, strict=True):
                data = leaf_bytes(rows).data
                for name in column.file_bytes:
                    write_new(files / name, data)
                checksums[column.field.name] = hash_in_memory(column, data, chunk_bytes)
            probes = tuple(
                (row, hash_row([rows[row] for rows in columns]))
                for row in choose_probe_rows(num_rows)
            )
            manifest = Manifest(
                generation=files.name,
                num_rows=num_rows,
                num_shards=1,
                probes=probes,
                checksums=checksums,
                source={**source, **describe_writer()},
                structure=schema.structure,
            )
            directory.commit(manifest)
        except BaseException as error:
            directory.remove_unused()
            raise_if_full(error, path, "nothing was changed")
            raise


class TableBuild:
    """The build of a table, in one process, which holds the lock until the table is committed."""

    def __init__(self, path: Path, draft: Manifest, *, overwrite: bool = False) -> None:
        self._path = path
        check_table_path(path, overwrite=overwrite)
        with ExitStack() as stack:
            stack.enter_context(StoreDirectory(path).locked(wait=False))
            check_table_path(path, overwrite=overwrite)
            self._building = stack.enter_context(Building.begin(path, draft, resume=False))
            self.token = self._building.path.name
            self._cleanup = stack.pop_all()

    def finish(self, num_written: int, **source: str) -> Store:
        """Commit the table, once all processes have closed their writers."""
        num_rows = self._building.draft.num_rows
        with self._cleanup:
            if missing := self._building.missing():
                raise StoreError(
                    f"{sum(map(len, missing))} of {num_rows} rows were not written, the first of"
                    f" them is row {missing[0].start}"
                )
            if num_written != num_rows:
                raise StoreError(
                    f"{num_written} rows were written, and the table has {num_rows}: some were"
                    " written more than once"
                )
            self._building.finish(source=source)
        return open_directory(self._path)

    def abandon(self) -> None:
        """Remove the written rows, and release the lock. A second call does nothing."""
        self._cleanup.close()


class TableWriter:
    """Writes rows into the files of a table that a `TableBuild` has made."""

    def __init__(self, path: Path, draft: Manifest, token: str) -> None:
        self._draft = draft
        self.num_written = 0
        try:
            self._writer = RowWriter(path / token, draft.columns, JOURNAL)
        except (FileNotFoundError, NotADirectoryError):
            raise StoreError(
                f"this process can't find the files of the table at {path}: all processes"
                " must share one file system, also on other machines"
            ) from None

    def write(self, rows: Sequence[int] | Integers, values: Sequence[Values]) -> None:
        """Write rows in any order."""
        indices = np.asarray(rows, np.int64)
        num_rows = self._draft.num_rows
        if not len(indices):
            return
        if indices.min() < 0 or indices.max() >= num_rows:
            raise IndexError(f"rows {indices.min()} to {indices.max()}: the table has {num_rows}")
        self._writer.write(indices, values)
        # Marked last, so that a marked row has all its values.
        write_rows(self._writer.journal, indices, np.full((len(indices), 1), WRITTEN, np.uint8))
        self.num_written += len(indices)

    def close(self) -> None:
        """Sync the rows to the disk, and close the files."""
        self._writer.files.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files. A second call does nothing."""
        self._writer.close()
