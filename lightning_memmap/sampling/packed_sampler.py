"""The order of packs, and the documents of each pack in an epoch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.integers import (
    Integers,
    bounds_of,
    ceil_div,
    distinct,
    elements_of,
    group_of,
    group_sums,
    index_in_group,
    ranges,
    starts_of,
)
from lightning_memmap.sampling.documents import (
    Documents,
    PackOptions,
    weights_of,
)
from lightning_memmap.sampling.packing import (
    GROUP_BITS,
    LAYER_BITS,
    MAX_ATTEMPTS,
    BlockDrawing,
    Drawing,
    PackedPieces,
    Packer,
    concatenate_and_cut,
    layered,
)
from lightning_memmap.sampling.permutations import bit_generator
from lightning_memmap.sampling.rows import shard_rows
from lightning_memmap.sampling.sampler import Sampler, cached_per_epoch, derive_seed

#: Fraction of padding from which a user is told that larger blocks have less.
_MUCH_PADDING = 0.05
#: Derives the seed by which documents of training sets are drawn.
_DRAWING_SEED = 1


class Needs(NamedTuple):
    """The packs that groups of documents need in epoch 0."""

    packs_per_group: Integers
    """The fewest packs of each group, int64 of shape (groups,)."""
    available: Integers
    """Documents of each group, of which a pack needs one; with ``split=True``, tokens."""
    max_documents: int
    """The most documents of a pack; 0 with ``split=True``."""


class PackedDocuments(NamedTuple):
    """The documents of some packs, pack after pack: rows, or pieces of rows."""

    pool_index: Integers
    """The row of each document, as an index in the pool: int64 of shape (documents,)."""
    starts: Integers | None
    """The first item of each document in its row, int64 of shape (documents,); None for 0."""
    lengths: NDArray[Any]
    """The length of each document by field, integers of shape (documents, fields)."""
    documents_per_pack: Integers
    """int64 of shape (packs,)."""


class EpochPacks(NamedTuple):
    """The packs of an epoch, shard after shard, in the order of their positions."""

    bounds: Integers
    """The first document of each pack, and the number of all documents: int64 (packs + 1,)."""
    documents: NDArray[Any]
    """The documents, pack after pack, as an index in `Documents`."""
    piece_starts: NDArray[Any] | None = None
    """With ``split=True``, where each piece starts in its document."""
    piece_lengths: NDArray[Any] | None = None
    """With ``split=True``, the length of each piece."""

    @property
    def documents_per_pack(self) -> Integers:
        """Documents of each pack, of shape (packs,)."""
        return np.diff(self.bounds)


@dataclass(frozen=True, kw_only=True)
class PackedSampler(Sampler):
    """An order whose positions are packs of documents.

    Args:
        options: The options of the packing.
        documents: The documents of each shard.
        num_packs: Positions of an epoch.
        max_documents: The most documents of a pack, for which batches have room.
        is_fixed: Whether all epochs have the packs of epoch 0.
    """

    options: PackOptions
    documents: Documents
    num_packs: int
    max_documents: int
    is_fixed: bool = False

    @property
    @override
    def num_positions(self) -> int:
        return self.num_packs

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The values that determine the order; see `Sampler.identity`."""
        identity = {**super().identity}
        if "shuffle_block" in identity:
            # Computed from the options and the rows: the last to explain a difference.
            identity["packs_per_block"] = identity.pop("shuffle_block")
        return identity

    @cached_property
    def packs_per_block(self) -> Integers:
        """Packs of each shard and block, int64 of shape (C, blocks); without blocks, (C, 1)."""
        return count_packs_per_block(self.num_packs, self.num_shards, self.shuffle_block)

    def with_packs(self, num_packs: int) -> Self:
        """Return this order with at least as many packs, some of which are divided.

        Raises:
            ValueError: A shard has too few documents.
        """
        order = replace(self, num_packs=num_packs)
        documents = self.documents
        is_cut = self.options.split
        available = documents.tokens_per_group if is_cut else documents.drawn_per_group
        where = "Curriculum: a shard of a stage with fewer packs than another one"
        check_available(available, order.positions_per_shard, self.options, where)
        return order

    def needs(self) -> Needs:
        """Pack epoch 0, in as many packs as each group needs."""
        documents = self.documents
        if self.options.split:
            tokens = documents.tokens_per_group
            return Needs(ceil_div(tokens, self.options.length), tokens, 0)
        packs = self._packer.pack(0, np.arange(len(documents.random_streams)))
        available = group_sums(packs.documents_per_pack, packs.packs_per_group)
        return Needs(packs.packs_per_group, available, int(packs.documents_per_pack.max(initial=0)))

    @cached_property
    def _packer(self) -> Packer:
        documents = self.documents
        lengths = documents.lengths.array
        if not lengths[:, 0].all():
            # A document without a token counts as one, so that packs have a limited number.
            lengths = lengths.copy()
            lengths[:, 0] = np.maximum(1, lengths[:, 0])
        return Packer(
            lengths,
            documents.documents_per_group,
            self.options.capacity,
            self.max_documents,
            self.seed,
            documents.random_streams,
            self._drawing,
        )

    @cached_property
    def _drawing(self) -> Drawing | BlockDrawing | None:
        documents = self.documents
        per_set = documents.documents_per_set
        if per_set is None:
            return None
        if documents.readings is not None:
            weights = weights_of(documents.lengths.array, self.options)
            return BlockDrawing(weights, per_set, documents.readings, self.packs_per_block)
        assert documents.drawn_per_set is not None
        seed = derive_seed(self.seed, _DRAWING_SEED)
        return Drawing(per_set, documents.drawn_per_set, seed, documents.random_streams)

    def packs(self, epoch: int) -> EpochPacks:
        """Return the packs of an epoch, which are planned for all shards at once."""
        return self._epoch_packs(0 if self.is_fixed else epoch)

    @cached_per_epoch
    def _epoch_packs(self, epoch: int) -> EpochPacks:
        cut = self._cut(epoch) if self.options.split else None
        targets = self.packs_per_block.ravel()
        packs = self._packer.pack_all(epoch, targets) if cut is None else cut.packs
        lengths = self.documents.lengths.array[packs.documents, 0] if cut is None else cut.lengths
        # The cost of attention.
        costs = group_sums(lengths.astype(np.int64) ** 2, packs.documents_per_pack)
        arranged = self._arranged(epoch, costs)
        bounds = bounds_of(packs.documents_per_pack[arranged])
        index = elements_of(arranged, packs.documents_per_pack)
        if cut is None:
            return EpochPacks(bounds, packs.documents[index])
        return EpochPacks(bounds, packs.documents[index], cut.starts[index], cut.lengths[index])

    def _arranged(self, epoch: int, costs: Integers) -> Integers:
        """Order the packs of all groups by their positions, shard after shard."""
        packs = self.packs_per_block
        if self.shuffle_block is None:
            return layered(packs[:, 0], costs, bit_generator(self.seed, epoch, LAYER_BITS))
        starts = starts_of(packs.ravel()).reshape(packs.shape)
        parts = []
        shards = []
        for block in self._block_order(epoch).tolist():
            counts = packs[:, block]
            index = ranges(starts[:, block], counts)
            bits = bit_generator(self.seed, epoch, self._block_bits + 1 + block)
            parts.append(index[layered(counts, costs[index], bits)])
            shards.append(group_of(counts))
        by_shard = np.argsort(np.concatenate(shards), kind="stable")
        arranged: Integers = np.concatenate(parts)[by_shard]
        return arranged

    @property
    def _block_bits(self) -> int:
        """The stream of random bits of the order of blocks, after the streams of groups."""
        return GROUP_BITS + self.packs_per_block.size * MAX_ATTEMPTS

    def _block_order(self, epoch: int) -> Integers:
        """Return the blocks in the order of an epoch. One with fewer packs stays last."""
        packs = self.packs_per_block
        order = np.arange(packs.shape[1])
        num_full = int(np.count_nonzero(packs[-1] == packs[0, 0]))
        bits = bit_generator(self.seed, epoch, self._block_bits)
        order[:num_full] = bits.random_raw(num_full).argsort()
        return order

    @override
    def rows_at(self, epoch: int, start: int, stop: int, shards: Integers) -> Integers:
        positions = (np.arange(start, stop)[:, None] * self.num_shards + shards).ravel()
        packed = self.documents_at(epoch, positions[positions < self.num_positions])
        return distinct(packed.pool_index)

    @override
    def most_in_block(self, shard: int, values: Integers) -> int | None:
        if self.shuffle_block is None:
            return None
        if isinstance(self._drawing, BlockDrawing):
            return self._drawing.most_in_block(shard, values)
        documents = self.documents
        num_blocks = self.packs_per_block.shape[1]
        here = slice(shard * num_blocks, (shard + 1) * num_blocks)
        counts = documents.documents_per_group[here]
        first = documents.group_starts[here][counts > 0]
        last = first + counts[counts > 0] - 1
        if documents.rows is not None:
            first = documents.rows[first]
            last = documents.rows[last]
        start = self.pool.starts[shard]
        sums_before = bounds_of(values)
        return int((sums_before[last + 1 - start] - sums_before[first - start]).max(initial=0))

    def _cut(self, epoch: int) -> PackedPieces:
        """Concatenate the documents of all groups in another order in each epoch, and cut them.

        If packs have too many documents in every order that is tried, cut them as in epoch 0.
        """
        documents = self.documents
        groups = np.arange(len(documents.documents_per_group))
        for attempt in range(MAX_ATTEMPTS):
            order, *_ = self._packer.permuted(epoch, groups, attempt)
            cut = concatenate_and_cut(
                documents.lengths.array[:, 0],
                order,
                documents.documents_per_group,
                self.packs_per_block.ravel(),
                self.options.length,
            )
            largest = int(cut.packs.documents_per_pack.max())
            if largest <= self.max_documents:
                return cut
        if epoch:
            return self._cut(0)
        raise ValueError(
            f"Packed: max_documents={self.max_documents}: with split=True, a pack has {largest}"
            " documents: increase max_documents, or decrease length"
        )

    def num_targets(self, epoch: int, positions: range) -> NDArray[Any]:
        """Count the tokens of each pack that predict the next one of their document.

        Args:
            epoch: Epoch, counted from 0.
            positions: Positions in ``[0, num_positions)``.

        Returns:
            Integers of shape (len(positions),).
        """
        packed = self.documents_at(epoch, np.asarray(positions, np.int64))
        num_targets = np.maximum(0, packed.lengths[:, 0].astype(np.int64) - 1)
        return group_sums(num_targets, packed.documents_per_pack)

    @override
    def sums_at(self, values: NDArray[Any], epoch: int, positions: range) -> NDArray[Any]:
        packed = self.documents_at(epoch, np.asarray(positions, np.int64))
        packs = group_of(packed.documents_per_pack)
        return np.bincount(packs, values[packed.pool_index], len(positions))

    @property
    def padding_fraction(self) -> float:
        """The fraction of the packs of the first epoch that is padding."""
        lengths = self.documents.lengths.array[:, 0]
        if self.documents.documents_per_set is not None:
            lengths = lengths[self.packs(0).documents]
        tokens = int(lengths.sum(dtype=np.int64))
        return 1 - tokens / (self.num_positions * self.options.length)

    @property
    def wastes_packs(self) -> bool:
        """Whether blocks are so small that much of their packs is padding."""
        # For several training sets, the packs of an epoch would have to be planned.
        if self.shuffle_block is None or self.is_sequential or self.documents.readings is not None:
            return False
        return self.padding_fraction > _MUCH_PADDING

    @property
    def cuts_rows(self) -> bool:
        """Whether documents may be pieces of rows."""
        return self.options.split or self.options.overflow in ("split", "truncate")

    @property
    def max_seqlen(self) -> dict[str, int]:
        """The most tokens of a document, by field."""
        longest = self.documents.lengths.array.max(axis=0, initial=1).tolist()
        return {
            name: min(limit, most)
            for (name, limit), most in zip(self.options.limits, longest, strict=True)
        }

    def documents_at(self, epoch: int, positions: Integers) -> PackedDocuments:
        """Look up the documents of the packs at these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: Positions in ``[0, num_positions)`` in any order, int64 of shape (packs,).
        """
        packs = self.packs(epoch)
        rounds, shards = np.divmod(positions, self.num_shards)
        index = starts_of(self.positions_per_shard)[shards] + rounds
        starts = packs.bounds[index]
        counts = packs.bounds[index + 1] - starts
        here = ranges(starts, counts)
        documents = packs.documents[here].astype(np.int64)
        lengths = self.documents.lengths.array[documents]
        row_starts: Integers | None = None
        rows = documents
        if self.documents.rows is not None and self.documents.starts is not None:
            row_starts = self.documents.starts[documents].astype(np.int64)
            rows = self.documents.rows[documents].astype(np.int64)
        if packs.piece_starts is not None and packs.piece_lengths is not None:
            piece_starts = packs.piece_starts[here].astype(np.int64)
            row_starts = piece_starts if row_starts is None else row_starts + piece_starts
            lengths = packs.piece_lengths[here, None]
        return PackedDocuments(rows, row_starts, lengths, counts)

    @override
    def padded_dataset_rows(self, epoch: int, positions: range) -> Integers:
        packed = self.documents_at(epoch, np.asarray(positions, np.int64))
        packs = group_of(packed.documents_per_pack)
        columns = index_in_group(packed.documents_per_pack)
        padded = np.full((len(positions), self.max_documents), -1, np.int64)
        padded[packs, columns] = self.pool.dataset_rows(packed.pool_index)
        return padded

    @override
    def num_rows_at(self, epoch: int, positions: Integers) -> Integers:
        return self.documents_at(epoch, positions).documents_per_pack

    @override
    def dataset_rows(self, epoch: int, positions: range) -> Integers:
        packed = self.documents_at(epoch, np.asarray(positions, np.int64))
        return self.pool.dataset_rows(packed.pool_index)

    @override
    def grid(
        self, epoch: int, start: int, stop: int, shards: Integers, shard_starts: Integers
    ) -> Integers:
        """Look up the first row of each pack; see `Sampler.grid`."""
        last = np.maximum(0, self.positions_per_shard[shards] - 1)
        rounds = np.minimum(np.arange(start, stop)[:, None], last)
        positions = (rounds * self.num_shards + shards).ravel()
        packed = self.documents_at(epoch, np.minimum(positions, self.num_packs - 1))
        firsts = packed.pool_index[starts_of(packed.documents_per_pack)]
        shifts = shard_starts - self.pool.starts[shards]
        grid: Integers = firsts + np.tile(shifts, stop - start)
        return grid

    @override
    def in_blocks(self, block: int) -> Self:
        raise ValueError(
            f"shuffle_block={block}: packs are planned for their blocks: make the sampler with"
            " Packed.make_in_blocks"
        )


