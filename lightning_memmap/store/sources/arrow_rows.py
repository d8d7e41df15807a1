"""Rows of Arrow columns, as the values of fields and as samples; types of columns, and casts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.integers import Integers
from lightning_memmap.schema.fields import TO_NUMPY, Field, Values
from lightning_memmap.schema.kinds import Bytes, Duration, Text
from lightning_memmap.schema.stack import Branch, as_tensor, as_values, lists_as_values
from lightning_memmap.schema.structure import Node, Path
from lightning_memmap.store.workers import RowIndices

_VIEWS = (pa.ListViewType, pa.LargeListViewType)
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, *_VIEWS)
#: The kind of field by Arrow type, for all types with bytes of any length.
TEXT_KINDS = {
    **dict.fromkeys((pa.string(), pa.large_string()), Text()),
    **dict.fromkeys((pa.binary(), pa.large_binary()), Bytes()),
}
#: Extension types whose stored numbers lose their meaning, and what to convert them to.
_LOSSY_EXTENSIONS = {
    "pandas.period": "periods, whose numbers have no unit: convert them with .dt.to_timestamp()",
    "pandas.interval": "intervals, whose closed ends would be lost: pass a column per end,"
    " .array.left and .array.right",
}


class ArrowRows(Branch):
    """Rows of an Arrow column.

    Args:
        array: An array or chunked column.
        shape: Shape of a row, if the type of the column fixes it.
        are_python: Whether samples have Python's numbers, as Hugging Face returns them.
    """

    def __init__(self, array: Any, *, shape: Any = None, are_python: bool = False) -> None:
        self.shape = array.type.shape if isinstance(array.type, pa.FixedShapeTensorType) else shape
        self.array = decode(array)
        self.are_python = are_python

    @override
    def __len__(self) -> int:
        return len(self.array)

    @override
    def present_mask(self) -> NDArray[np.bool_]:
        mask: NDArray[np.bool_] = self.array.is_valid().to_numpy(zero_copy_only=False)
        return mask

    @override
    def select(self, mask: NDArray[np.bool_]) -> Branch:
        return self._like(self.array.filter(pa.array(mask)))

    @override
    def parts(self, node: Node, path: Path) -> Sequence[Branch]:
        array = self._without_nulls()
        keys = list(map(str, node.keys))
        if node.kind == "dict" and pa.types.is_struct(array.type):
            names = [field.name for field in array.type]
            if sorted(names) == sorted(keys):
                return [self._like(array.field(names.index(key))) for key in keys]
        elif node.is_list and is_list(array.type) and (list_lengths(array) == len(keys)).all():
            indices = np.arange(len(array) * len(keys)).reshape(len(array), len(keys))
            items = array.flatten()
            return [self._like(items.take(pa.array(column))) for column in indices.T]
        raise MismatchError(f"found {array.type}")

    @override
    def lists(self, path: Path) -> tuple[Branch, Integers]:
        array = self._without_nulls()
        if not is_list(array.type):
            raise MismatchError(f"found {array.type}")
        return self._like(array.flatten()), list_lengths(array)

    @override
    def leaves(self, field: Field) -> Values:
        array = self._without_nulls()
        if field.is_text:
            if TEXT_KINDS.get(array.type) != field.kind:
                raise MismatchError(f"found {array.type}")
            return _text_values(array)
        are_lists = is_list(array.type)
        numbers = _list_numbers(array) if are_lists else to_numbers(array)
        if numbers is None:
            raise MismatchError(f"found {array.type}")
        if self.are_python:
            numbers = _as_python_dtype(field, numbers)
        if self.shape is not None:
            return as_values(field, numbers.reshape(-1, *self.shape))
        if are_lists:
            return lists_as_values(field, numbers, list_lengths(array))
        return as_values(field, numbers)

    def samples(self) -> list[Any]:
        """Return each row as a sample has it: a number, text, array, list, dict or None."""
        array = self.array
        values: Sequence[Any]
        if pa.types.is_struct(array.type):
            names = [field.name for field in array.type]
            children = [ArrowRows(array.field(index)).samples() for index in range(len(names))]
            values = [
                {name: child[row] for name, child in zip(names, children, strict=True)}
                for row in range(len(array))
            ]
        elif is_list(array.type):
            values = self._list_samples()
        elif (numbers := to_numbers(array)) is not None:
            values = list(numbers)
        else:
            return list(array.to_pylist())
        mask = self.present_mask().tolist()
        return [value if is_valid else None for value, is_valid in zip(values, mask, strict=True)]

    def _list_samples(self) -> list[Any]:
        numbers = _list_numbers(self.array)
        items: Any = ArrowRows(self.array.flatten()).samples() if numbers is None else numbers
        lengths = list_lengths(self.array)
        stops = np.cumsum(lengths).tolist()
        pairs = zip(stops, lengths.tolist(), strict=True)
        values = [items[stop - length : stop] for stop, length in pairs]
        if self.shape is None:
            return values
        return [value.reshape(self.shape) if len(value) else value for value in values]

    def _like(self, array: Any) -> "ArrowRows":
        return ArrowRows(array, shape=self.shape, are_python=self.are_python)

    def _without_nulls(self) -> Any:
        if self.array.null_count:
            raise MismatchError("rows have no value")
        return self.array


def to_numbers(array: Any) -> np.ndarray | None:
    """Return numbers or times, with any value in place of None; None for other types."""
    if not pa.types.is_primitive(array.type) or pa.types.is_time(array.type):
        return None
    if array.null_count:
        array = array.fill_null(zero_array(array.type)[0])
    numbers: np.ndarray = array.to_numpy(zero_copy_only=False)
    return numbers


def _list_numbers(array: Any) -> np.ndarray | None:
    """Return the concatenated numbers of lists; None for lists of other types.

    Inner lists of fixed length become dimensions of the numbers.
    """
    shape = []
    items = decode(array.flatten())
    has_none = bool(items.null_count)
    while pa.types.is_fixed_size_list(items.type):
        shape.append(items.type.list_size)
        items = decode(items.flatten())
        has_none |= bool(items.null_count)
    numbers = to_numbers(items)
    if numbers is not None and has_none:
        raise SchemaError(
            f"the table has None within a list of {items.type}, and an array can't hold None:"
            f" replace it in the table, such as with {suggest_fill_value(items.type)}, or remove it"
        )
    return None if numbers is None else numbers.reshape(-1, *shape)


def _text_values(array: Any) -> Values:
    is_large = array.type in (pa.large_string(), pa.large_binary())
    _, offsets, data = array.buffers()
    width = np.dtype(np.int64 if is_large else np.int32)
    bounds = np.frombuffer(offsets, width, len(array) + 1, array.offset * width.itemsize)
    items = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    return Values(as_tensor(items), np.diff(bounds).astype(np.int64)[:, None])


def _as_python_dtype(field: Field, values: np.ndarray) -> np.ndarray:
    """Cast numbers to the dtype that a field has for Python's numbers, unless values may change."""
    kind = field.kind
    dtype = kind.numpy_dtype if isinstance(kind, Duration) else TO_NUMPY[field.dtype]
    kinds = values.dtype.kind + dtype.kind
    is_safe = kinds in ("ii", "ui", "uu", "mm", "MM") and np.can_cast(values.dtype, dtype, "safe")
    return values.astype(dtype, copy=False) if is_safe or kinds in ("bb", "ff") else values


