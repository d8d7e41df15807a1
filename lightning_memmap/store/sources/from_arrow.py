"""Columns of a pyarrow Table as arrays."""

from typing import Any

import numpy as np

from lightning_memmap.store.sources.field_array import NullableRows, object_array


def to_numpy(column: Any) -> np.ndarray | NullableRows:
    """Convert a column to a numpy array.

    Args:
        column: A ChunkedArray, or an Array.

    Returns:
        For numbers and times an array of their type; for lists of numbers of one length a
        two-dimensional one; for tensors of one shape one of more dimensions; else an array of
        objects, in which lists of numbers are arrays, and missing values None. Numbers and times of
        which some are missing are `NullableRows`.
    """
    import pyarrow as pa

    if not isinstance(column, pa.ChunkedArray):
        return to_numpy(pa.chunked_array([column]))
    kind = column.type
    if isinstance(kind, pa.DictionaryType):
        return to_numpy(column.cast(kind.value_type))
    if _is_list(kind) and pa.types.is_primitive(kind.value_type):
        return _lists_to_numpy(column)
    if not column.null_count:
        if pa.types.is_primitive(kind):
            values: np.ndarray = column.to_numpy()
            return values
        if isinstance(kind, pa.FixedShapeTensorType):
            return np.concatenate([chunk.to_numpy_ndarray() for chunk in _chunks(column)])
    elif pa.types.is_primitive(kind):
        return NullableRows(_filled(column).to_numpy(), column.is_valid().to_numpy())
    if kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        texts: np.ndarray = column.to_numpy()
        return texts
    return object_array(column.to_pylist())


def _filled(column: Any) -> Any:
    """A column of numbers or times with zeros in place of what is missing."""
    import pyarrow as pa

    zero = pa.Array.from_buffers(column.type, 1, [None, pa.py_buffer(bytes(16))])[0]
    return column.fill_null(zero)


def _chunks(column: Any) -> list[Any]:
    """The pieces of a column, at least one."""
    import pyarrow as pa

    return column.chunks or [pa.array([], column.type)]


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in lists)


def _lists_to_numpy(column: Any) -> np.ndarray:
    import pyarrow.compute as pc

    flat = [chunk.flatten() for chunk in _chunks(column)]  # Without lists that are missing.
    if any(values.null_count for values in flat):
        return object_array(column.to_pylist())
    values = np.concatenate([part.to_numpy(zero_copy_only=False) for part in flat])
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    if len(lengths) and (lengths == lengths[0]).all() and not column.null_count:
        return values.reshape(len(lengths), -1)
    rows: list[Any] = np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
    if column.null_count:
        valid = column.is_valid().to_pylist()
        rows = [row if given else None for row, given in zip(rows, valid, strict=True)]
    return object_array(rows)
