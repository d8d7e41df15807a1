"""Open a store, read-only, from its manifest alone. Nothing is ever unpickled."""

import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import StoreError, check_integer, nearest
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.rows import Rows, StoreRows
from lightning_memmap.schema.fields import Field, Values, field_name, stored_name
from lightning_memmap.schema.kinds import Duration, Text
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.checksums import Damage, compute_checksums, list_damages
from lightning_memmap.store.columns import Column
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import IndexedItems, OpenColumn
from lightning_memmap.store.progress import ShowProgress

if TYPE_CHECKING:
    from tensordict import TensorDict


class PendingRows(ABC):
    """Rows of a store that haven't arrived: they are still being built or downloaded.

    Only `Store.read`, `Store.read_row` and the loaders read such a store. Everything else calls
    `Store.completed` first.
    """

    @property
    @abstractmethod
    def progress(self) -> float:
        """The fraction of rows that have arrived, from 0 to 1."""

    @property
    def has_all_rows(self) -> bool:
        """Whether all rows have arrived. A build may still have to commit them."""
        return self.progress == 1.0

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all rows have arrived for good. Raises the error of a build that failed."""

    def expect(self, shards: Collection[int]) -> None:  # noqa: B027
        """Declare the only shards whose rows will be requested, before the first request."""

    @abstractmethod
    def request(self, rows: Integers, priorities: Integers | None = None) -> None:
        """Request rows in the order in which they are needed. Replaces the previous request.

        Args:
            rows: Rows in dataset order, int64 of shape (B,).
            priorities: When each is needed, ascending, int64 of shape (B,), if requests for several
                stores are to be served in one order. By default 0 to B-1.
        """

    @abstractmethod
    def wait(self, rows: Integers) -> None:
        """Block until rows have arrived. Raises the error of a build or download that failed."""

    @abstractmethod
    def close(self) -> None:
        """Withdraw the request."""


class Store:
    """An open store. Use `lightning_memmap.store.open_store` or `build_store` to get one.

    A store is also a map-style dataset: ``store[i]`` is row ``i`` in dataset order. Its leaves are
    tensors, str for text, and bytes; a list of records is a list again, and None is None.
    Processes on one machine that open the same store share its pages in memory.

    Args:
        path: The directory; for a store at a URL, the directory of its files in the cache.
        manifest: The contents of the store.
        columns: The mapped rows of each field, in the order of the fields.
    """

    #: Rows that are being built or downloaded in the background; None if there are none.
    pending: PendingRows | None = None

    #: Whether rows can be read without `_make_readable`.
    _is_readable = True

    def __init__(self, path: Path, manifest: Manifest, columns: Sequence[OpenColumn]) -> None:
        self.path = path
        #: The directory of the column files. They never change.
        self.files = path / manifest.generation
        self.manifest = manifest
        #: One column per field. Rows that haven't arrived read as undefined values: use `read`, or
        #: `completed` and `download`.
        self.mapped_columns = list(columns)
        self._build: Callable[[Sequence[Any]], Any] = self.schema.make_builder(is_row=True)

    @property
    def location(self) -> str:
        """The directory, or the URL."""
        return str(self.path)

    @property
    def is_complete(self) -> bool:
        """Whether no rows are still being built or downloaded."""
        return self.pending is None or self.pending.is_complete

    def completed(self) -> "Store":
        """Wait for a build of this store, and return the store that it commits.

        Shards of a store at a URL are downloaded when they are read, or by `download`.
        """
        return self

    def download(
        self, shards: Collection[int] | None = None, fields: Collection[str] | None = None
    ) -> None:
        """Download shards that are not in the cache yet. A store in a directory has all of them.

        Args:
            shards: By default all.
            fields: Names of fields; by default all.

        Raises:
            StoreError: A shard cannot be downloaded, or has another checksum than the manifest.
        """

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return self.manifest.num_rows

    @property
    def num_shards(self) -> int:
        """Shards that the rows are divided into: row ``i`` belongs to shard ``i % num_shards``."""
        return self.manifest.num_shards

    @property
    def schema(self) -> Schema:
        """The fields and the nesting of a sample."""
        return self.manifest.schema

    @property
    def contents(self) -> dict[str, str]:
        """Row counts and checksums that identify the contents, by name."""
        manifest = self.manifest
        probes = xxhash.xxh3_64_hexdigest(msgspec.json.encode(manifest.probes))
        contents = {"rows": str(manifest.num_rows), "probe rows": probes}
        if self.pending is None:
            # Checksums of equal rows differ between numbers of shards.
            contents[f"in {manifest.num_shards} shards"] = manifest.content
        return contents

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the dataset's classes, by label; empty if it names none."""
        return self.manifest.classes

    def rows(self, subset: Integers | None = None) -> Rows:
        """Return the rows that an order draws from: all rows, or a subset, int64 of shape (n,)."""
        return StoreRows.of(self.manifest.shards, subset)

    def split_by_store(self, rows: Integers) -> "Iterator[tuple[Store, Integers, Integers]]":
        """Split rows by store: yield each store, the indices of its rows in `rows`, and its
        rows."""
        yield self, np.arange(len(rows)), rows

    @property
    def has_gaps(self) -> bool:
        """Whether mapped columns have other indices than files; see `memory_rows`."""
        return False

    def memory_rows(self, file_rows: Integers) -> Integers:
        """Return the indices of file rows in the mapped columns."""
        return file_rows

    def row_files(self, column: Column) -> list[tuple[Path, int, int]]:
        """List the files of a column's rows or items: path, first byte in memory, and size."""
        size = column.file_bytes.get(column.rows_name, 0)
        return [(self.files / column.rows_name, 0, size)] if size else []

    def column(self, field: str) -> OpenColumn:
        """Return the mapped column of a field, by its stored name."""
        names = [stored.name for stored in self.schema.fields]
        return self.mapped_columns[names.index(field)]

    def read(self, rows: Integers) -> list[Values]:
        """Copy rows of all fields, int64 of shape (B,) in dataset order, once they have arrived."""
        self._make_readable(rows)
        return [column.fetch(rows) for column in self.mapped_columns]

    def read_row(self, row: int, field: str | None = None) -> list[Tensor]:
        """Copy one row of all fields, or of one, once it has arrived."""
        if not self._is_readable:
            self._make_readable(np.array([row]), field)
        columns = self.mapped_columns if field is None else [self.column(field)]
        return [column.row(row) for column in columns]

    def _make_readable(self, rows: Integers, field: str | None = None) -> None:
        """Wait until rows have arrived, or download their shards."""

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        """Read the value of a field of each row; see `lightning_memmap.sampling.Fields`."""
        index = self._field_index(field)
        stored = self.schema.fields[index]
        kind = stored.kind
        is_text = isinstance(kind, Text) and not kind.many
        if not is_text and (stored.num_variable or math.prod(stored.item_shape) != 1):
            raise ValueError(
                f"field {field!r}: its rows are {stored.description}; choose a field with one value"
                " in each row"
            )
        rows = np.arange(self.num_rows, dtype=np.int64) if rows is None else rows
        missing = rows[~self.given(field)[rows]]
        if len(missing):
            raise ValueError(
                f"field {field!r}: it is None in {len(missing)} of {len(rows)} rows, first in row"
                f" {missing[0]}, and cannot be used as a weight there. Store another value instead,"
                " such as -1, or use the other rows alone, with"
                f" subset=Subset(field={self._masks(field)[-1]!r}, values=[True])."
            )
        if is_text:
            return self._read_texts(stored, rows)
        values = self._read_numbers(index, rows)
        return values.view(kind.numpy_dtype) if isinstance(kind, Duration) else values

    def given(self, field: str) -> NDArray[np.bool_]:
        """Return in which rows, in dataset order, a field and its parents are not None."""
        rows = np.arange(self.num_rows, dtype=np.int64)
        is_present = np.ones(self.num_rows, np.bool_)
        for mask in self._masks(field):
            is_present &= self._read_numbers(self._field_index(mask), rows)
        return is_present

    def _masks(self, field: str) -> list[str]:
        """List the masks of a field and of its parents, outermost first."""
        name = self.schema.fields[self._field_index(field)].name
        return [*self.schema.structure.masks[name]]

    def _read_numbers(self, index: int, rows: Integers) -> NDArray[Any]:
        """Read rows of a field that has one number in each."""
        store = self.completed()
        name = self.schema.fields[index].name
        store._make_readable(rows, name)
        column = store.mapped_columns[index]
        values = column.fetch(rows).data.reshape(-1)
        # numpy has no bfloat16.
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def _read_texts(self, field: Field, rows: Integers) -> NDArray[Any]:
        """Read the texts of rows, as Python objects: a numpy string array would use the size of
        the longest for all of them."""
        column = self._complete_items(field)
        data = column.items.numpy()
        starts, sizes = column.locate(column.file_rows(rows))
        pairs = zip(starts.tolist(), sizes[:, 0].tolist(), strict=True)
        texts = (field.decode(data[start : start + size].tobytes()) for start, size in pairs)
        return np.fromiter(texts, object, len(rows))

    def _complete_items(self, field: Field) -> IndexedItems:
        """Return the column of a field whose rows differ in length, with all rows."""
        store = self.completed()
        store.download(fields=[field.name])
        column = store.column(field.name)
        assert isinstance(column, IndexedItems)
        return column

    def lengths(self, field: str) -> Integers:
        """Count the items of each row in dataset order, or the bytes of a text. Reads no value."""
        stored = self.schema.fields[self._field_index(field)]
        if not stored.num_variable:
            raise ValueError(
                f"field {field!r}: all its rows have one length in the store at {self.path}: if"
                f" others may differ, pass variable=[{field!r}] and overwrite=True, and name all"
                " fields that differ alike"
            )
        return self._complete_items(stored).lengths(self.num_rows)

    def _field_index(self, field: str) -> int:
        names = [stored.name for stored in self.schema.fields]
        # As a key of a sample, which may contain dots, or as it is stored.
        for name in (field_name([field]), stored_name(field)):
            if name in names:
                return names.index(name)
        raise ValueError(
            f"field {field!r}: the store at {self.path} has {names}, and none of this name"
            f"{nearest(field, names)}"
        )

    def as_tensordict(self) -> "TensorDict":
        """Return all rows as a TensorDict of memory-mapped tensors, nested like a sample.

        The rows are in file order, shard after shard, not in dataset order. Items of a tuple or
        list have the keys "0", "1" and so on, and a sample that is a single tensor "value".
        Optional values are ``{"values", "mask"}``. Rows that differ in length are
        ``{"start", "stop"}``: indices of their items in `items_of`, and "shape", the sizes of their
        leading dimensions, if several differ. The keys are locked. Only the checked manifest
        decides what is mapped, whereas ``TensorDict.load_memmap`` trusts what it finds in a
        directory.

        Writing to a tensor changes neither a file nor what a loader reads: only the pages that are
        written are copied, for the TensorDicts of this store in this process. A pickled TensorDict
        contains the store's location, not its bytes: another process maps the same files.

        Returns:
            The TensorDict, on the CPU, of batch size (num_rows,), and ``is_memmap()``.

        Raises:
            StoreError: The store was replaced after it was opened, is damaged, or consists of
                several stores.
        """
        from lightning_memmap.store.tensordicts import rows_of_shards  # It imports tensordict.

        return rows_of_shards(self._reopened, range(self.num_shards))

    def shard(self, shard: int) -> "TensorDict":
        """Return the rows of one shard, as `as_tensordict` returns all of them.

        Args:
            shard: 0 to ``num_shards - 1``. Its row ``j`` is row ``shard + j * num_shards``.

        Returns:
            The TensorDict, on the CPU, of batch size (rows of the shard,). If the store is at a
            URL, only this shard is downloaded.

        Raises:
            IndexError: There is no such shard.
            TypeError: ``shard`` is not an integer.
            StoreError: As for `as_tensordict`.
        """
        index = check_integer("shard", shard)
        if not 0 <= index < self.num_shards:
            raise IndexError(f"shard={shard}: the store has {self.num_shards} shards, from 0")
        from lightning_memmap.store.tensordicts import rows_of_shards  # It imports tensordict.

        return rows_of_shards(self._reopened, range(index, index + 1))

    def items_of(self, field: str) -> Tensor:
        """Return the items of all rows of a field whose rows differ in length, concatenated.

        Args:
            field: Its name, such as "sound" or "objects.box".

        Returns:
            A memory-mapped tensor of shape (items, *shape of one item), which "start" and "stop"
            of `as_tensordict` are indices of. For text these are bytes of UTF-8.

        Raises:
            ValueError: There is no such field, or all its rows have one shape.
            StoreError: As for `as_tensordict`.
        """
        index = self._field_index(field)
        if not self.schema.fields[index].num_variable:
            raise ValueError(f"field {field!r}: all its rows have one shape: see as_tensordict()")
        from lightning_memmap.store.tensordicts import Source  # It imports tensordict.

        return Source(self._reopened, index, "items", range(self.num_shards)).view()

    @cached_property
    def _reopened(self) -> "Store":
        """The store, opened again: nothing else reads the memory of its mapping."""
        return copy(self.completed()).completed()

    def find_damages(self, num_threads: int, advance: Callable[[int], None]) -> list[Damage]:
        """Compare all files with their checksums; see `lightning_memmap.store.verify_store`."""
        columns = self.manifest.columns
        sums = compute_checksums(self.files, columns, num_threads=num_threads, advance=advance)
        return [
            damage
            for chunks, (field, computed) in zip(self.manifest.chunks, sums.items(), strict=True)
            for damage in list_damages(field, self.files, chunks.differing(computed))
        ]

    def check_bytes(self, show: ShowProgress, *, num_threads: int = 2) -> None:
        """Raise a StoreError if a byte differs from its checksum."""
        with show("verifying", sum(self.manifest.file_bytes.values()), 1) as advance:
            damages = self.find_damages(num_threads, advance)
        if damages:
            more = f", and {len(damages) - 3} more" if len(damages) > 3 else ""
            raise StoreError(
                f"the store at {self.location} is damaged: {'; '.join(map(str, damages[:3]))}"
                f"{more}. Restore these files, or build the store again"
            )

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        index = operator.index(row)
        if not -self.num_rows <= index < self.num_rows:
            raise IndexError(f"row {row}: the store has {self.num_rows} rows")
        index %= self.num_rows
        if not self._is_readable:
            self._make_readable(np.array([index]))
        columns = zip(self.schema.fields, self.mapped_columns, strict=True)
        return self._build([field.value(column.row(index)) for field, column in columns])

    def __reduce__(self) -> tuple[Any, ...]:
        return open_directory, (str(self.path), self.manifest.generation)

    def __repr__(self) -> str:
        return f"Store({self.location!r}, {self.num_rows} rows, {self.num_shards} shards)"


def open_directory(path: str | Path, generation: str | None = None) -> Store:
    """Open the store in a directory for reading."""
    directory = Path(os.path.realpath(path))
    manifest = Manifest.read(directory)
    while True:
        if generation not in (None, manifest.generation):
            raise StoreError(f"the store at {directory} was replaced: open it again")
        files = directory / manifest.generation
        try:
            return Store(directory, manifest, [column.open(files) for column in manifest.columns])
        except FileNotFoundError as error:
            latest = Manifest.read(directory)
            if latest.generation == manifest.generation:
                raise StoreError(f"{error.filename} is missing: build the store again") from None
            manifest = latest  # Another process has just replaced the store.
