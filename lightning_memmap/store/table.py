"""A table: a store whose rows several processes write, in any order.

One process makes the files (`TableBuild`), every one writes the rows that it has (`TableWriter`),
and the first one finishes the table: it sees that each row was written exactly once, and then it
commits like any build of a store. Whatever ends a process before that leaves no table, or the old
one.

Beside the fields there is a byte for each row, set with the row. All rows are there exactly once
where every byte is set and the processes have written as many rows as there are.
"""

import os
import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers, shard_starts
from lightning_memmap.schema import Field, Schema
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.files import (
    commit,
    describe_source,
    hash_written_row,
    make_files,
    write_all,
)
from lightning_memmap.store.manifest import Manifest, check_layout, field_path
from lightning_memmap.store.probes import probe_rows
from lightning_memmap.store.reader import Store, open_store
from lightning_memmap.store.recovery import (
    building_path,
    is_store,
    locked,
    make_room,
    recover,
    remove_tree,
)

#: A byte for each row, set when it is written.
_WRITTEN = "written"
#: Tells one build from the next one in the same place.
_TOKEN = "token"


@dataclass(frozen=True)
class TablePlan:
    """What all processes that write one table must know of it.

    Args:
        path: Directory of the table.
        num_rows: Rows of the table.
        num_shards: Shards that the rows are dealt to.
        schema: The fields of a row.
    """

    path: Path
    num_rows: int
    num_shards: int
    schema: Schema

    @property
    def building(self) -> Path:
        """Where the files grow until they are a table."""
        return building_path(self.path)

    def __str__(self) -> str:
        fields = ", ".join(f"{field.name} {field}" for field in self.schema.fields)
        return f"{self.num_rows} rows of {fields} at {self.path}"


def check_place(path: Path, *, overwrite: bool) -> None:
    """Check that a table may be written to a path.

    Raises:
        StoreError: Something is there that is no store, or a store is and ``overwrite`` is False.
    """
    if not os.path.lexists(path):
        return
    if not is_store(path):
        raise StoreError(f"{path} exists and is no store: choose another path, or remove it")
    if not overwrite:
        raise StoreError(
            f"{path} exists: choose another path, or replace what is there with overwrite=True"
        )


class TableBuild:
    """One process's hold on the place of a table, from the making of its files to the commit.

    Args:
        plan: The table.
        overwrite: Replace a store that is there. It stays until the table is whole.

    Attributes:
        token: What `TableWriter` must be given to write into these files and no others.

    Raises:
        StoreError: The path is taken, another process writes to it, or what others have put beside
            it is in the way; or the table would have too many fields or shards.
        OSError: The disk is too small.
    """

    def __init__(self, plan: TablePlan, *, overwrite: bool = False) -> None:
        self._plan = plan
        self.token = uuid.uuid4().hex
        check_layout(plan.num_rows, plan.num_shards, plan.schema)
        plan.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(plan.path, timeout_s=0))
            recover(plan.path)
            check_place(plan.path, overwrite=overwrite)
            make_room(plan.path)
            if os.path.lexists(plan.building):
                remove_tree(plan.building)
            make_files(plan.path, plan.schema, plan.num_rows)
            stack.callback(shutil.rmtree, plan.building, ignore_errors=True)
            with open(plan.building / _WRITTEN, "wb") as file:
                file.truncate(plan.num_rows)
            (plan.building / _TOKEN).write_text(self.token, encoding="ascii")
            self._hold = stack.pop_all()

    def finish(self, num_written: int, **source: str) -> Store:
        """Commit the table, once all processes have closed their writers.

        Args:
            num_written: Rows that all processes have written, each counted as often as it was.
            source: Where the table came from, for people to read.

        Returns:
            The open table.

        Raises:
            StoreError: A row was not written, or was written twice. No table is left then, or
                the old one.
        """
        plan = self._plan
        with self._hold:
            self._check_written(num_written)
            for name in (_WRITTEN, _TOKEN):
                (plan.building / name).unlink()
            what = (plan.schema, plan.num_rows, plan.num_shards)
            probes = tuple(
                (row, hash_written_row(plan.building, row, *what))
                for row in probe_rows(plan.num_rows)
            )
            sums = compute_checksums(plan.building, *what)
            manifest = Manifest(
                plan.num_rows, plan.num_shards, plan.schema, probes, sums, describe_source(**source)
            )
            commit(plan.path, manifest)
        return open_store(plan.path)

    def abandon(self) -> None:
        """Let go of the place, and of what was written."""
        self._hold.close()

    def _check_written(self, num_written: int) -> None:
        plan = self._plan
        written = np.fromfile(plan.building / _WRITTEN, np.uint8)
        missing = self._rows_at(np.flatnonzero(written == 0))
        if len(missing):
            raise StoreError(
                f"{len(missing)} of {plan.num_rows} rows were not written, the first of them is"
                f" row {missing.min()}"
            )
        if num_written != plan.num_rows:
            raise StoreError(
                f"{num_written} rows were written, and the table has {plan.num_rows}: some were"
                " written more than once"
            )

    def _rows_at(self, places: Integers) -> Integers:
        starts = shard_starts(self._plan.num_rows, self._plan.num_shards)
        shards = np.searchsorted(starts, places, side="right") - 1
        return (places - starts[shards]) * self._plan.num_shards + shards


