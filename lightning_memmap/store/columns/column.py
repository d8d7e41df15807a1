"""What a kind of column must be able to do; see `Column`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field
from lightning_memmap.schema.values import Values
from lightning_memmap.store.files import OpenFiles

#: A piece of a file: its name, the first byte, and one past the last byte.
FileRange = tuple[str, int, int]


class OpenColumn(Protocol):
    """The rows of one field of an open store."""

    @property
    def tensor(self) -> Tensor:
        """All rows as one mapped tensor of shape (num_rows, *field shape), on the CPU.

        The rows are in the order of `Shards.locate`: shard 0's rows first, then shard 1's, and so
        on.

        Raises:
            StoreError: The rows of this kind of column do not lie in one tensor.
        """

    def row(self, row: int) -> Tensor:
        """Copy one row.

        Args:
            row: The row in dataset order, in ``[0, num_rows)``. The column does not check it.

        Returns:
            A tensor of the field's dtype and shape on the CPU.
        """

    def fetch(self, rows: Integers) -> Tensor | list[Tensor]:
        """Copy rows into one batch.

        Args:
            rows: Rows in dataset order, int64 of shape (B,).

        Returns:
            A tensor of shape (B, *field shape) on the CPU; where rows differ in shape, a tensor for
            each.
        """


@dataclass(frozen=True)
class Column(ABC):
    """How one field of one store is kept in files: a frozen value that keeps nothing open.

    A column is made when a build begins, and `finish` makes the one that the manifest records.
    Where all rows have one size, the two are equal. Otherwise the location of a row is not known
    while other rows are still being written: each process then writes files of its own, whose names
    end in `files.TEMPORARY`, and records in an index of fixed size where each row is; `finish`
    joins these files.

    File names begin with the field's name and a dot. A column that needs more than seven characters
    for the rest checks that they fit.

    Args:
        field: The field.
        shards: The rows of the store, and the shards that they are divided into.

    Raises:
        ValueError: No such column can exist.
    """

    #: The name of this kind of column in a manifest.
    kind: ClassVar[str]
    field: Field
    shards: Shards

    @property
    @abstractmethod
    def file_bytes(self) -> Mapping[str, int]:
        """The size of each file by its name. There is no file for a field without bytes."""

    @property
    def rows_name(self) -> str | None:
        """The file in which rows lie as they are in memory, or the items of rows that differ in
        length, one after the other. By default None: only the column itself can read its rows."""
        return None

    @classmethod
    @abstractmethod
    def takes(cls, field: Field) -> bool:
        """Whether new stores keep a field in this kind of column.

        Args:
            field: A field of the schema.

        Returns:
            True if it is to be kept so.
        """

    @classmethod
    def from_json(cls, field: Field, shards: Shards, entry: Mapping[str, Any]) -> Self:
        """Make the column of an existing store from its manifest entry.

        Args:
            field: The field.
            shards: The rows of the store, and the shards that they are divided into.
            entry: The entry, which has not been checked except for its kind.

        Returns:
            The column; no file has been opened.

        Raises:
            ValueError: No such column can exist.
        """
        return cls(field, shards)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values what the manifest needs beside the kind: by default, nothing.

        Returns:
            The values by key, which `from_json` finds in the entry.
        """
        return {}

    @abstractmethod
    def num_bytes(self, rows: range | Integers) -> int:
        """Return the bytes that rows take where they are resident.

        A column that does not know the size of each row estimates it.

        Args:
            rows: Rows in dataset order.

        Returns:
            Bytes of all these rows together.
        """

    @abstractmethod
    def shard_ranges(self) -> Sequence[Sequence[FileRange]]:
        """Return where each shard's bytes are, for its checksum.

        Returns:
            For each shard, the pieces of files that it consists of, in order. The pieces of all
            shards cover every byte of every file.
        """

    def edge_bytes(self, shard: int) -> Sequence[tuple[str, int, bytes]]:
        """Return bytes outside of a shard that its rows are found by, as the manifest tells them.

        Where only some shards of a store are there, these bytes are there with each of them.

        Args:
            shard: The shard.

        Returns:
            Name of the file, the first byte, and the bytes; by default nothing.
        """
        return ()

    @abstractmethod
    def write(self, files: OpenFiles, rows: range | Integers, values: Values) -> None:
        """Write rows in any order. Several processes may do this at once, each with other rows.

        When this returns, the rows survive a kill of the process. Once ``file_bytes`` and all
        temporary files have been brought to the disk, they survive a power cut.

        Args:
            files: The files of the store that is being built.
            rows: The rows in dataset order, a range of step 1 or int64 of shape (B,).
            values: The rows, on any device.

        Raises:
            OSError: The files cannot be written.
        """

    def finish(self, directory: Path) -> "Column":
        """Finish the files of a build once all rows are written. By default there is nothing to do.

        What this writes is brought to the disk. After a kill it is done again.

        Args:
            directory: The directory in which the store is being built.

        Returns:
            The column as the manifest is to record it.
        """
        return self

    @abstractmethod
    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        """Read the bytes of one row.

        They are read from the files rather than through a mapping, in which a disk error would end
        the process.

        Args:
            directory: Directory of the files.
            row: The row in dataset order.

        Returns:
            uint8 of shape (bytes of the row,).
        """

    @abstractmethod
    def open(self, directory: Path) -> OpenColumn:
        """Open the column for reading.

        Args:
            directory: Directory of the store. The sizes of its files have been checked.

        Returns:
            The open column, which reads rows and never writes.

        Raises:
            StoreError: A file cannot be mapped.
        """
