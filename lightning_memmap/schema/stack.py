"""Stacking: the values that many samples, or the rows of a column, have for each field.

All rows of a field are looked at together, which costs a fraction of one row after the other. Only
leaves that differ in type, or do not fit, are looked at one by one: to convert them, or to say
which field does not fit.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema.fields import FROM_NUMPY, Field, described, where
from lightning_memmap.schema.kinds import (
    FROM_PYTHON,
    Array,
    Image,
    Text,
    is_missing,
    join_texts,
    to_array,
)
from lightning_memmap.schema.leaves import (
    array_dtype,
    as_tensor,
    is_list,
    leaf_array,
    numbers_array,
)
from lightning_memmap.schema.structure import Node, Path, columns_of
from lightning_memmap.schema.values import Values

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_NO_ROOM: Mapping[str, Tensor] = {}


def stack_samples(
    samples: Sequence[Any],
    node: Node,
    fields: Sequence[Field],
    room: Mapping[str, Tensor] = _NO_ROOM,
    path: Path = (),
) -> list[Values]:
    """Stack the leaves of samples."""
    if not len(samples):
        return [Values.none(field) for field in fields]
    if node.kind == "leaf":
        return [stack_leaves(fields[0], samples, room.get(fields[0].name))]
    if node.kind == "none":
        if wrong := [value for value in samples if not is_missing(value)]:
            raise MismatchError(f"{where(path)}: found {wrong[0]!r}, expected None")
        return []
    if node.kind == "optional":
        return _stack_optional(samples, node.children[0], fields[:-1], room, path)
    if node.kind == "records":
        if wrong := [value for value in samples if not is_list(value)]:
            raise MismatchError(
                f"{where(path)}: found {type(wrong[0]).__name__}, expected a list or tuple of"
                " records"
            )
        return _stack_records(samples, node.children[0], fields, path)
    stacked = list[Values]()
    columns = columns_of(samples, node, path)
    for column, (at, child, within) in zip(columns, node.parts(fields, path), strict=True):
        stacked += stack_samples(column, child, within, room, at)
    return stacked


def _stack_optional(
    values: Sequence[Any],
    part: Node,
    fields: Sequence[Field],
    room: Mapping[str, Tensor],
    path: Path,
) -> list[Values]:
    """Stack what is None in some rows, and the mask that says in which it is not."""
    given = np.array([not is_missing(value) for value in values])
    if given.all():
        found = stack_samples(values, part, fields, room, path)
    else:
        some = [value for value, is_given in zip(values, given.tolist(), strict=True) if is_given]
        found = stack_samples(some, part, fields, path=path)
        found = [each.spread(given) for each in found]
    return [*found, Values(torch.from_numpy(given))]


def _stack_records(
    lists: Sequence[Any], record: Node, fields: Sequence[Field], path: Path
) -> list[Values]:
    """Stack what the records of lists have."""
    inner = [field.of_record for field in fields]
    found = stack_samples(list(chain.from_iterable(lists)), record, inner, path=path)
    lengths, stacked = np.array(list(map(len, lists)), np.int64), list[Values]()
    for field, values in zip(fields, found, strict=True):
        try:
            in_lists = _join_texts if field.is_text else Values.in_lists
            stacked.append(in_lists(values, lengths))
        except ValueError as error:
            way_out = (
                "" if field.is_text
                else "; the records of a list have one shape: pad them in the dataset, or join them"
                " into one array, with their lengths in another field"
            )  # fmt: skip
            raise SchemaError(f"field {field.name!r}: {error}{way_out}") from error
    return stacked


def _join_texts(texts: Values, lengths: Integers) -> Values:
    """Texts as those of lists, of which each row has some."""
    each = (text.numpy() for text in texts.rows())
    rows = [join_texts([next(each) for _ in range(length)]) for length in lengths.tolist()]
    sizes = np.array(list(map(len, rows)), np.int64)[:, None]
    return Values(torch.from_numpy(np.concatenate(rows)), sizes)


def stack_leaves(field: Field, leaves: Sequence[Any], room: Tensor | None = None) -> Values:
    """Stack the leaves of one field, at least one, where there is room for them if possible."""
    if isinstance(field.kind, Text):
        return _stack_texts(field, field.kind, leaves)
    if not isinstance(field.kind, Image):
        # Whatever goes wrong here is told by the leaves one by one.
        with suppress(RuntimeError, TypeError, ValueError, OverflowError, AttributeError):
            return _stack_alike(field, leaves, room)
    data, sizes = _joined(field, [leaf_array(field, leaf) for leaf in leaves], room)
    return Values(as_tensor(data), sizes)


def _stack_alike(field: Field, leaves: Sequence[Any], room: Tensor | None) -> Values:
    """Stack leaves of one type and dtype; any error where they are not."""
    (kind,) = set(map(type, leaves))
    if kind in (list, tuple):
        return _stack_lists(field, leaves)
    if kind in FROM_PYTHON:
        # A float would round what is not.
        return fit_rows(field, np.array(leaves, FROM_PYTHON[kind]))
    (dtype,) = set(map(_dtype, leaves))
    if issubclass(kind, np.generic):
        return fit_rows(field, np.array(leaves, dtype))
    if kind not in (Tensor, np.ndarray) or not all(map(field.admits, set(map(_shape, leaves)))):
        raise TypeError("the leaves are to be converted one by one")
    data, sizes = _joined(field, leaves, room)
    return _fitting(field, data, sizes)


def _stack_lists(field: Field, lists: Sequence[Sequence[Any]]) -> Values:
    """Stack lists or tuples of numbers; any error where they do not fit."""
    numbers, lengths = numbers_array(field.name, lists), np.array(list(map(len, lists)), np.int64)
    if field.num_variable:
        return fit_items(field, numbers, lengths)
    if (lengths != lengths[0]).any():
        raise TypeError("the lists differ in length")
    return fit_rows(field, numbers.reshape(len(lists), -1))


def _joined(
    field: Field, leaves: Sequence[Any], room: Tensor | None
) -> tuple[Array, Integers | None]:
    """Arrays or tensors of shapes that a field admits, one after the other, and their sizes."""
    count = field.num_variable
    sizes = np.array([leaf.shape[:count] for leaf in leaves], np.int64) if count else None
    if count > 1:
        leaves = [leaf.reshape(-1, *field.item_shape) for leaf in leaves]
    kinds = set(map(type, leaves))
    are_arrays = not any(issubclass(kind, Tensor) for kind in kinds)
    dtype = FROM_NUMPY.get(leaves[0].dtype) if are_arrays else leaves[0].dtype
    if count or room is None or room.dtype != dtype:
        room = None
    if not are_arrays:
        tensors = tuple(leaves if kinds == {Tensor} else map(as_tensor, leaves))
        with torch.no_grad():
            data = torch.cat(tensors) if count else torch.stack(tensors, out=room)
            return data.resolve_conj().resolve_neg(), sizes
    if not field.shape:
        return np.array(leaves, leaves[0].dtype), None
    out = None if room is None else room.flatten(0, 1).numpy()
    items = np.concatenate(leaves, out=out)
    return items if count else items.reshape(len(leaves), *field.shape), sizes


def _stack_texts(field: Field, kind: Text, texts: Sequence[Any]) -> Values:
    types = set(map(type, texts))
    if types == {str} and str in kind.types and (joined := "".join(texts)).isascii():
        # As many bytes as characters: they are not encoded one by one.
        data, counted = joined.encode(), texts
    else:
        if not types <= kind.types:
            texts = [leaf_array(field, text).tobytes() for text in texts]  # type: ignore[union-attr]
            counted = texts
        else:
            counted = list(map(kind.encode, texts))
        data = b"".join(counted)
    sizes = np.fromiter(map(len, counted), np.int64, len(texts))
    return Values(as_tensor(np.frombuffer(data, np.uint8)), sizes[:, None])


def fit_rows(field: Field, rows: Any) -> Values:
    """The rows of a field that lie in one array, in the same memory where possible."""
    if not (count := field.num_variable):
        return _fitting(field, rows, None)
    shape = tuple(rows.shape[1:])
    if not field.admits(shape):
        raise MismatchError(f"field {field.name!r}: found rows of shape {shape}, expected {field}")
    sizes = np.full((len(rows), count), shape[:count], np.int64)
    return _fitting(field, rows.reshape(-1, *field.item_shape), sizes)


def fit_items(field: Field, items: Any, lengths: Any) -> Values:
    """The items of rows that differ in length, one row after the other, as rows of a field."""
    if field.num_variable != 1:
        raise MismatchError(f"field {field.name!r}: found lists, expected {field}")
    return _fitting(field, items, np.asarray(lengths, np.int64)[:, None])


def _fitting(field: Field, rows: Any, sizes: Integers | None) -> Values:
    array, kind = to_array(field.name, rows)
    dtype, shape = array_dtype(field.name, array), tuple(array.shape[1:])
    if not field.kind.takes_rows(kind) or (dtype, shape) != (field.dtype, field.item_shape):
        raise MismatchError(
            f"field {field.name!r}: found {described(dtype, shape, kind)}, expected"
            f" {field.described}"
        )
    return Values(as_tensor(array), sizes)
