"""Rows: the leaves of many samples stacked field by field, which is cheaper than row by row.

What is stacked here is what is sure to fit a field. Everything else, whether it is wrong or merely
unusual, is left to `lightning_memmap.schema.Schema.flatten`, which looks at one sample at a time
and names what does not fit.
"""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.leaves import EMPTY, is_missing, native_tensor, to_array
from lightning_memmap.schema.narrowing import narrowed
from lightning_memmap.schema.numbers import (
    FROM_NUMPY,
    FROM_PYTHON,
    MAX_NUMBERS,
    TO_NUMPY,
    array_dtype,
)
from lightning_memmap.schema.structure import Node

_NUMBERS = {kind: FROM_NUMPY[dtype] for kind, dtype in FROM_PYTHON.items()}
#: Types of the rows of a field of text, by its kind.
_TEXTS: dict[str, set[type]] = {"text": {str, np.str_}, "bytes": {bytes, bytearray, np.bytes_}}

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


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
        is_fit = is_kind and (dtype, tuple(array.shape[1:])) == (
            field.sample_dtype,
            field.item_shape,
        )
        return narrowed(field, array) if is_fit else None
    except (SchemaError, ValueError):
        return None


def packed_rows(field: Field, rows: Any) -> tuple[Tensor | np.ndarray, Integers] | None:
    """Check the rows of a field that differ in length, and lay them one after the other.

    Args:
        field: The field.
        rows: A numpy array with one object for each row, a str, bytes, array or tensor, or `EMPTY`;
            a numpy array of texts; or rows that happen to have one shape, along the first dimension
            of a tensor or array.

    Returns:
        The items, a dense CPU tensor or numpy array of the field's dtype and shape (items of all
        rows, *item shape), the latter in either byte order; and the sizes of each row in the
        dimensions that differ, int64 of shape (n, number of these). None if the rows are not of
        that kind.
    """
    if not isinstance(rows, Tensor | np.ndarray) or field.kind.startswith("image"):
        return None
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "OUS":
        return _pack_leaves(field, rows.tolist() if rows.ndim == 1 else [rows])
    count, shape = field.num_variable, tuple(rows.shape[1:])
    if not field.admits(shape):
        return None
    items = _fitting(field, rows.reshape(-1, *field.item_shape))
    return None if items is None else (items, np.full((len(rows), count), shape[:count], np.int64))


def _pack_leaves(
    field: Field, leaves: Sequence[Any]
) -> tuple[Tensor | np.ndarray, Integers] | None:
    if field.is_text:
        return _pack_texts(field, leaves)
    return None if field.kind.startswith("image") else _pack_arrays(field, leaves)


def _pack_texts(field: Field, texts: Sequence[Any]) -> tuple[np.ndarray, Integers] | None:
    kinds = set(map(type, texts))
    if not kinds - {type(EMPTY)} <= _TEXTS.get(field.kind, set()):
        return None
    if field.kind == "text" and type(EMPTY) not in kinds and (joined := "".join(texts)).isascii():
        # As many bytes as characters: they are not encoded one by one.
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        return np.frombuffer(joined.encode(), np.uint8), sizes[:, None]
    if field.kind == "text":
        data = [b"" if text is EMPTY else text.encode("utf-8", "surrogatepass") for text in texts]
    else:
        data = [b"" if text is EMPTY else text for text in texts]
    sizes = np.fromiter(map(len, data), np.int64, len(data))
    return np.frombuffer(b"".join(data), np.uint8), sizes[:, None]


def _pack_arrays(
    field: Field, leaves: Sequence[Any]
) -> tuple[Tensor | np.ndarray, Integers] | None:
    count = field.num_variable
    sizes = np.zeros((len(leaves), count), np.int64)
    given = [leaf for leaf in leaves if leaf is not EMPTY]
    if not given:
        return torch.empty((0, *field.item_shape), dtype=field.dtype), sizes
    kinds = set(map(type, given))
    if kinds not in ({Tensor}, {np.ndarray}) or len(set(map(_dtype, given))) > 1:
        return None
    try:
        shapes = [tuple(leaf.shape) for leaf in given]
        if not all(map(field.admits, set(shapes))):
            return None
        flat = [leaf.reshape(-1, *field.item_shape) for leaf in given] if count > 1 else given
        items = np.concatenate(flat) if kinds == {np.ndarray} else _join_tensors(flat)
    except (RuntimeError, ValueError):  # As of nested tensors, and those of other devices.
        return None
    fitting = None if items is None else _fitting(field, items)
    if fitting is None:
        return None
    sizes[[leaf is not EMPTY for leaf in leaves]] = [shape[:count] for shape in shapes]
    return fitting, sizes


def _join_tensors(tensors: Sequence[Tensor]) -> Tensor | None:
    with torch.no_grad():
        joined = torch.cat(tuple(tensors)).resolve_conj().resolve_neg()
    is_dense = not joined.is_nested and joined.layout is torch.strided
    return joined if is_dense and joined.device.type == "cpu" else None


def arrays_of_lists(field: Field, lists: Sequence[Any]) -> list[np.ndarray | None] | None:
    """Convert lists of numbers that differ in length to arrays.

    Args:
        field: The field whose rows they are.
        lists: One for each row, or None.

    Returns:
        An array of the field's dtype for each list, None for None; or None in place of all if there
        is anything else than lists or tuples of numbers of Python.
    """
    given = [each for each in lists if each is not None]
    if not set(map(type, given)) <= {list, tuple} or field.sample_dtype not in _NUMBERS.values():
        return None
    lengths = list(map(len, given))
    kinds = set(map(type, chain.from_iterable(given)))
    is_alike = all(_NUMBERS.get(kind) is field.sample_dtype for kind in kinds)
    if not is_alike or max(lengths, default=0) > MAX_NUMBERS:
        return None
    numbers = _numbers(field.sample_dtype, list(chain.from_iterable(given)))
    if numbers is None:
        return None
    arrays = iter([numbers[a:b] for a, b in pairwise(accumulate(lengths, initial=0))])
    return [None if each is None else next(arrays) for each in lists]