def is_list(arrow_type: Any) -> bool:
    """Return whether values are lists, of fixed length or not."""
    return isinstance(arrow_type, _LISTS)


def list_lengths(array: Any) -> Integers:
    """Return the length of each list, int64; 0 for None."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return np.asarray(lengths, np.int64)


def check_lossless(name: str, arrow_type: Any) -> None:
    """Raise a TypeError for an extension type whose stored numbers lose their meaning."""
    extension = getattr(arrow_type, "extension_name", "")
    if (reason := _LOSSY_EXTENSIONS.get(extension)) is not None:
        raise TypeError(f"column {name!r}: found {extension}, {reason}, or .astype(str)")


def decode(column: Any) -> Any:
    """Return a column as one array without chunks, dictionary, run lengths or extension type."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.DictionaryArray):
        return array.dictionary_decode()
    if isinstance(array, pa.RunEndEncodedArray):
        return pc.run_end_decode(array)
    if not isinstance(array, pa.ExtensionArray):
        return array
    is_bool = array.type.extension_name == "arrow.bool8"
    return array.storage.cast(pa.bool_()) if is_bool else array.storage


def zero_array(arrow_type: Any) -> Any:
    """Return an array of one value: zero, an empty text, or a struct of these."""
    if pa.types.is_struct(arrow_type):
        children = [zero_array(field.type) for field in arrow_type]
        return pa.StructArray.from_arrays(children, fields=list(arrow_type))
    zeros = [pa.py_buffer(bytes(16))] * (2 if arrow_type in TEXT_KINDS else 1)
    return pa.Array.from_buffers(arrow_type, 1, [None, *zeros])