class TableWriter:
    """Writes rows into the files of a table that a `TableBuild` has made.

    Rows go to the files by ``pwrite``, not through a mapping: two machines that share a file
    system would else overwrite each other's rows where these share a page.

    Args:
        plan: The table, the same in all processes.
        token: That of the build.

    Attributes:
        num_written: Rows written so far.

    Raises:
        StoreError: The files are not there, or are those of another build.
    """

    def __init__(self, plan: TablePlan, token: str) -> None:
        self._plan = plan
        self._starts = shard_starts(plan.num_rows, plan.num_shards)
        self._descriptors: list[int] = []
        self.num_written = 0
        # From here on by the directory itself, not by its name: a process that outlives its run
        # must not write into the files of the next one.
        with ExitStack() as stack:
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                directory = os.open(plan.building, flags)
                stack.callback(os.close, directory)
                found = _read_token(directory)
            except (FileNotFoundError, NotADirectoryError):
                found = ""
            if found != token:
                raise StoreError(
                    f"the files of the table at {plan.path} are not to be seen here: all processes"
                    " must share one file system there, those of other machines too"
                )
            for name in [_WRITTEN, *(str(field_path(Path(), field)) for field in self._fields)]:
                flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(name, flags, dir_fd=directory)
                self._descriptors.append(descriptor)

    @property
    def _fields(self) -> list[Field]:
        return [field for field in self._plan.schema.fields if field.row_bytes]

    def write(self, rows: Sequence[int] | Integers, leaves: Sequence[Tensor]) -> None:
        """Write some rows.

        Args:
            rows: Which ones, in any order.
            leaves: One tensor of shape (len(rows), *field shape) per field, on any device.

        Raises:
            IndexError: A row is outside the table.
            OSError: The files cannot be written.
        """
        if not len(rows):
            return
        numbers = np.asarray(rows, np.int64)
        if numbers.min() < 0 or numbers.max() >= self._plan.num_rows:
            raise IndexError(
                f"rows {numbers.min()} to {numbers.max()}: the table has {self._plan.num_rows}"
            )
        offsets, shards = np.divmod(numbers, self._plan.num_shards)
        places = self._starts[shards] + offsets
        order = np.argsort(places)
        places = places[order]
        bounds = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        index = torch.from_numpy(order)
        marks = torch.ones(len(places), dtype=torch.uint8)
        whole = [leaf for leaf in leaves if leaf.nbytes]
        for descriptor, leaf in zip(self._descriptors, [marks, *whole], strict=True):
            _write_runs(descriptor, leaf.cpu().index_select(0, index), places, bounds)
        self.num_written += len(places)

    def close(self) -> None:
        """Bring the rows to the disk and let go of the files."""
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the files. Doing it again changes nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _read_token(directory: int) -> str:
    descriptor = os.open(_TOKEN, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        return os.read(descriptor, 64).decode("ascii")
    finally:
        os.close(descriptor)


def _write_runs(descriptor: int, rows: Tensor, places: Integers, bounds: list[int]) -> None:
    """Write rows to ascending places: those between two bounds lie one after the other."""
    data = rows.contiguous().view(-1).view(torch.uint8).numpy().data
    size = rows[:1].nbytes
    for first, last in pairwise(bounds):
        write_all(descriptor, data[first * size : last * size], int(places[first]) * size)
