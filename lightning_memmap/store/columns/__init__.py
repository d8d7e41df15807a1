"""Columns: how each field of a store is kept in files.

A column decides which files a field has, how rows are written to them, where they lie, and how
they are read again. The kind of each field is decided when a store is
built, and recorded in its manifest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_memmap.sampling import Shards
from lightning_memmap.schema import Field, Schema
from lightning_memmap.store.columns.column import (
    Column,
    FileRange,
    OpenColumn,
)
from lightning_memmap.store.columns.fixed import FixedColumn
from lightning_memmap.store.columns.variable import ItemRows, VariableColumn

__all__ = [
    "Column",
    "FileRange",
    "ItemRows",
    "OpenColumn",
    "VariableColumn",
    "columns_from_json",
    "columns_to_json",
    "grow_columns",
]

#: All kinds of columns. A field of a new store gets the first one that takes it.
_KINDS: list[type[Column]] = [VariableColumn, FixedColumn]


def grow_columns(schema: Schema, shards: Shards) -> tuple[Column, ...]:
    """Make the columns of a store that has no rows yet, one for each field.

    Args:
        schema: The fields.
        shards: The rows of the store, and the shards that they are divided into.

    Returns:
        The columns, in the order of the fields.

    Raises:
        ValueError: The files would be larger than any file can be.
    """

    def grow(field: Field) -> Column:
        return next(kind for kind in _KINDS if kind.takes(field))(field, shards)

    grown = {field.name: grow(field) for field in schema.fields}
    for name, leader in schema.same_lengths.items():
        column = grown[name]
        if isinstance(column, VariableColumn) and isinstance(grown[leader], VariableColumn):
            grown[name] = replace(column, index_of=leader)
    return tuple(grown.values())


def columns_to_json(columns: Sequence[Column]) -> dict[str, Any]:
    """Convert columns to what the manifest must say of them.

    Args:
        columns: The finished columns of a store.

    Returns:
        Entries by field name under the key ``columns``; nothing where all columns are of the usual
        kind.
    """
    entries = {
        column.field.name: {"kind": column.kind, **column.to_json()}
        for column in columns
        if column.kind != FixedColumn.kind
    }
    return {"columns": entries} if entries else {}


def columns_from_json(schema: Schema, shards: Shards, entries: Any) -> tuple[Column, ...]:
    """Make the columns of an existing store from its manifest, one for each field.

    Args:
        schema: The fields.
        shards: The rows of the store, and the shards that they are divided into.
        entries: The manifest's entries by field name, which have not been checked. A field without
            an entry has a column of the usual kind.

    Returns:
        The columns, in the order of the fields.

    Raises:
        ValueError: An entry names no field, has an unknown kind, or describes a column that cannot
            exist.
    """
    if not isinstance(entries, dict) or not entries.keys() <= {f.name for f in schema.fields}:
        raise ValueError("its columns are not those of its fields")
    kinds = {kind.kind: kind for kind in _KINDS}
    columns = []
    for field in schema.fields:
        entry = entries.get(field.name, {"kind": FixedColumn.kind})
        name = entry.get("kind") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(f"field {field.name!r} is kept in a way that this version cannot read")
        columns.append(kinds[name].from_json(field, shards, entry))
    _check_indices(columns)
    return tuple(columns)


def _check_indices(columns: Sequence[Column]) -> None:
    """Check that an index that several columns have is that of one of them, and fits all.

    Raises:
        ValueError: It does not.
    """
    own = {
        column.field.name: column
        for column in columns
        if isinstance(column, VariableColumn) and not column.index_of
    }
    for column in columns:
        if isinstance(column, VariableColumn) and column.index_of:
            leader = own.get(column.index_of)
            fits = leader is not None and leader.field.num_variable == 1
            if not fits or leader is None or leader.shard_items != column.shard_items:
                raise ValueError(
                    f"field {column.field.name!r} cannot have the index of {column.index_of!r}"
                )
