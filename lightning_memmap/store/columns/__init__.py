"""Columns: how each field of a store is kept in files.

A column decides which files a field has, how rows are written to them, where they lie, and how
they are read again. Nothing else in a store knows it. A new kind of column is a class like
`fixed.FixedColumn`, and its line in `_KINDS`. The kind of each field is decided when a store is
built, and recorded in its manifest.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_memmap.sampling import Shards
from lightning_memmap.schema import Field, Schema
from lightning_memmap.store.columns.column import Block, Column, FileRange, OpenColumn
from lightning_memmap.store.columns.fixed import FixedColumn

__all__ = [
    "Block",
    "Column",
    "FileRange",
    "OpenColumn",
    "columns_from_json",
    "columns_to_json",
    "grow_columns",
    "registered",
]

#: A field of a new store has the first kind of column that takes it.
_KINDS: list[type[Column]] = [FixedColumn]


@contextmanager
def registered(kind: type[Column]) -> Iterator[None]:
    """Let stores have another kind of column, preferred to all others, within this context."""
    _KINDS.insert(0, kind)
    try:
        yield
    finally:
        _KINDS.remove(kind)


def grow_columns(schema: Schema, shards: Shards) -> tuple[Column, ...]:
    """The columns of a store of which no row is written yet, one for each field.

    Raises:
        ValueError: No file can hold so many rows.
    """

    def grow(field: Field) -> Column:
        return next(kind for kind in _KINDS if kind.takes(field))(field, shards)

    return tuple(map(grow, schema.fields))


def columns_to_json(columns: Sequence[Column]) -> dict[str, Any]:
    """What a manifest must say of columns: nothing where all are of the usual kind."""
    entries = {
        column.field.name: {"kind": column.kind, **column.to_json()}
        for column in columns
        if column.kind != FixedColumn.kind
    }
    return {"columns": entries} if entries else {}


def columns_from_json(schema: Schema, shards: Shards, entries: Any) -> tuple[Column, ...]:
    """The columns of a store that is there, one for each field.

    Args:
        schema: The fields.
        shards: The rows and shards of the store.
        entries: Entries of a manifest that nobody has checked, by field name.

    Raises:
        ValueError: An entry is of no field, of an unknown kind, or of a column that cannot be.
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
    return tuple(columns)
