"""Open a store: from its manifest alone, read-only, nothing ever unpickled."""

import math
import operator
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from lightning_memmap.errors import StoreError, check_integer, nearest
from lightning_memmap.sampling.rows import Integers, Rows, StoreRows
from lightning_memmap.schema.fields import Field, field_name, name_as_stored
from lightning_memmap.schema.kinds import Duration, Text
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.checksums import compute_checksums, merge_chunks
from lightning_memmap.store.columns import Column
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import ItemRows, OpenColumn, Supplied
from lightning_memmap.store.tensordicts import Source, rows_of_shards


@dataclass(frozen=True)
class Damage:
    """A range of bytes of one shard and field that differ from their checksums.

    Args:
        field: Name of the field.
        shard: Index of the shard.
        path: The file, or its URL.
        start: The first byte of the range in the file. Ranges are made of chunks of 8 MiB, each of
            which has a checksum.
        stop: One past the last byte.
    """

    field: str
    shard: int
    path: Path | str
    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"field {self.field!r}, shard {self.shard} is damaged: bytes {self.start} to"
            f" {self.stop} of {self.path}"
        )


class Supply(Protocol):
    """Brings the rows of a store that are not there yet, for one reader."""

    @property
    def share(self) -> float:
        """How much of them is there, from 0 to 1."""

    @property
    def is_complete(self) -> bool:
        """Whether all of them are there to stay. Where they will never be, this raises why."""

    def want(self, rows: Integers, turns: Integers | None = None) -> None:
        """Ask for rows, in the order in which they are needed, instead of those before.

        Turns are their places in that order, which may be shared with rows of other stores.
        """

    def wait(self, rows: Integers) -> None:
        """Wait until rows are there. Where they will never be, this raises why."""

    def close(self) -> None:
        """No more rows are wanted for now."""


