"""Stacking: the values that many samples, or the rows of a column, have for each field.

All rows of a field are looked at together, which costs a fraction of one row after the other. What
is stacked here is sure to fit its field. Samples that are wrong or merely unusual, such as those of
derived classes, are left to `lightning_memmap.schema.Schema.flatten`, which looks at one sample at
a time and names what does not fit; `join_rows` then joins what it gives.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema.fields import Field, join_texts
from lightning_memmap.schema.leaves import (
    EMPTY,
    FROM_NUMPY,
    FROM_PYTHON,
    MAX_NUMBERS,
    TO_NUMPY,
    array_dtype,
    is_missing,
    narrowed,
    native_tensor,
    to_array,
)
from lightning_memmap.schema.structure import Node
from lightning_memmap.schema.values import Values

_NUMBERS = {kind: FROM_NUMPY[dtype] for kind, dtype in FROM_PYTHON.items()}
#: Types of the rows of a field of text, by its kind.
_TEXTS: dict[str, set[type]] = {"text": {str, np.str_}, "bytes": {bytes, bytearray, np.bytes_}}
#: Torch has no index for these, and their bits do as well.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class _Lists(list[Any]):
    """The leaves of a field of lists of numbers: one list or tuple for each row, or `EMPTY`."""


class _Records(list[Any]):
    """The leaves of a field in the records of lists: those of all records, and how many are of
    each row."""

    lengths: Sequence[int]


def stack_samples(
    samples: Sequence[Any],
    structure: Node,
    fields: Sequence[Field],
    room: Sequence[Tensor | None] | None = None,
) -> list[Values] | None:
    """Stack the leaves of samples that all fit a schema.

    Args:
        samples: The samples, or the rows of a column, at least one.
        structure: The structure of the schema, or of the column.
        fields: Its fields.
        room: Memory for the rows of each field, of its dtype and shape (number of samples, *field
            shape) on the CPU. Where this can be done without another copy they are stacked there.

    Returns:
        The rows of each field; None if a sample may not fit.
    """
    columns: list[list[Any]] = []
    if not _collect(samples, structure, columns):
        return None
    stacked = []
    for field, column, memory in zip(fields, columns, room or [None] * len(fields), strict=True):
        if (values := _stack_leaves(field, column, memory)) is None:
            return None
        stacked.append(values)
    return stacked


def stack_rows(field: Field, rows: Any) -> Values | None:
    """Check the rows of a field that lie in one array.

    Args:
        field: The field.
        rows: A tensor or array with the rows along its first dimension.

    Returns:
        The rows, in the memory in which they lie where that is possible; None if they do not fit.
    """
    if not field.num_variable:
        fitting = _fitting(field, rows)
        return None if fitting is None else Values(fitting)
    count, shape = field.num_variable, tuple(rows.shape[1:])
    if not field.admits(shape) or field.kind.startswith("image"):
        return None
    items = _fitting(field, rows.reshape(-1, *field.item_shape))
    sizes = np.full((len(rows), count), shape[:count], np.int64)
    return None if items is None else Values(items, sizes)


def stack_items(field: Field, items: Any, lengths: Any) -> Values | None:
    """Check the items of rows that differ in length.

    Args:
        field: The field, in whose rows one dimension may differ.
        items: The items of all rows, one after the other.
        lengths: How many each row has, integers of shape (n,).

    Returns:
        The rows; None if they do not fit.
    """
    found = _fitting(field, items)
    if found is None or field.num_variable > 1:
        return None
    if field.num_variable:
        return Values(found, np.asarray(lengths, np.int64)[:, None])
    return None


def join_rows(field: Field, rows: Sequence[Tensor | np.ndarray]) -> Values:
    """Join rows that `Schema.flatten` has checked.

    Args:
        field: The field.
        rows: Of the field's dtype, and of shapes that it admits.
    """
    tensors, count = list(map(native_tensor, rows)), field.num_variable
    if not count:
        return Values(torch.stack(tensors))
    sizes = np.array([row.shape[:count] for row in tensors], np.int64)
    return Values(torch.cat([row.reshape(-1, *field.item_shape) for row in tensors]), sizes)


def take_values(values: Values, rows: Integers) -> Values:
    """Some of the rows that there are, in any order, int64 of shape (n,)."""
    if values.sizes is None:
        return Values(take_rows(values.data, rows))
    lengths = values.sizes.prod(axis=1)
    starts, taken = np.cumsum(lengths) - lengths, lengths[rows]
    shifts = starts[rows] - (np.cumsum(taken) - taken)
    items = np.repeat(shifts, taken) + np.arange(taken.sum())
    return Values(take_rows(values.data, items), values.sizes[rows])


def join_values(parts: Sequence[Values]) -> Values:
    """Join rows of one field, at least one part."""
    if len(parts) == 1:
        return parts[0]
    sizes = [part.sizes for part in parts if part.sizes is not None]
    data = torch.cat([part.data for part in parts])
    return Values(data, np.concatenate(sizes) if sizes else None)


def take_rows(data: Tensor, rows: Integers) -> Tensor:
    """Rows of a tensor of any dtype, in any order."""
    signed, numbers = _SIGNED.get(data.dtype, data.dtype), torch.from_numpy(rows)
    return data.detach().view(signed).index_select(0, numbers.to(data.device)).view(data.dtype)


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
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


def _fitting(field: Field, rows: Any) -> Tensor | None:
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
        return as_tensor(narrowed(field, array)) if is_fit else None
    except (SchemaError, ValueError):
        return None


def _collect(values: Sequence[Any], node: Node, columns: list[list[Any]]) -> bool:
    """Append the leaves of each field to a list. False if the values may not have the structure."""
    if node.kind == "leaf":
        columns.append(list(values))
        return True
    if node.kind == "none":
        return all(map(is_missing, values))
    if node.kind == "optional":
        return _collect_optional(values, node.children[0], columns)
    kinds = set(map(type, values))
    if node.kind == "sequence":
        columns.append(_Lists(values))
        return kinds <= {list, tuple}
    if node.kind == "records":
        return kinds <= {list, tuple} and _collect_records(values, node.children[0], columns)
    children = _children(values, kinds.pop(), node) if len(kinds) == 1 else None
    return children is not None and all(
        map(_collect, children, node.children, [columns] * len(node.keys))
    )


def _children(values: Sequence[Any], kind: Any, node: Node) -> Sequence[Any] | None:
    """The values of each child of a container; None if these may not be its containers."""
    keys = node.keys
    if kind in (tuple, list) and node.kind == kind.__name__:
        return list(zip(*values, strict=True)) if set(map(len, values)) == {len(keys)} else None
    if kind is dict and node.kind == "dict":
        if set(map(len, values)) != {len(keys)}:
            return None
        try:
            return [list(map(itemgetter(key), values)) for key in keys]
        except KeyError:
            return None
    if node.kind == "namedtuple" and getattr(kind, "_fields", None) == keys:
        return list(zip(*values, strict=True))
    if kind is TensorDict and node.kind == "tensordict":
        if any(tuple(value.keys()) != keys for value in values):
            return None
        return [[value.get(key) for value in values] for key in keys]
    if node.kind == "dataclass" and dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        return [list(map(attrgetter(str(key)), values)) for key in keys] if names == keys else None
    return None


def _collect_optional(values: Sequence[Any], part: Node, columns: list[list[Any]]) -> bool:
    is_given, first = [not is_missing(value) for value in values], len(columns)
    if all(is_given):
        is_found = _collect(values, part, columns)
    else:
        given = [value for value, here in zip(values, is_given, strict=True) if here]
        columns += [[] for _ in range(0 if given else part.num_fields)]
        is_found = _collect(given, part, columns) if given else True
        columns[first:] = [_spread(column, is_given) for column in columns[first:]]
    columns.append(is_given)
    return is_found


def _spread(column: list[Any], is_given: Sequence[bool]) -> list[Any]:
    """The leaves of all rows, of which a column has those that are given."""
    if isinstance(column, _Records):
        lengths, spread = iter(column.lengths), _Records(column)
        spread.lengths = [next(lengths) if here else 0 for here in is_given]
        return spread
    leaves = iter(column)
    return type(column)([next(leaves) if here else EMPTY for here in is_given])


def _collect_records(values: Sequence[Any], record: Node, columns: list[list[Any]]) -> bool:
    records, within = list(chain.from_iterable(values)), list[list[Any]]()
    if records and not _collect(records, record, within):
        return False
    for column in within if records else [list[Any]() for _ in range(record.num_fields)]:
        if isinstance(column, _Lists):  # Their numbers are left to the exact way.
            return False
        columns.append(_Records(column))
        columns[-1].lengths = list(map(len, values))  # type: ignore[attr-defined]
    return True


def _stack_leaves(field: Field, leaves: list[Any], room: Tensor | None = None) -> Values | None:
    """Stack the leaves of one field; None if one may not fit."""
    if isinstance(leaves, _Records):
        return _stack_records(field, leaves)
    if field.is_text:
        return _stack_texts(field, leaves)
    is_given = [leaf is not EMPTY for leaf in leaves]
    if not all(is_given):
        return _stack_given(field, leaves, is_given)
    if isinstance(leaves, _Lists):
        return _stack_lists(field, leaves)
    if field.num_variable:
        return None if field.kind.startswith("image") else _stack_ragged(field, leaves)
    found = _stack_fixed(field, leaves, room)
    return None if found is None else Values(found)


def _stack_given(field: Field, leaves: list[Any], is_given: list[bool]) -> Values | None:
    """Stack leaves of which some are missing: zeros, or nothing, in their place."""
    given = type(leaves)([leaf for leaf in leaves if leaf is not EMPTY])
    found = _stack_leaves(field, given) if given else None
    if given and found is None:
        return None
    count, rows = field.num_variable, torch.tensor(is_given)
    if count:
        sizes = np.zeros((len(leaves), count), np.int64)
        if found is None:
            return Values(torch.empty((0, *field.item_shape), dtype=field.dtype), sizes)
        assert found.sizes is not None
        sizes[is_given] = found.sizes
        return Values(found.data, sizes)
    data = torch.zeros((len(leaves), *field.item_shape), dtype=field.dtype)
    if found is not None:
        signed = _SIGNED.get(field.dtype, field.dtype)
        data.view(signed)[rows] = found.data.view(signed)
    return Values(data)


def _stack_records(field: Field, leaves: _Records) -> Values | None:
    record, lengths = field.of_record, np.array(leaves.lengths, np.int64)[:, None]
    if not leaves:
        return Values(torch.empty((0, *record.item_shape), dtype=field.dtype), lengths)
    if not field.is_text:
        found = None if record.num_variable else _stack_leaves(record, list(leaves))
        return None if found is None else Values(found.data, lengths)
    texts = _encoded(record, leaves)
    try:
        rows = None if texts is None else [*_joined_texts(texts, leaves.lengths)]
    except ValueError:
        return None
    if rows is None:
        return None
    sizes = np.array(list(map(len, rows)), np.int64)[:, None]
    return Values(as_tensor(np.concatenate(rows)), sizes)


def _joined_texts(texts: Sequence[bytes], lengths: Sequence[int]) -> Iterator[np.ndarray]:
    each = iter(texts)
    for length in lengths:
        yield join_texts([np.frombuffer(next(each), np.uint8) for _ in range(length)])


def _encoded(field: Field, texts: Sequence[Any]) -> list[bytes] | None:
    """The bytes of texts; None if one is none."""
    if not set(map(type, texts)) - {type(EMPTY)} <= _TEXTS.get(field.kind, set()):
        return None
    if field.kind == "bytes":
        return [b"" if text is EMPTY else text for text in texts]
    return [b"" if text is EMPTY else text.encode("utf-8", "surrogatepass") for text in texts]


def _stack_texts(field: Field, texts: Sequence[Any]) -> Values | None:
    is_plain = field.kind == "text" and set(map(type, texts)) == {str}
    if is_plain and (joined := "".join(texts)).isascii():
        # As many bytes as characters: they are not encoded one by one.
        data, counted = joined.encode(), texts
    else:
        if (found := _encoded(field, texts)) is None:
            return None
        data, counted = b"".join(found), found
    sizes = np.fromiter(map(len, counted), np.int64, len(texts))
    items = np.frombuffer(data, np.uint8)
    return Values(as_tensor(items), sizes[:, None])


def _stack_lists(field: Field, lists: Sequence[Any]) -> Values | None:
    """Lists or tuples of numbers of Python."""
    lengths = list(map(len, lists))
    numbers = list(chain.from_iterable(lists))
    kinds = {_NUMBERS.get(kind) for kind in set(map(type, numbers))}
    if kinds - {field.sample_dtype} or max(lengths) > MAX_NUMBERS or field.num_variable > 1:
        return None
    found = _numbers(field.sample_dtype, numbers)
    if found is None or field.item_shape not in ((), tuple({*lengths})):
        return None
    if not field.num_variable:
        return stack_rows(field, found.reshape(len(lists), -1))
    return stack_items(field, found, lengths)


def _stack_ragged(field: Field, leaves: Sequence[Any]) -> Values | None:
    count, kinds = field.num_variable, set(map(type, leaves))
    if kinds not in ({Tensor}, {np.ndarray}) or len(set(map(_dtype, leaves))) > 1:
        return None
    try:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if not all(map(field.admits, set(shapes))):
            return None
        flat = [leaf.reshape(-1, *field.item_shape) for leaf in leaves] if count > 1 else leaves
        items = np.concatenate(flat) if kinds == {np.ndarray} else _join_tensors(flat)
    except (RuntimeError, ValueError):  # As of nested tensors, and those of other devices.
        return None
    fitting = None if items is None else _fitting(field, items)
    if fitting is None:
        return None
    return Values(fitting, np.array([shape[:count] for shape in shapes], np.int64))


def _join_tensors(tensors: Sequence[Tensor]) -> Tensor | None:
    with torch.no_grad():
        joined = torch.cat(tuple(tensors)).resolve_conj().resolve_neg()
    is_dense = not joined.is_nested and joined.layout is torch.strided
    return joined if is_dense and joined.device.type == "cpu" else None


def _stack_fixed(field: Field, leaves: Sequence[Any], room: Tensor | None) -> Tensor | None:
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


def _stack_tensors(field: Field, leaves: Sequence[Tensor], room: Tensor | None) -> Tensor | None:
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


def _stack_arrays(field: Field, leaves: Sequence[Any], room: Tensor | None) -> Tensor | None:
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


def _stack_images(field: Field, images: Sequence[Any], room: Tensor | None) -> Tensor | None:
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
