"""Stack the values of many samples, or of rows of a table or batch, field by field.

All rows of a field are converted in one call, which costs a fraction of converting each row. Leaves
are converted one at a time only if their types differ, or to name the field in an error.
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
    is_null,
    join_texts,
    number_array,
    python_dtype,
    to_array,
)
from lightning_memmap.schema.shared_memory import SharedMemoryCheck
from lightning_memmap.schema.structure import Node, Path, split_columns

_dtype = attrgetter("dtype")
_shape = attrgetter("shape")


class Branch(ABC):
    """The values of many rows at one path of a sample.

    Methods raise a `SchemaError` if the values do not have the requested structure.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    def present_mask(self) -> NDArray[np.bool_]:
        """Return whether each row is not None, bool of shape (n,)."""
        return np.ones(len(self), np.bool_)

    def select(self, mask: NDArray[np.bool_]) -> "Branch":
        """Return the rows where a mask of shape (n,) is True."""
        raise SchemaError("the rows cannot be None")

    def parts(self, node: Node, path: Path) -> Sequence["Branch"]:
        """Return one branch for each child of a container."""
        raise SchemaError(f"{describe_path(path)}: the rows are not containers")

    def lists(self, path: Path) -> tuple["Branch", Integers]:
        """Return the concatenated items of lists, and the length of each list."""
        raise SchemaError(f"{describe_path(path)}: the rows are not lists")

    @abstractmethod
    def leaves(self, field: Field) -> Values:
        """Stack one or more rows of a field."""


class Samples(Branch):
    """Samples of a dataset, or one part of each sample.

    Args:
        values: The values.
        sharing: Records whether any of them share memory, once they are stacked.
    """

    def __init__(self, values: Sequence[Any], sharing: SharedMemoryCheck | None = None) -> None:
        self._values = values
        self._sharing = sharing

    @override
    def __len__(self) -> int:
        return len(self._values)

    @override
    def present_mask(self) -> NDArray[np.bool_]:
        return np.array([not is_null(value) for value in self._values])

    @override
    def select(self, mask: NDArray[np.bool_]) -> Branch:
        return self._like(list(compress(self._values, mask.tolist())))

    @override
    def parts(self, node: Node, path: Path) -> Sequence[Branch]:
        children = list(map(self._like, split_columns(self._values, node, path)))
        self._compare()
        return children

    @override
    def lists(self, path: Path) -> tuple[Branch, Integers]:
        if wrong := [value for value in self._values if not _is_list(value)]:
            raise MismatchError(
                f"{describe_path(path)}: found {type(wrong[0]).__name__}, expected a list or tuple"
                " of records"
            )
        lengths = np.array(list(map(len, self._values)), np.int64)
        items = self._like(list(chain.from_iterable(self._values)))
        self._compare()
        return items, lengths

    @override
    def leaves(self, field: Field) -> Values:
        stacked = _stack_leaves(field, self._values)
        self._compare()
        return stacked

    def _like(self, values: Sequence[Any]) -> Branch:
        return Samples(values, self._sharing)

    def _compare(self) -> None:
        if self._sharing is not None:
            self._sharing.compare(self._values)


