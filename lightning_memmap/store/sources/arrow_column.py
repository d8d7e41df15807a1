"""Columns of Arrow tables in memory: of polars, pyarrow, DuckDB, Lance and pandas' own types.

A row is returned as a sample has it: a number or time of numpy in the dtype of the table; a str or
bytes; an array for a list of numbers; a list for other lists; a dict for a struct; and None.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from lightning_memmap.errors import SchemaError, describe_error
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.fields import field_name
from lightning_memmap.schema.stack import Branch
from lightning_memmap.store.sources.arrow_rows import ArrowRows, to_numbers
from lightning_memmap.store.sources.arrow_types import (
    TEXT_KINDS,
    check_lossless,
    concatenate_columns,
    decode,
    is_list,
    list_lengths,
    take_column_rows,
    to_takeable,
    zero_array,
)
from lightning_memmap.store.sources.column import TableColumn
from lightning_memmap.store.workers import RowNumbers

#: Lists searched at once for the shortest and the longest.
_SEARCHED_ROWS = 2**14


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
    def representative_values(self) -> list[Any]:
        column = ArrowColumn(self.name, self.representatives())
        values = list[Any]()
        for row in range(len(column)):
            with suppress(SchemaError):  # Reading the row later raises it, with the row.
                values.append(column[row])
        return values

    def representatives(self) -> Any:
        """Return the representative values as an Arrow column."""
        return find_representatives(self.column)

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


def find_representatives(column: Any, among: Integers | None = None) -> Any:
    """Return the representative values of a column, or of some of its rows, as a short column."""
    if among is None:
        rows = {*_representative_rows(column)}
    else:
        rows = {*_representative_rows_among(column, among)}
    short = concatenate_columns((column.slice(row, 1) for row in sorted(rows)), column.type)
    has_lists = is_list(column.type) and len(short) > short.null_count
    if has_lists and not len(pc.list_flatten(short)):
        # All lists are empty. A list of texts or structs needs one item to show its kind; an empty
        # list of numbers is an array, whose dtype does.
        item_type = column.type.value_type
        if item_type in TEXT_KINDS or pa.types.is_struct(item_type):
            with suppress(ValueError):  # zero_array() supports only simple fields of a struct.
                array = pa.array([zero_array(item_type).to_pylist()], column.type)
                short = pa.chunked_array([*short.chunks, array])
    return short


def _representative_rows(column: Any) -> Iterator[int]:
    """Yield a row that is None and one that isn't, and the shortest and longest list, in children
    too."""
    valid_rows = None
    if column.null_count:
        is_valid = column.is_valid().to_numpy()
        valid_rows = np.flatnonzero(is_valid)
        yield from (int(is_valid.argmin()), *valid_rows[:1].tolist())
    if pa.types.is_struct(column.type):
        structs = column if valid_rows is None else column.drop_null()
        for index, field in enumerate(column.type):
            children = [chunk.field(index) for chunk in structs.chunks]
            rows = [*_representative_rows(pa.chunked_array(children, field.type))]
            yield from rows if valid_rows is None else valid_rows[rows].tolist()
    elif is_list(column.type) and not pa.types.is_fixed_size_list(column.type):
        lengths = pc.list_value_length(column)
        bounds = pc.min_max(lengths).values()
        yield from (lengths.index(bound).as_py() for bound in bounds if bound.is_valid)
        if rows := [*_representative_rows(pc.list_flatten(column))]:
            stops = np.cumsum(list_lengths(column))
            yield from np.searchsorted(stops, rows, side="right").tolist()


def _representative_rows_among(column: Any, rows: Integers) -> Iterator[int]:
    """Yield the `_representative_rows` among some rows, without reading texts and bytes."""
    if is_list(column.type):
        for start in range(0, len(rows), _SEARCHED_ROWS):
            block = rows[start : start + _SEARCHED_ROWS]
            indices = [*_representative_rows(take_column_rows(column, block))]
            yield from block[indices].tolist()
        return
    is_valid = column.is_valid().to_numpy()[rows]
    valid_rows = rows[is_valid]
    if len(valid_rows) < len(rows):
        yield from (int(rows[is_valid.argmin()]), *valid_rows[:1].tolist())
    if pa.types.is_struct(column.type):
        for index, field in enumerate(column.type):
            children = [chunk.field(index) for chunk in column.chunks]
            child = pa.chunked_array(children, field.type)
            yield from _representative_rows_among(child, valid_rows)
