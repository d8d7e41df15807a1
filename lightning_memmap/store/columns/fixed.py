"""The column of a field whose rows all have one shape.

It has one file, in which each row lies at a multiple of its size, shard after shard.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field
from lightning_memmap.schema.values import Values
from lightning_memmap.store.columns.column import Column, FileRange, OpenColumn
from lightning_memmap.store.files import (
    OpenFiles,
    open_plain,
    read_exactly,
    unreadable,
    write_all,
    write_rows,
)
from lightning_memmap.store.hashing import leaf_bytes

_MAX_FILE_BYTES = 2**62


@dataclass(frozen=True)
class FixedColumn(Column):
    """The column of a field whose rows all have one shape.

    Raises:
        ValueError: The rows would need a file of more than 2**62 bytes, or differ in shape.
    """

    kind: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        if self.field.num_variable:
            raise ValueError(f"the rows of field {self.field.name!r} differ in shape")
        # Empty sizes count as one: torch multiplies them in this way for the strides.
        row_bytes = (
            math.prod(max(1, size) for size in self.field.item_shape) * self.field.dtype.itemsize
        )
        if self.shards.num_rows * row_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"{self.shards.num_rows} rows of {self.field} fit into no file")

    @property
    def file_name(self) -> str:
        """The name of its file. Field names contain no path separators: see `schema.fields`."""
        return f"{self.field.name}.memmap"

    @property
    @override
    def rows_name(self) -> str | None:
        return self.file_name

    @property
    @override
    def file_bytes(self) -> Mapping[str, int]:
        num_bytes = self.shards.num_rows * self.field.row_bytes
        return {self.file_name: num_bytes} if num_bytes else {}

    @classmethod
    @override
    def takes(cls, field: Field) -> bool:
        return True

    @override
    def num_bytes(self, rows: range | Integers) -> int:
        return len(rows) * self.field.row_bytes

    @override
    def shard_ranges(self) -> list[list[FileRange]]:
        size = self.field.row_bytes
        if not size:
            return [[] for _ in range(self.shards.num_shards)]
        bounds = (*self.shards.starts.tolist(), self.shards.num_rows)
        return [[(self.file_name, first * size, end * size)] for first, end in pairwise(bounds)]

    @override
    def write(self, files: OpenFiles, rows: range | Integers, values: Values) -> None:
        size = self.field.row_bytes
        if not size or not len(rows):
            return
        file, data = files.open(self.file_name), leaf_bytes(values.data.detach().cpu())
        if isinstance(rows, range):
            # As numbers, small rows are copied faster than as bytes.
            kind = "u" if size in (1, 2, 4, 8) else "V"
            self._write_range(file, rows.start, data.view(f"{kind}{size}"))
        else:
            write_rows(file, self.shards.locate(rows), data.reshape(len(rows), size))

    def _write_range(self, file: int, first: int, data: NDArray[Any]) -> None:
        size, step = self.field.row_bytes, self.shards.num_shards
        # Memory that is new costs more than a copy into it.
        memory = np.empty(-(-len(data) // step), data.dtype)
        # Every `step`-th row is of the same shard, in which these rows follow one another.
        starts = self.shards.locate(np.arange(first, first + min(step, len(data))))
        for index, location in enumerate(starts.tolist()):
            part = data[index::step]
            if step > 1:
                memory[: len(part)] = part
                part = memory[: len(part)]
            write_all(file, part.view(np.uint8).data, location * size)

    @override
    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        if not (size := self.field.row_bytes):
            return np.empty(0, np.uint8)
        location = int(self.shards.locate(np.array(row)))
        with open(directory / self.file_name, "rb", buffering=0) as file:
            return read_exactly(file.fileno(), location * size, size)

    @override
    def open(self, directory: Path) -> OpenColumn:
        shape, dtype = (self.shards.num_rows, *self.field.item_shape), self.field.dtype
        if not self.file_bytes:
            return _Mapped(self.shards, torch.empty(shape, dtype=dtype, device="cpu"))
        return _Mapped(self.shards, map_rows(directory / self.file_name, dtype, shape))


def map_rows(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file as a tensor, by its descriptor: what was checked is what is mapped.

    Args:
        path: The file. A link is not followed.
        dtype: Dtype of the tensor.
        shape: Its shape.

    Returns:
        The tensor, on the CPU. What a process writes into it does not reach the file.

    Raises:
        FileNotFoundError: There is no file: the store was replaced, or the file removed.
        StoreError: It is no plain file of this size, or cannot be mapped.
    """
    count = math.prod(shape)
    try:
        file = open_plain(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        found = os.fstat(file).st_size
        if found != count * dtype.itemsize:
            raise StoreError(
                f"{path} has {found} bytes, expected {count * dtype.itemsize}: build the store"
                " again"
            )
        # Not shared: copy-on-write.
        mapped = torch.from_file(f"/proc/self/fd/{file}", shared=False, size=count, dtype=dtype)
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{path} cannot be mapped: {error}: see that you have the right to read it, that its"
            " disk works, and that the process may map that much (`ulimit -v`) and that many files"
            " (`sysctl vm.max_map_count`)"
        ) from error
    finally:
        os.close(file)
    return mapped.view(shape)


@dataclass(frozen=True)
class _Mapped:
    """The rows of a file that is mapped."""

    shards: Shards
    tensor: Tensor

    @cached_property
    def _starts(self) -> list[int]:
        return [int(start) for start in self.shards.starts]

    def row(self, row: int) -> Tensor:
        """A copy of one row."""
        num_shards = self.shards.num_shards
        return self.tensor[self._starts[row % num_shards] + row // num_shards].clone()

    def fetch(self, rows: Integers) -> Tensor:
        """Copy rows into one batch."""
        return take_rows(self.tensor, self.shards.locate(rows))


#: torch copies no rows of these, but of integers of their size.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def take_rows(rows: Tensor, locations: Integers) -> Tensor:
    """Copy rows of a tensor.

    Args:
        rows: Of any dtype, on the CPU.
        locations: int64 of shape (B,).

    Returns:
        Of shape (B, *row shape).
    """
    numbers = rows.view(_SIGNED.get(rows.dtype, rows.dtype))
    return numbers.index_select(0, torch.from_numpy(locations)).view(rows.dtype)
