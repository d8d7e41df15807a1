"""Sources: the rows of a dataset, read many at once, as the values of each field.

Datasets are read item by item, except for arrays and tables: a slice has the same values in a
fraction of the time. Only known classes are sliced, and never their subclasses, because these may
override what a sample is. Libraries are recognised by the module of a class, without importing
them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, SchemaError, describe_error
from lightning_memmap.integers import Integers
from lightning_memmap.schema.fields import Field, Values, join_values, take_rows
from lightning_memmap.schema.kinds import Image
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.stack import Branch, Samples, as_values, stack
from lightning_memmap.schema.structure import Node, as_container
from lightning_memmap.store.samples import SampleReader, choose_block_rows
from lightning_memmap.store.sources.column import (
    TableColumn,
    simplify_rows,
    split_by_group,
)
from lightning_memmap.store.sources.column_dataset import (
    ColumnDataset,
    is_array_like,
    is_hugging_face,
)
from lightning_memmap.store.sources.iterable import Spool
from lightning_memmap.store.workers import RowIndices
from lightning_memmap.tensordict_types import is_exactly

_MEMORY_TYPES = {Tensor, Parameter, np.ndarray, np.memmap}
_FILE_MODULES = {"h5py", "zarr"}
#: Datasets whose samples combine several columns, and the attribute with the columns.
_COLUMN_ATTRIBUTES = {TensorDataset: "tensors", ColumnDataset: "columns", StackDataset: "datasets"}
#: Rows of a file closer together than this are read at once, with the bytes between them.
_MAX_GAP_BYTES = 64 * 2**10


@dataclass(frozen=True, eq=False)
class Source:
    """The rows of a dataset."""

    #: Reads rows, as one value per field.
    read: Callable[[RowIndices], list[Values]]
    #: Returns the row group of each row, int64, if files are read one row group at a time.
    row_groups: Callable[[], Integers | None] = lambda: None
    #: Whether rows are sliced, instead of read item by item.
    is_sliced: bool = True

    @property
    def order(self) -> Integers | None:
        """The rows ordered by row group, which reads them fastest; None for dataset order."""
        groups = self.row_groups()
        if groups is None or (np.diff(groups) >= 0).all():
            return None
        return np.argsort(groups, kind="stable")


def make_source(dataset: Any, schema: Schema, row_bytes: int = 1) -> Source:
    """Make a source that slices a dataset if its class is known, or reads it item by item."""
    if isinstance(dataset, Spool):
        return Source(dataset.read)
    step = choose_block_rows(row_bytes)
    reader = SampleReader(dataset, schema)

    def read_items(rows: RowIndices) -> list[Values]:
        blocks = (rows[start : start + step] for start in range(0, len(rows), step))
        return join_values(list(map(reader.read, blocks)))

    sliced = None
    if not any(isinstance(field.kind, Image) for field in schema.fields):
        with suppress(SchemaError):  # Its arrays aren't nested like its samples.
            sliced = _make_sliced_source(dataset, schema.structure)
    if sliced is None:
        return Source(read_items, is_sliced=False)

    def read(rows: RowIndices) -> list[Values]:
        with suppress(SchemaError):  # Reading item by item raises it too, with the row.
            fields = sliced.read(rows)
            if all(values.num_rows == len(rows) for values in fields):
                return fields
        return read_items(rows)

    return replace(sliced, read=read)


def is_read_by_item(dataset: Any) -> bool:
    """Return whether a dataset is read item by item, judging by its class."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_known = type(dataset) in {*_COLUMN_ATTRIBUTES, ConcatDataset} or is_exactly(
        dataset, "TensorDict"
    )
    return not (is_known or _is_sliceable_array(dataset) or is_hugging_face(dataset))


def concatenate_sources(sources: Sequence[Source], sizes: Sequence[int]) -> Source:
    """Make one source of several, in their order.

    Args:
        sources: The sources.
        sizes: The number of rows of each source.
    """
    stops = np.cumsum(sizes, dtype=np.int64)

    def read(rows: RowIndices) -> list[Values]:
        parts, inverse = split_by_group(rows, stops)
        return join_values([sources[k].read(source_rows) for k, source_rows in parts], inverse)

    def row_groups() -> Integers | None:
        groups = [source.row_groups() for source in sources]
        if all(group is None for group in groups):
            return None
        # Number the row groups of a source after all row groups of earlier sources.
        return np.concatenate(
            [
                k * 2**32 + (np.zeros(size, np.int64) if group is None else group)
                for k, (group, size) in enumerate(zip(groups, sizes, strict=True))
            ]
        )

    return Source(read, row_groups, all(source.is_sliced for source in sources))


def _make_sliced_source(dataset: Any, node: Node, *, any_array: bool = False) -> Source | None:
    """Make a source that slices a dataset, or one column of it; None if its class is unknown.

    Args:
        dataset: The dataset or column.
        node: The structure of its samples.
        any_array: Whether to slice arrays of unknown libraries too.
    """
    if isinstance(dataset, TableColumn):
        return Source(partial(_read_column, dataset.rows, node), dataset.row_groups)
    if _is_sliceable_array(dataset) or (any_array and is_array_like(dataset)):
        return Source(partial(_read_column, partial(_slice_array, dataset), node))
    if type(dataset) is Subset:
        return _make_subset_source(dataset, node)
    if type(dataset) is ConcatDataset:
        parts: list[Any] = list(dataset.datasets)
        sources = [_make_sliced_source(part, node) for part in parts]
        sliced = [source for source in sources if source is not None]
        if len(sliced) < len(sources):
            return None
        return concatenate_sources(sliced, list(map(len, parts)))
    return _make_columns_source(dataset, node)


