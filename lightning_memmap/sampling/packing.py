"""Pack documents of the same group into sequences of a fixed length.

A pack is filled by best fit, longest documents first. Documents of 5 3 7 2 4 2 tokens, in packs of
8 tokens::

    document    7  5  4  3  2  2     longest first
    pack        0  1  2  1  2  2     the fullest pack that has room for it, or a new one
    packs       7 | 5 3 | 4 2 2      1, 0 and 0 tokens of padding

The lengths are multiplied by random factors before they are sorted, so that each epoch has other
packs. Documents are packed in groups: all documents of a shard, or of one block of a shard. A group
is divided into windows that are packed independently: numpy then packs a thousand windows at once,
and planning takes linear time.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.integers import (
    Integers,
    bounds_of,
    ceil_div,
    differs_from_previous,
    group_sums,
    index_in_group,
    starts_of,
)
from lightning_memmap.sampling.permutations import permuted, random_bits

#: Approximate number of packs of a window. More take longer, and leave less padding.
_WINDOW_PACKS = 128
#: Windows that are packed at once, and documents of all of them, so that they stay in the cache.
_MAX_WINDOWS = 1024
_MAX_ITEMS = 2**20
#: Lengths are multiplied by up to 1 + 255 / this, about 2, before they are sorted.
_JITTER = 256
#: Streams of the random bits: the order of layers, and the first of the streams of groups.
LAYER_BITS = 0
GROUP_BITS = 1
#: Attempts to pack a group in the packs that it has, before the packs of epoch 0 are used.
MAX_ATTEMPTS = 8
#: Neighbouring positions, up to this number, have packs of similar cost.
_MAX_ALIKE = 48
_GOLDEN_RATIO = (5**0.5 - 1) / 2


class Packs(NamedTuple):
    """Items of some groups, pack after pack."""

    items: NDArray[Any]
    """The items, int32 or int64 of shape (items,)."""
    sizes: Integers
    """Items of each pack, of shape (packs,)."""
    counts: Integers
    """Packs of each group, int64 of shape (groups,)."""

    def of_groups(self) -> "list[Packs]":
        """Divide the packs by group."""
        pack_stops = np.cumsum(self.counts)
        item_stops = bounds_of(self.sizes)[pack_stops]
        items = np.split(self.items, item_stops[:-1])
        sizes = np.split(self.sizes, pack_stops[:-1])
        parts = zip(items, sizes, self.counts, strict=True)
        return [Packs(item, size, np.array([count])) for item, size, count in parts]


def merge_packs(parts: list[Packs]) -> Packs:
    """Concatenate packs of several groups."""
    return Packs(*map(np.concatenate, zip(*parts, strict=True)))


class Drawing:
    """Draws documents of several sets, a fixed number of each set and shard in every epoch.

    A shard reads its documents of a set again and again, each time in another order, and an epoch
    continues where the previous one stopped. 2 of 3 documents an epoch: 2 0 | 1 1 | 0 2 | 1 ...

    Args:
        counts: Documents of each shard and set, int64 of shape (C, sets). The documents of a shard
            are ordered by set.
        drawn: Documents of each shard and set in an epoch, int64 of shape (C, sets).
        seed: Seed of the orders.
        streams: As for `Packer`.
    """

    def __init__(self, counts: Integers, drawn: Integers, seed: int, streams: Integers) -> None:
        self._counts = counts
        self._drawn = drawn
        self._seed = seed
        self._streams = streams

    def documents(self, epoch: int, group: int) -> Integers:
        """Return the documents of a group in an epoch. A group is a shard."""
        shard = group
        drawn = [np.zeros(0, np.int64)]
        start = int(self._counts[:shard].sum())
        num_sets = self._counts.shape[1]
        for number in range(num_sets):
            count = int(self._counts[shard, number])
            remaining = int(self._drawn[shard, number])
            position = epoch * remaining
            stream = int(self._streams[shard]) * num_sets + number
            while remaining:
                reading, skipped = divmod(position, count)
                order = random_bits(self._seed, reading, stream).random_raw(count).argsort()
                part = order[skipped : skipped + remaining]
                drawn.append(part + start)
                position += len(part)
                remaining -= len(part)
            start += count
        return np.concatenate(drawn)


class BlockDrawing:
    """Draws documents of several sets for blocks, in the order of the files.

    The documents of a set and shard are a line, which is read again and again: so many times in an
    epoch, of which a block reads its part. 1.5 times an epoch in 2 blocks, of 4 documents of one
    length: 0 1 2 | 3 0 1 in epoch 0, and 2 3 0 | 1 2 3 in epoch 1. A document belongs where its
    middle is.

    Args:
        weights: The length of each document, ordered by shard and set.
        counts: Documents of each shard and set, int64 of shape (C, sets).
        readings: How often an epoch reads each set, of shape (sets,).
        packs: Packs of each shard and block, int64 of shape (C, blocks).
    """

    def __init__(
        self, weights: Integers, counts: Integers, readings: NDArray[np.float64], packs: Integers
    ) -> None:
        self._counts = counts
        self._starts = starts_of(counts.ravel()).reshape(counts.shape)
        self._readings = readings
        stops = np.cumsum(weights)
        self._middles = stops - weights / 2
        #: The start of the line of each shard and set, and the end of the last one.
        self._bounds = np.append(0, stops)[np.append(self._starts, len(weights))]
        #: The fraction of an epoch before each block, and 1.
        before = np.cumsum(np.pad(packs, ((0, 0), (1, 0))), axis=1)
        self._fractions = before / np.maximum(1, before[:, -1:])

    def _line(self, shard: int, number: int) -> tuple[NDArray[np.float64], float]:
        """Return the middles of the documents of a shard and set, and the length of their line."""
        start = int(self._starts[shard, number])
        at = shard * self._counts.shape[1] + number
        first, last = self._bounds[at : at + 2].tolist()
        middles = self._middles[start : start + int(self._counts[shard, number])] - first
        return middles, last - first

    def documents(self, epoch: int, group: int) -> Integers:
        """Return the documents of a group in an epoch. A group is a block of a shard."""
        shard, block = divmod(group, self._fractions.shape[1] - 1)
        drawn = [np.zeros(0, np.int64)]
        for number in np.flatnonzero((self._readings > 0) & (self._counts[shard] > 0)).tolist():
            middles, length = self._line(shard, number)
            count = len(middles)
            bounds = (epoch + self._fractions[shard, block : block + 2]) * self._readings[number]
            rounds = np.floor(bounds)
            places = np.searchsorted(middles, (bounds - rounds) * length)
            start, stop = (rounds.astype(np.int64) * count + places).tolist()
            drawn.append(np.arange(start, stop) % count + self._starts[shard, number])
        return np.concatenate(drawn)

    def most_in_block(self, shard: int, values: Integers) -> int:
        """Return the most that the documents of a shard have together in a block of any epoch."""
        before = 0
        total = 0
        for number, count in enumerate(self._counts[shard].tolist()):
            here = values[before : before + count]
            before += count
            middles, length = self._line(shard, number)
            part = float(np.diff(self._fractions[shard]).max()) * self._readings[number]
            if part >= 1:
                total += int(here.sum())
            elif part > 0 and count:
                twice = np.append(middles, middles + length)
                # Half a token for rounding.
                stops = np.searchsorted(twice, middles + part * length + 0.5, side="right")
                sums = bounds_of(np.tile(here, 2))
                total += int((sums[stops] - sums[:count]).max())
        return total


class Packer:
    """Packs the items of groups, differently in each epoch.

    Args:
        lengths: The length of each item by field, group after group: integers of shape
            (items, fields). The lengths of the first field are at least 1.
        counts: Items of each group, int64 of shape (groups,).
        capacity: The most that a pack holds of each field, int64 of shape (fields,).
        max_documents: The most items of a pack.
        seed: Seed of the order.
        streams: A number below the number of groups for each of them, by which its random bits are
            chosen.
        drawing: Draws the items of an epoch; None if an epoch has each item once.
    """

    def __init__(
        self,
        lengths: NDArray[Any],
        counts: Integers,
        capacity: Integers,
        max_documents: int,
        seed: int,
        streams: Integers,
        drawing: Drawing | BlockDrawing | None = None,
    ) -> None:
        self._lengths = lengths
        self._streams = streams
        self._drawing = drawing
        self._counts = counts
        self._starts = starts_of(counts)
        self._capacity = capacity
        self._max_documents = max_documents
        self._seed = seed

    def pack(self, epoch: int, groups: Integers, attempt: int = 0) -> Packs:
        """Pack the items of some groups. Other groups don't change the result."""
        items, noise, group_counts = self.permuted(epoch, groups, attempt)
        num_windows = self._num_windows(group_counts)
        starts, sizes = _windows(group_counts, num_windows)
        packed: list[tuple[NDArray[Any], Integers]] = []
        window_packs = np.zeros(len(sizes), np.int64)
        width = int(sizes.max(initial=1))
        step = max(1, min(_MAX_WINDOWS, _MAX_ITEMS // width))
        for first in range(0, len(sizes), step):
            chunk = slice(first, first + step)
            chunk_items, pack_sizes, window_packs[chunk] = self._pack_windows(
                items, noise, starts[chunk], sizes[chunk]
            )
            packed.append((chunk_items, pack_sizes))
        # The windows of a group follow each other.
        counts = group_sums(window_packs, num_windows)
        packed_items, pack_sizes = map(np.concatenate, zip(*packed, strict=True))
        return Packs(packed_items, pack_sizes, counts)

    def pack_all(self, epoch: int, targets: Integers) -> Packs:
        """Pack all groups, group ``c`` in ``targets[c]`` packs.

        Args:
            epoch: Epoch, counted from 0.
            targets: At least the packs of epoch 0, and at most the items of each group: int64 of
                shape (groups,).
        """
        packs = self.pack(epoch, np.arange(len(targets)))
        if (packs.counts == targets).all():
            return packs
        parts = packs.of_groups()
        num_items = group_sums(packs.sizes, packs.counts)
        is_unfit = (packs.counts > targets) | (num_items < targets)
        for group in np.flatnonzero(is_unfit).tolist():
            parts[group] = self._retry(epoch, group, int(targets[group]))
        return merge_packs([_split(*pair) for pair in zip(parts, targets.tolist(), strict=True)])

    def _retry(self, epoch: int, group: int, target: int) -> Packs:
        """Pack a group with other random factors, until it needs few enough packs."""
        groups = np.array([group])
        for attempt in range(1, MAX_ATTEMPTS):
            packs = self.pack(epoch, groups, attempt)
            if packs.counts[0] <= target <= packs.sizes.sum():
                return packs
        return self.pack(0, groups)

    def permuted(
        self, epoch: int, groups: Integers, attempt: int = 0
    ) -> tuple[NDArray[Any], NDArray[np.uint8], Integers]:
        """Permute the items of each group, draw a random byte for each, and count them."""
        drawn = None
        counts = self._counts
        if self._drawing is None:
            counts = self._counts[groups]
        else:
            drawn = [self._drawing.documents(epoch, group) for group in groups.tolist()]
            counts = np.array([len(documents) for documents in drawn], np.int64)
        dtype = np.int32 if len(self._lengths) < 2**31 else np.int64
        total = int(counts.sum())
        items = np.empty(total, dtype)
        noise = np.empty(total, np.uint8)
        start = 0
        for number, (group, count) in enumerate(zip(groups.tolist(), counts.tolist(), strict=True)):
            stream = GROUP_BITS + int(self._streams[group]) * MAX_ATTEMPTS + attempt
            raw = random_bits(self._seed, epoch, stream).random_raw(count)
            # The order is decided by the high bits.
            noise[start : start + count] = raw & np.uint64(255)
            order = raw.argsort()
            noise[start : start + count] = noise[start : start + count][order]
            here = items[start : start + count]
            if drawn is None:
                np.add(order, self._starts[group], out=here, casting="unsafe")
            else:
                here[:] = drawn[number][order]
            start += count
        return items, noise, counts

    def _num_windows(self, counts: Integers) -> Integers:
        """Count the windows of groups of some items: a pure function of the lengths."""
        if not len(self._lengths):
            return np.ones(len(counts), np.int64)
        fill = max((self._lengths[:, f].sum() / c for f, c in enumerate(self._capacity.tolist())))
        per_item = max(float(fill), len(self._lengths) / self._max_documents) / len(self._lengths)
        num_windows: Integers = np.maximum(1, np.rint(counts * per_item / _WINDOW_PACKS)).astype(
            np.int64
        )
        return num_windows

    def _pack_windows(
        self,
        items: NDArray[Any],
        noise: NDArray[np.uint8],
        starts: Integers,
        sizes: Integers,
    ) -> tuple[NDArray[Any], Integers, Integers]:
        """Pack some windows.

        Returns:
            The items pack after pack, the items of each pack, and the packs of each window.
        """
        if not sizes.any():
            return items[:0], np.zeros(0, np.int64), np.zeros(len(sizes), np.int64)
        # (windows, items of the longest window)
        along = np.arange(int(sizes.max()))
        is_item = along < sizes[:, None]
        index = np.minimum(starts[:, None] + along, len(items) - 1)
        items = items[index]
        lengths = self._lengths[items]
        lengths[~is_item] = 0
        keys = lengths[..., 0] * (_JITTER + noise[index].astype(np.int64))
        order = np.argsort(-keys, axis=1)
        items = np.take_along_axis(items, order, axis=1)
        lengths = np.take_along_axis(lengths, order[..., None], axis=1)
        packs, counts = best_fit(lengths, self._capacity, self._max_documents)
        # Places after the last item are sorted last.
        grouped = np.argsort(packs, axis=1, kind="stable")
        items = np.take_along_axis(items, grouped, axis=1)[is_item]
        num_packs = (counts > 0).sum(axis=1)
        return items, counts[counts > 0], num_packs


def _windows(counts: Integers, num_windows: Integers) -> tuple[Integers, Integers]:
    """Divide the items of each group evenly: where windows start, and their sizes."""
    window = index_in_group(num_windows)
    items = np.repeat(counts, num_windows)
    windows = np.repeat(num_windows, num_windows)
    sizes = (window + 1) * items // windows - window * items // windows
    return starts_of(sizes), sizes


def best_fit(
    lengths: NDArray[Any], capacity: Integers, max_documents: int
) -> tuple[NDArray[np.int32], Integers]:
    """Assign the items of several windows to packs, in the order of the items.

    Args:
        lengths: Integers of shape (windows, items, fields), 0 after the last item of a window.
        capacity: The most that a pack holds of each field, int64 of shape (fields,).
        max_documents: The most items of a pack.

    Returns:
        The pack of each item, int32 of shape (windows, items), 2**31 - 1 after the last item; and
        the number of items of each pack, int64 of shape (windows, packs).
    """
    num_windows, num_items, num_fields = lengths.shape
    # (items, windows) for each field
    columns = [np.ascontiguousarray(lengths[..., f].T) for f in range(num_fields)]
    num_packs = 4 + max(
        int(column.sum(axis=0).max()) // int(limit)
        for column, limit in zip(columns, capacity, strict=True)
    )
    num_packs = max(num_packs, ceil_div(num_items, max_documents))
    is_limited = max_documents < num_items
    room = _Room(capacity, num_windows, num_packs)
    packs = np.empty((num_items, num_windows), np.int32)
    counts = np.zeros((num_windows, num_packs), np.int32)
    windows = np.arange(num_windows)
    for k in range(num_items):
        needed = [column[k] for column in columns]
        packs[k] = pack = room.best(needed)
        while len(counts[0]) < room.num_packs:
            counts = np.pad(counts, ((0, 0), (0, room.num_packs - len(counts[0]))))
        counts[windows, pack] += needed[0] > 0
        if is_limited:
            room.close(counts[windows, pack] >= max_documents, windows, pack)
    packs[columns[0] == 0] = np.iinfo(np.int32).max
    return packs.T, counts.astype(np.int64)


class _Room:
    """The free space of the packs of several windows, of shape (windows, packs) for each field."""

    # Unsigned: a negative remainder, where an item doesn't fit, is a huge number.

    def __init__(self, capacity: Integers, num_windows: int, num_packs: int) -> None:
        self._dtype = np.uint32 if int(capacity.max()) < 2**31 else np.uint64
        self._limit = np.iinfo(self._dtype).max // 2
        self._capacity = capacity
        self._windows = np.arange(num_windows)
        self._free = [np.full((num_windows, num_packs), c, self._dtype) for c in capacity]
        self._remaining = [np.empty_like(free) for free in self._free]

    @property
    def num_packs(self) -> int:
        """Packs of each window, the empty ones included."""
        return self._free[0].shape[1]

    def best(self, needed: list[NDArray[Any]]) -> Integers:
        """Place an item in each window, and return its pack: the fullest that has room for it."""
        while True:
            for free, length, remaining in zip(self._free, needed, self._remaining, strict=True):
                np.subtract(free, length.astype(self._dtype)[:, None], out=remaining)
            score: NDArray[Any] = (
                self._remaining[0] if len(self._remaining) == 1 else self._relative()
            )
            pack: Integers = score.argmin(axis=1)
            at = self._windows, pack
            if all((remaining[at] <= self._limit).all() for remaining in self._remaining):
                break
            self._add_packs()
        for free, remaining in zip(self._free, self._remaining, strict=True):
            free[at] = remaining[at]
        return pack

    def _relative(self) -> NDArray[np.float64]:
        """Return the sum of the fractions of all fields that would be remaining."""
        parts = zip(self._remaining, self._capacity.tolist(), strict=True)
        total = sum(
            np.where(remaining > self._limit, np.inf, remaining / limit)
            for remaining, limit in parts
        )
        score: NDArray[np.float64] = np.asarray(total)
        return score

    def _add_packs(self) -> None:
        """Add empty packs."""
        num_more = 8 + self.num_packs // 4
        parts = zip(self._free, self._capacity, strict=True)
        self._free = [
            np.pad(free, ((0, 0), (0, num_more)), constant_values=limit) for free, limit in parts
        ]
        self._remaining = [np.empty_like(free) for free in self._free]

    def close(self, is_full: NDArray[np.bool_], windows: Integers, pack: Integers) -> None:
        """Close packs that have the most items."""
        self._free[0][windows[is_full], pack[is_full]] = 0


def _split(packs: Packs, target: int) -> Packs:
    """Halve the packs of a group with the most items, until there are ``target`` packs."""
    sizes = packs.sizes
    while (num_missing := target - len(sizes)) > 0:
        by_size = np.argsort(-sizes, kind="stable")[:num_missing]
        is_halved = np.zeros(len(sizes), bool)
        is_halved[by_size[sizes[by_size] > 1]] = True
        assert is_halved.any(), f"{packs.sizes.sum()} items do not make {target} packs"
        parts = 1 + is_halved
        starts = starts_of(parts)
        halved = np.empty(int(parts.sum()), np.int64)
        halved[starts] = np.where(is_halved, (sizes + 1) // 2, sizes)
        halved[starts[is_halved] + 1] = sizes[is_halved] // 2
        sizes = halved
    return Packs(packs.items, sizes, np.array([target]))


def layered(counts: Integers, costs: NDArray[Any], bits: np.random.Philox) -> Integers:
    """Order the packs of all shards by layers of similar cost, which are permuted at random.

    A layer is the packs at one place of all shards, which are neighbours in the order of the epoch.

    Args:
        counts: Packs of each shard, int64 of shape (C,). The first shards may have one pack more.
        costs: The cost of each pack, shard after shard.
        bits: Random bits of the order of layers.

    Returns:
        The packs in their new order, shard after shard.
    """
    # Packs are ranked by their cost in each shard. Layer j takes the packs of rank order[j], plus a
    # shift that differs between groups of shards, so that groups of neighbouring positions differ.
    num_shards = len(counts)
    shared = int(counts[-1])
    alike = max(d for d in range(1, min(_MAX_ALIKE, num_shards) + 1) if num_shards % d == 0)
    zero = np.zeros(1, np.int64)
    order = permuted(np.array([max(1, shared)]), bits).grid(0, shared, zero, zero)
    arranged = np.empty(int(counts.sum()), np.int64)
    starts = starts_of(counts)
    for shard, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        ranked = start + np.argsort(-costs[start : start + count], kind="stable")
        shift = int(shard // alike * _GOLDEN_RATIO % 1 * shared)
        arranged[start : start + shared] = ranked[(order + shift) % max(1, shared)]
        arranged[start + shared : start + count] = ranked[shared:]
    return arranged


class Cut(NamedTuple):
    """Pieces of documents, pack after pack."""

    packs: Packs
    """The document of each piece, the pieces of each pack, and the packs of each group."""
    starts: NDArray[Any]
    """The first item of each piece in its document, of shape (pieces,)."""
    lengths: NDArray[Any]
    """The length of each piece, of shape (pieces,)."""


def concatenate_and_cut(
    lengths: NDArray[Any], order: NDArray[Any], counts: Integers, targets: Integers, length: int
) -> Cut:
    """Concatenate the documents of each group, and cut them at multiples of a length.

    Documents of 5 3 7 tokens, in 2 packs of 8 tokens: 5 3 | 7. In 3 packs, the last packs are
    shorter: 5 3 | 4 | 3.

    Args:
        lengths: The length of each document, group after group.
        order: The documents of each group in their order.
        counts: Documents of each group, int64 of shape (groups,).
        targets: Packs of each group, at most its tokens, int64 of shape (groups,).
        length: Tokens of a pack.
    """
    ordered = lengths[order].astype(np.int64)
    group_tokens = group_sums(ordered, counts)
    # The start of each pack in its group. The last packs share the rest.
    pack = index_in_group(targets)
    tokens = np.repeat(group_tokens, targets)
    num_packs = np.repeat(targets, targets)
    least = np.maximum(1, np.minimum(length // 2, tokens // np.maximum(1, num_packs)))
    starts = np.minimum(pack * length, tokens - (num_packs - pack) * least)
    starts += np.repeat(starts_of(group_tokens), targets)
    document, piece_starts, piece_lengths, sizes = cut_line(ordered, starts)
    return Cut(Packs(order[document], sizes, targets), piece_starts, piece_lengths)


def cut_line(lengths: Integers, starts: Integers) -> tuple[Integers, Integers, Integers, Integers]:
    """Concatenate documents, and cut them where sections start.

    Documents without a token have no piece. 5 3 7 tokens, cut at 0 and 6: 5 1 | 2 7.

    Args:
        lengths: The length of each document, int64 of shape (documents,).
        starts: The first token of each section, ascending from 0, int64 of shape (sections,).

    Returns:
        The document of each piece, its first token in the document, its length, and the number of
        pieces of each section.
    """
    stops = np.cumsum(lengths)
    document_starts = stops - lengths
    cuts = np.concatenate([document_starts[lengths > 0], starts[starts < stops[-1]]])
    cuts.sort(kind="stable")
    cuts = cuts[differs_from_previous(cuts)]
    document = np.searchsorted(stops, cuts, side="right")
    piece_lengths = np.diff(cuts, append=stops[-1:])
    sizes = np.diff(np.searchsorted(cuts, starts), append=len(cuts))
    return document, cuts - document_starts[document], piece_lengths, sizes
