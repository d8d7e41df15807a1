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
    ceil_div,
    group_of,
    group_sums,
    index_in_group,
    ranges,
    starts_of,
)
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.packing import cut_line
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
        counts: Documents of each group, int64 of shape (groups,): one per shard, or in blocks, one
            per shard and block.
        rows: The index in the pool of each document's row, or None if each row is a document.
        starts: The first item of each document in its row, or None for 0.
        streams: A number below the number of groups for each of them, by which its random bits are
            chosen.
        set_counts: Documents of each shard and training set, int64 of shape (C, sets), or None.
        drawn: Documents of each shard and training set in an epoch, or None.
        readings: In blocks, how often an epoch reads each training set, of shape (sets,), or None.
            The documents are then counted by shard, and drawn for groups.
    """

    lengths: Numbers
    counts: Integers
    rows: NDArray[Any] | None
    starts: NDArray[Any] | None
    streams: Integers
    set_counts: Integers | None = None
    drawn: Integers | None = None
    readings: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, lengths: NDArray[Any], sizes: Integers, options: "PackOptions") -> "Documents":
        """Make the documents from the lengths of rows, group after group."""
        streams = np.arange(len(sizes))
        limit = options.length
        if options.overflow == "truncate":
            lengths = np.minimum(lengths, limit)
        if options.overflow != "split" or not (lengths[:, 0] > limit).any():
            return cls(Numbers(lengths), sizes, None, None, streams)
        num_chunks = np.maximum(1, ceil_div(lengths[:, 0].astype(np.int64), limit))
        rows = group_of(num_chunks)
        starts = index_in_group(num_chunks) * limit
        chunk_lengths = np.minimum(limit, lengths[rows, 0] - starts)[:, None]
        counts = group_sums(num_chunks, sizes)
        return cls(Numbers(chunk_lengths.astype(lengths.dtype)), counts, rows, starts, streams)

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
        return starts_of(self.counts)

    def reordered(self, pool: Pool, shards: Integers) -> "tuple[Pool, Documents]":
        """Renumber the shards: shard ``shards[c]`` becomes shard ``c``."""
        assert isinstance(pool.chosen, np.ndarray)
        index = ranges(pool.starts[shards], pool.sizes[shards])
        reordered = pool.choose(pool.sizes[shards], pool.chosen[index])
        here = ranges(self.group_starts[shards], self.counts[shards])
        rows = None
        if self.rows is not None:
            moved = np.empty_like(index)
            moved[index] = np.arange(len(index))
            rows = moved[self.rows[here]]
        documents = Documents(
            Numbers(self.lengths.array[here]),
            self.counts[shards],
            rows,
            None if self.starts is None else self.starts[here],
            self.streams[shards],
            None if self.set_counts is None else self.set_counts[shards],
            None if self.drawn is None else self.drawn[shards],
        )
        return reordered, documents

    @property
    def num_available(self) -> Integers:
        """Documents of each group in an epoch, int64 of shape (groups,)."""
        return self.counts if self.drawn is None else self.drawn.sum(axis=1)

    def with_at_least(self, least: Integers) -> "Documents":
        """Halve the longest documents of groups that have too few, ``least`` being the fewest."""
        if (self.counts >= least).all() or self.rows is None or self.starts is None:
            return self
        parts: list[tuple[Any, ...]] = []
        counts = self.counts.copy()
        pairs = zip(self.group_starts.tolist(), least.tolist(), strict=True)
        for group, (start, count) in enumerate(pairs):
            here = slice(start, start + int(counts[group]))
            lengths = self.lengths.array[here, 0]
            rows = self.rows[here]
            starts = self.starts[here]
            while len(lengths) < count and lengths.max(initial=0) > 1:
                is_cut = np.zeros(len(lengths), bool)
                is_cut[np.argsort(-lengths, kind="stable")[: count - len(lengths)]] = True
                is_cut &= lengths > 1
                num_parts = 1 + is_cut
                is_second = index_in_group(num_parts) == 1
                halves = np.repeat(lengths // 2, num_parts)
                rows = np.repeat(rows, num_parts)
                starts = np.repeat(starts, num_parts) + np.where(is_second, halves, 0)
                repeated = np.repeat(lengths, num_parts)
                is_first = np.repeat(is_cut, num_parts) & ~is_second
                lengths = np.where(is_second, repeated - halves, repeated)
                lengths = np.where(is_first, halves, lengths)
            counts[group] = len(lengths)
            parts.append((lengths, rows, starts))
        lengths, rows, starts = map(np.concatenate, zip(*parts, strict=True))
        return Documents(Numbers(lengths[:, None]), counts, rows, starts, self.streams)


def deal(
    pool: Pool, lengths: NDArray[Any], kept: Integers | None, sets: Integers | None
) -> tuple[Pool, NDArray[Any], Integers | None]:
    """Deal the rows of a pool to its shards by length, to and fro, so that all shards are alike.

    Args:
        pool: The pool.
        lengths: The lengths of its rows, of shape (rows, fields).
        kept: The rows to deal, or None for all.
        sets: The training set of each row, which are dealt set after set, or None.

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
    if sets is not None:
        dealt = dealt[np.argsort(sets[dealt], kind="stable")]
    ranks = np.arange(len(dealt))
    rounds, positions = np.divmod(ranks, num_shards)
    # The first shards have one row more: the last, incomplete round goes forwards.
    is_forward = (rounds - len(dealt) // num_shards) % 2 == 0
    shards = np.where(is_forward, positions, num_shards - 1 - positions)
    order = np.argsort(shards, kind="stable")
    sizes = np.bincount(shards, minlength=num_shards)
    chosen = dealt[order]
    return pool.choose(sizes, chosen), lengths[chosen], None if sets is None else sets[chosen]


def divide(
    pool: Pool, kept: Integers | None, line: Documents, options: PackOptions, packs: Integers
) -> tuple[Pool, Documents]:
    """Divide documents among shards and blocks in the order of the files.

    Args:
        pool: A pool of all rows whose shards are ranges of the files.
        kept: The rows to pack, or None for all.
        line: Their documents, in the order of the files. With ``split=True``, they may be cut.
        options: The options of the packing.
        packs: Packs of each shard and block, int64 of shape (C, blocks).

    Returns:
        The pool of these shards, and its documents. A row that is cut may be in two shards.
    """
    lengths = line.lengths.array
    rows = line.rows
    starts = line.starts
    stops = np.cumsum(weights_of(lengths, options))
    num_before = starts_of(packs.ravel())
    # Python integers do not overflow.
    cuts = (num_before.astype(object) * int(stops[-1]) // int(packs.sum())).astype(np.int64)
    if options.split:
        rows, starts, pieces, counts = cut_line(lengths[:, 0].astype(np.int64), cuts)
        lengths = pieces[:, None].astype(lengths.dtype)
    else:
        # A document belongs to the section that has its middle.
        doubled = np.append(0, stops[:-1]) + stops
        bounds = np.searchsorted(doubled, 2 * cuts)
        # A section has at least as many documents as packs, if there are enough.
        spare = np.maximum.accumulate(bounds - num_before)
        bounds = num_before + np.minimum(spare, max(0, len(lengths) - int(packs.sum())))
        bounds = np.minimum(bounds, len(lengths))
        counts = np.diff(bounds, append=len(lengths))
    num_shards = len(packs)
    shard_counts = counts.reshape(packs.shape).sum(axis=1)
    document_rows = np.arange(len(lengths)) if rows is None else rows
    # The first row of each shard, and one past its last.
    bounds = np.append(document_rows, 0)
    document_starts = starts_of(shard_counts)
    first = bounds[document_starts]
    last = bounds[np.maximum(0, document_starts + shard_counts - 1)]
    sizes = np.where(shard_counts > 0, last + 1 - first, 0)
    shifts = first - starts_of(sizes)
    chosen: NDArray[Any] | Runs = Runs(starts_of(sizes)[sizes > 0], shifts[sizes > 0])
    if kept is not None:
        chosen = kept[ranges(first, sizes)]
    if rows is not None:
        rows = rows - np.repeat(shifts, shard_counts)
    streams = np.arange(num_shards * packs.shape[1])
    divided = Documents(Numbers(lengths), counts, rows, starts, streams)
    return pool.choose(sizes, chosen), divided


def divide_sets(
    pool: Pool,
    kept: Integers | None,
    line: Documents,
    sets: Integers,
    readings: NDArray[np.float64],
    options: PackOptions,
) -> tuple[Pool, Documents]:
    """Divide the documents of several sets among shards in the order of the files, set after set.

    Args:
        pool: A pool of all rows whose shards are ranges of the files.
        kept: The rows to pack, or None for all.
        line: Their documents, in the order of the files. Each row is one.
        sets: The training set of each document, ascending.
        readings: How often an epoch reads each set, of shape (sets,).
        options: The options of the packing.
    """
    num_shards = pool.num_shards
    num_sets = len(readings)
    lengths = line.lengths.array
    weights = weights_of(lengths, options)
    stops = np.cumsum(weights)
    middles = stops - weights / 2
    bounds = np.append(0, stops)[np.searchsorted(sets, np.arange(num_sets + 1))]
    sections = np.arange(num_shards + 1)[:, None] / num_shards
    # (C + 1, sets): the first document of each shard and set, and one past the last shard's.
    cuts = np.searchsorted(middles, bounds[:-1] + sections * np.diff(bounds))
    cuts[-1] = np.searchsorted(sets, np.arange(num_sets), side="right")
    counts = np.diff(cuts, axis=0)
    chosen = ranges(cuts[:-1].ravel(), counts.ravel())
    shard_counts = counts.sum(axis=1)
    divided = Documents(
        Numbers(lengths[chosen]),
        shard_counts,
        None,
        None,
        np.arange(num_shards),
        counts,
        readings=readings,
    )
    if kept is not None:
        return pool.choose(shard_counts, kept[chosen]), divided
    starts = starts_of(counts.ravel())
    has_rows = counts.ravel() > 0
    runs = Runs(starts[has_rows], (cuts[:-1].ravel() - starts)[has_rows])
    return pool.choose(shard_counts, runs), divided


def weights_of(lengths: NDArray[Any], options: PackOptions) -> Integers:
    """Return what each document takes of a pack, in tokens: int64 of shape (documents,)."""
    if options.split:
        tokens: Integers = lengths[:, 0].astype(np.int64)
        return tokens
    capacity = options.capacity
    weights: Integers = (lengths.astype(np.int64) * capacity[0] // capacity).max(axis=1)
    least = 1 if options.max_documents is None else ceil_div(options.length, options.max_documents)
    return np.maximum(least, weights)
