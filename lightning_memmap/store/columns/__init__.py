"""Columns: how each field of a store is kept in files.

A column decides which files a field has, how rows are written to them, where they lie, and how
they are read again. Nothing else in a store knows it. A new kind of column is a class like
`fixed.FixedColumn`, and its line in `_KINDS`; the kind of each field is decided when a store is
built, and recorded in its manifest.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.schema import Field, Schema
from lightning_memmap.store.columns.fixed import FixedColumn
from lightning_memmap.store.files import OpenFiles


class Block(Protocol):
    """Memory for consecutive rows of one field, which are written together."""

    def put(self, index: int, leaf: Tensor | np.ndarray) -> None:
        """Copy a row into the block.

        Args:
            index: Which row of the block.
            leaf: The row, of the field's dtype and shape, on the CPU.
        """

    def write(self, files: OpenFiles, first: int, num_rows: int) -> None:
        """Write the rows of the block. When this returns, a kill of the process costs none of them,
        once the column's files have been brought to the disk.

        Args:
            files: The files of the store that grows.
            first: The dataset row that row 0 of the block is.
            num_rows: Rows, from row 0 of the block on.
        """


class OpenColumn(Protocol):
    """The rows of one field in a store that is open."""

    @property
    def tensor(self) -> Tensor:
        """All rows as one mapped tensor of shape (num_rows, *field shape), in the order of
        `Shards.locate`.

        Raises:
            StoreError: The rows of this kind of column do not lie in one tensor.
        """

    def row(self, row: int) -> Tensor:
        """A copy of one row, of the field's shape."""

    def fetch(self, rows: Integers) -> Tensor:
        """Copy rows into one batch.

        Args:
            rows: Rows in dataset order, int64 of shape (B,).

        Returns:
            A tensor of shape (B, *field shape) on the CPU.
        """


class Column(Protocol):
    """How one field of one store is kept in files: a frozen value that holds nothing open.

    A column is made twice: by ``grow`` when a build begins, and by ``finish`` from what the build
    has written. Where rows have one size the two are equal. A column whose rows have sizes of their
    own cannot know where a row will lie while others are still being written: its blocks write
    what they have into files of their own, whose names end in `files.TEMPORARY`, and a
    fixed-size index of them; ``finish`` joins them.

    File names begin with the field's name and a dot, and have up to seven more characters.
    """

    #: The name of this kind of column in a manifest.
    kind: ClassVar[str]

    @property
    def field(self) -> Field:
        """The field."""

    @property
    def shards(self) -> Shards:
        """The rows of the store, and the shards that they are dealt to."""

    @property
    def file_bytes(self) -> Mapping[str, int]:
        """The size of each file by its name. A file without a byte is not there."""

    @classmethod
    def takes(cls, field: Field) -> bool:
        """Whether new stores keep a field in this way."""

    @classmethod
    def grow(cls, field: Field, shards: Shards) -> "Column":
        """The column of a store of which no row is written yet.

        Raises:
            ValueError: No file can hold so many rows.
        """

    @classmethod
    def from_json(cls, field: Field, shards: Shards, entry: Mapping[str, Any]) -> "Column":
        """The column of a store that is there, from an entry of a manifest that nobody has checked.

        Raises:
            ValueError: There can be no such column.
        """

    def to_json(self) -> dict[str, Any]:
        """What a manifest must say of this column, beside its kind."""

    def num_bytes(self, rows: range | Integers) -> int:
        """Bytes of some rows. Where a column does not know the size of each row, it rounds up.

        Args:
            rows: Rows in dataset order.
        """

    def shard_ranges(self) -> Sequence[Sequence[tuple[str, int, int]]]:
        """The bytes of each shard, for its checksum: pieces of files as their name, their first
        byte and one past their last byte. All pieces together are all bytes of all files."""

    def block(self, max_rows: int) -> Block:
        """Memory for up to ``max_rows`` rows, for one process."""

    def write(self, files: OpenFiles, rows: Integers, values: Tensor) -> None:
        """Write rows in any order. Several processes may do this at once.

        Args:
            files: The files of the store that grows.
            rows: Which rows, int64 of shape (B,).
            values: A tensor of shape (B, *field shape), on any device.
        """

    def finish(self, directory: Path) -> "Column":
        """Finish the files of a build once all rows are written, and bring to the disk what this
        writes. It may be done again after a kill.

        Returns:
            The column as the manifest is to record it.
        """

    def read(self, directory: Path, row: int) -> NDArray[np.uint8]:
        """The bytes of one row, read from the files rather than through a mapping, in which an
        error of the disk would end the process."""

    def open(self, directory: Path) -> OpenColumn:
        """Open the column for reading. The sizes of its files have been checked.

        Raises:
            StoreError: A file cannot be mapped.
        """


#: A field has the first kind of column that takes it.
_KINDS: list[type[Column]] = [FixedColumn]


@contextmanager
def registered(kind: type[Column]) -> Iterator[None]:
    """Let stores have another kind of column, before all others, within this context."""
    _KINDS.insert(0, kind)
    try:
        yield
    finally:
        _KINDS.remove(kind)


def grow_columns(schema: Schema, shards: Shards) -> tuple[Column, ...]:
    """The columns of a store that is to be built, one for each field.

    Raises:
        ValueError: No file can hold so many rows.
    """
    kinds = (next(kind for kind in _KINDS if kind.takes(field)) for field in schema.fields)
    return tuple(kind.grow(field, shards) for kind, field in zip(kinds, schema.fields, strict=True))


def columns_to_json(columns: Sequence[Column]) -> dict[str, dict[str, Any]]:
    """The entries of a manifest, by field name, for the columns that are not of the usual kind."""
    return {
        column.field.name: {"kind": column.kind, **column.to_json()}
        for column in columns
        if column.kind != FixedColumn.kind
    }


def columns_from_json(schema: Schema, shards: Shards, entries: Any) -> tuple[Column, ...]:
    """The columns of a store that is there, one for each field.

    Args:
        schema: The fields.
        shards: The rows and shards of the store.
        entries: Entries of a manifest that nobody has checked, by field name.

    Raises:
        ValueError: An entry is of no field, of an unknown kind, or of a column that cannot be.
    """
    names = {field.name for field in schema.fields}
    if not isinstance(entries, dict) or not entries.keys() <= names:
        raise ValueError("its columns are not those of its fields")
    kinds = {kind.kind: kind for kind in _KINDS}
    columns = []
    for field in schema.fields:
        entry = entries.get(field.name, {"kind": FixedColumn.kind})
        name = entry.get("kind") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(f"field {field.name!r} is kept in a way that this version cannot read")
        columns.append(kinds[name].from_json(field, shards, entry))
    return tuple(columns)