@dataclass(frozen=True, kw_only=True)
class UnpackedSampler(PackedSampler):
    """A single document in each pack, in dataset order."""

    is_sequential: ClassVar[bool] = True

    @override
    def in_blocks(self, block: int) -> Self:
        return replace(self, shuffle_block=block)

    @override
    def packs(self, epoch: int) -> EpochPacks:
        return self._packs_in_order

    @cached_property
    def _packs_in_order(self) -> EpochPacks:
        documents = np.arange(self.pool.num_rows + 1)
        return EpochPacks(documents, documents[:-1])


def count_packs_per_block(num_packs: int, num_shards: int, shuffle_block: int | None) -> Integers:
    """Count the packs of each shard in each block, int64 of shape (shards, blocks)."""
    packs_per_shard = shard_rows(num_packs, num_shards)[:, None]
    most = int(packs_per_shard.max())
    size = shuffle_block or most
    packs: Integers = np.clip(packs_per_shard - np.arange(0, most, size), 0, size)
    return packs


def check_available(
    available: Integers,
    packs_per_group: Integers,
    options: PackOptions,
    where: str,
    remedy: str = "set a smaller num_shards",
) -> None:
    """Check that each group has a document for each pack; with ``split=True``, a token."""
    if len(lacking := np.flatnonzero(available < packs_per_group)):
        group = lacking[0]
        raise ValueError(
            f"{where} has {available[group]} {'tokens' if options.split else 'documents'} for"
            f" {packs_per_group[group]} packs of {options.length} tokens: {remedy}"
        )
