"""The column of a field whose rows all have one shape: one file, each row at a multiple of its
size, shard after shard."""

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
from tensordict import MemoryMappedTensor
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field
from lightning_memmap.store.files import OpenFiles, write_all

_MAX_FILE_BYTES = 2**62


@dataclass(frozen=True)
class FixedColumn:
    """The column of a field whose rows all have one shape; see `Column`.

    Args:
        field: The field.
        shards: The rows of the store, and the shards that they are dealt to.

    Raises:
        ValueError: No file can hold so many rows.
    """

    kind: ClassVar[str] = "fixed"
    field: Field
    shards: Shards

    def __post_init__(self) -> None:
        # Empty sizes count as one: torch multiplies them in this way for the strides.
        row_bytes = math.prod(max(1, size) for size in self.field.shape) * self.field.dtype.itemsize
        if self.shards.num_rows * row_bytes > _MAX_FILE_BYTES:
            raise ValueError(f"{self.shards.num_rows} rows of {self.field} fit into no file")

    @property
    def file_name(self) -> str:
        """The name of its file, which is not there for a field without bytes. Names of fields hold
        no separators: see `schema`."""
        return f"{self.field.name}.memmap"

    @property
    def file_bytes(self) -> Mapping[str, int]:
        """The size of its file by its name."""
        num_bytes = self.shards.num_rows * self.field.row_bytes
        return {self.file_name: num_bytes} if num_bytes else {}

    @classmethod
    def takes(cls, field: Field) -> bool:
        """Every field that no other kind of column takes."""
        return True

    @classmethod
    def grow(cls, field: Field, shards: Shards) -> "FixedColumn":
        """The column of a store of which no row is written yet."""
        return cls(field, shards)

    @classmethod
    def from_json(cls, field: Field, shards: Shards, entry: Mapping[str, Any]) -> "FixedColumn":
        """The column of a store that is there."""
        return cls(field, shards)

    def to_json(self) -> dict[str, Any]:
        """Nothing: field, rows and shards say it all."""
        return {}

    def num_bytes(self, rows: range | Integers) -> int:
        """Bytes of some rows, each of the same size."""
        return len(rows) * self.field.row_bytes

    def shard_ranges(self) -> list[list[tuple[str, int, int]]]:
        """The bytes of each shard: one piece of the file."""
        size = self.field.row_bytes
        if not size:
            return [[] for _ in range(self.shards.num_shards)]
        bounds = (*self.shards.starts.tolist(), self.shards.num_rows)
        return [[(self.file_name, first * size, end * size)] for first, end in pairwise(bounds)]

    def block(self, max_rows: int) -> "_Block":
        """Memory for up to ``max_rows`` rows."""
        return _Block(self, max_rows)

    def write(self, files: OpenFiles, rows: Integers, values: Tensor) -> None:
        """Write rows in any order, with one call for all that lie one after the other."""
        size = self.field.row_bytes
        if not size or not len(rows):
            return
        locations = self.shards.locate(rows)
        order = np.argsort(locations)
        locations = locations[order]
        flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        data = flat.reshape(len(rows), size).take(order, axis=0).reshape(-1).data
        file = files.open(self.file_name)
        bounds = [0, *(np.flatnonzero(np.diff(locations) != 1) + 1).tolist(), len(rows)]
        for first, end in pairwise(bounds):
            write_all(file, data[first * size : end * size], int(locations[first]) * size)

    def finish(self, directory: Path) -> "FixedColumn":
        """Nothing is left to do: each row has been written where it lies."""
        return self

    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        """The bytes of one row."""
        if not (size := self.field.row_bytes):
            return np.empty(0, np.uint8)
        location = int(self.shards.locate(np.array(row)))
        with open(directory / self.file_name, "rb") as file:
            return np.frombuffer(os.pread(file.fileno(), size, location * size), np.uint8)

    def open(self, directory: Path) -> "_Open":
        """Map the file."""
        shape, dtype = (self.shards.num_rows, *self.field.shape), self.field.dtype
        if not self.file_bytes:
            return _Open(self.shards, torch.empty(shape, dtype=dtype, device="cpu"))
        # Mode "r" maps copy-on-write: nothing that a process does reaches the file.
        path = str(directory / self.file_name)
        try:
            mapped: Tensor = MemoryMappedTensor.from_filename(path, dtype, shape, mode="r")
        except (OSError, RuntimeError) as error:
            raise StoreError(
                f"{path} cannot be mapped: {error}: see that you have the right to read it, that"
                " its disk works, and that the process may map so much (`ulimit -v`) and so many"
                " files (`sysctl vm.max_map_count`)"
            ) from error
        return _Open(self.shards, mapped)


class _Block:
    """Memory for consecutive rows; see `Block`."""

    def __init__(self, column: FixedColumn, max_rows: int) -> None:
        self._column = column
        shape, dtype = (max_rows, *column.field.shape), column.field.dtype
        self._rows = torch.empty(shape, dtype=dtype, device="cpu")

    def put(self, index: int, leaf: Tensor | np.ndarray) -> None:
        """Copy a row into the block."""
        if isinstance(leaf, Tensor):
            self._rows[index].copy_(leaf)
        else:
            self._rows.numpy()[index] = leaf

    def write(self, files: OpenFiles, first: int, num_rows: int) -> None:
        """Write rows from the start of the block."""
        self._column.write(files, np.arange(first, first + num_rows), self._rows[:num_rows])


@dataclass(frozen=True)
class _Open:
    """Mapped rows; see `OpenColumn`."""

    shards: Shards
    tensor: Tensor

    @cached_property
    def _starts(self) -> list[int]:
        return [int(start) for start in self.shards.starts]

    def row(self, row: int) -> Tensor:
        """A copy of one row."""
        num_shards = self.shards.num_shards
        copy: Tensor = self.tensor[self._starts[row % num_shards] + row // num_shards].clone()
        return copy

    def fetch(self, rows: Integers) -> Tensor:
        """Copy rows into one batch."""
        locations = torch.from_numpy(self.shards.locate(rows))
        return self.tensor.as_subclass(Tensor).index_select(0, locations)