def suggest_fill_value(arrow_type: Any) -> str:
    """Return a number or time to replace None with, for error messages."""
    return "NaN" if pa.types.is_floating(arrow_type) else str(zero_array(arrow_type)[0])


def to_takeable(column: Any) -> Any:
    """Return an array or column as a chunked column in its `takeable_type`."""
    chunked = column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
    arrow_type = takeable_type(chunked.type)
    return chunked if chunked.type == arrow_type else chunked.cast(arrow_type)


def takeable_type(arrow_type: Any) -> Any:
    """Return a type with the same values whose rows Arrow can take: views have few functions."""
    types = pa.types
    if types.is_string_view(arrow_type):
        return pa.large_string()
    if types.is_binary_view(arrow_type):
        return pa.large_binary()
    if types.is_dictionary(arrow_type):
        values = takeable_type(arrow_type.value_type)
        return pa.dictionary(arrow_type.index_type, values, arrow_type.ordered)
    if types.is_struct(arrow_type):
        return pa.struct([field.with_type(takeable_type(field.type)) for field in arrow_type])
    # Casting a list view ignores its sizes.
    if not is_list(arrow_type) or isinstance(arrow_type, _VIEWS):
        return arrow_type
    item = arrow_type.value_field.with_type(takeable_type(arrow_type.value_type))
    if types.is_fixed_size_list(arrow_type):
        return pa.list_(item, arrow_type.list_size)
    return (pa.list_ if types.is_list(arrow_type) else pa.large_list)(item)


def common_type(one: Any, other: Any) -> Any:
    """Return a type that holds the values of two takeable types; None if there isn't one."""
    types = pa.types
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_dictionary(one) or types.is_dictionary(other):
        return common_type(
            *(item.value_type if types.is_dictionary(item) else item for item in (one, other))
        )
    for small, large in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if {one, other} <= {small, large}:
            return large
    if types.is_struct(one) and types.is_struct(other):
        if sorted(field.name for field in one) != sorted(field.name for field in other):
            return None
        children = [common_type(field.type, other.field(field.name).type) for field in one]
        if None in children:
            return None
        return pa.struct([(field.name, child) for field, child in zip(one, children, strict=True)])
    are_lists = is_list(one) and is_list(other)
    if not are_lists or isinstance(one, _VIEWS) or isinstance(other, _VIEWS):
        return None
    if (item := common_type(one.value_type, other.value_type)) is None:
        return None
    are_fixed = types.is_fixed_size_list(one) and types.is_fixed_size_list(other)
    if are_fixed and one.list_size == other.list_size:
        return pa.list_(item, one.list_size)
    return pa.large_list(item)


def cast_column(column: Any, arrow_type: Any) -> Any:
    """Cast a column to a type from `common_type`."""
    if column.type == arrow_type:
        return column
    if not (pa.types.is_struct(arrow_type) and pa.types.is_struct(column.type)):
        return column.cast(arrow_type)
    # Match the fields of structs by name, because their order may differ.
    chunks = []
    for chunk in column.chunks:
        children = []
        for field in arrow_type:
            child = cast_column(pa.chunked_array([chunk.field(field.name)]), field.type)
            children.append(pa.concat_arrays(child.chunks))
        mask = chunk.is_null()
        chunks.append(pa.StructArray.from_arrays(children, fields=[*arrow_type], mask=mask))
    return pa.chunked_array(chunks, arrow_type)


def take_column_rows(column: Any, rows: RowIndices) -> Any:
    """Return rows of a chunked column, without a copy for a range."""
    if isinstance(rows, range):
        return column.slice(rows.start, len(rows))
    return column.take(pa.array(rows))


def concatenate_columns(columns: Iterable[Any], arrow_type: Any = None) -> Any:
    """Concatenate chunked columns without a copy. Pass a type if there may be no column."""
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], arrow_type)
