"""Leaves: what a dataset gives for a field, as a dense CPU tensor or numpy array."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.schema.fields import (
    DTYPES,
    FROM_NUMPY,
    TO_NUMPY,
    Field,
    described,
    dtype_name,
)
from lightning_memmap.schema.kinds import (
    Array,
    check_dense,
    is_missing,
    number_array,
    python_dtype,
    to_array,
)


class RowList(list[Any]):
    """A list with one entry for each row of a batch: a tensor, a str, bytes, or what a row has of a
    list of records.

    It is a list like any other, but counts as one field and not as a container of fields.
    """


def describe_leaf(name: str, leaf: Any) -> Field:
    """Describe the field that a leaf of a sample belongs to."""
    array, kind = to_array(name, leaf)
    return Field(name, array_dtype(name, array), kind.shape or tuple(array.shape), kind)


def describe_rows(name: str, leaf: Any) -> Field:
    """Describe the field whose rows a leaf of a batch holds."""
    if isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout is not torch.jagged:
        raise SchemaError(
            f"field {name!r}: found a nested tensor of layout {leaf.layout}: make it with"
            " torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    if (rows := rows_apart(leaf)) is not None:
        if not rows:
            raise SchemaError(f"field {name!r}: found no rows: give one for each row of the batch")
        first = describe_leaf(name, rows[0])
        if not first.shape:
            raise SchemaError(
                f"field {name!r}: found a list of numbers: give a tensor of one number for each row"
            )
        return replace(first, shape=(None, *first.shape[1:]))
    if not isinstance(leaf, Tensor):
        raise SchemaError(
            f"field {name!r}: found {type(leaf).__name__}; give tensors whose first dimension is"
            " the rows of the batch, and a lightning_memmap.loading.RowList of text, or of rows"
            " that differ in length"
        )
    if leaf.ndim == 0:
        raise SchemaError(
            f"field {name!r}: found a tensor without dimensions; its first dimension must be the"
            " rows of the batch"
        )
    check_dense(name, leaf)
    return Field(name, array_dtype(name, leaf), tuple(leaf.shape[1:]))


def rows_apart(leaf: Any) -> list[Any] | None:
    """The rows of a leaf of a batch that has them one by one: a `RowList` or a nested tensor."""
    if isinstance(leaf, Tensor):
        return list(leaf.unbind()) if leaf.is_nested else None
    return leaf if isinstance(leaf, RowList) else None


def is_list(value: Any) -> bool:
    """Whether this is a list or tuple that has no class of its own."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def leaf_array(field: Field, leaf: Any) -> Array:
    """Check a leaf of any type, and convert it to what is stored of it."""
    try:
        if is_list(leaf):
            empty = torch.empty(0, dtype=field.dtype, device="cpu")
            leaf = numbers_array(field.name, [leaf]) if leaf else empty
        array, kind = to_array(field.name, leaf)
        dtype, shape = array_dtype(field.name, array), tuple(array.shape)
    except SchemaError as error:
        kind_of_error = MismatchError if is_missing(leaf) else SchemaError
        raise kind_of_error(f"{error}; expected {field.described}") from error
    # Palette and grey images may have the same shape and dtype, but differ in meaning.
    if dtype != field.dtype or not field.admits(shape) or not field.kind.takes(kind):
        raise MismatchError(
            f"field {field.name!r}: found {described(dtype, shape, kind)}, expected"
            f" {field.described}"
        )
    return array


def as_tensor(values: Array) -> Tensor:
    """An array as a tensor, of the same memory where torch can use it."""
    if isinstance(values, Tensor):
        return values
    array = values.astype(values.dtype.newbyteorder("="), copy=False)
    if min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Of memory that torch must not write to, such as a file that is mapped: it is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def array_dtype(name: str, array: Array) -> torch.dtype:
    """The dtype in which a dense array or tensor is stored, in either byte order."""
    if isinstance(array, Tensor):
        if array.dtype in DTYPES.values():
            return array.dtype
        raise SchemaError(
            f"field {name!r}: found dtype {dtype_name(array.dtype)}, which does not survive in a"
            f" memory-mapped file; convert it in the dataset to one of {', '.join(DTYPES)}"
        )
    dtype = FROM_NUMPY.get(array.dtype.newbyteorder("="))
    if dtype is None:
        raise SchemaError(
            f"field {name!r}: found a numpy array of dtype {array.dtype}; convert it in the"
            f" dataset to one of {', '.join(DTYPES)}"
        )
    return dtype


def numbers_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """The dtype that numbers share, of Python, numpy or tensors; None if they share none."""
    return _shared_dtype(values, set(map(type, values)))


def _shared_dtype(values: Sequence[Any], kinds: set[type]) -> torch.dtype | None:
    dtypes: set[torch.dtype | None] = set()
    for kind in kinds:
        if kind is Tensor:
            tensors = [value for value in values if isinstance(value, Tensor)]
            is_number = all(each.layout is torch.strided and not each.ndim for each in tensors)
            dtypes |= {tensor.dtype for tensor in tensors} if is_number else {None}
        else:
            dtype = np.dtype(kind) if issubclass(kind, np.generic) else python_dtype(kind)
            dtypes.add(None if dtype is None else FROM_NUMPY.get(dtype))
    found = dtypes.pop() if len(dtypes) == 1 else None
    return found if found in DTYPES.values() else None


def numbers_array(name: str, lists: Sequence[Sequence[Any]]) -> Array:
    """The numbers of lists, one list after the other, in an array of one dimension."""
    values = list(chain.from_iterable(lists))
    kinds = set(map(type, values))
    dtype = _shared_dtype(values, kinds)
    if dtype is None:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        way_out = ": give NaN, or a mask beside it, for None" if type(None) in kinds else ""
        raise SchemaError(
            f"field {name!r}: found a list of {found}, expected numbers of one dtype{way_out}"
        )
    if Tensor not in kinds:
        return number_array(name, values, TO_NUMPY[dtype])
    try:
        return torch.stack([torch.as_tensor(value, dtype=dtype) for value in values])
    except (ValueError, RuntimeError, OverflowError) as error:
        raise SchemaError(f"field {name!r}: a number does not fit into {dtype}: {error}") from error
