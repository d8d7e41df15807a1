"""Columns of Arrow tables: of polars, pyarrow, DuckDB, Lance, pandas' own types and Hugging Face.

A row of a column is what a sample has: a number or time of numpy, in the dtype of the table; a str
or bytes; an array for a list of numbers; a list for other lists; a dict for a struct; and None.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema import Field, Node, Values
from lightning_memmap.schema.fields import field_name
from lightning_memmap.schema.kinds import Bytes, Text
from lightning_memmap.schema.leaves import as_tensor
from lightning_memmap.schema.stack import fit_items, fit_rows, stack_samples
from lightning_memmap.schema.structure import LEAF
from lightning_memmap.store.sources.column import Column, Rows

#: Gives the numbers of a field the dtype that samples have.
Convert = Callable[[Field, np.ndarray], np.ndarray]


class TableColumn(Column):
    """A column of a table, whose item ``i`` is what sample ``i`` has."""

    name: str

    @abstractmethod
    def has_missing(self) -> bool:
        """Whether rows have no value."""

    def __getitem__(self, row: int) -> Any:
        try:
            return _objects(self.take(range(row, row + 1)))[0]
        except SchemaError as error:
            raise SchemaError(f"field {field_name((self.name,))!r}: {error}") from None

    @override
    def values(self, found: Any, node: Node, fields: Sequence[Field]) -> list[Values]:
        try:
            return arrow_values(found, node, fields)
        except SchemaError:
            return stack_samples(_objects(found), node, fields)


class ArrowColumn(TableColumn):
    """A column of an Arrow table in memory."""

    def __init__(self, name: str, column: Any) -> None:
        self.name = name
        self.column = plain(column)

    def __len__(self) -> int:
        return len(self.column)

    @override
    def has_missing(self) -> bool:
        return bool(self.column.null_count)

    @override
    def take(self, rows: Rows) -> Any:
        return take(self.column, rows)


def plain(column: Any) -> Any:
    """A column, or an array, as a column of types in which rows can be taken."""
    import pyarrow as pa

    chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    kind = _plain_type(chunked.type)
    return chunked if chunked.type == kind else chunked.cast(kind)


def simple_array(column: Any, otherwise: Any) -> Any:
    """A column of numbers or times without a gap as an array of numpy; else what is given."""
    import pyarrow as pa

    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_simple = pa.types.is_primitive(kind) and not pa.types.is_time(kind)
    return _numbers(_one(column)) if is_simple and not column.null_count else otherwise


def take(column: Any, rows: Rows) -> Any:
    """Rows of a column of Arrow, in a range of step 1 or in any order."""
    import pyarrow as pa

    if isinstance(rows, range):
        return column.slice(rows.start, len(rows))
    return column.take(pa.array(rows))


def _plain_type(kind: Any) -> Any:
    """A type in which rows can be taken: Arrow's views have few functions."""
    import pyarrow as pa

    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain_type(kind.value_type)))
    return kind


def _one(column: Any) -> Any:
    """One array of a column in pieces, with the values that a dictionary stands for."""
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # As of no pieces, or too many bytes for one.
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if isinstance(array, pa.DictionaryArray):
        return array.dictionary_decode()
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _numbers(array: Any) -> np.ndarray | None:
    """Numbers or times, zeros where they are missing; None for anything else."""
    import pyarrow as pa

    if not pa.types.is_primitive(array.type) or pa.types.is_time(array.type):
        return None
    if array.null_count:
        zero = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(bytes(16))])[0]
        array = array.fill_null(zero)
    numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
    return numbers


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in lists)


