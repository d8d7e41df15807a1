"""The rows of a store as a TensorDict of memory-mapped tensors, nested like a sample.

    sample                                       TensorDict of batch size (N,)
    {"image": (3, 32, 32), "label": 7}           {"image": (N, 3, 32, 32), "label": (N,)}
    (image, label)                               {"0": ..., "1": ...}
    {"age": 7 or None}                           {"age": {"values": (N,), "mask": (N,)}}
    {"sound": (T,)}, where T differs             {"sound": {"start": (N,), "stop": (N,)}}

The items of all rows of ``sound`` are one more mapped tensor, of which row ``i`` is ``start[i]`` to
``stop[i]``. Nested tensors would have the rows themselves, but reading one of a million rows takes
them 4 ms or more.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict
from torch import Tensor
from typing_extensions import Self, override

from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import Node
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import LOCATED_ROWS, IndexedItems, MappedRows, OpenColumn

#: "rows" of one shape; or, of rows that differ in length, all "items", the first and one past the
#: last of each row, and the sizes of its leading dimensions where several differ.
Content = Literal["rows", "items", "start", "stop", "shape"]


class MappedStore(Protocol):
    """An open store, which is pickled as its location."""

    manifest: Manifest
    files: Path

    @property
    def num_rows(self) -> int:
        """The rows of all shards."""

    @property
    def schema(self) -> Schema:
        """The fields and the nesting of a sample."""

    def column(self, field: str) -> OpenColumn:
        """Return the mapped column of a field, by its stored name."""

    def download(self, shards: Collection[int], fields: Collection[str]) -> None:
        """Download shards of fields that are not in the cache yet."""


class Source(NamedTuple):
    """A tensor of a store, from which every process can open it."""

    store: MappedStore
    field: int
    """Its number in the schema."""
    content: Content
    shards: range
    """The shards whose rows are used."""

    @property
    def rows(self) -> slice:
        """The file rows of the shards."""
        bounds = [*self.store.manifest.shards.starts.tolist(), self.store.num_rows]
        return slice(bounds[self.shards.start], bounds[self.shards.stop])

    def open(self) -> Tensor:
        """Open the whole tensor, or compute it where no file has it.

        Raises:
            StoreError: An index is damaged.
        """
        name = self.store.schema.fields[self.field].name
        self.store.download(self.shards, [name])
        column = self.store.column(name)
        if self.content == "rows":
            assert isinstance(column, MappedRows)
            return column.tensor
        assert isinstance(column, IndexedItems)
        if self.content == "items":
            return column.items
        if self.content == "start":
            return torch.from_numpy(_read_starts(column, self.rows))
        index = torch.from_numpy(column.index)
        return index[:, 0] if self.content == "stop" else index[:, 1:]

    def view(self) -> StoredTensor:
        """Open the tensor, cut to the rows of the shards."""
        opened = self.open()
        is_cut = self.content not in ("items", "start")
        return StoredTensor.of(opened[self.rows] if is_cut else opened, self)


def _read_starts(column: IndexedItems, rows: slice) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Check the index of rows, and return the first item of each."""
    starts = np.empty(rows.stop - rows.start, np.int64)
    for first in range(rows.start, rows.stop, LOCATED_ROWS):
        locations = np.arange(first, min(first + LOCATED_ROWS, rows.stop), dtype=np.int64)
        starts[locations - rows.start] = column.locate(locations).starts
    return starts


class StoredTensor(MemoryMappedTensor):
    """A mapped tensor of a store, or a view of one.

    It is pickled as the store and its place there: another process maps the files again, from the
    manifest and the descriptors that it has checked. Writing to it changes the memory of this
    process alone: the mapping is copy-on-write.
    """

    source: Source

    @classmethod
    def of(cls, tensor: Tensor, source: Source) -> Self:
        """Wrap a view of an opened tensor. They share their memory."""
        wrapped = cls(tensor)
        wrapped.source = source
        return wrapped

    @property  # type: ignore[misc]
    def filename(self) -> str:
        """The file that is mapped.

        Raises:
            RuntimeError: No file has these numbers.
        """
        store, field, content, _ = self.source
        if content == "start":
            raise RuntimeError("the starts of rows are computed from their ends: no file has them")
        column = store.manifest.columns[field]
        # The index of rows that differ in length comes first.
        name = next(iter(column.bounds)) if content in ("stop", "shape") else column.rows_name
        return os.path.realpath(store.files / name)

    def _wrap(self, result: Any) -> Any:
        """Wrap a result where it is a view of this tensor."""
        return self.of(result, self.source) if isinstance(result, MemoryMappedTensor) else result

    @override
    def __getitem__(self, item: Any) -> Any:
        return self._wrap(super().__getitem__(item))

    @override
    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        return tuple(map(self._wrap, super().unbind(dim)))  # type: ignore[no-untyped-call]

    @override
    def chunk(self, chunks: int, dim: int = 0) -> tuple[Any, ...]:
        return tuple(map(self._wrap, super().chunk(chunks, dim)))  # type: ignore[no-untyped-call]

    @override
    def split(self, split_size: Any, dim: int = 0) -> tuple[Any, ...]:
        return tuple(map(self._wrap, super().split(split_size, dim)))  # type: ignore[no-untyped-call]

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # A copy does not share memory, as after `clone`.
        memo[id(self)] = copied = self.clone()
        return copied

    @override
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        layout = tuple(self.shape), self.stride(), self.storage_offset()
        return _reopen, (type(self), self.source, *layout)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)


def _reopen(
    tensor_type: type[StoredTensor],
    source: Source,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> StoredTensor:
    return tensor_type.of(source.open().as_strided(shape, stride, offset), source)


def rows_of_shards(store: MappedStore, shards: range) -> TensorDict:
    """Return the rows of consecutive shards, in the order of the files.

    Args:
        store: A store whose mapping nothing else reads.
        shards: Which.
    """
    bounds = [*store.manifest.shards.starts.tolist(), store.num_rows]
    num_rows = bounds[shards.stop] - bounds[shards.start]
    leaves: dict[str, Tensor | TensorDict] = {}
    for index, field in enumerate(store.schema.fields):
        if not field.num_variable:
            leaves[field.name] = Source(store, index, "rows", shards).view()
            continue
        # The starts first: they check the index.
        contents: tuple[Content, ...] = ("start", "stop")
        if field.num_variable > 1:
            contents = (*contents, "shape")
        tensors = {name: Source(store, index, name, shards).view() for name in contents}
        leaves[field.name] = TensorDict(tensors, [num_rows])
    nested = _nest(store.schema.structure, leaves, num_rows)
    if not isinstance(nested, TensorDict):
        nested = TensorDict({store.schema.fields[0].name: nested}, [num_rows])
    # Its tensors are mapped already: this copies nothing, and locks the keys.
    nested.memmap_()
    return nested


def _nest(
    node: Node, leaves: Mapping[str, Tensor | TensorDict], num_rows: int
) -> Tensor | TensorDict:
    """Nest leaves, by name of their field, like a sample."""
    if node.field is not None:
        return leaves[node.field.name]
    children = [_nest(child, leaves, num_rows) for child in node.children]
    if node.kind == "records":
        return children[0]
    if node.kind == "optional":
        return TensorDict({"values": children[0], "mask": leaves[node.mask]}, [num_rows])
    batch_size = torch.Size([num_rows])
    if node.kind == "tensordict" and isinstance(first := leaves[node.fields[0].name], Tensor):
        batch_size = first.shape[: first.ndim - node.feature_dims]
    return TensorDict(dict(zip(map(str, node.keys), children, strict=True)), batch_size)
