"""Rows of Arrow columns, as the values of fields and as samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.fields import TO_NUMPY, Field, Values
from lightning_memmap.schema.kinds import Duration
from lightning_memmap.schema.stack import Branch, as_tensor, as_values, lists_as_values
from lightning_memmap.schema.structure import Node, Path
from lightning_memmap.store.sources.arrow_types import (
    TEXT_KINDS,
    decode,
    is_list,
    list_lengths,
    suggest_fill_value,
    zero_array,
)


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
