"""Batches of packed documents: fetched pack by pack, and nested like the dataset's samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.integers import Integers
from lightning_memmap.loading.buffers import Buffers, byte_pool
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.packed_rows import PackedRows
from lightning_memmap.loading.packing import Packing
from lightning_memmap.loading.row_source import Cut, FieldRows, RowSource, Take
from lightning_memmap.loading.variable_batch import ROW_NUMBER, check_may_have_layout
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.sampling.packed_sampler import PackedDocuments, PackedSampler
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.schema.forms import Layout, Pad
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import make_builder

#: The key of the `Packing` in a batch.
PACKING = "packing"


class PackedSource(RowSource):
    """The packs of another source's rows. The slot of a pack is its position in the epoch."""

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.device = source.device

    @override
    def release(self) -> None:
        super().release()
        self._source.release()

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range | Integers) -> Integers:
        return np.asarray(positions, np.int64)

    @override
    @contextmanager
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> Iterator[Take]:
        assert isinstance(sampler, PackedSampler)
        with self._source.epoch(sampler, epoch, position) as take:
            yield partial(self._take, take, sampler, epoch)

    def _take(
        self,
        take: Take,
        sampler: PackedSampler,
        epoch: int,
        slots: Tensor,
        out: Buffers | None = None,
        cut: Cut | None = None,
    ) -> list[FieldRows]:
        """Fetch the documents of packs; see `Take`."""
        packed = sampler.documents_at(epoch, slots.numpy())
        positions = np.repeat(slots.numpy(), packed.documents_per_pack)
        order = cast(Sampler, _Documents(sampler, packed, positions))
        located = self._source.locate(order, epoch, positions)
        leaves = take(torch.from_numpy(located), None, _cut(packed, sampler))
        return [PackedRows(cast(Any, leaf), packed.documents_per_pack) for leaf in leaves]


class _Documents:
    """The documents of some packs, which a source looks up like the rows of positions."""

    def __init__(
        self, sampler: PackedSampler, packed: PackedDocuments, positions: Integers
    ) -> None:
        self._sampler = sampler
        self._packed = packed
        self._positions = positions

    def locate(
        self, epoch: int, positions: Integers, shard_starts: Integers | None = None
    ) -> Integers:
        """Look up the rows of all documents; see `Sampler.locate`."""
        index = self._packed.pool_index
        if shard_starts is None:
            return index
        shifts = shard_starts - self._sampler.pool.starts
        return index + shifts[self._positions % self._sampler.num_shards]


def _cut(packed: PackedDocuments, sampler: PackedSampler) -> Cut | None:
    """Return what to take of rows, if some are longer than a pack."""
    if not sampler.cuts_rows:
        return None
    lengths = packed.lengths[:, 0].astype(np.int64)
    starts = np.zeros_like(lengths) if packed.starts is None else packed.starts
    return Cut(starts, lengths)


