"""Columns of Arrow tables in memory: of polars, pyarrow, DuckDB, Lance and pandas' own types.

A row is returned as a sample has it: a number or time of numpy in the dtype of the table; a str or
bytes; an array for a list of numbers; a list for other lists; a dict for a struct; and None.
"""

from typing import Any

import pyarrow as pa
from typing_extensions import override

from lightning_memmap.errors import SchemaError, describe_error
from lightning_memmap.schema.fields import field_name
from lightning_memmap.schema.stack import Branch
from lightning_memmap.store.sources.arrow_facts import ArrowFacts, find_facts
from lightning_memmap.store.sources.arrow_rows import ArrowRows, to_numbers
from lightning_memmap.store.sources.arrow_types import (
    check_lossless,
    decode,
    take_column_rows,
    to_takeable,
)
from lightning_memmap.store.sources.column import TableColumn
from lightning_memmap.store.workers import RowNumbers


class ArrowColumn(TableColumn):
    """A column of an Arrow table in memory, whose item ``i`` is row ``i`` as a sample has it."""

    def __init__(self, name: str, column: Any) -> None:
        self.name = name
        self.column = to_takeable(column)

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> Any:
        try:
            return ArrowRows(self.take(range(row, row + 1))).samples()[0]
        except SchemaError as error:
            raise SchemaError(f"field {field_name((self.name,))!r}: {error}") from None

    @override
    def find_facts(self) -> ArrowFacts:
        return find_facts(self.column)

    def take(self, rows: RowNumbers) -> Any:
        """Return rows as an Arrow column."""
        return take_column_rows(self.column, rows)

    @override
    def rows(self, rows: RowNumbers) -> Branch:
        return ArrowRows(self.take(rows))


def to_arrow_or_numpy(name: str, column: Any) -> Any:
    """Convert a column of any library to an `ArrowColumn`, or to a numpy array if it has only
    numbers or times and no None."""
    if not isinstance(column, (pa.Array, pa.ChunkedArray)):
        # pandas exports NaN as a value in a stream; pa.array() reads it as None.
        is_stream = hasattr(column, "__arrow_c_stream__") and not hasattr(column, "isna")
        try:
            column = pa.chunked_array(column) if is_stream else pa.array(column)
        except pa.ArrowException as error:
            raise TypeError(
                f"column {name!r}: Arrow can't hold its values ({describe_error(error)}): convert"
                " them to a type that Arrow has"
            ) from error
    check_lossless(name, column.type)
    arrow_column = ArrowColumn(name, column)
    plain = arrow_column.column
    if plain.null_count or isinstance(plain.type, pa.BaseExtensionType):
        return arrow_column
    numbers = to_numbers(decode(plain))
    return arrow_column if numbers is None else numbers
