"""Sources: datasets whose rows lie in arrays, one for each field, and are read by slices.

A dataset is read item by item. Where the rows of a field lie in one array, a slice of it gives the
same values in a fraction of the time. Only datasets of known classes are read in this way, never
their subclasses: what a subclass overrides decides what a sample is. No optional library is
imported here; their objects are recognised by the modules of their classes.

A new kind of source is a file with a function like `hugging_face.arrays_of`, and its line in
`_arrays_of`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tensordict import MemoryMappedTensor, TensorDict
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema import Field, Node, Schema
from lightning_memmap.schema.names import field_name
from lightning_memmap.schema.structure import LEAF, flatten
from lightning_memmap.store.sources import hugging_face
from lightning_memmap.store.sources.column_dataset import ColumnDataset
from lightning_memmap.store.sources.field_array import (
    FieldArray,
    FileArray,
    JoinedArray,
    MemoryArray,
    NullableRows,
    PartOfRows,
    RowsOfLists,
    SubsetArray,
)
from lightning_memmap.store.sources.image_folder import ImageFolder
from lightning_memmap.store.sources.stream import Spool, SpooledItems
from lightning_memmap.store.sources.tar_dataset import TarDataset

__all__ = [
    "ColumnDataset",
    "FieldArray",
    "ImageFolder",
    "TarDataset",
    "field_arrays",
    "nullable_columns",
]

_MEMORY_TYPES = {Tensor, Parameter, MemoryMappedTensor, np.ndarray, np.memmap}
_FILE_MODULES = {"h5py", "zarr"}


def field_arrays(dataset: Any, schema: Schema) -> Sequence[FieldArray | SpooledItems] | None:
    """Find the arrays in which the rows of a dataset lie. No row is read.

    Args:
        dataset: The dataset.
        schema: The schema of its samples.

    Returns:
        One array for each field, in the order of the fields; None where the dataset must be read
        item by item.
    """
    if isinstance(dataset, Spool):
        return dataset.arrays
    if any(field.kind.startswith("image") for field in schema.fields):
        return None
    try:
        return _arrays_of(dataset, schema.structure, schema.fields)
    except SchemaError:  # Its arrays are not nested as its samples are.
        return None


def _arrays_of(dataset: Any, node: Node, fields: Sequence[Field]) -> list[FieldArray] | None:
    """The arrays of a dataset whose samples have this structure around these fields."""
    kind = type(dataset)
    if kind is Subset:
        return _picked(dataset, node, fields)
    if kind is ConcatDataset:
        return _joined(dataset, node, fields)
    if kind is StackDataset:
        return _stacked(dataset, node, fields)
    if hugging_face.is_dataset(dataset):
        return hugging_face.arrays_of(dataset, node, fields)
    if kind is TensorDataset:
        dataset = dataset.tensors
    elif kind is ColumnDataset:
        dataset = dataset.columns
    elif kind is not TensorDict and _array(dataset) is None:
        return None
    leaves: list[Any] = []
    flatten(dataset, _by_column(node), leaves, number_ndim=1)
    arrays = list[FieldArray]()
    are_lists = [part != LEAF for _, part in node.walk() if part.is_field]
    for leaf in leaves:
        if leaf is True:  # Whether the rows of the array before are None.
            whole = arrays.pop()
            arrays += [PartOfRows(whole, is_mask=False), PartOfRows(whole, is_mask=True)]
            continue
        array = _duck_typed(leaf) if kind is ColumnDataset else _array(leaf)
        if array is None:
            return None
        number = len(arrays)
        arrays.append(RowsOfLists(array, fields[number]) if are_lists[number] else array)
    return arrays


def _by_column(node: Node) -> Node:
    """The structure of the columns of a dataset: one that has lists in its rows is one array."""
    if node.is_field:
        return LEAF
    return replace(node, children=tuple(map(_by_column, node.children)))


def nullable_columns(dataset: Any) -> set[str]:
    """Find the columns that have rows without a value, where that is known without reading all rows
    one by one.

    Returns:
        The names of their fields.
    """
    kind = type(dataset)
    if kind is Subset:
        return nullable_columns(dataset.dataset)
    if kind is ConcatDataset:
        return set().union(*map(nullable_columns, dataset.datasets))
    if hugging_face.is_dataset(dataset):
        names = hugging_face.nullable_columns(dataset)
    else:
        names = dataset.nullable if isinstance(dataset, ColumnDataset) else []
    return {field_name((name,)) for name in names}


def _array(values: Any) -> FieldArray | None:
    if type(values) in _MEMORY_TYPES:
        is_nested = isinstance(values, Tensor) and values.is_nested
        return None if is_nested or not values.ndim else MemoryArray(values)
    is_file = type(values).__module__.partition(".")[0] in _FILE_MODULES
    return FileArray(values) if is_file and _is_array_like(values) else None


def _duck_typed(values: Any) -> FieldArray | None:
    """An array of any library, which the user has given as a column."""
    if isinstance(values, FieldArray):
        return values
    if isinstance(values, NullableRows):
        return MemoryArray(values)
    return _array(values) or (FileArray(values) if _is_array_like(values) else None)


def _is_array_like(values: Any) -> bool:
    dtype = getattr(values, "dtype", None)
    return isinstance(dtype, np.dtype) and len(getattr(values, "shape", ())) > 0


def _picked(dataset: Any, node: Node, fields: Sequence[Field]) -> list[FieldArray] | None:
    arrays = _arrays_of(dataset.dataset, node, fields)
    if arrays is None:
        return None
    indices, num_rows = np.asarray(dataset.indices), len(dataset.dataset)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        return None
    if indices.min() < -num_rows or indices.max() >= num_rows:
        return None
    rows = indices.astype(np.int64, copy=False)
    rows = np.where(rows < 0, rows + num_rows, rows) if rows.min() < 0 else rows
    return [SubsetArray(array, rows) for array in arrays]


def _joined(dataset: Any, node: Node, fields: Sequence[Field]) -> list[FieldArray] | None:
    sizes = [len(part) for part in dataset.datasets]
    parts = [_arrays_of(part, node, fields) for part in dataset.datasets]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    return [JoinedArray(arrays, sizes) for arrays in zip(*found, strict=True)]


def _stacked(dataset: Any, node: Node, fields: Sequence[Field]) -> list[FieldArray] | None:
    parts: Any = dataset.datasets
    names: Sequence[Any] = list(parts) if isinstance(parts, dict) else range(len(parts))
    if tuple(names) != node.keys or (node.kind == "dict") != isinstance(parts, dict):
        return None
    arrays: list[FieldArray] = []
    for name, child in zip(names, node.children, strict=True):
        within = fields[len(arrays) : len(arrays) + len(child.fields())]
        found = _arrays_of(parts[name], child, within)
        if found is None:
            return None
        arrays += found
    return arrays
