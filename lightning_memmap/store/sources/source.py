"""Sources: the rows of a dataset, read many at once, as the values of each field.

A dataset is read item by item. Where its rows lie in arrays or tables, a slice of these gives the
same values in a fraction of the time. Only datasets of known classes are read in this way, never
their subclasses: what a subclass overrides decides what a sample is. Libraries are recognised by
the modules of their classes, and imported by nobody else.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, SchemaError, describe_error
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.schema.fields import Field, Values, join_values, take_rows
from lightning_memmap.schema.kinds import Image
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.stack import Branch, Samples, as_values, stack
from lightning_memmap.schema.structure import Node, as_container
from lightning_memmap.store.samples import SampleReader, rows_at_once
from lightning_memmap.store.sources.column import (
    TableColumn,
    as_range,
    split_by_group,
)
from lightning_memmap.store.sources.column_dataset import ColumnDataset, is_array_like
from lightning_memmap.store.sources.stream import Spool
from lightning_memmap.store.workers import RowNumbers
from lightning_memmap.tensordict_types import is_exactly

_MEMORY_TYPES = {Tensor, Parameter, np.ndarray, np.memmap}
_FILE_MODULES = {"h5py", "zarr"}
#: Datasets of columns that lie side by side, and their attribute.
_SIDE_BY_SIDE = {TensorDataset: "tensors", ColumnDataset: "columns", StackDataset: "datasets"}
#: Rows that lie closer together than this in a file are read together, with what is between them.
_MAX_GAP_BYTES = 64 * 2**10


@dataclass(frozen=True, eq=False)
class Source:
    """The rows of a dataset."""

    #: Reads rows of each field.
    read: Callable[[RowNumbers], list[Values]]
    #: By row, in which piece of its files it is, where a piece is read as a whole.
    row_groups: Callable[[], Integers | None] = lambda: None
    #: Whether rows are read many at once, and not made one by one.
    is_sliced: bool = True

    @property
    def order(self) -> Integers | None:
        """The order in which all rows are read fastest, piece by piece; None for their own."""
        pieces = self.row_groups()
        if pieces is None or (np.diff(pieces) >= 0).all():
            return None
        return np.argsort(pieces, kind="stable")


def source_of(dataset: Any, schema: Schema, row_bytes: int = 1) -> Source:
    """Find how the rows of a dataset are read: by slices where it is known, or as items."""
    if isinstance(dataset, Spool):
        return Source(dataset.read)
    step, reader, slices = rows_at_once(row_bytes), SampleReader(dataset, schema), None

    def read_items(rows: RowNumbers) -> list[Values]:
        some = (rows[first : first + step] for first in range(0, len(rows), step))
        return join_values(list(map(reader.read, some)))

    if not any(isinstance(field.kind, Image) for field in schema.fields):
        with suppress(SchemaError):  # Its arrays are not nested as its samples are.
            slices = _source_of(dataset, schema.structure)
    if slices is None:
        return Source(read_items, is_sliced=False)

    def read(rows: RowNumbers) -> list[Values]:
        with suppress(SchemaError):  # Some do not fit, and are to be named.
            found = slices.read(rows)
            if all(values.num_rows == len(rows) for values in found):
                return found
        return read_items(rows)

    return replace(slices, read=read)


def is_read_by_item(dataset: Any) -> bool:
    """Whether each row of a dataset is made by itself, as far as its class tells."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_known = type(dataset) in {*_SIDE_BY_SIDE, ConcatDataset} or is_exactly(dataset, "TensorDict")
    return not (is_known or _is_array(dataset) or _is_hugging_face(dataset))


def concatenate_sources(sources: Sequence[Source], sizes: Sequence[int]) -> Source:
    """The rows of several sources, one source after the other."""
    ends = np.cumsum(sizes, dtype=np.int64)

    def read(rows: RowNumbers) -> list[Values]:
        parts, back = split_by_group(rows, ends)
        return join_values([sources[part].read(within) for part, within in parts], back)

    def row_groups() -> Integers | None:
        found = [source.row_groups() for source in sources]
        if all(each is None for each in found):
            return None
        # The pieces of each come after those of all before it.
        return np.concatenate(
            [
                number * 2**32 + (np.zeros(size, np.int64) if each is None else each)
                for number, (each, size) in enumerate(zip(found, sizes, strict=True))
            ]
        )

    return Source(read, row_groups, all(source.is_sliced for source in sources))


def representative_samples(dataset: Any) -> list[Any]:
    """Samples of the values of a table, which show what is None in some rows or differs in length.

    Each has values of several rows. There are none of datasets that are no tables. Of a ``Subset``,
    they show all rows of the table: so training and validation rows of one table have one schema.
    """
    kind = type(dataset)
    if kind is Subset:
        return representative_samples(dataset.dataset)
    if kind is ConcatDataset:
        return [*chain.from_iterable(map(representative_samples, dataset.datasets))]
    if _is_hugging_face(dataset):
        from lightning_memmap.store.sources.tables import hugging_face_samples

        return hugging_face_samples(dataset)
    return dataset.representative_samples() if kind is ColumnDataset else []


