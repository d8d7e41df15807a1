"""Sources: the rows of a dataset, read many at once, as the values of each field.

A dataset is read item by item. Where its rows lie in arrays or tables, a slice of these gives the
same values in a fraction of the time. Only datasets of known classes are read in this way, never
their subclasses: what a subclass overrides decides what a sample is. Libraries are recognised by
the modules of their classes, and imported by nobody else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tensordict import MemoryMappedTensor, TensorDict
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, SchemaError, describe_error
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field, Node, Schema, Values
from lightning_memmap.schema.fields import field_name, join_values, take_rows
from lightning_memmap.schema.kinds import Image
from lightning_memmap.schema.stack import Column, Samples, fit, stack
from lightning_memmap.schema.structure import children_of
from lightning_memmap.store.sources.column import Rows, TableColumn, as_range, by_piece
from lightning_memmap.store.sources.column_dataset import ColumnDataset, is_array_like
from lightning_memmap.store.sources.stream import Spool

_MEMORY_TYPES = {Tensor, Parameter, MemoryMappedTensor, np.ndarray, np.memmap}
_FILE_MODULES = {"h5py", "zarr"}
#: Rows that lie closer together than this in a file are read together, with what is between them.
_MAX_GAP_BYTES = 64 * 2**10


class Source(Protocol):
    """The rows of a dataset."""

    def read(self, rows: Rows) -> list[Values]:
        """The rows of each field. A SchemaError says that they must be read one by one."""

    def pieces(self, rows: Integers) -> Integers | None:
        """In which piece of its files each row is, where a piece is read as a whole."""


def reading_order(source: Source | None, num_rows: int) -> Integers | None:
    """The order in which all rows are read fastest, int64 of shape (num_rows,): piece by piece."""
    pieces = None if source is None else source.pieces(np.arange(num_rows, dtype=np.int64))
    if pieces is None or (np.diff(pieces) >= 0).all():
        return None
    return np.argsort(pieces, kind="stable")


def source_of(dataset: Any, schema: Schema) -> Source | None:
    """Find the arrays and tables in which the rows of a dataset lie. No row is read."""
    if isinstance(dataset, Spool):
        return dataset
    if any(isinstance(field.kind, Image) for field in schema.fields):
        return None
    try:
        return _source_of(dataset, schema.structure, schema.fields)
    except SchemaError:  # Its arrays are not nested as its samples are.
        return None


def nullable_columns(dataset: Any) -> set[str]:
    """Find the columns that have rows without a value, where no row must be read for it."""
    kind = type(dataset)
    if kind is Subset:
        return nullable_columns(dataset.dataset)
    if kind is ConcatDataset:
        return set().union(*map(nullable_columns, dataset.datasets))
    names = dataset.nullable if isinstance(dataset, ColumnDataset) else []
    if _is_hugging_face(dataset) and dataset.format["type"] is None:
        # In a format, samples have NaN, or whatever a transform makes of it.
        names = [n for n in dataset.format["columns"] if dataset.data.column(n).null_count]
    return {field_name((name,)) for name in names}


def _is_hugging_face(dataset: Any) -> bool:
    """Whether a dataset is exactly of the class ``datasets.Dataset``."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def _source_of(
    dataset: Any, node: Node, fields: Sequence[Field], *, any_array: bool = False
) -> Source | None:
    """The source of a dataset, or of a part of one, whose samples have a structure and fields."""
    kind = type(dataset)
    if isinstance(dataset, TableColumn):
        return _OfColumn(dataset.rows, node, fields, dataset.pieces)
    if _is_array(dataset) or (any_array and is_array_like(dataset)):
        return _OfColumn(partial(_rows_of_array, dataset), node, fields)
    if kind is Subset:
        return _picked(dataset, node, fields)
    if kind is ConcatDataset:
        sources = [_source_of(part, node, fields) for part in dataset.datasets]
        ends = np.cumsum([len(part) for part in dataset.datasets], dtype=np.int64)
        found = [source for source in sources if source is not None]
        return _Joined(found, ends) if len(found) == len(sources) else None
    parts = children_of(_side_by_side(dataset, node, fields), ())
    if parts is None or parts[0] != node.kind or set(parts[1]) != set(node.keys):
        return None
    columns, found = dict(zip(parts[1], parts[2], strict=True)), []
    for key, (_, child, within) in zip(node.keys, node.parts(fields), strict=True):
        source = _source_of(columns[key], child, within, any_array=kind is ColumnDataset)
        if source is None:
            return None
        found.append(source)
    return _Stacked(found)


def _side_by_side(dataset: Any, node: Node, fields: Sequence[Field]) -> Any:
    """The container of what lies side by side in a dataset; None where its class is not known."""
    kind = type(dataset)
    if _is_hugging_face(dataset):
        from lightning_memmap.store.sources.tables import hugging_face_columns

        return hugging_face_columns(dataset, node, fields)
    names = {TensorDataset: "tensors", ColumnDataset: "columns", StackDataset: "datasets"}
    return dataset if kind is TensorDict else getattr(dataset, names.get(kind, ""), None)


