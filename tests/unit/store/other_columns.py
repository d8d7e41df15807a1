"""Two kinds of columns that the package does not have, each made without a change to it."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field
from lightning_memmap.schema.values import Values
from lightning_memmap.store.columns import Column, OpenColumn
from lightning_memmap.store.columns.fixed import FixedColumn
from lightning_memmap.store.files import OpenFiles, sync_path, write_all


def not_one_tensor(field: Field) -> StoreError:
    return StoreError(f"field {field.name!r} does not lie in one tensor")


@dataclass(frozen=True)
class Bits(FixedColumn):
    """Bools, eight to a byte: rows of one size, which are not the bytes of the samples."""

    kind: ClassVar[str] = "bits"

    @property
    def packed(self) -> FixedColumn:
        size = -(-int(np.prod(self.field.shape)) // 8)
        return FixedColumn(replace(self.field, dtype=torch.uint8, shape=(size,)), self.shards)

    @property
    def file_bytes(self) -> Mapping[str, int]:
        return self.packed.file_bytes

    @property
    def rows_name(self) -> None:
        return None

    @classmethod
    def takes(cls, field: Field) -> bool:
        return field.dtype == torch.bool

    def num_bytes(self, rows: range | Integers) -> int:
        return self.packed.num_bytes(rows)

    def shard_ranges(self) -> list[list[tuple[str, int, int]]]:
        return self.packed.shard_ranges()

    def write(self, files: OpenFiles, rows: Integers, values: Values) -> None:
        packed = np.packbits(values.data.numpy().reshape(len(rows), -1), axis=1)
        self.packed.write(files, rows, Values(torch.from_numpy(packed)))

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.unpackbits(packed, axis=-1, count=int(np.prod(self.field.shape)))

    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        return self.unpack(self.packed.read(directory, row))

    def open(self, directory: Path) -> Any:
        return OpenBits(self, self.packed.open(directory))


@dataclass(frozen=True)
class OpenBits:
    column: Bits
    packed: OpenColumn

    @property
    def tensor(self) -> Tensor:
        raise not_one_tensor(self.column.field)

    def row(self, row: int) -> Tensor:
        return self.fetch(np.array([row]))[0]

    def fetch(self, rows: Integers) -> Tensor:
        bits = self.column.unpack(self.packed.fetch(rows).numpy())
        return torch.from_numpy(bits).view(torch.bool).view(-1, *self.column.field.shape)


@dataclass(frozen=True)
class Compressed(Column):
    """Rows that are compressed one by one, so that each has a size of its own.

    While it grows, rows that are written together go to a piece, and an index says where each is:
    the first row of its piece, the offset in it, and the length. Pieces that a killed build
    has left are written anew with their rows. In the end the rows are joined, shard after shard.

    Args:
        field: The field.
        shards: Rows and shards.
        shard_bytes: Bytes of each shard; none while the column grows.
    """

    kind: ClassVar[str] = "compressed"
    shard_bytes: tuple[int, ...] = ()

    @property
    def index(self) -> str:
        return f"{self.field.name}.ix.tmp"

    @property
    def ends(self) -> str:
        return f"{self.field.name}.ends"

    @property
    def values(self) -> str:
        return f"{self.field.name}.values"

    def piece(self, first: int) -> str:
        return f"{self.field.name}.{first}.tmp"

    @property
    def file_bytes(self) -> Mapping[str, int]:
        num_rows = self.shards.num_rows
        if not self.shard_bytes:
            return {self.index: 24 * num_rows}
        return {self.ends: 8 * num_rows, self.values: sum(self.shard_bytes)}

    @classmethod
    def takes(cls, field: Field) -> bool:
        return field.dtype == torch.int64

    @classmethod
    def from_json(cls, field: Field, shards: Shards, entry: Mapping[str, Any]) -> "Compressed":
        sizes = entry.get("shard_bytes")
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise ValueError("its compressed shards have no sizes")
        if sizes and len(sizes) != shards.num_shards:
            raise ValueError("its compressed shards have not a size each")
        return cls(field, shards, tuple(sizes))

    def to_json(self) -> dict[str, Any]:
        return {"shard_bytes": list(self.shard_bytes)}

    def num_bytes(self, rows: range | Integers) -> int:
        for shard, size in enumerate(self.shard_bytes):
            if rows == range(shard, self.shards.num_rows, self.shards.num_shards):
                return size
        if rows == range(self.shards.num_rows) and self.shard_bytes:
            return sum(self.shard_bytes)
        return len(rows) * (self.field.row_bytes + 64)

    def shard_ranges(self) -> list[list[tuple[str, int, int]]]:
        ends = np.cumsum(self.shard_bytes).tolist()
        firsts = self.shards.starts.tolist()
        return [
            [(self.ends, 8 * first, 8 * (first + num_rows)), (self.values, end - size, end)]
            for first, num_rows, size, end in zip(
                firsts, self.shards.sizes.tolist(), self.shard_bytes, ends, strict=True
            )
        ]

    def write(self, files: OpenFiles, rows: Integers, values: Values) -> None:
        first = int(rows[0])
        data = [zlib.compress(value.numpy().tobytes()) for value in values.data]
        piece = files.open(self.piece(first), os.O_CREAT | os.O_TRUNC)
        write_all(piece, memoryview(b"".join(data)), 0)
        os.fsync(piece)
        offset = 0
        for location, row in zip(self.shards.locate(rows).tolist(), data, strict=True):
            entry = np.array([first, offset, len(row)]).tobytes()
            write_all(files.open(self.index), memoryview(entry), 24 * location)
            offset += len(row)

    def finish(self, directory: Path) -> "Compressed":
        index = np.fromfile(directory / self.index, np.int64).reshape(-1, 3)
        np.cumsum(index[:, 2]).tofile(directory / self.ends)
        with open(directory / self.values, "wb") as values:
            for first, offset, length in index.tolist():
                with open(directory / self.piece(first), "rb") as piece:
                    values.write(os.pread(piece.fileno(), length, offset))
        for name in (self.ends, self.values):
            sync_path(directory / name)
        bounds = (*self.shards.starts.tolist(), self.shards.num_rows)
        sizes = (int(index[first:end, 2].sum()) for first, end in pairwise(bounds))
        return replace(self, shard_bytes=tuple(sizes))

    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        location = int(self.shards.locate(np.array(row)))
        ends = np.fromfile(directory / self.ends, np.int64)
        start = int(ends[location - 1]) if location else 0
        with open(directory / self.values, "rb") as file:
            data = os.pread(file.fileno(), int(ends[location]) - start, start)
        return np.frombuffer(zlib.decompress(data), np.uint8)

    def open(self, directory: Path) -> "OpenCompressed":
        return OpenCompressed(self, directory)


@dataclass(frozen=True)
class OpenCompressed:
    column: Compressed
    directory: Path

    @property
    def tensor(self) -> Tensor:
        raise not_one_tensor(self.column.field)

    def row(self, row: int) -> Tensor:
        data = self.column.read(self.directory, row)
        return torch.from_numpy(data.copy()).view(torch.int64).view(self.column.field.shape)

    def fetch(self, rows: Integers) -> Tensor:
        return torch.stack([self.row(row) for row in rows.tolist()])
