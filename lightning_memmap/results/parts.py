"""Parts: the values that one process writes during an epoch, by position in its order.

Process 1 of 2 serves the positions 1, 3, 5 and so on, which are the slots 0, 1, 2 of its part::

    position   0   1   2   3   4   5
    rank 0     0       1       2            slots of part 0
    rank 1         0       1       2        slots of part 1

A packed position has a slot for each of its documents, one after the other.

Each field has a file of slots, and so have the marks, which are 1 in slots that have values.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.integers import bounds_of, num_strided, strided
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.fields import Field, dtype_name
from lightning_memmap.schema.validation import read_dtype
from lightning_memmap.store.files import open_plain, read_plain, write_all

HEADER = "part.json"
_MARKS = "marks"
_MAX_HEADER_BYTES = 2**20
_Count = Annotated[int, Meta(ge=0)]


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a part.

    Args:
        run: The run that wrote it.
        order: A digest of the identity of the order.
        order_epoch: The epoch of the order.
        rank: The first position of slot 0: the data-parallel rank of the process.
        size: The step between positions of slots: the number of data-parallel processes.
        start: The first position that the process served.
        stop: Positions from here on do not count, because the run was resumed from here.
        fields: The fields.
    """

    run: str
    order: str
    order_epoch: _Count
    rank: _Count
    size: Annotated[int, Meta(ge=1)]
    start: _Count
    stop: _Count
    fields: tuple[Field, ...]

    def write(self, directory: Path) -> None:
        """Write the header in one step, also in place of an older one."""
        temporary = directory / (HEADER + ".tmp")
        temporary.write_bytes(msgspec.json.encode(self, enc_hook=dtype_name))
        temporary.replace(directory / HEADER)

    @classmethod
    def read(cls, directory: Path) -> "PartHeader":
        """Read and check the header of a part."""
        try:
            data = read_plain(directory / HEADER, _MAX_HEADER_BYTES)
            return msgspec.json.decode(data, type=cls, dec_hook=read_dtype)
        except (OSError, ValueError) as error:
            raise StoreError(f"{directory / HEADER} cannot be read: {error}") from error


class RowSlots:
    """Which slots the rows of positions have: the rows of one process, in the order of an epoch."""

    def __init__(self, order: Sampler, epoch: int, rank: int, size: int) -> None:
        self.order = order
        self.epoch = epoch
        self.rank = rank
        self.size = size
        #: The first slot of each position of the process, if positions have several rows.
        self._starts: NDArray[np.int64] | None = None
        if isinstance(order, PackedSampler):
            positions = np.arange(rank, order.num_positions, size)
            counts = order.num_rows_at(epoch, positions)
            self._starts = bounds_of(counts)

    def slot(self, position: int) -> int:
        """Count the rows of the process before a position."""
        number = num_strided(position, self.rank, self.size)
        return number if self._starts is None else int(self._starts[number])

    def batch_shape(self, num_positions: int) -> tuple[int, ...]:
        """Return the first dimensions of values: the positions, and if packed, max_documents."""
        if isinstance(self.order, PackedSampler):
            return num_positions, self.order.max_documents
        return (num_positions,)

    def unpack(self, values: Tensor, positions: range) -> Tensor:
        """Return one value for each slot of some positions.

        Args:
            values: On the CPU, of the shape `batch_shape` and further dimensions.
            positions: The positions of the values.
        """
        if not isinstance(self.order, PackedSampler):
            return values
        index = np.arange(positions.start, positions.stop, positions.step)
        counts = self.order.num_rows_at(self.epoch, index)
        is_document = np.arange(self.order.max_documents) < counts[:, None]
        return values[torch.from_numpy(is_document)]

    def positions_and_rows(
        self, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the position and the dataset row of each slot between two positions."""
        served = strided(start, stop, self.rank, self.size)
        positions = np.arange(served.start, served.stop, served.step)
        rows = self.order.dataset_rows(self.epoch, served) if served else positions
        if self._starts is not None and served:
            positions = np.repeat(positions, self.order.num_rows_at(self.epoch, positions))
        return positions, rows


class Written(NamedTuple):
    """Rows that have values, and these values as bytes."""

    #: int64 of shape (n,), in ascending order.
    positions: NDArray[np.int64]
    #: Rows of the dataset, int64 of shape (n,).
    rows: NDArray[np.int64]
    #: For each field, one item of raw bytes per row, of shape (n,).
    values: list[NDArray[np.void]]


def item_type(field: Field) -> np.dtype[np.void]:
    """Return the type of one row of a field as raw bytes."""
    return np.dtype((np.void, field.row_bytes))


class PartWriter:
    """Writes the values of one process. Only whole slots are marked."""

    def __init__(self, directory: Path, header: PartHeader) -> None:
        self.header = header
        self._files: dict[str, int] = {}
        directory.mkdir(parents=True)
        for name in [*map(str, range(len(header.fields))), _MARKS]:
            self._files[name] = open_plain(directory / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        header.write(directory)

    def write(self, slot: int, num_slots: int, values: Sequence[Tensor]) -> None:
        """Write consecutive slots.

        Args:
            slot: The first slot.
            num_slots: The number of slots.
            values: For each field a tensor of shape (num_slots, *field shape) on the CPU.
        """
        for index, (field, tensor) in enumerate(zip(self.header.fields, values, strict=True)):
            # numpy has no bfloat16. A view as bytes needs a dimension.
            data = tensor.to(field.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
            write_all(self._files[str(index)], data, slot * field.row_bytes)
        # The marks last: a slot with one has all its values.
        write_all(self._files[_MARKS], memoryview(b"\1" * num_slots), slot)

    def sync(self) -> None:
        """Bring the values to the disk."""
        for descriptor in self._files.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the files. A second call does nothing."""
        while self._files:
            os.close(self._files.popitem()[1])


def read_part(
    directory: Path, header: PartHeader, slots: RowSlots, start: int, stop: int
) -> Written:
    """Read the values of a part at positions in ``[start, stop)``."""
    stop = min(stop, header.stop)
    first = slots.slot(start)
    last = max(first, slots.slot(stop))
    marks = _read_items(directory / _MARKS, np.dtype(np.uint8), first, last)
    marked = np.flatnonzero(marks)
    values = []
    for index, field in enumerate(header.fields):
        items = _read_items(directory / str(index), item_type(field), first, last)
        if len(marked) and marked[-1] >= len(items):
            raise StoreError(f"{directory / str(index)} is truncated; remove {directory}")
        values.append(items[marked])
    positions, rows = slots.positions_and_rows(start, stop)
    return Written(positions[marked], rows[marked], values)


def _read_items(
    path: Path, dtype: np.dtype[np.uint8] | np.dtype[np.void], first: int, last: int
) -> NDArray[np.void]:
    """Read the items ``[first, last)`` of a file, or those of them that it has."""
    descriptor = open_plain(path)
    with open(descriptor, "rb") as file:
        file.seek(first * dtype.itemsize)
        data = file.read((last - first) * dtype.itemsize)
    return np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)


def remove_part(directory: Path) -> None:
    """Remove a part, its header first: without one, a directory is not a part."""
    (directory / HEADER).unlink(missing_ok=True)
    shutil.rmtree(directory)


def limit_part(directory: Path, position: int) -> None:
    """Keep the values of a part at positions before this one only."""
    header = PartHeader.read(directory)
    if header.start >= position:
        remove_part(directory)
    elif header.stop > position:
        msgspec.structs.replace(header, stop=position).write(directory)
