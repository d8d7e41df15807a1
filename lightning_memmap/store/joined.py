"""Several stores as one, whose rows are those of all of them. Nothing is copied."""

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.sampling import (
    Integers,
    JoinedRows,
    Pool,
    Shards,
    StoreRows,
    WindowedRows,
)
from lightning_memmap.schema import Field
from lightning_memmap.store.columns import Column
from lightning_memmap.store.files import open_plain, replaced
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import ItemRows, MappedRows, OpenColumn
from lightning_memmap.store.store import Store

#: A file begins at a multiple of this in memory.
_PAGE = mmap.ALLOCATIONGRANULARITY
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value


class JoinedStore(Store):
    """Several open stores of the same fields as one."""

    def __init__(self, path: Path, stores: Mapping[str, Store]) -> None:
        parts = list(stores.values())
        _check_alike(stores)
        first = parts[0].manifest
        self._names = tuple(stores)
        self.parts = parts
        total = sum(part.num_rows for part in parts)
        #: How far the rows of each store lie behind those of the store before, beyond its rows.
        self._shifts = _shifts(first.schema.fields, [part.num_rows for part in parts])
        self._rows = self.rows()
        shards = Shards(total, max(part.num_shards for part in parts))
        # Of a store at a URL, all shards are fetched.
        opened = [part.provide(None, range(part.num_shards)) for part in parts]
        manifests = tuple(part.manifest for part in parts)
        manifest = JoinedManifest(
            **{**vars(first), "shards": shards, "parts": manifests, "rows": self._rows}
        )
        #: The files of each field: see `Store.row_files`.
        self._files: dict[str, list[tuple[Path, int, int]]] = {}
        columns = zip(first.schema.fields, *opened, strict=True)
        self._shards = _InMemory(
            total, shards.num_shards, places=lambda rows: self.in_memory(self._rows.places(rows))
        )
        joined = [self._joined(field, each, index) for index, (field, *each) in enumerate(columns)]
        super().__init__(path, manifest, joined)

    @override
    def rows(self, subset: Integers | None = None) -> JoinedRows:
        assert subset is None, "rows are chosen from each store by itself"
        return self.chosen([None] * len(self.parts))

    def chosen(self, subsets: Sequence[Integers | None]) -> JoinedRows:
        """Some rows of each of the stores, or all."""
        shards = [part.manifest.shards for part in self.parts]
        return JoinedRows(self._names, tuple(map(StoreRows.of, shards, subsets)))

    @property
    @override
    def has_gaps(self) -> bool:
        return True

    @override
    def in_memory(self, locations: Integers) -> Integers:
        return locations + self._shifts[self._rows.stores_of(locations)]

    @override
    def row_files(self, column: Column) -> list[tuple[Path, int, int]]:
        return self._files[column.field.name]

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedStore, (self.path, dict(zip(self._names, self.parts, strict=True)))

    def _files_of(self, index: int, begins: Integers) -> list[tuple[Path, int, int]]:
        """The files of a field, as each store gives them, and where they begin in memory."""
        files = [
            (path, begin, size)
            for part, begin in zip(self.parts, begins.tolist(), strict=True)
            for path, _, size in part.row_files(part.manifest.columns[index])
        ]
        self._files[self.parts[0].schema.fields[index].name] = files
        return files

    def _joined(self, field: Field, columns: Sequence[OpenColumn], index: int) -> OpenColumn:
        firsts = self._rows.firsts + self._shifts
        variable = [column for column in columns if isinstance(column, ItemRows)]
        if not variable:
            files = self._files_of(index, firsts * field.row_bytes)
            num_rows = int(firsts[-1]) + self.parts[-1].num_rows
            return _JoinedRows(self._shards, _map(field, files, num_rows))
        # The same once more, for the items: fields of as many items have them at the same places.
        unit = replace(field, shape=field.item_shape)
        sizes = [len(column.items) for column in variable]
        begins = (
            np.cumsum(sizes, dtype=np.int64)
            - np.array(sizes)
            + _shifts(self.parts[0].schema.fields, sizes)
        )
        files = self._files_of(index, begins * field.item_bytes)
        items = _map(unit, files, int(begins[-1]) + sizes[-1])
        pieces = []
        for number, (column, begin) in enumerate(zip(variable, begins, strict=True)):
            # Behind the last row of the store before, empty rows up to where this one begins.
            width = column.index.shape[1]
            gap = np.zeros((int(np.diff(self._shifts, prepend=0)[number]), width), np.int64)
            gap[:, 0] = begin
            pieces += [gap, column.index + np.eye(1, width, dtype=np.int64) * begin]
        return ItemRows(field, self._shards, items, np.concatenate(pieces))


@dataclass(frozen=True)
class JoinedManifest(Manifest):
    """What several stores contain."""

    parts: tuple[Manifest, ...] = ()
    rows: JoinedRows = field(kw_only=True)

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
            rows = pool.dataset_rows(*pool.offsets_of(shard))
            for number, count in enumerate(np.bincount(self.rows.stores_of(rows)).tolist()):
                columns = self.parts[number].columns
                sizes[shard] += sum(c.mean_bytes(count) for c in columns)
        return sizes


@dataclass(frozen=True)
class _InMemory(Shards):
    """All rows, by where they lie in memory."""

    places: Callable[[Integers], Integers] = field(kw_only=True)

    @override
    def locate(self, rows: Integers) -> Integers:
        return self.places(rows)


class _JoinedRows(MappedRows):
    """Rows of several stores in one tensor."""

    @override
    def row(self, row: int) -> Tensor:
        return self.fetch(np.array([row]))[0]


def _shifts(fields: Sequence[Field], sizes: Sequence[int]) -> Integers:
    """How many rows more than those before it lie before each part in memory."""
    # A part begins at a multiple of so many rows that each field begins with a page.
    unit = max(_PAGE // math.gcd(_PAGE, field.item_bytes or _PAGE) for field in fields)
    shifts, first, total = [], 0, 0
    for size in sizes:
        shifts.append(first - total)
        total += size
        first = (first + size) // unit * unit + unit
    return np.array(shifts, np.int64)


def _map(field: Field, files: Sequence[tuple[Path, int, int]], num_rows: int) -> Tensor:
    """Map files into one range of addresses."""
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
