"""Several stores as one: its rows are theirs, store after store. Nothing is copied.

The files of a field are mapped into one range of addresses, so that a batch is one indexed copy.
Copied store by store, rows of 256 B to 4 KiB take 1.5 to 1.8 times as long. Each file starts on a
page, which leaves gaps. Stores of 3 and 2 rows of 1 KiB, with pages of 4 rows::

    file row       0 1 2   | 3 4
    memory row     0 1 2 . | 4 5      `Store.memory_rows`
    store          0 0 0   | 1 1
"""

import ctypes
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import asdict
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.integers import Integers, Runs, items_per_row, starts_of
from lightning_memmap.sampling.rows import JoinedRows, StoreRows
from lightning_memmap.schema.fields import Field, join_values
from lightning_memmap.store.columns import Column
from lightning_memmap.store.files import make_replaced_error, open_plain
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import (
    IndexedItems,
    Located,
    MappedRows,
    OpenColumn,
    VariableItems,
)
from lightning_memmap.store.store import PendingRows, Store

#: The address of a file is a multiple of this.
_PAGE = mmap.ALLOCATIONGRANULARITY
# Constants of <sys/mman.h>.
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class JoinedStore(Store):
    """Several open stores of the same fields as one.

    Args:
        path: The directory of the stores.
        stores: The stores by name. If one is at a URL, all its shards are downloaded.
    """

    _is_readable = False

    def __init__(self, path: Path, stores: Mapping[str, Store]) -> None:
        _check_alike(stores)
        self._names = tuple(stores)
        self.parts = list(stores.values())
        self._rows = self.rows()
        #: The first memory row of each store, int64 of shape (stores,).
        self._memory_starts = self._find_page_starts([part.num_rows for part in self.parts])
        #: Maps file rows to memory rows.
        self._to_memory = Runs(self._rows.starts, self._memory_starts - self._rows.starts)
        #: The files of each field: see `Store.row_files`.
        self._files: dict[str, list[tuple[Path, int, int]]] = {}
        if any(part.pending is not None for part in self.parts):
            self.pending = _JoinedPendingRows(self)
        for part in self.parts:
            if part.pending is None:
                part.download()
            else:
                part.pending.expect(range(part.num_shards))
        mapped = zip(*(part.mapped_columns for part in self.parts), strict=True)
        columns = [self._join_columns(index, parts) for index, parts in enumerate(mapped)]
        first = self.parts[0].manifest
        more = {
            "num_rows": sum(part.num_rows for part in self.parts),
            "num_shards": max(part.num_shards for part in self.parts),
            "parts": tuple(part.manifest for part in self.parts),
            "rows": self._rows,
        }
        super().__init__(path, JoinedManifest(**{**asdict(first), **more}), columns)

    @property
    @override
    def contents(self) -> dict[str, str]:
        pairs = zip(self._names, self.parts, strict=True)
        named = ((name, part.contents.items()) for name, part in pairs)
        return {f"{key} of {name}": text for name, items in named for key, text in items}

    @override
    def rows(self, subset: Integers | None = None) -> JoinedRows:
        assert subset is None, "rows are chosen from each store by itself"
        return self.chosen([None] * len(self.parts))

    def chosen(self, subsets: Sequence[Integers | None]) -> JoinedRows:
        """Return a subset, or all rows, of each of the stores."""
        shards = [part.manifest.shards for part in self.parts]
        return JoinedRows(self._names, tuple(map(StoreRows.of, shards, subsets)))

    @override
    def completed(self) -> Store:
        return self if self.pending is None else self._completed

    @cached_property
    def _completed(self) -> Store:
        pairs = zip(self._names, self.parts, strict=True)
        return JoinedStore(self.path, {name: part.completed() for name, part in pairs})

    @override
    def _make_readable(self, rows: Integers, field: str | None = None) -> None:
        for part, _, part_rows in self.split_by_store(rows):
            part._make_readable(part_rows, field)

    @cached_property
    @override
    def _reopened(self) -> Store:
        paths = ", ".join(part.location for part in self.parts)
        raise StoreError(
            "the rows of several stores aren't one tensor: call this on the open_store(path) of"
            f" one of them ({paths})"
        )

    @property
    @override
    def has_gaps(self) -> bool:
        return True

    @override
    def memory_rows(self, file_rows: Integers) -> Integers:
        return self._to_memory.at(file_rows)

    @override
    def row_files(self, column: Column) -> list[tuple[Path, int, int]]:
        return self._files[column.field.name]

    def _find_memory_rows(self, rows: Any) -> Integers:
        """Return the memory rows of rows, int64 of the same shape, or one integer."""
        return self._to_memory.at(self._rows.file_rows(np.asarray(rows)))

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedStore, (self.path, dict(zip(self._names, self.parts, strict=True)))

    def _find_page_starts(self, sizes: Sequence[int]) -> Integers:
        """Find memory rows for the rows, or items, of each store, so that files start on pages.

        Args:
            sizes: The rows, or items, of each store.

        Returns:
            The first memory row of each store, after a gap. It starts a page in every field.
        """
        fields = self.parts[0].schema.fields
        unit = max(_PAGE // math.gcd(_PAGE, field.item_bytes or _PAGE) for field in fields)
        return starts_of((np.array(sizes, np.int64) // unit + 1) * unit)

    def _join_columns(self, index: int, columns: Sequence[OpenColumn]) -> OpenColumn:
        """Join the columns of one field, by its index in the schema."""
        field = self.parts[0].schema.fields[index]
        variable = [column for column in columns if isinstance(column, VariableItems)]
        if variable and self.pending is not None:
            return _JoinedItems(field, self._find_memory_rows, variable, self._memory_starts)
        indexed = [column for column in variable if isinstance(column, IndexedItems)]
        sizes = [len(column.items) for column in indexed] or [part.num_rows for part in self.parts]
        item_starts = self._find_page_starts(sizes)
        files = self._files[field.name] = [
            (path, start * field.item_bytes, num_bytes)
            for part, start in zip(self.parts, item_starts.tolist(), strict=True)
            for path, _, num_bytes in part.row_files(part.manifest.columns[index])
        ]
        items = _map_files(field, files, int(item_starts[-1]) + sizes[-1])
        if not indexed:
            return MappedRows(self._find_memory_rows, items)
        num_rows = int(self._memory_starts[-1]) + self.parts[-1].num_rows
        joined_index = np.zeros((num_rows, indexed[0].index.shape[1]), np.int64)
        starts = zip(indexed, self._memory_starts.tolist(), item_starts.tolist(), strict=True)
        for column, row, item in starts:
            # The first row starts where the last memory row of the gap ends.
            joined_index[max(0, row - 1), 0] = item
            joined_index[row : row + len(column.index)] = column.index
            joined_index[row : row + len(column.index), 0] += item
        return IndexedItems(field, self._find_memory_rows, items, joined_index)

    @override
    def split_by_store(self, rows: Integers) -> Iterator[tuple[Store, Integers, Integers]]:
        store_of = self._rows.set_index_of(rows)
        for index, part in enumerate(self.parts):
            here = np.flatnonzero(store_of == index)
            yield part, here, rows[here] - self._rows.starts[index]


class JoinedManifest(Manifest, frozen=True, kw_only=True):
    """The contents of several stores."""

    parts: tuple[Manifest, ...]
    rows: JoinedRows

    @cached_property
    @override
    def columns(self) -> tuple[Column, ...]:
        return self.parts[0].columns

    @property
    @override
    def has_default_shards(self) -> bool:
        return all(part.has_default_shards for part in self.parts)

    @property
    @override
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    @override
    def content(self) -> str:
        return "; ".join(part.content for part in self.parts)


@dataclass(frozen=True)
class _JoinedItems(VariableItems):
    """A field of several stores whose rows differ in length, while some are still written."""

    columns: Sequence[VariableItems]
    #: The first memory row of each store, int64 of shape (stores,).
    starts: Integers

    @override
    def items_and_ranges(self, memory_rows: Integers) -> tuple[Tensor, Located]:
        store_of = np.searchsorted(self.starts, memory_rows, side="right") - 1
        values = [
            [column.read(memory_rows[store_of == index] - start)]
            for index, (column, start) in enumerate(zip(self.columns, self.starts, strict=True))
        ]
        ((items, sizes),) = join_values(values)
        assert sizes is not None
        back = np.argsort(np.argsort(store_of, kind="stable"))
        return items, Located(starts_of(items_per_row(sizes))[back], sizes[back])


class _JoinedPendingRows(PendingRows):
    """The pending rows of several stores."""

    def __init__(self, store: JoinedStore) -> None:
        self._store = store

    def _split_pending(self, rows: Integers) -> Iterator[tuple[PendingRows, Integers, Integers]]:
        """Yield the pending rows of each store, the indices of its rows in `rows`, and its rows."""
        for part, here, part_rows in self._store.split_by_store(rows):
            if part.pending is not None:
                yield part.pending, here, part_rows

    @property
    @override
    def progress(self) -> float:
        parts = self._store.parts
        progress = [1.0 if part.pending is None else part.pending.progress for part in parts]
        return float(np.average(progress, weights=[part.num_rows for part in parts]))

    @property
    @override
    def is_complete(self) -> bool:
        return all(part.is_complete for part in self._store.parts)

    @override
    def request(self, rows: Integers, priorities: Integers | None = None) -> None:
        for pending, here, part_rows in self._split_pending(rows):
            pending.request(part_rows, here if priorities is None else priorities[here])

    @override
    def wait(self, rows: Integers) -> None:
        for pending, _, part_rows in self._split_pending(rows):
            pending.wait(part_rows)

    @override
    def close(self) -> None:
        for pending, *_ in self._split_pending(np.zeros(0, np.int64)):
            pending.close()


def _map_files(field: Field, files: Sequence[tuple[Path, int, int]], num_rows: int) -> Tensor:
    """Map files into one range of addresses.

    Args:
        field: The field.
        files: Each file, its first byte in the range, and its size.
        num_rows: The rows, or items, of the range.
    """
    shape = (num_rows, *field.item_shape)
    num_bytes = num_rows * field.item_bytes
    if not files or not num_bytes:
        return torch.empty(shape, dtype=field.dtype, device="cpu")
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    try:
        # Reserve addresses. Pages that are not replaced by pages of a file take no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        reserved = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags, prot=protection), np.uint8)
        for path, first, size in files:
            file = open_plain(path)
            try:
                if os.fstat(file).st_size < size:
                    raise make_replaced_error(path)
                address = reserved.ctypes.data + first
                fixed = mmap.MAP_PRIVATE | _MAP_FIXED
                if library.mmap(address, size, protection, fixed, file, 0) == _MAP_FAILED:
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
            finally:
                os.close(file)
    except FileNotFoundError as error:
        raise make_replaced_error(path) from error
    except OSError as error:
        raise StoreError(
            f"{', '.join(str(path) for path, _, _ in files)} cannot be mapped: {error}. Check that"
            " you may read them, and the limit of memory (`ulimit -v`)."
        ) from error
    return torch.from_numpy(reserved).view(field.dtype).view(shape)


def _check_alike(stores: Mapping[str, Store]) -> None:
    """Check that stores have the same fields, nested alike."""
    (name, first), *rest = stores.items()
    for other_name, other in rest:
        pairs = zip(first.schema.fields, other.schema.fields, strict=False)
        for one, two in pairs:
            if one != two:
                raise SchemaError(
                    f"train_dataset: field {one.name!r} is {one} ({one.kind}) in {name!r}, and"
                    f" {other_name!r} has {two.name!r}, {two} ({two.kind}). Training sets that are"
                    " mixed need the same fields. If only lengths differ, name the field in"
                    " variable=[...] and build the stores again with overwrite=True."
                )
        if first.schema != other.schema:
            names = [[field.name for field in store.schema.fields] for store in (first, other)]
            raise SchemaError(
                f"train_dataset: {name!r} has the fields {names[0]}, and {other_name!r} has"
                f" {names[1]}. Training sets that are mixed need the same fields, nested alike."
            )
