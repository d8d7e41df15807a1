"""Stacking: the values that many samples, or the rows of a table, have for each field.

All rows of a field are looked at together, which costs a fraction of one row after the other. Only
leaves that differ in type, or do not fit, are looked at one by one: to convert them, or to say
which field does not fit.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.integers import Integers
from lightning_memmap.schema.fields import (
    DTYPES,
    FROM_NUMPY,
    TO_NUMPY,
    Field,
    RowList,
    Values,
    describe_path,
    dtype_name,
)
from lightning_memmap.schema.kinds import (
    FROM_PYTHON,
    Array,
    Image,
    Text,
    is_missing,
    join_texts,
    number_array,
    python_dtype,
    to_array,
)
from lightning_memmap.schema.structure import Node, Path, columns_of

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class Branch(ABC):
    """The values of many rows at one path of a sample.

    Methods raise a SchemaError if the values do not have the requested structure.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    def is_present(self) -> NDArray[np.bool_]:
        """Return which rows are not None, bool of shape (rows,)."""
        return np.ones(len(self), np.bool_)

    def select(self, mask: NDArray[np.bool_]) -> "Branch":
        """Return the rows where a mask is True."""
        raise SchemaError("no row is None")

    def parts(self, node: Node, path: Path) -> Sequence["Branch"]:
        """Return the values of containers, child by child."""
        raise SchemaError(f"{describe_path(path)}: there are no containers")

    def lists(self, path: Path) -> tuple["Branch", Integers]:
        """Return the concatenated items of lists, and the length of each list."""
        raise SchemaError(f"{describe_path(path)}: there are no lists")

    @abstractmethod
    def leaves(self, field: Field) -> Values:
        """Stack the rows of a field, at least one."""


class Samples(Branch):
    """Samples, or one part of each, as the dataset returned them."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    @override
    def __len__(self) -> int:
        return len(self._values)

    @override
    def is_present(self) -> NDArray[np.bool_]:
        return np.array([not is_missing(value) for value in self._values])

    @override
    def select(self, mask: NDArray[np.bool_]) -> Branch:
        return self._like(list(compress(self._values, mask.tolist())))

    @override
    def parts(self, node: Node, path: Path) -> Sequence[Branch]:
        return list(map(self._like, columns_of(self._values, node, path)))

    @override
    def lists(self, path: Path) -> tuple[Branch, Integers]:
        if wrong := [value for value in self._values if not _is_list(value)]:
            raise MismatchError(
                f"{describe_path(path)}: found {type(wrong[0]).__name__}, expected a list or tuple"
                " of records"
            )
        lengths = np.array(list(map(len, self._values)), np.int64)
        return self._like(list(chain.from_iterable(self._values))), lengths

    @override
    def leaves(self, field: Field) -> Values:
        leaves = self._values
        if isinstance(field.kind, Text):
            return _stack_texts(field, field.kind, leaves)
        if not isinstance(field.kind, Image):
            # On failure, convert leaf by leaf below, which names the field.
            with suppress(RuntimeError, TypeError, ValueError, OverflowError, AttributeError):
                return _stack_alike(field, leaves)
        data, sizes = _joined(field, [leaf_array(field, leaf) for leaf in leaves])
        return Values(as_tensor(data), sizes)

    def _like(self, values: Sequence[Any]) -> Branch:
        return Samples(values)


class Batch(Branch):
    """The rows of a batch, in tensors or one by one."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    @override
    def __len__(self) -> int:
        return 1  # Never empty. The number of rows is only known field by field.

    @override
    def parts(self, node: Node, path: Path) -> Sequence[Branch]:
        return [Batch(part) for (part,) in columns_of([self._batch], node, path)]

    @override
    def leaves(self, field: Field) -> Values:
        if (rows := unstacked_rows(field.name, self._batch)) is None:
            return as_values(field, self._batch)
        return Samples(rows).leaves(field) if rows else Values.empty(field)


def unstacked_rows(name: str, leaf: Any) -> Sequence[Any] | None:
    """Return the rows of a `RowList` or nested tensor, and None for a tensor of stacked rows."""
    if isinstance(leaf, RowList):
        return leaf
    found = type(leaf).__name__
    if isinstance(leaf, Tensor):
        if leaf.layout is torch.jagged:
            return leaf.unbind()
        if leaf.ndim and not leaf.is_nested:
            return None
        found = "a tensor without dimensions" if not leaf.ndim else "a nested tensor"
    raise SchemaError(
        f"field {name!r}: found {found}; give tensors whose first dimension is the rows of the"
        " batch, and of text, or of rows that differ in length, a lightning_memmap.loading.RowList"
        " or a torch.nested.nested_tensor(..., layout=torch.jagged)"
    )


