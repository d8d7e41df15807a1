"""The documents that are packed: rows, or pieces of rows, and the shards that they belong to.

Documents are packed in groups. A group is all documents of a shard, which are dealt by length; or
in blocks, consecutive documents of the files, so that a block can be read at once.

In blocks, the documents are a line that is cut into as many sections as there are packs. 2 shards
of 2 blocks have 8 packs of 8 tokens, and 59 tokens in sections of 7.4::

    documents      5 3 6 | 4 4 5 2 | 8 7 | 3 5 7      a document belongs where its middle is
    shard, block     0 0       0 1   1 0     1 1
    packs          8 6     8 7       8 7   8 7
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.integers import (
    Integers,
    Runs,
    bounds_of,
    ceil_div,
    elements_of,
    group_of,
    group_sums,
    index_in_group,
    ranges,
    starts_of,
)
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.packing import cut_line, halve_largest
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Shards


@dataclass(frozen=True)
class PackOptions:
    """The options of `Packed`, as checkpoints store them."""

    limits: tuple[tuple[str, int], ...]
    overflow: str
    max_documents: int | None
    split: bool
    shares: tuple[tuple[str, float], ...] | None = None
    shares_of: str = "tokens"

    @property
    def field(self) -> str:
        """The field by whose length documents are packed."""
        return self.limits[0][0]

    @property
    def length(self) -> int:
        """Tokens of a pack."""
        return self.limits[0][1]

    @property
    def capacity(self) -> Integers:
        """The most that a pack holds of each field, int64 of shape (fields,)."""
        return np.array([limit for _, limit in self.limits], np.int64)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that identify the options, as JSON values."""
        mixed = {}
        if self.shares is not None:
            mixed = {"shares": dict(self.shares), "shares_of": self.shares_of}
        return {
            "length": dict(self.limits),
            "overflow": self.overflow,
            "max_documents": self.max_documents,
            "split": self.split,
            **mixed,
        }


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents to pack: rows of a pool, or pieces of rows.

    Args:
        lengths: The length of each document by field, group after group, (documents, fields).
        documents_per_group: int64 of shape (groups,). A group is a shard, or in blocks, a block of
            a shard.
        rows: The index in the pool of each document's row, or None if each row is a document.
        starts: The first item of each document in its row, or None for 0.
        random_streams: As for `Packer`, int64 of shape (groups,).
        documents_per_set: Documents of each shard and training set, int64 of shape (C, sets), or
            None for a single set.
        drawn_per_set: Documents of each shard and set that an epoch draws, or None.
        readings: In blocks, how often an epoch reads each training set, of shape (sets,), or None.
            The documents are then counted by shard, and drawn for groups.
    """

    lengths: FrozenArray
    documents_per_group: Integers
    rows: NDArray[Any] | None
    starts: NDArray[Any] | None
    random_streams: Integers
    documents_per_set: Integers | None = None
    drawn_per_set: Integers | None = None
    readings: NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls, lengths: NDArray[Any], rows_per_group: Integers, options: "PackOptions"
    ) -> "Documents":
        """Make the documents from the lengths of rows, group after group."""
        random_streams = np.arange(len(rows_per_group))
        limit = options.length
        if options.overflow == "truncate":
            lengths = np.minimum(lengths, limit)
        if options.overflow != "split" or not (lengths[:, 0] > limit).any():
            return cls(FrozenArray(lengths), rows_per_group, None, None, random_streams)
        num_chunks = np.maximum(1, ceil_div(lengths[:, 0].astype(np.int64), limit))
        rows = group_of(num_chunks)
        starts = index_in_group(num_chunks) * limit
        chunk_lengths = np.minimum(limit, lengths[rows, 0] - starts)[:, None].astype(lengths.dtype)
        chunks_per_group = group_sums(num_chunks, rows_per_group)
        return cls(FrozenArray(chunk_lengths), chunks_per_group, rows, starts, random_streams)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that identify the documents, as JSON values."""
        return self.lengths.identity

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self.lengths == other.lengths

    def __hash__(self) -> int:
        return hash(self.lengths)

    @cached_property
    def group_starts(self) -> Integers:
        """The first document of each group, int64 of shape (groups,)."""
        return starts_of(self.documents_per_group)

    @property
    def tokens_per_group(self) -> Integers:
        """Tokens of each group, int64 of shape (groups,)."""
        return group_sums(self.lengths.array[:, 0], self.documents_per_group)

    @property
    def drawn_per_group(self) -> Integers:
        """Documents of each group in an epoch, int64 of shape (groups,)."""
        drawn = self.drawn_per_set
        return self.documents_per_group if drawn is None else drawn.sum(axis=1)

    def reordered(self, pool: Pool, shards: Integers) -> "tuple[Pool, Documents]":
        """Renumber the shards: shard ``shards[c]`` becomes shard ``c``."""
        assert isinstance(pool.chosen, np.ndarray)
        index = elements_of(shards, pool.sizes)
        reordered = pool.choose(pool.sizes[shards], pool.chosen[index])
        here = elements_of(shards, self.documents_per_group)
        rows = None
        if self.rows is not None:
            moved = np.empty_like(index)
            moved[index] = np.arange(len(index))
            rows = moved[self.rows[here]]
        documents = Documents(
            FrozenArray(self.lengths.array[here]),
            self.documents_per_group[shards],
            rows,
            None if self.starts is None else self.starts[here],
            self.random_streams[shards],
            None if self.documents_per_set is None else self.documents_per_set[shards],
            None if self.drawn_per_set is None else self.drawn_per_set[shards],
        )
        return reordered, documents

    def halve_longest(self, min_documents: Integers) -> "Documents":
        """Halve the longest documents of groups that have too few, if they were cut before."""
        if self.rows is None or self.starts is None:
            return self
        lengths = self.lengths.array[:, 0]
        halved, source, counts = halve_largest(
            lengths, self.documents_per_group, min_documents, is_first_larger=False
        )
        # The documents form the same line as before.
        starts = self.starts[source] + starts_of(halved) - starts_of(lengths)[source]
        streams = self.random_streams
        return Documents(FrozenArray(halved[:, None]), counts, self.rows[source], starts, streams)


