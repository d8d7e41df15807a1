"""Documents of one field, pack after pack, on their way into a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.integers import (
    Integers,
    bounds_of,
    group_of,
    group_sums,
    index_in_group,
    ranges,
    starts_of,
)
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.variable_rows import Allocate, VariableRows, largest
from lightning_memmap.schema.fields import RowList, select


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The documents of one field in some packs. A loader handles packs like rows.

    Args:
        documents: The documents, pack after pack: of one shape in a tensor, or of any length.
        counts: Documents of each pack, int64 of shape (B,).
    """

    documents: Tensor | VariableRows
    counts: Integers

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, packs: Integers) -> "PackedRows":
        counts = self.counts[packs]
        index = ranges(starts_of(self.counts)[packs], counts)
        if isinstance(self.documents, Tensor):
            on_device = send(torch.from_numpy(index), self.documents.device)
            return PackedRows(select(self.documents, on_device), counts)
        return PackedRows(self.documents[index], counts)

    def split_with_sizes(self, sizes: Sequence[int]) -> "list[PackedRows]":
        """Divide the packs."""
        pack_stops = np.cumsum(sizes)
        document_stops = bounds_of(self.counts)[pack_stops].tolist()
        bounds = pairwise([0, *document_stops])
        counts = np.split(self.counts, pack_stops[:-1])
        pairs = zip(bounds, counts, strict=True)
        return [PackedRows(self.documents[start:stop], part) for (start, stop), part in pairs]

    def to(self, device: torch.device) -> "PackedRows":
        """Return the packs on another device. Text stays on the CPU."""
        documents = self.documents
        if isinstance(documents, Tensor):
            return PackedRows(send(documents, device), self.counts)
        return PackedRows(documents.to(device), self.counts)

    def cu_seqlens(self, max_documents: int) -> Tensor:
        """Return where each document of a pack starts; see `Packing`. On the CPU."""
        assert isinstance(self.documents, VariableRows)
        num_packs = len(self)
        stops = np.zeros((num_packs, max_documents + 1), np.int32)
        pack = group_of(self.counts)
        column = index_in_group(self.counts)
        stops[pack, column + 1] = self.documents.lengths
        return torch.from_numpy(stops.cumsum(axis=1, dtype=np.int32))

    def padded(self, length: int, value: float, allocate: Allocate) -> Tensor:
        """Concatenate the documents of each pack, and pad it: of shape (B, length, *item shape)."""
        assert isinstance(self.documents, VariableRows)
        documents = self.documents.replaced(allocate=allocate)
        widths = documents.lengths.copy()
        # The last document of each pack is padded to what the others leave.
        last = np.cumsum(self.counts) - 1
        widths[last] += length - group_sums(widths, self.counts)
        values = documents.padded_each(widths[:, None], value)
        return values.view(len(self), length, *documents.field.item_shape)

    def in_columns(self, max_documents: int) -> Tensor:
        """Return a column for each document, 0 if there is none: (B, max_documents, *shape)."""
        assert isinstance(self.documents, Tensor)
        documents = self.documents
        index = ranges(np.arange(len(self)) * max_documents, self.counts)
        columns = documents.new_zeros((len(self) * max_documents, *documents.shape[1:]))
        columns[send(torch.from_numpy(index), documents.device)] = documents
        return columns.view(len(self), max_documents, *documents.shape[1:])

    def listed(self) -> RowList:
        """Return a list for each pack, with a text or tensor for each document."""
        assert isinstance(self.documents, VariableRows)
        documents = self.documents.listed()
        stops = np.cumsum(self.counts).tolist()
        return RowList([*documents[start:stop]] for start, stop in pairwise([0, *stops]))


def merge_packed(parts: Sequence[PackedRows]) -> PackedRows:
    """Concatenate packs of one field from several sources."""
    counts = np.concatenate([part.counts for part in parts])
    first = parts[0].documents
    if isinstance(first, Tensor):
        return PackedRows(
            torch.cat([p.documents for p in parts if isinstance(p.documents, Tensor)]), counts
        )
    documents = [part.documents for part in parts if isinstance(part.documents, VariableRows)]
    sizes = np.concatenate([rows.sizes for rows in documents])
    items = torch.cat([rows.packed() for rows in documents])
    starts = starts_of(sizes.prod(axis=1))
    merged = VariableRows(first.field, items, starts, sizes, largest(sizes), is_packed=True)
    return PackedRows(merged, counts)