def stack(branch: Branch, node: Node, path: Path = ()) -> list[Values]:
    """Stack the values of a branch, field by field of a node."""
    if not len(branch):
        return [Values.empty(field) for field in node.fields]
    if node.field is not None:
        return [branch.leaves(node.field)]
    if node.kind == "none":
        if branch.is_present().any():
            raise MismatchError(f"{describe_path(path)}: found a value, expected None")
        return []
    if node.kind == "optional":
        mask = branch.is_present()
        if mask.all():
            stacked = stack(branch, node.children[0], path)
        else:
            rows = stack(branch.select(mask), node.children[0], path)
            stacked = [values.scatter(mask) for values in rows]
        return [*stacked, Values(torch.from_numpy(mask))]
    if node.kind == "records":
        return _stack_records(*branch.lists(path), node.children[0], path)
    children = zip(branch.parts(node, path), node.items(path), strict=True)
    return [
        values
        for part, (child_path, child) in children
        for values in stack(part, child, child_path)
    ]


def _stack_records(records: Branch, lengths: Integers, record: Node, path: Path) -> list[Values]:
    """Stack the records of lists, field by field, into one row for each list."""
    fields, stacked = record.fields, stack(records, record, path)
    by_name = {field.name: values for field, values in zip(fields, stacked, strict=True)}
    in_lists = list[Values]()
    for field in fields:
        masks = record.masks[field.name]
        # An outer mask is False wherever an inner one is.
        mask = by_name[masks[-1]].data.numpy() if masks else None
        try:
            if field.is_text:
                in_lists.append(_join_texts(by_name[field.name], lengths))
            else:
                in_lists.append(by_name[field.name].group_into_lists(lengths, mask))
        except ValueError as error:
            way_out = (
                "" if field.is_text
                else "; the records of a list have one shape: pad them in the dataset, or join them"
                " into one array, with their lengths in another field"
            )  # fmt: skip
            raise SchemaError(f"field {field.name!r}: {error}{way_out}") from error
    return in_lists


def _join_texts(texts: Values, lengths: Integers) -> Values:
    """Join texts into one row for each list."""
    each = (text.numpy().tobytes() for text in texts.rows())
    rows = [join_texts([*islice(each, length)]) for length in lengths.tolist()]
    sizes = np.array(list(map(len, rows)), np.int64)[:, None]
    return Values(as_tensor(np.frombuffer(b"".join(rows), np.uint8)), sizes)


def _stack_alike(field: Field, leaves: Sequence[Any]) -> Values:
    """Stack leaves of one type and dtype. Raises any error if they differ."""
    (kind,) = set(map(type, leaves))
    if kind in (list, tuple):
        lengths = np.array(list(map(len, leaves)), np.int64)
        return lists_as_values(field, concatenate_numbers(leaves), lengths)
    if kind in FROM_PYTHON:
        # A float would round what is not.
        return as_values(field, np.array(leaves, FROM_PYTHON[kind]))
    (dtype,) = set(map(_dtype, leaves))
    if issubclass(kind, np.generic):
        return as_values(field, np.array(leaves, dtype))
    if kind is Tensor and not field.num_variable:
        return as_values(field, torch.stack(tuple(leaves)))  # Which compares their shapes.
    if kind not in (Tensor, np.ndarray) or not all(map(field.admits, set(map(_shape, leaves)))):
        raise TypeError("the leaves are to be converted one by one")
    return as_values(field, *_joined(field, leaves))


def _joined(field: Field, leaves: Sequence[Any]) -> tuple[Array, Integers | None]:
    """Concatenate arrays or tensors of shapes that a field admits, and return their sizes."""
    count = field.num_variable
    sizes = np.array([leaf.shape[:count] for leaf in leaves], np.int64) if count else None
    if count > 1:
        leaves = [leaf.reshape(-1, *field.item_shape) for leaf in leaves]
    kinds = set(map(type, leaves))
    if any(issubclass(kind, Tensor) for kind in kinds):
        tensors = tuple(leaves if kinds == {Tensor} else map(as_tensor, leaves))
        with torch.no_grad():
            data = torch.cat(tensors) if count else torch.stack(tensors)
            return data.resolve_conj().resolve_neg(), sizes
    if not field.shape:
        return np.array(leaves, leaves[0].dtype), None
    items = np.concatenate(leaves)
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


def as_values(field: Field, rows: Any, sizes: Integers | None = None) -> Values:
    """Check rows of a field in one array, or their items and sizes; copy nothing if possible."""
    try:
        array, kind = to_array(rows)
    except SchemaError as error:
        raise SchemaError(f"field {field.name!r}: {error}") from error
    count, shape, dtype = field.num_variable, tuple(array.shape[1:]), array_dtype(array)
    fits = field.kind.accepts(kind) and dtype == field.dtype
    if sizes is not None:
        fits &= (sizes.shape[1], shape) == (count, field.item_shape)
    elif (fits := fits and field.admits(shape)) and count:
        sizes = np.full((len(array), count), shape[:count], np.int64)
        array = array.reshape(-1, *field.item_shape)
    if not fits:
        found = Field(field.name, dtype, shape, kind).description
        raise MismatchError(
            f"field {field.name!r}: found rows of {found}, expected rows of {field.description}"
        )
    return Values(as_tensor(array), sizes)


