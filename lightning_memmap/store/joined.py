"""Several stores as one, whose rows are those of all of them. Nothing is copied."""

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
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import (
    Integers,
    JoinedRows,
    Runs,
    StoreRows,
    WindowedRows,
    starts_of,
)
from lightning_memmap.schema.fields import Field, join_values
from lightning_memmap.store.columns import Column
from lightning_memmap.store.files import open_plain, replaced
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import (
    ItemRows,
    Located,
    MappedRows,
    OpenColumn,
    RaggedRows,
)
from lightning_memmap.store.store import PendingRows, Store

#: A file begins at a multiple of this in memory.
_PAGE = mmap.ALLOCATIONGRANULARITY
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value


class JoinedStore(Store):
    """Several open stores of the same fields as one."""

    def __init__(self, path: Path, stores: Mapping[str, Store]) -> None:
        _check_alike(stores)
        self._names, self.parts = tuple(stores), list(stores.values())
        self._rows, first = self.rows(), self.parts[0].manifest
        #: Where the rows of each store begin in memory.
        self._begins = self._begins_of([part.num_rows for part in self.parts])
        self._places = _Places(
            self._rows, Runs(self._rows.starts, self._begins - self._rows.starts)
        )
        #: The files of each field: see `Store.row_files`.
        self._files: dict[str, list[tuple[Path, int, int]]] = {}
        if any(part.pending is not None for part in self.parts):
            self.pending = _JoinedRows(self)
        for part in self.parts:
            if part.pending is None:
                part.download()
            else:
                part.pending.expect(range(part.num_shards))
        opened = [part.mapped_columns for part in self.parts]
        joined = [self._joined(*each) for each in enumerate(zip(*opened, strict=True))]
        more = {
            "num_rows": sum(part.num_rows for part in self.parts),
            "num_shards": max(part.num_shards for part in self.parts),
            "parts": tuple(part.manifest for part in self.parts),
            "rows": self._rows,
        }
        super().__init__(path, JoinedManifest(**{**asdict(first), **more}), joined)

    @override
    def rows(self, subset: Integers | None = None) -> JoinedRows:
        assert subset is None, "rows are chosen from each store by itself"
        return self.chosen([None] * len(self.parts))

    def chosen(self, subsets: Sequence[Integers | None]) -> JoinedRows:
        """Some rows of each of the stores, or all."""
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
        for part, _, part_rows in self.each(rows):
            part._make_readable(part_rows, field)

    @cached_property
    @override
    def _mapped_again(self) -> Store:
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
    def in_memory(self, locations: Integers) -> Integers:
        return self._places.in_memory.at(locations)

    @override
    def row_files(self, column: Column) -> list[tuple[Path, int, int]]:
        return self._files[column.field.name]

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedStore, (self.path, dict(zip(self._names, self.parts, strict=True)))

    def _begins_of(self, sizes: Sequence[int]) -> Integers:
        """Where rows, or items, of each store begin, behind a gap: each field with a page."""
        fields = self.parts[0].schema.fields
        unit = max(_PAGE // math.gcd(_PAGE, field.item_bytes or _PAGE) for field in fields)
        return starts_of((np.array(sizes, np.int64) // unit + 1) * unit)

    def _joined(self, index: int, columns: Sequence[OpenColumn]) -> OpenColumn:
        """One field of all stores."""
        field = self.parts[0].schema.fields[index]
        ragged = [column for column in columns if isinstance(column, ItemRows)]
        if field.num_variable and self.pending is not None:
            parts = [column for column in columns if isinstance(column, RaggedRows)]
            return _JoinedItems(field, self._places, parts, self._begins)
        sizes = [len(column.items) for column in ragged] or [part.num_rows for part in self.parts]
        begins = self._begins_of(sizes)
        files = self._files[field.name] = [
            (path, begin * field.item_bytes, num_bytes)
            for part, begin in zip(self.parts, begins.tolist(), strict=True)
            for path, _, num_bytes in part.row_files(part.manifest.columns[index])
        ]
        items = _map(field, files, int(begins[-1]) + sizes[-1])
        if not ragged:
            return MappedRows(self._places, items)
        num_rows = int(self._begins[-1]) + self.parts[-1].num_rows
        ends = np.zeros((num_rows, ragged[0].index.shape[1]), np.int64)
        for column, row, begin in zip(ragged, self._begins.tolist(), begins.tolist(), strict=True):
            # The first row begins where the last one of the gap ends.
            ends[max(0, row - 1), 0] = begin
            ends[row : row + len(column.index)] = column.index
            ends[row : row + len(column.index), 0] += begin
        return ItemRows(field, self._places, items, ends)

    @override
    def each(self, rows: Integers) -> Iterator[tuple[Store, Integers, Integers]]:
        stores = self._rows.stores_of(rows)
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(stores == number)
            yield part, here, rows[here] - self._rows.starts[number]


class JoinedManifest(Manifest, frozen=True, kw_only=True):
    """What several stores contain."""

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

    @override
    def shard_bytes(self, pool: Pool | None = None, num_data_devices: int = 1) -> Integers:
        pool = pool or Pool.of(self.rows, self.num_shards)
        if isinstance(pool.rows, WindowedRows):
            return super().shard_bytes(pool, num_data_devices)
        sizes = np.zeros(pool.num_shards, np.int64)
        for shard in range(pool.num_shards):
            rows = pool.shard_dataset_rows(shard)
            for number, count in enumerate(np.bincount(self.rows.stores_of(rows)).tolist()):
                columns = self.parts[number].columns
                sizes[shard] += sum(c.mean_bytes(count) for c in columns)
        return sizes


@dataclass(frozen=True)
class _Places:
    """Where the rows of several stores lie in memory."""

    rows: JoinedRows
    in_memory: Runs

    @property
    def num_rows(self) -> int:
        """The rows of all stores."""
        return self.rows.num_rows

    def file_rows(self, rows: Any) -> Integers:
        """Return where rows are mapped, int64 of the same shape, or one integer."""
        return self.in_memory.at(self.rows.file_rows(np.asarray(rows)))


@dataclass(frozen=True)
class _JoinedItems(RaggedRows):
    """Rows of several stores that differ in length, of which some are still to come."""

    columns: Sequence[RaggedRows]
    begins: Integers

    @override
    def among(self, locations: Integers) -> tuple[Tensor, Located]:
        stores = np.searchsorted(self.begins, locations, side="right") - 1
        pairs = enumerate(zip(self.columns, self.begins, strict=True))
        found = [column.read(locations[stores == n] - begin) for n, (column, begin) in pairs]
        ((items, sizes),) = join_values([[each] for each in found])
        assert sizes is not None
        back = np.argsort(np.argsort(stores, kind="stable"))
        return items, Located(starts_of(sizes.prod(axis=1))[back], sizes[back])


class _JoinedRows(PendingRows):
    """The pending rows of several stores."""

    def __init__(self, store: JoinedStore) -> None:
        self._store = store

    def _each(self, rows: Integers) -> Iterator[tuple[PendingRows, Integers, Integers]]:
        for part, places, some in self._store.each(rows):
            if part.pending is not None:
                yield part.pending, places, some

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
    def request(self, rows: Integers, ranks: Integers | None = None) -> None:
        for pending, places, some in self._each(rows):
            pending.request(some, places)

    @override
    def wait(self, rows: Integers) -> None:
        for pending, _, some in self._each(rows):
            pending.wait(some)

    @override
    def close(self) -> None:
        for pending, *_ in self._each(np.zeros(0, np.int64)):
            pending.close()


def _map(field: Field, files: Sequence[tuple[Path, int, int]], num_rows: int) -> Tensor:
    """Map files into one range of addresses."""
    # Copied file by file, the rows of a batch take at least 1.9 times as long.
    shape, num_bytes = (num_rows, *field.item_shape), num_rows * field.item_bytes
    if not files or not num_bytes:
        return torch.empty(shape, dtype=field.dtype, device="cpu")
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    size_t, long = ctypes.c_size_t, ctypes.c_long
    library.mmap.argtypes = [ctypes.c_void_p, size_t, *[ctypes.c_int] * 3, long]
    try:
        # Addresses alone: pages that are not replaced by those of a file take no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        reserved = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags, prot=protection), np.uint8)
        for path, first, size in files:
            file = open_plain(path)
            try:
                if os.fstat(file).st_size < size:
                    raise replaced(path)
                place = reserved.ctypes.data + first
                private = mmap.MAP_PRIVATE | _MAP_FIXED
                if library.mmap(place, size, protection, private, file, 0) == _MAP_FAILED:
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
            finally:
                os.close(file)
    except FileNotFoundError as error:
        raise replaced(path) from error
    except OSError as error:
        raise StoreError(
            f"{', '.join(str(path) for path, _, _ in files)} cannot be mapped: {error}: see that"
            " you have the right to read them, and that the process may map that much (`ulimit -v`)"
        ) from error
    return torch.from_numpy(reserved).view(field.dtype).view(shape)


def _check_alike(stores: Mapping[str, Store]) -> None:
    (name, first), *others = stores.items()
    for other_name, other in others:
        pairs = zip(first.schema.fields, other.schema.fields, strict=False)
        for one, two in pairs:
            if one != two:
                raise SchemaError(
                    f"train_dataset: field {one.name!r} is {one} ({one.kind}) in {name!r}, and"
                    f" {other_name!r} has {two.name!r}, {two} ({two.kind}): training sets that are"
                    " mixed have the same fields; where only lengths differ, name the field in"
                    " variable={...} and build the stores again with overwrite=True"
                )
        if first.schema != other.schema:
            names = [[field.name for field in store.schema.fields] for store in (first, other)]
            raise SchemaError(
                f"train_dataset: {name!r} has the fields {names[0]}, and {other_name!r} has"
                f" {names[1]}: training sets that are mixed have the same fields, nested alike"
            )
