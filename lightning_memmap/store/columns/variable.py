"""The column of a field whose rows differ in length.

It has two files. ``values`` holds the items of all rows, one row after the other, without padding.
``index`` holds an int64 for each row: where it ends, counted in items from the start of ``values``.
Where several dimensions differ, their sizes follow it. Fields that have as many items as each other
in every row, such as those of a list of records, share an index.

While the column grows, each process appends its rows to a file of its own, and a file of fixed size
says where each row is.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field
from lightning_memmap.schema.values import Values
from lightning_memmap.store.columns.column import Column, FileRange
from lightning_memmap.store.columns.fixed import map_rows
from lightning_memmap.store.columns.segments import copy_segments
from lightning_memmap.store.files import (
    TEMPORARY,
    OpenFiles,
    claim,
    read_exactly,
    write_all,
    write_rows,
)

_MAX_FILE_BYTES = 2**62
#: No dimension of a row is larger, so that products of sizes can be checked.
_MAX_SIZE = 2**40
_JOIN_BYTES = 32 * 2**20
#: Rows whose places are looked up at once.
_LOCATED_ROWS = 2**18
#: What the names of the files have beside the field's.
_MAX_SUFFIX = len(".0123456789abcdef") + len(TEMPORARY)
#: The largest size of a row without items in a dimension that differs: nothing else bounds it, and
#: whoever pads such rows makes memory of that size.
_MAX_EMPTY_SIZE = 2**16


@dataclass(frozen=True)
class VariableColumn(Column):
    """The column of a field whose rows differ in length.

    Args:
        field: The field.
        shards: The rows of the store, and the shards that they are divided into.
        shard_items: Items of each shard, int64 of shape (C,); nothing while the column grows.
        index_of: Name of another field whose index this one has as well; by default its own.

    Raises:
        ValueError: The rows of the field have one shape, its items have no bytes, its name is too
            long, no file could hold its items, or its rows need an index of their own.
    """

    kind: ClassVar[str] = "variable"
    shard_items: tuple[int, ...] = ()
    index_of: str = ""

    def __post_init__(self) -> None:
        field = self.field
        if not field.num_variable or not field.item_bytes:
            raise ValueError(f"{field} is no field whose rows differ in length, or has no bytes")
        if len(field.name) + _MAX_SUFFIX > 255:
            raise ValueError(f"the name of field {field.name!r} is too long for its files")
        if sum(self.shard_items) * field.item_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"{sum(self.shard_items)} items of {field} fit into no file")
        if self.index_of and field.num_variable > 1:
            raise ValueError(f"the rows of field {field.name!r} need an index of their own")

    @property
    def _index_name(self) -> str:
        return f"{self.index_of or self.field.name}.index"

    @property
    @override
    def rows_name(self) -> str:
        return f"{self.field.name}.values"

    @property
    def _places_name(self) -> str:
        return f"{self.field.name}.at{TEMPORARY}"

    def _piece_name(self, piece: int) -> str:
        return f"{self.field.name}.{piece:016x}{TEMPORARY}"

    @property
    def _index_width(self) -> int:
        count = self.field.num_variable
        return 1 if count == 1 else 1 + count

    @property
    @override
    def file_bytes(self) -> Mapping[str, int]:
        num_rows = self.shards.num_rows
        if not self.shard_items:
            return {self._places_name: 8 * (2 + self.field.num_variable) * num_rows}
        sizes = {self._index_name: 8 * self._index_width * num_rows}
        num_bytes = sum(self.shard_items) * self.field.item_bytes
        return {**sizes, self.rows_name: num_bytes} if num_bytes else sizes

    @classmethod
    @override
    def takes(cls, field: Field) -> bool:
        return field.num_variable > 0

    @classmethod
    @override
    def from_json(cls, field: Field, shards: Shards, entry: Mapping[str, Any]) -> "VariableColumn":
        items = entry.get("shard_items")
        if not isinstance(items, list) or len(items) != shards.num_shards:
            raise ValueError(f"the items of {field.name!r} are not given for each shard")
        if any(type(count) is not int or not 0 <= count <= _MAX_FILE_BYTES for count in items):
            raise ValueError(f"the items of {field.name!r} are no counts")
        index_of = entry.get("index_of", "")
        if not isinstance(index_of, str):
            raise ValueError(f"the index of {field.name!r} is that of no field")
        return cls(field, shards, tuple(items), index_of)

    @override
    def to_json(self) -> dict[str, Any]:
        items = {"shard_items": list(self.shard_items or (0,) * self.shards.num_shards)}
        return {**items, "index_of": self.index_of} if self.index_of else items

    @override
    def num_bytes(self, rows: range | Integers) -> int:
        size, shards = self.field.item_bytes, self.shards
        if not self.shard_items:
            return len(rows) * size
        first = rows.start if isinstance(rows, range) else -1
        if 0 <= first < shards.num_shards and rows == shards.rows_of(first):
            return self.shard_items[first] * size
        return -(-sum(self.shard_items) * size * len(rows) // shards.num_rows)

    @override
    def shard_ranges(self) -> list[list[FileRange]]:
        width, size = 8 * self._index_width, self.field.item_bytes
        rows = (*self.shards.starts.tolist(), self.shards.num_rows)
        items = np.cumsum((0, *self.shard_items)).tolist()
        ranges = []
        for (first, end), (begin, stop) in zip(pairwise(rows), pairwise(items), strict=True):
            found = [(self._index_name, first * width, end * width)]
            if stop > begin:
                found.append((self.rows_name, begin * size, stop * size))
            ranges.append(found)
        return ranges

    @override
    def edge_bytes(self, shard: int) -> Sequence[tuple[str, int, bytes]]:
        # A row begins where the one before it ends, which may be of another shard.
        if not (first := int(self.shards.starts[shard])):
            return ()
        end = np.int64(sum(self.shard_items[:shard]))
        return [(self._index_name, (first - 1) * 8 * self._index_width, end.tobytes())]

    @override
    def write(self, files: OpenFiles, rows: range | Integers, values: Values) -> None:
        if not len(rows):
            return
        assert values.sizes is not None
        items = values.data.detach().cpu().contiguous()
        # Without items, or with one, any stride counts as contiguous.
        data = items.as_strided((items.numel(),), (1,)).view(torch.uint8).numpy()
        _check_sizes(self.field, values.sizes)
        file = files.open(self._piece_name(files.number), os.O_CREAT)
        # At its end: rows were written there before, perhaps part of one.
        begin = os.fstat(file).st_size
        write_all(file, data.data, begin)
        num_bytes = values.sizes.prod(axis=1) * self.field.item_bytes
        places = np.empty((len(rows), 2 + self.field.num_variable), np.int64)
        places[:, 0] = files.number
        places[:, 1] = begin + np.cumsum(num_bytes) - num_bytes
        places[:, 2:] = values.sizes
        write_rows(
            files.open(self._places_name),
            self.shards.locate(np.asarray(rows)),
            places.view(np.uint8),
        )

    @override
    def finish(self, directory: Path) -> "VariableColumn":
        files = OpenFiles(directory)
        try:
            bounds = np.append(self.shards.starts, self.shards.num_rows)
            edges = np.zeros(len(bounds), np.int64)
            index = files.open(self._index_name, os.O_CREAT)
            end, width = 0, self._index_width
            for first, places in self._places(files):
                packed = packed_index(places[:, 2:])
                packed[:, 0] += end
                within = (bounds > first) & (bounds <= first + len(places))
                edges[within] = packed[bounds[within] - first - 1, 0]
                end = int(packed[-1, 0])
                data = np.ascontiguousarray(packed).reshape(-1).view(np.uint8).data
                write_all(index, data, first * 8 * width)
            if end:
                values = files.open(self.rows_name, os.O_CREAT)
                claim(values, end * self.field.item_bytes, "to lay rows of one shard together")
                begin = 0
                for _, places in self._places(files):
                    for joined in self._joined(directory, places):
                        write_all(values, joined.data, begin)
                        begin += len(joined)
            files.sync()
        finally:
            files.close()
        return replace(self, shard_items=tuple(np.diff(edges).tolist()))

    def _places(self, files: OpenFiles) -> Iterator[tuple[int, Integers]]:
        """Where all rows are in the pieces, in the order of the file, some rows at a time: the
        first of them, and for each row its piece, the first byte in it, and its sizes."""
        width = 2 + self.field.num_variable
        file = files.open(self._places_name)
        for first in range(0, self.shards.num_rows, _LOCATED_ROWS):
            count = min(_LOCATED_ROWS, self.shards.num_rows - first)
            data = read_exactly(file, first * 8 * width, count * 8 * width)
            yield first, data.view(np.int64).reshape(count, width)

    def _joined(self, directory: Path, places: Integers) -> Iterator[NDArray[np.uint8]]:
        """The bytes of some rows in their order.

        Args:
            directory: The directory in which the store is being built.
            places: As from `_places`.
        """
        pieces: dict[int, NDArray[np.uint8]] = {}
        ends = np.cumsum(places[:, 2:].prod(axis=1)) * self.field.item_bytes
        first, begin = 0, 0
        while first < len(ends):
            end = max(first + 1, int(np.searchsorted(ends, begin + _JOIN_BYTES, side="right")))
            rows = places[first:end]
            starts = np.append(begin, ends[first : end - 1])
            lengths = ends[first:end] - starts
            out = np.empty(int(ends[end - 1]) - begin, np.uint8)
            for piece in np.unique(rows[lengths > 0, 0]).tolist():
                if piece not in pieces:
                    pieces[piece] = np.memmap(directory / self._piece_name(piece), np.uint8, "r")
                mine = rows[:, 0] == piece
                copy_segments(
                    pieces[piece], rows[mine, 1], out, starts[mine] - begin, lengths[mine]
                )
            yield out
            first, begin = end, int(ends[end - 1])

    @override
    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        location = int(self.shards.locate(np.array(row)))
        width, size = 8 * self._index_width, self.field.item_bytes
        with ExitStack() as stack:
            index = stack.enter_context(open(directory / self._index_name, "rb", buffering=0))
            before = min(location, 1)
            data = read_exactly(index.fileno(), (location - before) * width, (1 + before) * width)
            ends = [0, *data.view(np.int64).reshape(-1, self._index_width)[:, 0].tolist()]
            first, end = ends[-2:]
            if not 0 <= first <= end <= sum(self.shard_items):
                raise _damaged(self.field)
            if first == end:
                return np.empty(0, np.uint8)
            values = stack.enter_context(open(directory / self.rows_name, "rb", buffering=0))
            return read_exactly(values.fileno(), first * size, (end - first) * size)

    @override
    def open(self, directory: Path) -> "ItemRows":
        assert self.shard_items
        num_rows = self.shards.num_rows
        index = map_rows(directory / self._index_name, torch.int64, (num_rows, self._index_width))
        shape = (sum(self.shard_items), *self.field.item_shape)
        if shape[0]:
            items = map_rows(directory / self.rows_name, self.field.dtype, shape)
        else:
            items = torch.empty(shape, dtype=self.field.dtype, device="cpu")
        return ItemRows(self.field, self.shards, items, index.numpy())


def packed_index(sizes: Integers) -> Integers:
    """The index of rows whose items lie one after the other.

    Args:
        sizes: The sizes of each row in the dimensions that differ, int64 of shape (B, number of
            these).

    Returns:
        What `ItemRows` has: int64 of shape (B, 1 or 1 + number of these).
    """
    ends = np.cumsum(sizes.prod(axis=1))
    index: Integers = ends[:, None] if sizes.shape[1] == 1 else np.c_[ends, sizes]
    return index


def pack_rows(field: Field, rows: Sequence[Tensor]) -> Values:
    """Lay rows one after the other.

    Args:
        field: Their field.
        rows: Tensors of the field's dtype and of shapes that it admits, on one device, at least
            one.
    """
    count = field.num_variable
    sizes = np.array([row.shape[:count] for row in rows], np.int64)
    return Values(torch.cat([row.reshape(-1, *field.item_shape) for row in rows]), sizes)


class Located(NamedTuple):
    """Where rows lie among items."""

    starts: Integers
    """The first item of each row, int64 of shape (B,)."""
    sizes: Integers
    """Its sizes in the dimensions that differ, int64 of shape (B, number of these)."""


@dataclass(frozen=True)
class ItemRows:
    """Rows that differ in length, in one place in memory. An open column is one.

    The index may come from an untrusted source, and may change while it is mapped: each entry is
    copied, and checked, before it is used.

    Args:
        field: Their field.
        shards: The rows of the store, and the shards that they are divided into.
        items: The items of all rows, of shape (items, *item shape), on any device.
        index: Where each row ends in them and, where several dimensions differ, its sizes. int64 of
            shape (rows, 1 or 1 + number of these).
    """

    field: Field
    shards: Shards
    items: Tensor
    index: Integers

    @property
    def tensor(self) -> Tensor:
        """Never: the rows do not lie in one tensor.

        Raises:
            StoreError: Always.
        """
        raise StoreError(
            f"field {self.field.name!r}: its rows differ in length, so that they do not lie in one"
            " tensor: read them by row, or through a loader"
        )

    def at(self, locations: Integers) -> Located:
        """Find rows.

        Args:
            locations: Places in the index, int64 of shape (B,).

        Raises:
            IndexError: There is no such place.
            StoreError: The index is damaged.
        """
        # As an unsigned integer, a negative location is larger than any other.
        if len(locations) and int(locations.view(np.uint64).max()) >= len(self.index):
            raise IndexError(f"locations {locations.min()} to {locations.max()}: outside the rows")
        ends = self.index[:, 0].take(locations)
        starts = self.index[:, 0].take(locations - 1, mode="wrap")
        starts[locations == 0] = 0
        # Compared, not subtracted: a difference may overflow.
        least, most = starts.min(initial=0), ends.max(initial=0)
        is_valid = least >= 0 and most <= len(self.items) and bool((starts <= ends).all())
        lengths = ends - starts
        sizes = lengths[:, None]
        if is_valid and self.field.num_variable > 1:
            sizes = self.index[:, 1:].take(locations, axis=0)
            most = np.where(lengths, _MAX_SIZE, _MAX_EMPTY_SIZE)[:, None]
            is_small = ((sizes >= 0) & (sizes <= most)).all()
            # As floats too, which do not overflow.
            products = sizes.astype(np.float64).prod(axis=1)
            is_valid = bool(is_small and (products == lengths).all())
        if not is_valid:
            raise _damaged(self.field)
        return Located(starts, sizes)

    def lengths(self) -> Integers:
        """The items of each row, int64 of shape (rows,), in dataset order.

        Raises:
            StoreError: The index is damaged.
        """
        lengths = np.empty(self.shards.num_rows, np.int64)
        for first in range(0, len(lengths), _LOCATED_ROWS):
            rows = np.arange(first, min(first + _LOCATED_ROWS, len(lengths)), dtype=np.int64)
            lengths[rows] = self._at_rows(rows).sizes.prod(axis=1)
        return lengths

    def _at_rows(self, rows: Integers) -> Located:
        """Find rows, given in dataset order."""
        return self.at(self.shards.locate(rows))

    def row(self, row: int) -> Tensor:
        """Copy one row, given in dataset order."""
        return self.fetch(np.array([row]))[0]

    def fetch(self, rows: Integers) -> list[Tensor]:
        """Copy rows, given in dataset order: one tensor for each."""
        starts, sizes = self._at_rows(rows)
        items = self.items
        return [
            items[start : start + math.prod(shape)].clone().view(*shape, *self.field.item_shape)
            for start, shape in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]


def _check_sizes(field: Field, sizes: Integers) -> None:
    """Check that rows without items can be read again.

    Raises:
        SchemaError: They cannot.
    """
    if field.num_variable > 1:
        most = sizes.max(axis=1, initial=0)
        empty = np.flatnonzero((sizes.prod(axis=1) == 0) & (most > _MAX_EMPTY_SIZE))
        if len(empty):
            raise SchemaError(
                f"field {field.name!r}: a row of shape {tuple(sizes[empty[0]].tolist())} has no"
                f" values, and a size of more than {_MAX_EMPTY_SIZE}: give such rows a shape of"
                " zeros"
            )


def _damaged(field: Field) -> StoreError:
    return StoreError(
        f"field {field.name!r}: the index of its rows is damaged: check the store with"
        " `lightning-memmap store verify`, and build it again"
    )