def lists_as_values(field: Field, items: Any, lengths: Integers) -> Values:
    """Turn concatenated lists of numbers into rows; ``lengths`` must not be empty."""
    if field.num_variable:
        return as_values(field, items, lengths[:, None])
    if (lengths != lengths[0]).any():
        raise MismatchError(f"field {field.name!r}: the lists differ in length")
    return as_values(field, items.reshape(len(lengths), int(lengths[0]), *items.shape[1:]))


# One leaf, of any type


def _is_list(value: Any) -> bool:
    """Return whether this is a plain list or tuple, not a named tuple."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def leaf_array(field: Field, leaf: Any) -> Array:
    """Check a leaf of any type, and convert it to the array that is stored."""
    try:
        if _is_list(leaf):
            empty = torch.empty(0, dtype=field.dtype, device="cpu")
            leaf = concatenate_numbers([leaf]) if leaf else empty
        array, kind = to_array(leaf)
        dtype, shape = array_dtype(array), tuple(array.shape)
    except SchemaError as error:
        raised = MismatchError if is_missing(leaf) else SchemaError
        raise raised(f"field {field.name!r}: {error}; expected {field.description}") from error
    # Palette and grey images may have the same shape and dtype, but differ in meaning.
    if dtype != field.dtype or not field.admits(shape) or field.kind != kind:
        found = Field(field.name, dtype, shape, kind).description
        raise MismatchError(f"field {field.name!r}: found {found}, expected {field.description}")
    return array


def as_tensor(values: Array) -> Tensor:
    """Convert an array to a tensor, which shares its memory if torch can use it."""
    if isinstance(values, Tensor):
        return values
    array = values.astype(values.dtype.newbyteorder("="), copy=False)
    if min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Of memory that torch must not write to, such as a file that is mapped: it is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def array_dtype(array: Array) -> torch.dtype:
    """Return the dtype in which a dense array or tensor, of either byte order, is stored."""
    if isinstance(array, Tensor):
        dtype, found = array.dtype if array.dtype in DTYPES.values() else None, "dtype"
        lost = f"{dtype_name(array.dtype)}, which does not survive in a memory-mapped file"
    else:
        # numpy's StringDType has no byte order.
        is_text = array.dtype.kind == "T"
        dtype = None if is_text else FROM_NUMPY.get(array.dtype.newbyteorder("="))
        found = "a numpy array of dtype"
        lost = f"{array.dtype}"
    if dtype is None:
        texts = "; lists and texts are given without numpy, as by with_format(None) of Hugging Face"
        is_text = not isinstance(array, Tensor) and array.dtype.kind == "T"
        texts = "; its texts are given as a list, such as by tolist()" if is_text else texts
        raise SchemaError(
            f"found {found} {lost}; convert it in the dataset to one of"
            f" {', '.join(DTYPES)}{texts * (lost == 'object' or is_text)}"
        )
    return dtype


def common_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype that numbers of Python, numpy or torch share; None if they differ."""
    dtypes: set[torch.dtype | None] = set()
    for kind in set(map(type, values)):
        if kind is Tensor:
            tensors = [value for value in values if type(value) is Tensor]
            are_numbers = all(each.layout is torch.strided and not each.ndim for each in tensors)
            dtypes |= {tensor.dtype for tensor in tensors} if are_numbers else {None}
        else:
            dtype = np.dtype(kind) if issubclass(kind, np.generic) else python_dtype(kind)
            dtypes.add(None if dtype is None else FROM_NUMPY.get(dtype))
    found = dtypes.pop() if len(dtypes) == 1 else None
    return found if found in DTYPES.values() else None


def concatenate_numbers(lists: Sequence[Sequence[Any]]) -> Array:
    """Concatenate the numbers of lists into an array of one dimension."""
    values = list(chain.from_iterable(lists))
    dtype, kinds = common_dtype(values), set(map(type, values))
    if dtype is None:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        way_out = (
            ": for None give a number of that dtype, such as NaN or -1, and a mask beside it"
            if type(None) in kinds else ""
        )  # fmt: skip
        raise SchemaError(f"found a list of {found}, expected numbers of one dtype{way_out}")
    if Tensor not in kinds:
        return number_array(values, TO_NUMPY[dtype])
    return torch.stack([as_tensor(to_array(value)[0]) for value in values])