class Batch(Branch):
    """A batch, whose leaves are tensors, `RowList` or nested tensors."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    @override
    def __len__(self) -> int:
        return 1  # Not empty. The leaves have the number of rows.

    @override
    def parts(self, node: Node, path: Path) -> Sequence[Branch]:
        return [Batch(part) for (part,) in split_columns([self._batch], node, path)]

    @override
    def leaves(self, field: Field) -> Values:
        if (rows := find_unstacked_rows(field.name, self._batch)) is None:
            return as_values(field, self._batch)
        return Samples(rows).leaves(field) if rows else Values.empty(field)


def find_unstacked_rows(name: str, leaf: Any) -> Sequence[Any] | None:
    """Return the rows of a `RowList` or jagged tensor, or None if a tensor has stacked rows."""
    if isinstance(leaf, RowList):
        return leaf
    description = type(leaf).__name__
    if isinstance(leaf, Tensor):
        if leaf.layout is torch.jagged:
            return leaf.unbind()
        if leaf.ndim and not leaf.is_nested:
            return None
        description = "a tensor without dimensions" if not leaf.ndim else "a nested tensor"
    raise SchemaError(
        f"field {name!r}: found {description}. Return tensors whose first dimension is the rows of"
        " the batch. Return text as a lightning_memmap.loading.RowList, and rows that vary in"
        " length as a RowList or a torch.nested.nested_tensor(..., layout=torch.jagged)"
    )


def stack(branch: Branch, node: Node, path: Path = ()) -> list[Values]:
    """Stack the values of a branch into one `Values` for each field of a node."""
    if not len(branch):
        return [Values.empty(field) for field in node.fields]
    if node.field is not None:
        return [branch.leaves(node.field)]
    if node.kind == "none":
        if branch.present_mask().any():
            raise MismatchError(f"{describe_path(path)}: found a value, expected None")
        return []
    if node.kind == "optional":
        mask = branch.present_mask()
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
    """Stack the concatenated records of lists into one row per list, for each field."""
    stacked = stack(records, record, path)
    by_name = {field.name: values for field, values in zip(record.fields, stacked, strict=True)}
    in_lists = list[Values]()
    for field in record.fields:
        masks = record.masks[field.name]
        # The innermost mask is False wherever an outer one is.
        mask = by_name[masks[-1]].data.numpy() if masks else None
        try:
            if field.is_text:
                in_lists.append(_join_texts(by_name[field.name], lengths))
            else:
                in_lists.append(by_name[field.name].group_into_lists(lengths, mask))
        except ValueError as error:
            advice = (
                "" if field.is_text
                else ". The records of a list must have one shape: pad them in the dataset, or"
                " concatenate them into one array, with their lengths in another field"
            )  # fmt: skip
            raise SchemaError(f"field {field.name!r}: {error}{advice}") from error
    return in_lists


def _join_texts(texts: Values, lengths: Integers) -> Values:
    """Join the texts of all lists into one row per list."""
    encoded = (text.numpy().tobytes() for text in texts.rows())
    rows = [join_texts([*islice(encoded, length)]) for length in lengths.tolist()]
    sizes = np.array(list(map(len, rows)), np.int64)[:, None]
    return Values(as_tensor(np.frombuffer(b"".join(rows), np.uint8)), sizes)


def _stack_leaves(field: Field, leaves: Sequence[Any]) -> Values:
    if isinstance(field.kind, Text):
        return _stack_texts(field, field.kind, leaves)
    if not isinstance(field.kind, Image):
        # If this fails, the leaves are converted one at a time below.
        with suppress(RuntimeError, TypeError, ValueError, OverflowError, AttributeError):
            return _stack_same_type(field, leaves)
    data, sizes = _stack_arrays(field, [check_leaf(field, leaf) for leaf in leaves])
    return Values(as_tensor(data), sizes)


def _stack_same_type(field: Field, leaves: Sequence[Any]) -> Values:
    """Stack leaves of one type and dtype. Raises an error of any type if they differ."""
    (python_type,) = set(map(type, leaves))
    if python_type in (list, tuple):
        lengths = np.array(list(map(len, leaves)), np.int64)
        return lists_as_values(field, concatenate_numbers(leaves), lengths)
    if python_type in FROM_PYTHON:
        # Only one type, because a float among integers would round them.
        return as_values(field, np.array(leaves, FROM_PYTHON[python_type]))
    (dtype,) = set(map(_dtype, leaves))
    if issubclass(python_type, np.generic):
        return as_values(field, np.array(leaves, dtype))
    if python_type is Tensor and not field.num_variable:
        return as_values(field, torch.stack(tuple(leaves)))  # torch compares their shapes.
    are_arrays = python_type in (Tensor, np.ndarray)
    if not (are_arrays and all(map(field.admits, set(map(_shape, leaves))))):
        raise TypeError("the leaves must be converted one at a time")
    return as_values(field, *_stack_arrays(field, leaves))


def _stack_arrays(field: Field, leaves: Sequence[Any]) -> tuple[Array, Integers | None]:
    """Stack arrays or tensors of one shape, or concatenate their items. Return the sizes too; see
    `Values`."""
    count = field.num_variable
    sizes = np.array([leaf.shape[:count] for leaf in leaves], np.int64) if count else None
    if count > 1:
        leaves = [leaf.reshape(-1, *field.item_shape) for leaf in leaves]
    python_types = set(map(type, leaves))
    if any(issubclass(python_type, Tensor) for python_type in python_types):
        tensors = tuple(leaves if python_types == {Tensor} else map(as_tensor, leaves))
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
        # In ASCII, a text has the same number of bytes as characters.
        data = joined.encode()
        encoded = texts
    else:
        if types <= kind.types:
            encoded = list(map(kind.encode, texts))
        else:
            encoded = [check_leaf(field, text).tobytes() for text in texts]  # type: ignore[union-attr]
        data = b"".join(encoded)
    sizes = np.fromiter(map(len, encoded), np.int64, len(texts))
    return Values(as_tensor(np.frombuffer(data, np.uint8)), sizes[:, None])


def as_values(field: Field, rows: Any, sizes: Integers | None = None) -> Values:
    """Convert an array of rows to the `Values` of a field, without a copy if possible.

    Args:
        field: The field that the rows must fit.
        rows: The stacked rows, or the concatenated items if ``sizes`` is passed.
        sizes: The sizes of each row, as in `Values`.

    Raises:
        MismatchError: The dtype, shape or kind differs from the field.
    """
    try:
        array, kind = to_array(rows)
    except SchemaError as error:
        raise SchemaError(f"field {field.name!r}: {error}") from error
    count = field.num_variable
    shape = tuple(array.shape[1:])
    dtype = array_dtype(array)
    if sizes is None:
        fits = field.admits(shape)
    else:
        fits = (sizes.shape[1], shape) == (count, field.item_shape)
    if not (fits and dtype == field.dtype and field.kind.accepts(kind)):
        actual = Field(field.name, dtype, shape, kind).description
        raise MismatchError(
            f"field {field.name!r}: found rows of {actual}, expected rows of {field.description}"
        )
    if count and sizes is None:  # These rows are alike, and others may differ.
        sizes = np.full((len(array), count), shape[:count], np.int64)
        array = array.reshape(-1, *field.item_shape)
    return Values(as_tensor(array), sizes)


def lists_as_values(field: Field, items: Any, lengths: Integers) -> Values:
    """Convert the concatenated numbers of one or more lists to the `Values` of a field."""
    if field.num_variable:
        return as_values(field, items, lengths[:, None])
    if (lengths != lengths[0]).any():
        raise MismatchError(f"field {field.name!r}: the lists vary in length")
    return as_values(field, items.reshape(len(lengths), int(lengths[0]), *items.shape[1:]))


# One leaf, of any type


def _is_list(value: Any) -> bool:
    """Return whether a value is a list or tuple, but not a named tuple."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def check_leaf(field: Field, leaf: Any) -> Array:
    """Return a leaf as the array that is stored. Raises an error unless dtype, shape and kind are
    the field's: nothing is cast."""
    try:
        if _is_list(leaf):
            empty = torch.empty(0, dtype=field.dtype, device="cpu")
            leaf = concatenate_numbers([leaf]) if leaf else empty
        array, kind = to_array(leaf)
        dtype = array_dtype(array)
        shape = tuple(array.shape)
    except SchemaError as error:
        error_type = MismatchError if is_null(leaf) else SchemaError
        raise error_type(f"field {field.name!r}: {error}; expected {field.description}") from error
    # Kinds matter, because images of two modes may have the same shape and dtype.
    if dtype != field.dtype or not field.admits(shape) or field.kind != kind:
        actual = Field(field.name, dtype, shape, kind).description
        raise MismatchError(f"field {field.name!r}: found {actual}, expected {field.description}")
    return array