def _lists(array: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The numbers of all lists, and how many each has; None for lists of anything else. Lists of
    fixed length in lists are further dimensions of the numbers."""
    import pyarrow as pa

    shape, items = [], _one(array.flatten())
    has_none = bool(items.null_count)
    while pa.types.is_fixed_size_list(items.type):
        shape.append(items.type.list_size)
        items = _one(items.flatten())
        has_none |= bool(items.null_count)
    numbers = _numbers(items)
    if numbers is None:
        return None
    if has_none:
        raise SchemaError(
            f"the table has None within a list of {items.type}, which is given as an array: fill"
            " it in the table, such as with NaN, or leave it out there"
        )
    return numbers.reshape(-1, *shape), _lengths(array)


def _lengths(array: Any) -> np.ndarray:
    import pyarrow.compute as pc

    lengths: np.ndarray = pc.fill_null(pc.list_value_length(array), 0).to_numpy(
        zero_copy_only=False
    )
    return lengths


def _objects(column: Any) -> list[Any]:
    """What samples have of the rows of a column."""
    import pyarrow as pa

    shape = column.type.shape if isinstance(column.type, pa.FixedShapeTensorType) else None
    array = _one(column)
    found: Sequence[Any]
    if pa.types.is_struct(array.type):
        names = [field.name for field in array.type]
        parts = [_objects(array.field(index)) for index in range(len(names))]
        found = [dict(zip(names, values, strict=True)) for values in zip(*parts, strict=True)]
    elif _is_list(array.type):
        items, lengths = _lists(array) or (_objects(array.flatten()), _lengths(array))
        ends = np.cumsum(lengths).tolist()
        found = [items[end - size : end] for end, size in zip(ends, lengths.tolist(), strict=True)]
        if shape is not None:
            found = [row.reshape(shape) if len(row) else row for row in found]
    elif (numbers := _numbers(array)) is not None:
        found = list(numbers)
    else:
        return list(array.to_pylist())
    if not array.null_count:
        return list(found)
    given = array.is_valid().to_pylist()
    return [value if here else None for value, here in zip(found, given, strict=True)]


def _as_it_is(field: Field, numbers: np.ndarray) -> np.ndarray:
    return numbers


def arrow_values(
    column: Any, node: Node, fields: Sequence[Field], convert: Convert = _as_it_is
) -> list[Values]:
    """The values of the fields that a column has, by its arrays; a SchemaError where they differ
    from what samples have. Numbers are converted first."""
    import pyarrow as pa

    if isinstance(column.type, pa.FixedShapeTensorType):
        raise _UnlikeError("tensors")
    array = _one(column)
    part = node.children[0] if node.kind == "optional" else node
    if array.null_count and part is node:
        raise _UnlikeError("rows without a value")
    if part.is_field:
        found = [_field_values(array, fields[0], convert)]
    elif part.kind == "dict" and pa.types.is_struct(array.type):
        found = _struct_values(array, part, fields, convert)
    elif part.is_list and _is_list(array.type) and all(child == LEAF for child in part.children):
        found = _item_values(array, fields[: part.num_fields], convert)
    else:
        raise _UnlikeError(part.kind)
    if part is not node:
        found.append(Values(as_tensor(array.is_valid().to_numpy(zero_copy_only=False))))
    return found


class _UnlikeError(SchemaError):
    """A column has not the arrays that its fields need."""


def _struct_values(
    array: Any, node: Node, fields: Sequence[Field], convert: Convert
) -> list[Values]:
    names, found = [field.name for field in array.type], list[Values]()
    if array.null_count or set(names) != set(node.keys):
        raise _UnlikeError("structs")
    for key, (_, child, within) in zip(node.keys, node.parts(fields), strict=True):
        found += arrow_values(array.field(names.index(str(key))), child, within, convert)
    return found


def _field_values(array: Any, field: Field, convert: Convert) -> Values:
    import pyarrow as pa

    if field.is_text:
        texts = {pa.string(): Text(), pa.large_string(): Text()}
        texts |= {pa.binary(): Bytes(), pa.large_binary(): Bytes()}
        if texts.get(array.type) != field.kind:
            raise _UnlikeError(str(array.type))
        return _text_values(array)
    if not _is_list(array.type):
        numbers = _numbers(array)
        if numbers is None:
            raise _UnlikeError(str(array.type))
        return fit_rows(field, convert(field, numbers))
    items, lengths = _number_lists(array)
    items = convert(field, items)
    if field.num_variable:
        return fit_items(field, items, lengths)
    given = array.is_valid().to_numpy(zero_copy_only=False)
    if not field.shape or (lengths[given] != field.item_shape[0]).any():
        raise _UnlikeError("lists")
    rows = items.reshape(int(given.sum()), field.item_shape[0], *items.shape[1:])
    if array.null_count:
        spread = np.zeros((len(array), *rows.shape[1:]), items.dtype)
        spread[given] = rows
        rows = spread
    return fit_rows(field, rows)


def _number_lists(array: Any) -> tuple[np.ndarray, np.ndarray]:
    if (found := _lists(array)) is None:
        raise _UnlikeError("lists")
    return found


def _text_values(array: Any) -> Values:
    import pyarrow as pa

    if array.null_count:
        is_text = array.type in (pa.string(), pa.large_string())
        array = array.fill_null("" if is_text else b"")
    is_large = array.type in (pa.large_string(), pa.large_binary())
    _, offsets, data = array.buffers()
    width = np.dtype(np.int64 if is_large else np.int32)
    if not len(array):
        return Values(as_tensor(np.empty(0, np.uint8)), np.empty((0, 1), np.int64))
    ends = np.frombuffer(offsets, width, len(array) + 1, array.offset * width.itemsize)
    if data is None:
        items = np.empty(0, np.uint8)
    else:
        items = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]
    return Values(as_tensor(items), np.diff(ends).astype(np.int64)[:, None])


def _item_values(array: Any, fields: Sequence[Field], convert: Convert) -> list[Values]:
    """Short lists of numbers, of which each is a field of its own."""
    items, lengths = _number_lists(array)
    if array.null_count or (lengths != len(fields)).any() or items.ndim != 1:
        raise _UnlikeError("lists")
    columns = items.reshape(-1, len(fields)).T
    pairs = zip(fields, columns, strict=True)
    return [fit_rows(field, convert(field, column)) for field, column in pairs]