def _is_array(values: Any) -> bool:
    if type(values) in _MEMORY_TYPES:
        is_nested = isinstance(values, Tensor) and values.is_nested
        return not is_nested and values.ndim > 0
    is_file = type(values).__module__.partition(".")[0] in _FILE_MODULES
    return is_file and is_array_like(values)


def _picked(dataset: Any, node: Node, fields: Sequence[Field]) -> Source | None:
    indices, num_rows = np.asarray(dataset.indices), len(dataset.dataset)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
        return None
    if indices.min() < -num_rows or indices.max() >= num_rows:
        return None
    rows = indices.astype(np.int64, copy=False)
    rows = np.where(rows < 0, rows + num_rows, rows) if rows.min() < 0 else rows
    source = _source_of(dataset.dataset, node, fields)
    return None if source is None else _Picked(source, rows)


@dataclass(frozen=True, eq=False)
class _ArrayRows(Column):
    """Rows of an array, none of which is None."""

    rows: Any

    @override
    def __len__(self) -> int:
        return len(self.rows)

    @override
    def given(self) -> NDArray[np.bool_]:
        return np.ones(len(self.rows), np.bool_)

    @override
    def leaves(self, field: Field, room: Tensor | None) -> Values:
        return fit(field, self.rows)


def _rows_of_array(values: Any, rows: Rows) -> Column:
    """Rows of a tensor or array, or of one in a file, which is read by slices."""
    is_memory = type(values) in _MEMORY_TYPES
    if isinstance(rows, range):
        found = values[rows.start : rows.stop]
    elif isinstance(values, Tensor):
        found = take_rows(values, rows)
    else:
        found = values[rows] if is_memory else _take_of_file(values, rows)
    found = found if is_memory else np.asarray(found)
    if isinstance(found, np.ndarray) and found.dtype.kind in "OUS" and found.ndim == 1:
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


@dataclass(frozen=True, eq=False)
class _OfColumn(Source):
    """The rows of one column, of a structure with some fields."""

    rows: Callable[[Rows], Column]
    node: Node
    fields: Sequence[Field]
    find_pieces: Callable[[Integers], Integers | None] = lambda rows: None

    @override
    def read(self, rows: Rows) -> list[Values]:
        try:
            found = self.rows(rows)
        except Exception as error:
            raise DatasetError(
                f"the dataset raised at rows {min(rows)} to {max(rows)}, field"
                f" {self.fields[0].name!r}: {describe_error(error)}"
            ) from error
        try:
            return stack(found, self.node, self.fields)
        except NotImplementedError as error:  # Of pyarrow, for types that have few functions.
            raise SchemaError(str(error)) from error

    @override
    def pieces(self, rows: Integers) -> Integers | None:
        return self.find_pieces(rows)


@dataclass(frozen=True, eq=False)
class _Picked(Source):
    """Some rows of another source, in an order of their own."""

    source: Source
    rows: Integers

    @override
    def read(self, rows: Rows) -> list[Values]:
        picked = self.rows[rows.start : rows.stop] if isinstance(rows, range) else self.rows[rows]
        return self.source.read(as_range(picked))

    @override
    def pieces(self, rows: Integers) -> Integers | None:
        return self.source.pieces(self.rows[rows])


@dataclass(frozen=True, eq=False)
class _Joined(Source):
    """The rows of several sources, one source after the other."""

    sources: Sequence[Source]
    ends: Integers

    @override
    def read(self, rows: Rows) -> list[Values]:
        parts, back = by_piece(rows, self.ends)
        found = [self.sources[part].read(within) for part, within in parts]
        joined = [join_values(values) for values in zip(*found, strict=True)]
        return joined if back is None else [each.take(back) for each in joined]

    @override
    def pieces(self, rows: Integers) -> Integers | None:
        numbers = np.searchsorted(self.ends, rows, side="right")
        found, is_known = numbers * 2**32, False
        for number, source in enumerate(self.sources):
            mine = numbers == number
            first = int(self.ends[number - 1]) if number else 0
            if (pieces := source.pieces(rows[mine] - first)) is not None:
                found[mine] += pieces
                is_known = True
        return found if is_known else None


@dataclass(frozen=True, eq=False)
class _Stacked(Source):
    """Sources side by side: each has some of the fields."""

    sources: Sequence[Source]

    @override
    def read(self, rows: Rows) -> list[Values]:
        return [values for source in self.sources for values in source.read(rows)]

    @override
    def pieces(self, rows: Integers) -> Integers | None:
        found = (source.pieces(rows) for source in self.sources)
        return next((pieces for pieces in found if pieces is not None), None)