def as_tensor(values: Array) -> Tensor:
    """Convert an array to a tensor, which shares its memory if torch supports its layout."""
    if isinstance(values, Tensor):
        return values
    array = values.astype(values.dtype.newbyteorder("="), copy=False)
    if min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # torch warns of read-only memory, such as a mapped file. The tensor is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def array_dtype(array: Array) -> torch.dtype:
    """Return the dtype in which an array or tensor is stored, of either byte order.

    Raises:
        SchemaError: The dtype is not supported.
    """
    advice = ""
    if isinstance(array, Tensor):
        if array.dtype in DTYPES.values():
            return array.dtype
        description = f"dtype {dtype_name(array.dtype)}, which a memory-mapped file cannot preserve"
    else:
        # numpy's StringDType, of kind T, has no byte order.
        is_text = array.dtype.kind == "T"
        if not is_text and (dtype := FROM_NUMPY.get(array.dtype.newbyteorder("="))) is not None:
            return dtype
        description = f"a numpy array of dtype {array.dtype}"
        if is_text:
            advice = ". Return its texts as a list, such as by tolist()"
        elif array.dtype.kind == "O":
            advice = (
                ". Return lists and texts without numpy, such as by with_format(None) of Hugging"
                " Face datasets"
            )
    raise SchemaError(
        f"found {description}; convert it in the dataset to one of {', '.join(DTYPES)}{advice}"
    )


def common_dtype(values: Sequence[Any]) -> torch.dtype | None:
    """Return the torch dtype that Python, numpy or torch numbers share, or None if they differ."""
    dtypes: set[torch.dtype | None] = set()
    for python_type in set(map(type, values)):
        if python_type is Tensor:
            tensors = [value for value in values if type(value) is Tensor]
            are_numbers = all(t.layout is torch.strided and not t.ndim for t in tensors)
            dtypes |= {tensor.dtype for tensor in tensors} if are_numbers else {None}
        else:
            is_numpy = issubclass(python_type, np.generic)
            dtype = np.dtype(python_type) if is_numpy else python_dtype(python_type)
            dtypes.add(None if dtype is None else FROM_NUMPY.get(dtype))
    common = dtypes.pop() if len(dtypes) == 1 else None
    return common if common in DTYPES.values() else None


def concatenate_numbers(lists: Sequence[Sequence[Any]]) -> Array:
    """Concatenate the numbers of lists into an array of one dimension."""
    values = list(chain.from_iterable(lists))
    dtype = common_dtype(values)
    python_types = set(map(type, values))
    if dtype is None:
        names = ", ".join(sorted(python_type.__name__ for python_type in python_types))
        advice = (
            ". Replace None by a number of that dtype, such as NaN or -1, and return a mask as well"
            if type(None) in python_types else ""
        )  # fmt: skip
        raise SchemaError(f"found a list of {names}, expected numbers of one dtype{advice}")
    if Tensor not in python_types:
        return number_array(values, TO_NUMPY[dtype])
    return torch.stack([as_tensor(to_array(value)[0]) for value in values])
