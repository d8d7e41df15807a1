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
    elements_of,
    group_of,
    group_sums,
    index_in_group,
    ranges,
)
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.variable_rows import Allocate, VariableRows, concatenate_rows
from lightning_memmap.schema.fields import RowList, select


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The documents of one field in some packs. A loader handles packs like rows.

    Args:
        documents: The documents, pack after pack: of one shape in a tensor, or of any length.
        documents_per_pack: Documents of each pack, int64 of shape (B,).
    """

    documents: Tensor | VariableRows
    documents_per_pack: Integers

    def __len__(self) -> int:
        return len(self.documents_per_pack)

    def __getitem__(self, packs: Integers) -> "PackedRows":
        counts = self.documents_per_pack[packs]
        index = elements_of(packs, self.documents_per_pack)
        if isinstance(self.documents, Tensor):
            on_device = send(torch.from_numpy(index), self.documents.device)
            return PackedRows(select(self.documents, on_device), counts)
        return PackedRows(self.documents[index], counts)

    def split_with_sizes(self, sizes: Sequence[int]) -> "list[PackedRows]":
        """Divide the packs."""
        pack_bounds = bounds_of(sizes)
        counts = np.split(self.documents_per_pack, pack_bounds[1:-1])
        bounds = pairwise(bounds_of(self.documents_per_pack)[pack_bounds].tolist())
        pairs = zip(bounds, counts, strict=True)
        return [PackedRows(self.documents[start:stop], part) for (start, stop), part in pairs]

    def to(self, device: torch.device) -> "PackedRows":
        """Return the packs on another device. Text stays on the CPU."""
        documents = self.documents
        if isinstance(documents, Tensor):
            return PackedRows(send(documents, device), self.documents_per_pack)
        return PackedRows(documents.to(device), self.documents_per_pack)

    def cu_seqlens(self, max_documents: int) -> Tensor:
        """Return where each document of a pack starts; see `Packing`. On the CPU."""
        assert isinstance(self.documents, VariableRows)
        num_packs = len(self)
        stops = np.zeros((num_packs, max_documents + 1), np.int32)
        pack = group_of(self.documents_per_pack)
        column = index_in_group(self.documents_per_pack)
        stops[pack, column + 1] = self.documents.lengths
        return torch.from_numpy(stops.cumsum(axis=1, dtype=np.int32))

    def padded(self, length: int, value: float, allocate: Allocate) -> Tensor:
        """Concatenate the documents of each pack, and pad it: of shape (B, length, *item shape)."""
        assert isinstance(self.documents, VariableRows)
        documents = self.documents.replaced(allocate=allocate)
        widths = documents.lengths.copy()
        # The last document of each pack is padded to what the others leave.
        last = np.cumsum(self.documents_per_pack) - 1
        widths[last] += length - group_sums(widths, self.documents_per_pack)
        values = documents.padded_items(widths[:, None], value)
        return values.view(len(self), length, *documents.field.item_shape)

    def in_columns(self, max_documents: int) -> Tensor:
        """Return a column for each document, 0 if there is none: (B, max_documents, *shape)."""
        assert isinstance(self.documents, Tensor)
        documents = self.documents
        index = ranges(np.arange(len(self)) * max_documents, self.documents_per_pack)
        columns = documents.new_zeros((len(self) * max_documents, *documents.shape[1:]))
        columns[send(torch.from_numpy(index), documents.device)] = documents
        return columns.view(len(self), max_documents, *documents.shape[1:])

    def listed(self) -> RowList:
        """Return a list for each pack, with a text or tensor for each document."""
        assert isinstance(self.documents, VariableRows)
        documents = self.documents.listed()
        bounds = pairwise(bounds_of(self.documents_per_pack).tolist())
        return RowList([*documents[start:stop]] for start, stop in bounds)


def concatenate_packs(parts: Sequence[PackedRows]) -> PackedRows:
    """Concatenate packs of one field from several sources."""
    documents = concatenate_rows([part.documents for part in parts])
    return PackedRows(documents, np.concatenate([part.documents_per_pack for part in parts]))