def deal(
    pool: Pool, lengths: NDArray[Any], kept: Integers | None, set_of_row: Integers | None
) -> tuple[Pool, NDArray[Any], Integers | None]:
    """Deal the rows of a pool to its shards by length, to and fro, so that all shards are alike.

    Args:
        pool: The pool.
        lengths: The lengths of its rows, of shape (rows, fields).
        kept: The rows to deal, or None for all.
        set_of_row: The training set of each row, which are dealt set after set, or None.

    Returns:
        The pool, and the lengths and sets by its index.
    """
    num_shards = pool.num_shards
    index = np.arange(pool.num_rows)
    if pool.is_striped:
        # In dataset order, in which rows of one length are dealt.
        index = Shards(pool.num_rows, num_shards).file_rows(index)
    if kept is not None:
        is_kept = np.zeros(pool.num_rows, bool)
        is_kept[kept] = True
        index = index[is_kept[index]]
    dealt = index[np.argsort(-lengths[index, 0].astype(np.int64), kind="stable")]
    if set_of_row is not None:
        dealt = dealt[np.argsort(set_of_row[dealt], kind="stable")]
    rounds, positions = np.divmod(np.arange(len(dealt)), num_shards)
    # The first shards have one row more: the last, incomplete round goes forwards.
    is_forward = (rounds - len(dealt) // num_shards) % 2 == 0
    shards = np.where(is_forward, positions, num_shards - 1 - positions)
    chosen = dealt[np.argsort(shards, kind="stable")]
    dealt_pool = pool.choose(np.bincount(shards, minlength=num_shards), chosen)
    return dealt_pool, lengths[chosen], None if set_of_row is None else set_of_row[chosen]


def divide(
    pool: Pool,
    kept: Integers | None,
    line: Documents,
    options: PackOptions,
    packs_per_block: Integers,
) -> tuple[Pool, Documents]:
    """Divide documents among shards and blocks in the order of the files.

    Args:
        pool: A pool of all rows whose shards are ranges of the files.
        kept: The rows to pack, or None for all.
        line: Their documents, in the order of the files. With ``split=True``, they may be cut.
        options: The options of the packing.
        packs_per_block: Packs of each shard and block, int64 of shape (C, blocks).

    Returns:
        The pool of these shards, and its documents. A row that is cut may be in two shards.
    """
    lengths = line.lengths.array
    rows = line.rows
    starts = line.starts
    num_packs = int(packs_per_block.sum())
    num_before = starts_of(packs_per_block.ravel())
    stops = np.cumsum(weights_of(lengths, options))
    # Python integers do not overflow.
    cuts = (num_before.astype(object) * int(stops[-1]) // num_packs).astype(np.int64)
    if options.split:
        rows, starts, cut_lengths, counts = cut_line(lengths[:, 0].astype(np.int64), cuts)
        lengths = cut_lengths[:, None].astype(lengths.dtype)
    else:
        # A document belongs to the section that has its middle.
        doubled = np.append(0, stops[:-1]) + stops
        bounds = np.searchsorted(doubled, 2 * cuts)
        # A section has at least as many documents as packs, if there are enough.
        spare = np.maximum.accumulate(bounds - num_before)
        bounds = num_before + np.minimum(spare, max(0, len(lengths) - num_packs))
        bounds = np.minimum(bounds, len(lengths))
        counts = np.diff(bounds, append=len(lengths))
    documents_per_shard = counts.reshape(packs_per_block.shape).sum(axis=1)
    document_starts = starts_of(documents_per_shard)
    last_documents = np.maximum(0, document_starts + documents_per_shard - 1)
    document_rows = np.append(np.arange(len(lengths)) if rows is None else rows, 0)
    first_rows = document_rows[document_starts]
    num_rows = document_rows[last_documents] + 1 - first_rows
    sizes = np.where(documents_per_shard > 0, num_rows, 0)
    chosen: NDArray[Any] | Runs = Runs.of_ranges(first_rows, sizes)
    if kept is not None:
        chosen = kept[ranges(first_rows, sizes)]
    if rows is not None:
        rows = rows - np.repeat(first_rows - starts_of(sizes), documents_per_shard)
    streams = np.arange(packs_per_block.size)
    divided = Documents(FrozenArray(lengths), counts, rows, starts, streams)
    return pool.choose(sizes, chosen), divided


def divide_sets(
    pool: Pool,
    kept: Integers | None,
    line: Documents,
    set_of_row: Integers,
    readings: NDArray[np.float64],
    options: PackOptions,
) -> tuple[Pool, Documents]:
    """Divide the documents of several sets among shards in the order of the files, set after set.

    Args:
        pool: A pool of all rows whose shards are ranges of the files.
        kept: The rows to pack, or None for all.
        line: Their documents, in the order of the files. Each row is one.
        set_of_row: The training set of each document, ascending.
        readings: How often an epoch reads each set, of shape (sets,).
        options: The options of the packing.
    """
    num_shards = pool.num_shards
    num_sets = len(readings)
    lengths = line.lengths.array
    weights = weights_of(lengths, options)
    middles = np.cumsum(weights) - weights / 2
    bounds = bounds_of(weights)[np.searchsorted(set_of_row, np.arange(num_sets + 1))]
    sections = np.arange(num_shards + 1)[:, None] / num_shards
    # (C + 1, sets): the first document of each shard and set, and one past the last shard's.
    cuts = np.searchsorted(middles, bounds[:-1] + sections * np.diff(bounds))
    cuts[-1] = np.searchsorted(set_of_row, np.arange(num_sets), side="right")
    documents_per_set = np.diff(cuts, axis=0)
    firsts = cuts[:-1].ravel()
    counts = documents_per_set.ravel()
    chosen = ranges(firsts, counts)
    documents_per_shard = documents_per_set.sum(axis=1)
    divided = Documents(
        FrozenArray(lengths[chosen]),
        documents_per_shard,
        None,
        None,
        np.arange(num_shards),
        documents_per_set,
        readings=readings,
    )
    if kept is not None:
        return pool.choose(documents_per_shard, kept[chosen]), divided
    return pool.choose(documents_per_shard, Runs.of_ranges(firsts, counts)), divided


def weights_of(lengths: NDArray[Any], options: PackOptions) -> Integers:
    """Return how much of a pack each document takes, in tokens: int64 of shape (documents,)."""
    if options.split:
        tokens: Integers = lengths[:, 0].astype(np.int64)
        return tokens
    capacity = options.capacity
    weights: Integers = (lengths.astype(np.int64) * capacity[0] // capacity).max(axis=1)
    max_documents = options.max_documents or options.length
    return np.maximum(ceil_div(options.length, max_documents), weights)