def stack_samples(
    samples: Sequence[Any],
    structure: Node,
    fields: Sequence[Field],
    room: Sequence[Tensor | None] | None = None,
) -> list[Tensor | np.ndarray | tuple[Tensor | np.ndarray, Integers]] | None:
    """Stack the leaves of samples that all fit a schema.

    Args:
        samples: The samples, at least one.
        structure: The structure of the schema.
        fields: Its fields.
        room: Memory for the rows of each field, of its dtype and shape (number of samples, *field
            shape) on the CPU. Where this can be done without another copy they are stacked there.

    Returns:
        For each field a tensor or numpy array of its dtype and shape (number of samples, *field
        shape); where rows differ in length, what `packed_rows` returns. None if a sample may not
        fit.
    """
    leaves: list[Any] = []
    if not _collect(samples, structure, leaves):
        return None
    stacked = list[Any]()
    for field, values, memory in zip(fields, leaves, room or [None] * len(fields), strict=True):
        rows: Any
        if isinstance(values, np.ndarray):
            rows = fitting_rows(field, values)
        elif field.num_variable:
            rows = _pack_leaves(field, values)
        else:
            rows = stack_leaves(field, values, memory)
        if rows is None:
            return None
        stacked.append(rows)
    return stacked


def _collect(values: Sequence[Any], node: Node, leaves: list[Any]) -> bool:
    """Append the values of each field to a list. False if the values may not have the structure."""
    if node.kind == "leaf":
        leaves.append(values)
        return True
    if node.kind == "optional" and node.children[0].kind == "leaf":
        is_given = [not is_missing(value) for value in values]
        pairs = zip(values, is_given, strict=True)
        leaves += [[value if given else EMPTY for value, given in pairs], is_given]
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


def stack_leaves(
    field: Field, leaves: Sequence[Any], room: Tensor | None = None
) -> Tensor | np.ndarray | None:
    """Stack the leaves of one field.

    Args:
        field: The field.
        leaves: One for each row, at least one.
        room: As in `stack_samples`.

    Returns:
        A tensor or numpy array of the field's dtype and shape (number of rows, *field shape); None
        if a leaf may not fit.
    """
    is_given = [leaf is not EMPTY for leaf in leaves]
    if not all(is_given):
        rows = torch.zeros((len(leaves), *field.item_shape), dtype=field.dtype)
        given = [leaf for leaf in leaves if leaf is not EMPTY]
        found = stack_leaves(field, given) if given else rows[:0]
        if found is not None:
            rows[torch.tensor(is_given)] = native_tensor(found)
        return None if found is None else rows
    if field.kind.startswith("image"):
        return _stack_images(field, leaves, room)
    kinds = set(map(type, leaves))
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind is Tensor:
        return _stack_tensors(field, leaves, room)
    if kind is np.ndarray or issubclass(kind, np.generic):
        return _stack_arrays(field, leaves, room)
    if _NUMBERS.get(kind) is not field.sample_dtype or field.shape:
        return None
    numbers = _numbers(field.sample_dtype, leaves)
    return None if numbers is None else _fitting(field, numbers)


def _stack_tensors(
    field: Field, leaves: Sequence[Tensor], room: Tensor | None
) -> Tensor | np.ndarray | None:
    # Of mixed dtypes, torch would make another one.
    if set(map(_dtype, leaves)) != {field.sample_dtype}:
        return None
    # Memory that does not fit would be replaced. All leaves must have the shape of the first one.
    if room is not None and (room.dtype, room.shape[1:]) != (leaves[0].dtype, leaves[0].shape):
        room = None
    try:
        with torch.no_grad():
            stacked = torch.stack(tuple(leaves), out=room).resolve_conj().resolve_neg()
    except RuntimeError:
        return None
    if stacked.is_nested or stacked.layout is not torch.strided or stacked.device.type != "cpu":
        return None
    return _fitting(field, stacked)


def _stack_arrays(
    field: Field, leaves: Sequence[Any], room: Tensor | None
) -> Tensor | np.ndarray | None:
    if len(set(map(_dtype, leaves))) != 1 or leaves[0].dtype.hasobject:
        return None
    if room is not None and room.ndim > 1 and leaves[0].dtype == TO_NUMPY.get(room.dtype):
        if set(map(_shape, leaves)) != {tuple(room.shape[1:])}:
            return None
        np.concatenate(leaves, out=room.flatten(0, 1).numpy())
        return _fitting(field, room.numpy())
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


def _stack_images(
    field: Field, images: Sequence[Any], room: Tensor | None
) -> Tensor | np.ndarray | None:
    try:
        found = [to_array(field.name, image) for image in images]
    except SchemaError:
        return None
    arrays = [np.asarray(array) for array, kind in found if kind == field.kind]
    return _stack_arrays(field, arrays, room) if len(arrays) == len(found) else None


def _numbers(dtype: torch.dtype, values: Sequence[Any]) -> np.ndarray | None:
    try:
        return np.array(values, TO_NUMPY[dtype])
    except OverflowError:
        return None