class PackedCollate:
    """Nests a batch of packs like the dataset's samples, and adds a `Packing`.

    Args:
        schema: The schema of the store.
        sampler: The order of the packs.
        layout: The layouts of fields; of `Pad`, the value is used.
        lengths: Returns the length of each row of a field.
        sample: A sample of the dataset, for its classes.
        with_row_numbers: Whether the last leaf has the row of each document.

    Raises:
        ValueError: The samples aren't dicts, or a field can't be packed.
    """

    def __init__(
        self,
        schema: Schema,
        sampler: PackedSampler,
        layout: Mapping[str, Layout] | None,
        lengths: Callable[[str], Integers],
        sample: Any = None,
        with_row_numbers: bool = False,
    ) -> None:
        structure = schema.structure
        if structure.kind != "dict":
            raise ValueError(
                f"sampler=Packed(...): samples are of kind {structure.kind!r}: let the dataset"
                " return dicts, such as {'tokens': ...}"
            )
        added = [PACKING, *[ROW_NUMBER] * with_row_numbers]
        if taken := [key for key in added if key in structure.keys]:
            raise ValueError(
                f"sampler=Packed(...): samples have a key {taken[0]!r}, which batches of packs use:"
                " rename it in the dataset"
            )
        if unknown := [*schema.optional, *schema.lists]:
            raise ValueError(
                f"sampler=Packed(...): field {unknown[0]!r} may be None, or is a list of records,"
                " which can't be packed: omit it from the samples"
            )
        self._with_row_numbers = with_row_numbers
        self._max_documents = sampler.max_documents
        self._max_seqlen = sampler.max_seqlen
        self._limits = dict(sampler.options.limits)
        layouts = layout or {}
        fields = {field.name: field for field in structure.fields}
        for name in layouts:
            schema.check_name("layout", name)
            check_may_have_layout(name, fields.get(name), ())
        field_indices = {field.name: i for i, field in enumerate(structure.fields)}
        self._build = make_builder(structure, sample, field_indices)
        self._packs = [
            _packing_of(f, layouts.get(f.name), self._limits, lengths) for f in schema.fields
        ]
        names = [field.name for field in schema.fields]
        self._packed_fields = {name: names.index(name) for name in self._limits}

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Make a batch."""
        pairs = zip(self._packs, leaves, strict=False)
        batch = self._build([pack(leaf, self._max_documents) for pack, leaf in pairs])
        packings = {
            name: self._packing(name, leaves[index]) for name, index in self._packed_fields.items()
        }
        batch[PACKING] = packings if len(packings) > 1 else next(iter(packings.values()))
        if self._with_row_numbers:
            batch[ROW_NUMBER] = leaves[len(self._packs)]
        return batch

    def _packing(self, name: str, leaf: PackedRows) -> Packing:
        assert isinstance(leaf.documents, VariableRows)
        cu_seqlens = send(leaf.cu_seqlens(self._max_documents), leaf.documents.device)
        return Packing.of(cu_seqlens, self._limits[name], self._max_seqlen[name])


#: Makes what a batch has for the documents of a field, with room for a number of documents.
_Pack = Callable[[PackedRows, int], Any]


def _packing_of(
    field: Any, layout: Layout | None, limits: Mapping[str, int], lengths: Callable[[str], Integers]
) -> _Pack:
    """Decide how the documents of a field are packed."""
    if field.is_text and field.name in limits:
        raise ValueError(
            f"sampler=Packed({field.name!r}): the field is text: store its tokens, as a tensor of"
            " integers"
        )
    if field.is_text:
        return lambda rows, max_documents: rows.listed()
    if not field.num_variable:
        return PackedRows.in_columns
    if field.num_variable > 1:
        raise ValueError(
            f"sampler=Packed(...): field {field.name!r} differs in {field.num_variable} dimensions,"
            " and packs concatenate along one: flatten it in the dataset"
        )
    if layout is not None and not isinstance(layout, Pad):
        raise ValueError(
            f"layout: field {field.name!r} as {layout.name!r} with sampler=Packed(...): packed"
            " fields may have the layout Pad(value=...) only"
        )
    value = layout.value if isinstance(layout, Pad) else 0
    if field.name in limits:
        limit = limits[field.name]
    else:
        limit = _same_lengths(field.name, limits, lengths)
    allocate = byte_pool()
    return lambda rows, max_documents: rows.padded(limit, value, allocate)


def _same_lengths(name: str, limits: Mapping[str, int], lengths: Callable[[str], Integers]) -> int:
    """Return the limit of the packed field whose rows have the same lengths as a field."""
    field_lengths = lengths(name)
    first = next(iter(limits))
    for packed, limit in limits.items():
        if np.array_equal(field_lengths, lengths(packed)):
            return limit
    row = int(np.flatnonzero(field_lengths != lengths(first))[0])
    raise ValueError(
        f"sampler=Packed({first!r}): row {row} has {field_lengths[row]} items of field {name!r} and"
        f" {lengths(first)[row]} of field {first!r}: pack it too, with a length for each field, as"
        f" in length={{{first!r}: {limits[first]}, {name!r}: ...}}; or store it with one shape"
    )
