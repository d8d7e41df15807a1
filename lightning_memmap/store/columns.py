"""Columns: the files of each field of a store.

If all rows have one shape, ``FIELD.memmap`` has the rows of shard 0, then the rows of shard 1, and
so on. If rows differ in length, ``FIELD.values`` has the items of all rows, concatenated without
padding, and ``FIELD.index`` an int64 for each row: one past its last item. If several dimensions
differ, their sizes follow it.

During a build, each writer of such a field appends its rows to a separate file, and a file of fixed
size has the location of each row. `VariableColumn.finish` concatenates the rows.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import SchemaError
from lightning_memmap.integers import Integers, bounds_of, ceil_div, items_per_row, starts_of
from lightning_memmap.sampling.rows import Shards
from lightning_memmap.schema.fields import Field, Values
from lightning_memmap.store.files import (
    TEMPORARY,
    OpenFiles,
    copy_segments,
    leaf_bytes,
    read_exactly,
    write_all,
    write_rows,
)
from lightning_memmap.store.open_columns import (
    LOCATED_ROWS,
    MAX_EMPTY_SIZE,
    IndexedItems,
    MappedRows,
    compute_index,
    map_rows,
)

_MAX_FILE_BYTES = 2**62
#: Bytes of rows that are gathered at once.
_GATHER_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _Column(ABC):
    """The files of one field of one store: a frozen value that opens nothing.

    A build begins with one column, and `finish` returns the column that the manifest records.
    """

    field: Field
    shards: Shards

    @property
    @abstractmethod
    def bounds(self) -> Mapping[str, Integers]:
        """The bytes at which shards start, and the size, of each file, int64 of shape (C + 1,)."""

    @property
    def file_bytes(self) -> Mapping[str, int]:
        """The size of each file by its name. A field without bytes doesn't have a file."""
        return {name: int(bounds[-1]) for name, bounds in self.bounds.items() if bounds[-1]}

    @property
    def shard_bytes(self) -> Integers:
        """Bytes of the resident rows of each shard, int64 of shape (C,)."""
        return self.shards.sizes * self.field.item_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all resident rows."""
        return int(self.shard_bytes.sum())

    def mean_bytes(self, num_rows: int) -> int:
        """Return the average bytes of ``num_rows`` rows, rounded up."""
        return ceil_div(self.num_bytes * num_rows, self.shards.num_rows)

    def entries_before(self, shard: int) -> Sequence[tuple[str, int, bytes]]:
        """Return the index entries before a shard that are needed to locate its first row.

        Each is a file, the first byte in it, and the bytes.
        """
        return ()


@dataclass(frozen=True)
class FixedColumn(_Column):
    """The column of a field whose rows all have one shape."""

    def __post_init__(self) -> None:
        # Empty sizes count as one: torch multiplies them in this way for the strides.
        row_bytes = (
            math.prod(max(1, size) for size in self.field.item_shape) * self.field.dtype.itemsize
        )
        if self.shards.num_rows * row_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"{self.shards.num_rows} rows of {self.field} fit into no file")

    @property
    def rows_name(self) -> str:
        """The file of the rows, as they are in memory."""
        # Field names contain no path separators: see `schema.fields`.
        return f"{self.field.name}.memmap"

    @property
    @override
    def bounds(self) -> Mapping[str, Integers]:
        return {self.rows_name: _row_bounds(self.shards) * self.field.row_bytes}

    def write(self, files: OpenFiles, rows: range | Integers, values: Values) -> None:
        """Write rows in any order. Several writers may do this at once, each with other rows."""
        size = self.field.row_bytes
        if not size or not len(rows):
            return
        file = files.open(self.rows_name)
        data = leaf_bytes(values.data.detach().cpu())
        if isinstance(rows, range):
            # As numbers, small rows are copied faster than as bytes.
            dtype = f"u{size}" if size in (1, 2, 4, 8) else f"V{size}"
            self._write_range(file, rows.start, data.view(dtype))
        else:
            write_rows(file, self.shards.file_rows(rows), data.reshape(len(rows), size))

    def _write_range(self, file: int, start: int, data: NDArray[Any]) -> None:
        num_shards = self.shards.num_shards
        # Memory that is new costs more than a copy into it.
        memory = np.empty(ceil_div(len(data), num_shards), data.dtype)
        # Every C-th row is of the same shard, in which these rows follow one another.
        file_rows = self.shards.file_rows(np.arange(start, start + min(num_shards, len(data))))
        for index, file_row in enumerate(file_rows.tolist()):
            shard_rows = data[index::num_shards]
            if num_shards > 1:
                memory[: len(shard_rows)] = shard_rows
                shard_rows = memory[: len(shard_rows)]
            write_all(file, shard_rows.view(np.uint8).data, file_row * self.field.row_bytes)

    def finish(self, directory: Path) -> "FixedColumn":
        """Return the column of the finished store."""
        return self

    def open(self, directory: Path) -> MappedRows:
        """Open the column for reading."""
        shape = (self.shards.num_rows, *self.field.item_shape)
        dtype = self.field.dtype
        if not self.file_bytes:
            return MappedRows(self.shards.file_rows, torch.empty(shape, dtype=dtype, device="cpu"))
        return MappedRows(self.shards.file_rows, map_rows(directory / self.rows_name, dtype, shape))


@dataclass(frozen=True)
class VariableColumn(_Column):
    """The column of a field whose rows differ in length."""

    shard_items: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if sum(self.shard_items) * self.field.item_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"{sum(self.shard_items)} items of {self.field} fit into no file")

    @property
    def index_name(self) -> str:
        """The file that says where each row stops."""
        return f"{self.field.name}.index"

    @property
    def rows_name(self) -> str:
        """The file of the items, as they are in memory."""
        return f"{self.field.name}.values"

    @property
    def locations_name(self) -> str:
        """During a build, the file with the location of each row: writer, offset and sizes."""
        return f"{self.field.name}.locations{TEMPORARY}"

    def writer_file(self, writer_id: int) -> str:
        """Return the file of one writer during a build."""
        return f"{self.field.name}.{writer_id:016x}{TEMPORARY}"

    @property
    def _index_width(self) -> int:
        count = self.field.num_variable
        return 1 if count == 1 else 1 + count

    @property
    @override
    def bounds(self) -> Mapping[str, Integers]:
        rows = _row_bounds(self.shards)
        if not self.shard_items:
            return {self.locations_name: rows * 8 * (2 + self.field.num_variable)}
        items = bounds_of(self.shard_items)
        index = rows * 8 * self._index_width
        return {self.index_name: index, self.rows_name: items * self.field.item_bytes}

    @property
    @override
    def shard_bytes(self) -> Integers:
        return np.diff(self.bounds[self.rows_name]) if self.shard_items else super().shard_bytes

    @override
    def entries_before(self, shard: int) -> Sequence[tuple[str, int, bytes]]:
        # A row starts where the one before it stops, which may be of another shard.
        if not (start_row := int(self.shards.starts[shard])):
            return ()
        stop = np.int64(sum(self.shard_items[:shard]))
        return [(self.index_name, (start_row - 1) * 8 * self._index_width, stop.tobytes())]

    def write(self, files: OpenFiles, rows: range | Integers, values: Values) -> None:
        """Append rows in any order to the file of this writer, and write their locations.

        If a row is written twice, the last one counts.
        """
        if not len(rows):
            return
        assert values.sizes is not None
        items = values.data.detach().cpu().contiguous()
        # Without items, or with one, any stride counts as contiguous.
        data = items.as_strided((items.numel(),), (1,)).view(torch.uint8).numpy()
        _check_sizes(self.field, values.sizes)
        file = files.open(self.writer_file(files.writer_id), os.O_CREAT)
        # Append: the file may end with an incomplete row.
        start = os.fstat(file).st_size
        write_all(file, data.data, start)
        num_bytes = items_per_row(values.sizes) * self.field.item_bytes
        locations = np.empty((len(rows), 2 + self.field.num_variable), np.int64)
        locations[:, 0] = files.writer_id
        locations[:, 1] = start + starts_of(num_bytes)
        locations[:, 2:] = values.sizes
        file_rows = self.shards.file_rows(np.asarray(rows))
        write_rows(files.open(self.locations_name), file_rows, locations.view(np.uint8))

    def finish(self, directory: Path) -> "VariableColumn":
        """Concatenate the rows once all are written. Repeat it after a kill."""
        row_bounds = _row_bounds(self.shards)
        item_bounds = np.zeros(len(row_bounds), np.int64)
        num_items = num_bytes = 0
        with closing(OpenFiles(directory)) as files:
            for start, locations in self._read_locations(files):
                index = compute_index(locations[:, 2:])
                index[:, 0] += num_items
                is_here = (row_bounds > start) & (row_bounds <= start + len(locations))
                item_bounds[is_here] = index[row_bounds[is_here] - start - 1, 0]
                num_items = int(index[-1, 0])
                file = files.open(self.index_name, os.O_CREAT)
                write_all(file, leaf_bytes(index).data, start * 8 * self._index_width)
                for gathered in self.gather_rows(directory, locations):
                    write_all(files.open(self.rows_name, os.O_CREAT), gathered.data, num_bytes)
                    num_bytes += len(gathered)
            if num_bytes:
                os.truncate(files.open(self.rows_name), num_bytes)
            files.sync()
        return replace(self, shard_items=tuple(np.diff(item_bounds).tolist()))

    def _read_locations(self, files: OpenFiles) -> Iterator[tuple[int, Integers]]:
        """Yield the locations of blocks of rows, and the first row of each, in file order."""
        width = 2 + self.field.num_variable
        file = files.open(self.locations_name)
        for start in range(0, self.shards.num_rows, LOCATED_ROWS):
            count = min(LOCATED_ROWS, self.shards.num_rows - start)
            data = read_exactly(file, start * 8 * width, count * 8 * width)
            yield start, data.view(np.int64).reshape(count, width)

    def gather_rows(self, directory: Path, locations: Integers) -> Iterator[NDArray[np.uint8]]:
        """Read rows from the files of all writers, and yield their bytes, concatenated."""
        files: dict[int, NDArray[np.uint8]] = {}
        num_bytes = items_per_row(locations[:, 2:]) * self.field.item_bytes
        # Rows are gathered together if they start in the same block of the output.
        blocks = starts_of(num_bytes) // _GATHER_BYTES
        for rows in np.split(np.arange(len(blocks)), np.flatnonzero(np.diff(blocks)) + 1):
            writer_ids, offsets = locations[rows, :2].T
            lengths = num_bytes[rows]
            starts = starts_of(lengths)
            gathered = np.empty(int(lengths.sum()), np.uint8)
            for writer_id in np.unique(writer_ids[lengths > 0]).tolist():
                if writer_id not in files:
                    path = directory / self.writer_file(writer_id)
                    files[writer_id] = np.memmap(path, np.uint8, "r")
                is_own = writer_ids == writer_id
                segments = starts[is_own], lengths[is_own]
                copy_segments(files[writer_id], offsets[is_own], gathered, *segments)
            if len(gathered):
                yield gathered

    def open(self, directory: Path) -> IndexedItems:
        """Open the column for reading."""
        assert self.shard_items
        num_rows = self.shards.num_rows
        index = map_rows(directory / self.index_name, torch.int64, (num_rows, self._index_width))
        shape = (sum(self.shard_items), *self.field.item_shape)
        if shape[0]:
            items = map_rows(directory / self.rows_name, self.field.dtype, shape)
        else:
            items = torch.empty(shape, dtype=self.field.dtype, device="cpu")
        return IndexedItems(self.field, self.shards.file_rows, items, index.numpy())


Column = FixedColumn | VariableColumn


def _row_bounds(shards: Shards) -> Integers:
    """Return the rows at which shards start, and the number of rows, int64 of shape (C + 1,)."""
    return np.append(shards.starts, shards.num_rows)


#: The items of each shard of a column whose rows differ in length, as a manifest has them.
ShardItems = list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_FILE_BYTES)]]


def shard_items(columns: Sequence[Column]) -> dict[str, ShardItems]:
    """Return the items of each shard, by field name, for the manifest."""
    return {
        column.field.name: list(column.shard_items or (0,) * column.shards.num_shards)
        for column in columns
        if isinstance(column, VariableColumn)
    }


def _check_sizes(field: Field, sizes: Integers) -> None:
    """Check that rows without items can be read again."""
    if field.num_variable > 1:
        is_empty = items_per_row(sizes) == 0
        empty = np.flatnonzero(is_empty & (sizes.max(axis=1, initial=0) > MAX_EMPTY_SIZE))
        if len(empty):
            raise SchemaError(
                f"field {field.name!r}: a row of shape {tuple(sizes[empty[0]].tolist())} has no"
                f" values, and a size of more than {MAX_EMPTY_SIZE}: return such rows in a"
                " shape of zeros"
            )
