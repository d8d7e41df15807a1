"""Types of Arrow columns: those whose rows can be taken, and casts between them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.kinds import Bytes, Text
from lightning_memmap.store.workers import RowNumbers

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


def take_column_rows(column: Any, rows: RowNumbers) -> Any:
    """Return rows of a chunked column, without a copy for a range."""
    if isinstance(rows, range):
        return column.slice(rows.start, len(rows))
    return column.take(pa.array(rows))


def concatenate_columns(columns: Iterable[Any], arrow_type: Any = None) -> Any:
    """Concatenate chunked columns without a copy. Pass a type if there may be no column."""
    return pa.chunked_array([chunk for column in columns for chunk in column.chunks], arrow_type)
