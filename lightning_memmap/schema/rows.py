"""Rows: the leaves of many samples stacked field by field, which is cheaper than row by row.

What is stacked here is what is sure to fit a field. Everything else, whether it is wrong or merely
unusual, is left to `lightning_memmap.schema.Schema.flatten`, which looks at one sample at a time
and names what does not fit.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.leaves import array_dtype, to_array
from lightning_memmap.schema.narrowing import narrowed
from lightning_memmap.schema.structure import Node

_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128
}  # fmt: skip

_dtype = attrgetter("dtype")


def fitting_rows(field: Field, rows: Any) -> Tensor | np.ndarray | None:
    """Check the rows of a field that lie in one array.

    Args:
        field: The field.
        rows: Rows along the first dimension, or a numpy array of objects with one for each row.

    Returns:
        A dense CPU tensor or numpy array of the field's dtype and shape (n, *field shape), the
        latter in either byte order; None if the rows are not of that kind.
    """
    if isinstance(rows, np.ndarray) and rows.dtype.hasobject:
        is_list = rows.ndim == 1 and rows.dtype == object
        return stack_leaves(field, rows.tolist()) if is_list else None
    return _fitting(field, rows)


def _fitting(field: Field, rows: Any) -> Tensor | np.ndarray | None:
    try:
        array, kind = to_array(field.name, rows)
        dtype = array_dtype(field.name, array)
        # An array has no time zone, and does not say whether it is of images.
        is_kind = field.is_kind(kind) or field.kind.removesuffix(";UTC") == kind
        is_kind = is_kind or field.kind.startswith("image")
        is_fit = is_kind and (dtype, tuple(array.shape[1:])) == (field.sample_dtype, field.shape)
        return narrowed(field, array) if is_fit else None
    except (SchemaError, ValueError):
        return None


def stack_samples(
    samples: Sequence[Any], structure: Node, fields: Sequence[Field]
) -> list[Tensor | np.ndarray] | None:
    """Stack the leaves of samples that all fit a schema.

    Args:
        samples: The samples, at least one.
        structure: The structure of the schema.
        fields: Its fields.

    Returns:
        For each field a tensor or numpy array of its dtype and shape (number of samples, *field
        shape); None if a sample may not fit.
    """
    leaves: list[Any] = []
    if not _collect(samples, structure, leaves):
        return None
    stacked = []
    for field, values in zip(fields, leaves, strict=True):
        is_array = isinstance(values, np.ndarray)
        rows = fitting_rows(field, values) if is_array else stack_leaves(field, values)
        if rows is None:
            return None
        stacked.append(rows)
    return stacked


def _collect(values: Sequence[Any], node: Node, leaves: list[Any]) -> bool:
    """Append the values of each field to a list. False if the values may not have the structure."""
    if node.kind == "leaf":
        leaves.append(values)
        return True
    if node.kind == "numbers":
        lists = _stack_lists(values)
        leaves.append(lists)
        return lists is not None
    kinds, num_keys = set(map(type, values)), len(node.keys)
    if len(kinds) > 1:
        return False
    kind = kinds.pop()
    if kind in (tuple, list) and node.kind == kind.__name__:
        if set(map(len, values)) != {num_keys}:
            return False
        children: Any = zip(*values, strict=True)
    elif kind is dict and node.kind == "dict":
        if set(map(len, values)) != {num_keys}:
            return False
        try:
            children = [list(map(itemgetter(key), values)) for key in node.keys]
        except KeyError:
            return False
    elif node.kind == "namedtuple" and getattr(kind, "_fields", None) == node.keys:
        children = zip(*values, strict=True)
    elif kind is TensorDict and node.kind == "tensordict":
        if any(tuple(value.keys()) != node.keys for value in values):
            return False
        children = [[value.get(key) for value in values] for key in node.keys]
    elif node.kind == "dataclass" and _field_names(kind) == node.keys:
        children = [list(map(attrgetter(str(key)), values)) for key in node.keys]
    else:
        return False
    return all(map(_collect, children, node.children, [leaves] * num_keys))


def _field_names(kind: type) -> tuple[str, ...] | None:
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def stack_leaves(field: Field, leaves: Sequence[Any]) -> Tensor | np.ndarray | None:
    """Stack the leaves of one field.

    Args:
        field: The field.
        leaves: One for each row, at least one.

    Returns:
        A tensor or numpy array of the field's dtype and shape (number of rows, *field shape); None
        if a leaf may not fit.
    """
    if field.kind.startswith("image"):
        return _stack_images(field, leaves)
    kinds = set(map(type, leaves))
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind is Tensor:
        return _stack_tensors(field, leaves)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _stack_arrays(field, leaves)
    if _NUMBERS.get(kind) is not field.sample_dtype or field.shape:
        return None
    numbers = _numbers(field.sample_dtype, leaves)
    return None if numbers is None else _fitting(field, numbers)


def _stack_tensors(field: Field, leaves: Sequence[Tensor]) -> Tensor | np.ndarray | None:
    # Of mixed dtypes, torch would make another one.
    if set(map(_dtype, leaves)) != {field.sample_dtype}:
        return None
    try:
        with torch.no_grad():
            stacked = torch.stack(tuple(leaves)).resolve_conj().resolve_neg()
    except RuntimeError:
        return None
    if stacked.is_nested or stacked.layout is not torch.strided or stacked.device.type != "cpu":
        return None
    return _fitting(field, stacked)


def _stack_arrays(field: Field, leaves: Sequence[Any]) -> Tensor | np.ndarray | None:
    if len(set(map(_dtype, leaves))) != 1 or leaves[0].dtype.hasobject:
        return None
    try:
        return _fitting(field, np.array(leaves, leaves[0].dtype))
    except ValueError:
        return None


def _stack_lists(lists: Sequence[Any]) -> np.ndarray | None:
    """Lists or tuples of as many numbers of Python, as the rows of one array."""
    if not set(map(type, lists)) <= {list, tuple} or len(set(map(len, lists))) > 1:
        return None
    kinds = set(map(type, chain.from_iterable(lists)))
    dtype = _NUMBERS.get(kinds.pop()) if len(kinds) == 1 else None
    return None if dtype is None else _numbers(dtype, lists)


def _stack_images(field: Field, images: Sequence[Any]) -> Tensor | np.ndarray | None:
    try:
        found = [to_array(field.name, image) for image in images]
    except SchemaError:
        return None
    arrays = [np.asarray(array) for array, kind in found if kind == field.kind]
    return _stack_arrays(field, arrays) if len(arrays) == len(found) else None


def _numbers(dtype: torch.dtype, values: Sequence[Any]) -> np.ndarray | None:
    try:
        return np.array(values, torch.empty(0, dtype=dtype).numpy().dtype)
    except OverflowError:
        return None