def _make_columns_source(dataset: Any, node: Node) -> Source | None:
    """Make a source that slices each column of a dataset; None if a class is unknown."""
    children = as_container(_columns_of(dataset, node), ())
    if children is None or children[0] != node.kind or set(children[1]) != set(node.keys):
        return None
    columns = dict(zip(children[1], children[2], strict=True))
    sources = []
    for key, child in zip(node.keys, node.children, strict=True):
        source = _make_sliced_source(columns[key], child, any_array=type(dataset) is ColumnDataset)
        if source is None:
            return None
        sources.append(source)

    def read(rows: RowIndices) -> list[Values]:
        return [values for source in sources for values in source.read(rows)]

    def row_groups() -> Integers | None:
        groups = (source.row_groups() for source in sources)
        return next((group for group in groups if group is not None), None)

    return Source(read, row_groups)


def _columns_of(dataset: Any, node: Node) -> Any:
    """Return the container of the columns of a dataset; None if its class is unknown."""
    if is_hugging_face(dataset):
        from lightning_memmap.store.sources.arrow_columns import hugging_face_columns

        return hugging_face_columns(dataset, node)
    if is_exactly(dataset, "TensorDict"):
        return dataset
    return getattr(dataset, _COLUMN_ATTRIBUTES.get(type(dataset), ""), None)


def _is_in_memory(values: Any) -> bool:
    return type(values) in _MEMORY_TYPES or is_exactly(values, "MemoryMappedTensor")


def _is_sliceable_array(values: Any) -> bool:
    if _is_in_memory(values):
        is_nested = isinstance(values, Tensor) and values.is_nested
        return not is_nested and values.ndim > 0
    is_file = type(values).__module__.partition(".")[0] in _FILE_MODULES
    return is_file and is_array_like(values)


def _make_subset_source(dataset: Any, node: Node) -> Source | None:
    """Make a source that slices the dataset of a ``Subset``; None if its class is unknown."""
    indices = np.asarray(dataset.indices)
    num_rows = len(dataset.dataset)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        return None
    if indices.min() < -num_rows or indices.max() >= num_rows:
        return None
    inner_rows = indices.astype(np.int64, copy=False)
    if inner_rows.min() < 0:
        inner_rows = np.where(inner_rows < 0, inner_rows + num_rows, inner_rows)
    if (source := _make_sliced_source(dataset.dataset, node)) is None:
        return None

    def read(rows: RowIndices) -> list[Values]:
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return source.read(simplify_rows(inner_rows[index]))

    def row_groups() -> Integers | None:
        groups = source.row_groups()
        return None if groups is None else groups[inner_rows]

    return Source(read, row_groups)


@dataclass(frozen=True, eq=False)
class _ArrayRows(Branch):
    """Rows of an array without None."""

    rows: Any

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def leaves(self, field: Field) -> Values:
        return as_values(field, self.rows)


def _slice_array(array: Any, rows: RowIndices) -> Branch:
    """Read rows of a tensor or array in memory, or of an array in a file."""
    is_memory = _is_in_memory(array)
    if isinstance(rows, range):
        values = array[rows.start : rows.stop]
    elif isinstance(array, Tensor):
        values = take_rows(array, rows)
    else:
        values = array[rows] if is_memory else _take_from_file(array, rows)
    if not is_memory:
        # h5py and zarr return new arrays; other libraries may reuse a buffer.
        is_new = type(array).__module__.partition(".")[0] in _FILE_MODULES
        values = np.asarray(values) if is_new else np.array(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "OUST" and values.ndim == 1:
        return Samples(values.tolist())
    return _ArrayRows(values)


def _take_from_file(array: Any, rows: Integers) -> np.ndarray:
    """Read rows of an array in a file, by slices that include small gaps."""
    taken = np.empty((len(rows), *array.shape[1:]), array.dtype)
    order = np.argsort(rows, kind="stable")
    max_gap = max(1, _MAX_GAP_BYTES * len(taken) // max(1, taken.nbytes))
    for run in np.split(order, np.flatnonzero(np.diff(rows[order]) > max_gap) + 1):
        if len(run):
            start = int(rows[run[0]])
            stop = int(rows[run[-1]]) + 1
            taken[run] = np.asarray(array[start:stop])[rows[run] - start]
    return taken


def _read_column(
    read_rows: Callable[[RowIndices], Branch], node: Node, rows: RowIndices
) -> list[Values]:
    """Read rows of one column as one value per field, and name the rows in errors."""
    try:
        branch = read_rows(rows)
    except Exception as error:
        raise DatasetError(
            f"the dataset raised at rows {min(rows)} to {max(rows)}, field"
            f" {node.fields[0].name!r}: {describe_error(error)}"
        ) from error
    return stack(branch, node)