class Store:
    """An open store. Use `lightning_memmap.store.open_store` or `build_store` to get one.

    It is a map-style dataset as well: ``store[i]`` is row ``i`` in dataset order, with tensors, and
    for text str and bytes, as leaves. A list of records is a list again, and None is None.
    Processes on one machine that open the same store share its pages in memory.

    Args:
        path: The directory; of a store at a URL, that of the files in the cache.
        manifest: What the store contains.
        columns: The rows of each field, in the order of the fields.
    """

    #: Brings rows while the store is built or fetched; None where all are there.
    supply: Supply | None = None

    def __init__(self, path: Path, manifest: Manifest, columns: Sequence[OpenColumn]) -> None:
        self.path = path
        #: The directory of the files of the columns. They never change.
        self.files = path / manifest.generation
        self.manifest = manifest
        self.columns = list(columns)
        self._build: Callable[[Sequence[Any]], Any] = self.schema.builder(is_row=True)

    @property
    def location(self) -> str:
        """The directory, or the URL."""
        return str(self.path)

    @property
    def whole(self) -> "Store":
        """The store with all rows, for which this waits."""
        return self

    def finished(self) -> "Store | None":
        """The store with all rows; None where some have still to come."""
        return self.whole if self.supply is None or self.supply.is_complete else None

    def whole_items(self, index: int) -> ItemRows:
        """All rows of a field that differ in length, for which this waits."""
        column = self.whole.columns[index]
        assert isinstance(column, ItemRows)
        return column

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
    def classes(self) -> tuple[str, ...]:
        """The names of the dataset's classes, by label; empty where it has none."""
        return self.manifest.classes

    @property
    def tensors(self) -> list[Tensor]:
        """One mapped tensor per field, shard after shard. Writing to it changes no file."""
        return [column.tensor for column in self.columns]

    def rows(self, subset: Integers | None = None) -> Rows:
        """What an order orders: the rows of the store, or those of some numbers."""
        return StoreRows.of(self.manifest.shards, subset)

    def each(self, rows: Integers) -> "Iterator[tuple[Store, Integers, Integers]]":
        """Each store that it consists of, the places of its rows among some, and their numbers."""
        yield self, np.arange(len(rows)), rows

    @property
    def has_gaps(self) -> bool:
        """Whether rows lie elsewhere in the mapped columns than in files; see `in_memory`."""
        return False

    def in_memory(self, locations: Integers) -> Integers:
        """Where rows lie in the mapped columns, by where they lie in the files: here the same."""
        return locations

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        """Read the value of a field of each row; see `lightning_memmap.sampling.Fields`."""
        index = self._index_of(field)
        found = self.schema.fields[index]
        kind = found.kind
        is_text = isinstance(kind, Text) and not kind.many
        if not is_text and (found.num_variable or math.prod(found.item_shape) != 1):
            raise ValueError(
                f"field {field!r}: its rows are {found.described}; give a field with one value in"
                " each row"
            )
        rows = np.arange(self.num_rows, dtype=np.int64) if rows is None else rows
        missing = rows[~self.given(field)[rows]]
        if len(missing):
            raise ValueError(
                f"field {field!r}: it is None in {len(missing)} of {len(rows)} rows, the first of"
                f" which is row {missing[0]}, and None is no value to weight rows by: store"
                " a value of your own in its place, such as -1, or use the other rows alone, with"
                f" subset=Subset(field={self._masks(field)[-1]!r}, values=[True])"
            )
        if is_text:
            return self._texts(found, rows)
        values = self._numbers(index, rows)
        return values.view(kind.numpy_dtype) if isinstance(kind, Duration) else values

    def given(self, field: str) -> NDArray[np.bool_]:
        """In which rows, in dataset order, neither a field nor what it is a part of is None."""
        rows = np.arange(self.num_rows, dtype=np.int64)
        found = np.ones(self.num_rows, np.bool_)
        for mask in self._masks(field):
            found &= self._numbers(self._index_of(mask), rows)
        return found

    def _masks(self, field: str) -> list[str]:
        """The fields that say where a field, from its outermost part on, is not None."""
        name = self.schema.fields[self._index_of(field)].name
        return [*self.schema.structure.masks[name]]

    def _numbers(self, index: int, rows: Integers) -> NDArray[Any]:
        """The values of rows of a field that has one in each."""
        values = self.whole.columns[index].fetch(rows).data.reshape(-1)
        # numpy has no bfloat16.
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    def _texts(self, field: Field, rows: Integers) -> NDArray[Any]:
        """The texts of rows, as objects: beside one long text, all would take its length."""
        column = self._items_of(field)
        data, (starts, sizes) = column.items.numpy(), column.at(column.shards.file_rows(rows))
        pairs = zip(starts.tolist(), sizes[:, 0].tolist(), strict=True)
        texts = (field.decode(data[start : start + size].tobytes()) for start, size in pairs)
        return np.fromiter(texts, object, len(rows))

    def _items_of(self, field: Field) -> ItemRows:
        """All rows of a field that differ in length."""
        (column,) = self.whole.provide([field.name], range(self.num_shards))
        if not isinstance(column, ItemRows):
            raise ValueError(
                f"field {field.name!r}: its column does not tell the lengths of its rows"
            )
        return column

    def lengths(self, field: str) -> Integers:
        """The items of each row in dataset order, for text its bytes. No value is read."""
        found = self.schema.fields[self._index_of(field)]
        if not found.num_variable:
            raise ValueError(f"field {field!r}: all its rows have one length")
        return self._items_of(found).lengths()

    def _index_of(self, field: str) -> int:
        names = [each.name for each in self.schema.fields]
        # As it is called in a sample, whose keys may have dots, or as it is stored.
        for name in (field_name([field]), name_as_stored(field)):
            if name in names:
                return names.index(name)
        raise ValueError(
            f"field {field!r}: the store at {self.path} has {names}, and none of this name"
            f"{nearest(field, names)}"
        )

    def provide(self, fields: Collection[str] | None, shards: Collection[int]) -> list[OpenColumn]:
        """The open columns of some fields, or all, of which rows of these shards alone are used."""
        pairs = zip(self.schema.fields, self.columns, strict=True)
        found = [column for field, column in pairs if fields is None or field.name in fields]
        return [each.column if isinstance(each, Supplied) else each for each in found]

    def row_files(self, column: Column) -> list[tuple[Path, int, int]]:
        """The files of a column's rows or items: path, where it begins in memory, and bytes."""
        size = column.file_bytes.get(column.rows_name, 0)
        return [(self.files / column.rows_name, 0, size)] if size else []

    def as_tensordict(self) -> TensorDict:
        """Return all rows as a TensorDict of memory-mapped tensors, nested like a sample.

        The rows are in the order of the files, shard after shard, not in dataset order. Items of a
        tuple or list have the keys "0", "1" and so on, and a sample that is a single tensor
        "value". What may be None is ``{"values", "mask"}``. Rows that differ in length are
        ``{"start", "stop"}``: indices of their items in `items_of`, and "shape", the sizes of their
        leading dimensions, where several differ. The keys are locked. Only the checked manifest
        decides what is mapped, whereas ``TensorDict.load_memmap`` trusts what it finds in a
        directory.

        Writing to a tensor changes neither a file nor what a loader reads: only the pages that are
        written are copied, for the TensorDicts of this store in this process. A pickled TensorDict
        has the store's location, not its bytes: another process maps the same files.

        Returns:
            The TensorDict, on the CPU, of batch size (num_rows,), and ``is_memmap()``.

        Raises:
            StoreError: The store was replaced after it was opened, is damaged, or consists of
                several stores.
        """
        return rows_of_shards(self._mapped_again, range(self.num_shards))

    def shard(self, shard: int) -> TensorDict:
        """Return the rows of one shard, as `as_tensordict` returns all of them.

        Args:
            shard: 0 to ``num_shards - 1``. Its row ``j`` is row ``shard + j * num_shards``.

        Returns:
            The TensorDict, on the CPU, of batch size (rows of the shard,). Of a store at a URL,
            only this shard is fetched.

        Raises:
            IndexError: There is no such shard.
            TypeError: ``shard`` is not an integer.
            StoreError: As for `as_tensordict`.
        """
        index = check_integer("shard", shard)
        if not 0 <= index < self.num_shards:
            raise IndexError(f"shard={shard}: the store has {self.num_shards} shards, from 0")
        return rows_of_shards(self._mapped_again, range(index, index + 1))

    def items_of(self, field: str) -> Tensor:
        """Return the items of all rows of a field that differ in length, one row after the other.

        Args:
            field: Its name, such as "sound" or "objects.box".

        Returns:
            A memory-mapped tensor of shape (items, *shape of one item), to which the "start" and
            "stop" of `as_tensordict` are indices. For text these are bytes of UTF-8.

        Raises:
            ValueError: There is no such field, or all its rows have one shape.
            StoreError: As for `as_tensordict`.
        """
        index = self._index_of(field)
        if not self.schema.fields[index].num_variable:
            raise ValueError(f"field {field!r}: all its rows have one shape: see as_tensordict()")
        return Source(self._mapped_again, index, "items", range(self.num_shards)).view()

    @cached_property
    def _mapped_again(self) -> "Store":
        """The store, opened again: nothing else reads the memory of its mapping."""
        return copy(self.whole).whole

    def damage(self, num_threads: int, advance: Callable[[int], None]) -> list[Damage]:
        """Compare all files with their checksums; see `lightning_memmap.store.verify_store`."""
        columns = self.manifest.columns
        sums = compute_checksums(self.files, columns, num_threads=num_threads, advance=advance)
        return [
            Damage(field, shard, self.files / file, start, stop)
            for chunks, (field, found) in zip(self.manifest.chunks, sums.items(), strict=True)
            for shard, file, start, stop in merge_chunks(chunks.differing(found))
        ]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        index = operator.index(row)
        if not -self.num_rows <= index < self.num_rows:
            raise IndexError(f"row {row}: the store has {self.num_rows} rows")
        index %= self.num_rows
        fields = self.schema.fields
        rows = zip(fields, self.columns, strict=True)
        return self._build([field.value(column.row(index)) for field, column in rows])

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
            raise StoreError(f"the store at {directory} was replaced meanwhile: open it again")
        files = directory / manifest.generation
        try:
            return Store(directory, manifest, [each.open(files) for each in manifest.columns])
        except FileNotFoundError as error:
            found = Manifest.read(directory)
            if found.generation == manifest.generation:
                raise StoreError(f"{error.filename} is missing: build the store again") from None
            manifest = found  # Another process has just replaced the store.