def _is_hugging_face(dataset: Any) -> bool:
    """Whether a dataset is exactly of the class ``datasets.Dataset``."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def _source_of(dataset: Any, node: Node, *, any_array: bool = False) -> Source | None:
    """Find how to slice a dataset, or a part of one, whose samples have a structure.

    Returns None where its class is not known.
    """
    kind = type(dataset)
    if isinstance(dataset, TableColumn):
        return Source(partial(_read_column, dataset.rows, node), dataset.row_groups)
    if _is_array(dataset) or (any_array and is_array_like(dataset)):
        rows_of = partial(_rows_of_array, dataset)
        return Source(partial(_read_column, rows_of, node))
    if kind is Subset:
        return _picked(dataset, node)
    if kind is ConcatDataset:
        parts = [_source_of(part, node) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return (
            concatenate_sources(known, list(map(len, dataset.datasets)))
            if len(known) == len(parts)
            else None
        )
    children = as_container(_side_by_side(dataset, node), ())
    if children is None or children[0] != node.kind or set(children[1]) != set(node.keys):
        return None
    columns, found = dict(zip(children[1], children[2], strict=True)), []
    for key, child in zip(node.keys, node.children, strict=True):
        source = _source_of(columns[key], child, any_array=kind is ColumnDataset)
        if source is None:
            return None
        found.append(source)

    def row_groups() -> Integers | None:
        each = (source.row_groups() for source in found)
        return next((pieces for pieces in each if pieces is not None), None)

    return Source(lambda rows: [values for each in found for values in each.read(rows)], row_groups)


def _side_by_side(dataset: Any, node: Node) -> Any:
    """The container of what lies side by side in a dataset; None where its class is not known."""
    kind = type(dataset)
    if _is_hugging_face(dataset):
        from lightning_memmap.store.sources.tables import hugging_face_columns

        return hugging_face_columns(dataset, node)
    if is_exactly(dataset, "TensorDict"):
        return dataset
    return getattr(dataset, _SIDE_BY_SIDE.get(kind, ""), None)


def _is_in_memory(values: Any) -> bool:
    return type(values) in _MEMORY_TYPES or is_exactly(values, "MemoryMappedTensor")


def _is_array(values: Any) -> bool:
    if _is_in_memory(values):
        is_nested = isinstance(values, Tensor) and values.is_nested
        return not is_nested and values.ndim > 0
    is_file = type(values).__module__.partition(".")[0] in _FILE_MODULES
    return is_file and is_array_like(values)


def _picked(dataset: Any, node: Node) -> Source | None:
    """Some rows of another source, in an order of their own."""
    indices, num_rows = np.asarray(dataset.indices), len(dataset.dataset)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        return None
    if indices.min() < -num_rows or indices.max() >= num_rows:
        return None
    picked = indices.astype(np.int64, copy=False)
    picked = np.where(picked < 0, picked + num_rows, picked) if picked.min() < 0 else picked
    if (source := _source_of(dataset.dataset, node)) is None:
        return None

    def read(rows: RowNumbers) -> list[Values]:
        some = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return source.read(as_range(picked[some]))

    def row_groups() -> Integers | None:
        return None if (found := source.row_groups()) is None else found[picked]

    return Source(read, row_groups)


@dataclass(frozen=True, eq=False)
class _ArrayRows(Branch):
    """Rows of an array, none of which is None."""

    rows: Any

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def leaves(self, field: Field) -> Values:
        return as_values(field, self.rows)


def _rows_of_array(values: Any, rows: RowNumbers) -> Branch:
    """Rows of a tensor or array, or of one in a file, which is read by slices."""
    is_memory = _is_in_memory(values)
    if isinstance(rows, range):
        found = values[rows.start : rows.stop]
    elif isinstance(values, Tensor):
        found = take_rows(values, rows)
    else:
        found = values[rows] if is_memory else _take_of_file(values, rows)
    if not is_memory:
        # Libraries of arrays in files return new arrays; any other may reuse a buffer.
        is_new = type(values).__module__.partition(".")[0] in _FILE_MODULES
        found = np.asarray(found) if is_new else np.array(found)
    if isinstance(found, np.ndarray) and found.dtype.kind in "OUST" and found.ndim == 1:
        return Samples(found.tolist())
    return _ArrayRows(found)


def _take_of_file(values: Any, rows: Integers) -> np.ndarray:
    taken = np.empty((len(rows), *values.shape[1:]), values.dtype)
    order = np.argsort(rows, kind="stable")
    gap = max(1, _MAX_GAP_BYTES * len(taken) // max(1, taken.nbytes))
    for places in np.split(order, np.flatnonzero(np.diff(rows[order]) > gap) + 1):
        if len(places):
            first, last = int(rows[places[0]]), int(rows[places[-1]])
            taken[places] = np.asarray(values[first : last + 1])[rows[places] - first]
    return taken


def _read_column(
    rows_of: Callable[[RowNumbers], Branch], node: Node, rows: RowNumbers
) -> list[Values]:
    """Read rows of one column, whose items have a structure."""
    try:
        found = rows_of(rows)
    except Exception as error:
        raise DatasetError(
            f"the dataset raised at rows {min(rows)} to {max(rows)}, field"
            f" {node.fields[0].name!r}: {describe_error(error)}"
        ) from error
    return stack(found, node)
