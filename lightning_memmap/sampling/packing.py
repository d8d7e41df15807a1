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

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.integers import (
    Integers,
    bounds_of,
    ceil_div,
    differs_from_previous,
    elements_of,
    group_of,
    group_sums,
    index_in_group,
    starts_of,
)
from lightning_memmap.sampling.permutations import bit_generator, permuted

#: Approximate number of packs of a window. More take longer, and leave less padding.
_WINDOW_PACKS = 128
#: Windows that are packed at once, and documents of all of them, so that they stay in the cache.
_MAX_WINDOWS = 1024
_MAX_DOCUMENTS = 2**20
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
    """The documents of some groups, pack after pack."""

    documents: NDArray[Any]
    """The documents, int32 or int64 of shape (documents,)."""
    documents_per_pack: Integers
    """Of shape (packs,)."""
    packs_per_group: Integers
    """Of shape (groups,)."""

    def of_groups(self, groups: Integers) -> "Packs":
        """Return the packs of some of the groups."""
        packs = elements_of(groups, self.packs_per_group)
        documents = elements_of(packs, self.documents_per_pack)
        return Packs(
            self.documents[documents], self.documents_per_pack[packs], self.packs_per_group[groups]
        )

    def fit(self, targets: Integers) -> NDArray[np.bool_]:
        """Return which groups can be divided further into these numbers of packs."""
        num_documents = group_sums(self.documents_per_pack, self.packs_per_group)
        return (self.packs_per_group <= targets) & (targets <= num_documents)


class Drawing:
    """Draws documents of several sets, a fixed number of each set and shard in every epoch.

    A shard reads its documents of a set again and again, each time in another order, and an epoch
    continues where the previous one stopped. 2 of 3 documents an epoch: 2 0 | 1 1 | 0 2 | 1 ...

    Args:
        documents_per_set: Documents of each shard and training set, int64 of shape (C, sets). The
            documents of a shard are ordered by set.
        drawn_per_set: Documents of each shard and set in an epoch, int64 of shape (C, sets).
        seed: Seed of the orders.
        random_streams: As for `Packer`.
    """

    def __init__(
        self,
        documents_per_set: Integers,
        drawn_per_set: Integers,
        seed: int,
        random_streams: Integers,
    ) -> None:
        self._documents_per_set = documents_per_set
        self._drawn_per_set = drawn_per_set
        self._seed = seed
        self._random_streams = random_streams

    def documents(self, epoch: int, group: int) -> Integers:
        """Return the documents of a group in an epoch. A group is a shard."""
        drawn = [np.zeros(0, np.int64)]
        start = int(self._documents_per_set[:group].sum())
        num_sets = self._documents_per_set.shape[1]
        for set_index, count in enumerate(self._documents_per_set[group].tolist()):
            remaining = int(self._drawn_per_set[group, set_index])
            position = epoch * remaining
            stream = int(self._random_streams[group]) * num_sets + set_index
            while remaining:
                reading, skipped = divmod(position, count)
                order = bit_generator(self._seed, reading, stream).random_raw(count).argsort()
                part = order[skipped : skipped + remaining]
                drawn.append(part + start)
                position += len(part)
                remaining -= len(part)
            start += count
        return np.concatenate(drawn)


class BlockDrawing:
    """Draws documents of several sets for blocks, in the order of the files.

    The documents of a set and shard form a line, and each block reads the next part of it. 4
    documents of one length that are read 1.5 times in an epoch of 2 blocks: 0 1 2 | 3 0 1 in epoch
    0, and 2 3 0 | 1 2 3 in epoch 1. A document belongs to the block that reads its middle.

    Args:
        weights: The length of each document, ordered by shard and set.
        documents_per_set: Documents of each shard and set, int64 of shape (C, sets).
        readings: How often an epoch reads each set, of shape (sets,).
        packs_per_block: Packs of each shard and block, int64 of shape (C, blocks).
    """

    def __init__(
        self,
        weights: Integers,
        documents_per_set: Integers,
        readings: NDArray[np.float64],
        packs_per_block: Integers,
    ) -> None:
        self._documents_per_set = documents_per_set
        self._starts = starts_of(documents_per_set.ravel()).reshape(documents_per_set.shape)
        self._readings = readings
        stops = np.cumsum(weights)
        self._middles = stops - weights / 2
        #: The start of the line of each shard and set, and the end of the last one.
        self._bounds = np.append(0, stops)[np.append(self._starts, len(weights))]
        #: The fraction of an epoch before each block, and 1.
        before = np.cumsum(np.pad(packs_per_block, ((0, 0), (1, 0))), axis=1)
        self._fractions = before / np.maximum(1, before[:, -1:])

    def _line(self, shard: int, set_index: int) -> tuple[NDArray[np.float64], float]:
        """Return the middles of the documents of a shard and set, and the length of their line."""
        start = int(self._starts[shard, set_index])
        stop = start + int(self._documents_per_set[shard, set_index])
        index = shard * self._documents_per_set.shape[1] + set_index
        line_start, line_stop = self._bounds[index : index + 2].tolist()
        return self._middles[start:stop] - line_start, line_stop - line_start

    def documents(self, epoch: int, group: int) -> Integers:
        """Return the documents of a group in an epoch. A group is a block of a shard."""
        shard, block = divmod(group, self._fractions.shape[1] - 1)
        drawn = [np.zeros(0, np.int64)]
        is_drawn = (self._readings > 0) & (self._documents_per_set[shard] > 0)
        for set_index in np.flatnonzero(is_drawn).tolist():
            middles, length = self._line(shard, set_index)
            count = len(middles)
            bounds = (epoch + self._fractions[shard, block : block + 2]) * self._readings[set_index]
            rounds = np.floor(bounds)
            index = np.searchsorted(middles, (bounds - rounds) * length)
            start, stop = (rounds.astype(np.int64) * count + index).tolist()
            drawn.append(np.arange(start, stop) % count + self._starts[shard, set_index])
        return np.concatenate(drawn)

    def most_in_block(self, shard: int, values: Integers) -> int:
        """Return the largest sum of the values of a shard's documents in a block of any epoch."""
        total = 0
        bounds = bounds_of(self._documents_per_set[shard])
        for set_index, count in enumerate(self._documents_per_set[shard].tolist()):
            here = values[bounds[set_index] : bounds[set_index + 1]]
            middles, length = self._line(shard, set_index)
            part = float(np.diff(self._fractions[shard]).max()) * self._readings[set_index]
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
    """Packs the documents of groups, differently in each epoch.

    Args:
        lengths: The length of each document by field, group after group: integers of shape
            (documents, fields). The lengths of the first field are at least 1.
        documents_per_group: int64 of shape (groups,).
        capacity: The most that a pack holds of each field, int64 of shape (fields,).
        max_documents: The most documents of a pack.
        seed: Seed of the order.
        random_streams: Which stream of random bits each group uses: distinct integers from 0 to
            ``groups - 1``.
        drawing: Draws the documents of an epoch; None if an epoch has each document once.
    """

    def __init__(
        self,
        lengths: NDArray[Any],
        documents_per_group: Integers,
        capacity: Integers,
        max_documents: int,
        seed: int,
        random_streams: Integers,
        drawing: Drawing | BlockDrawing | None = None,
    ) -> None:
        self._lengths = lengths
        self._random_streams = random_streams
        self._drawing = drawing
        self._documents_per_group = documents_per_group
        self._starts = starts_of(documents_per_group)
        self._capacity = capacity
        self._max_documents = max_documents
        self._seed = seed

    def pack(self, epoch: int, groups: Integers, attempt: int = 0) -> Packs:
        """Pack the documents of some groups. Other groups don't change the result."""
        documents, noise, documents_per_group = self.permuted(epoch, groups, attempt)
        windows_per_group = self._windows_per_group(documents_per_group)
        starts, sizes = _windows(documents_per_group, windows_per_group)
        packed: list[list[NDArray[Any]]] = []
        packs_per_window = np.zeros(len(sizes), np.int64)
        width = int(sizes.max(initial=1))
        step = max(1, min(_MAX_WINDOWS, _MAX_DOCUMENTS // width))
        for start in range(0, len(sizes), step):
            chunk = slice(start, start + step)
            *packed_chunk, packs_per_window[chunk] = self._pack_windows(
                documents, noise, starts[chunk], sizes[chunk]
            )
            packed.append(packed_chunk)
        packed_documents, documents_per_pack = map(np.concatenate, zip(*packed, strict=True))
        packs_per_group = group_sums(packs_per_window, windows_per_group)
        return Packs(packed_documents, documents_per_pack, packs_per_group)

    def pack_all(self, epoch: int, targets: Integers) -> Packs:
        """Pack all groups, group ``c`` in ``targets[c]`` packs.

        Args:
            epoch: Epoch, counted from 0.
            targets: At least the packs that each group needs in epoch 0, and at most its documents:
                int64 of shape (groups,).
        """
        parts = [self.pack(epoch, np.arange(len(targets)))]
        unfit = np.flatnonzero(~parts[0].fit(targets))
        # The index of each group among the groups of all parts.
        index = np.arange(len(targets))
        num_groups = len(targets)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if not len(unfit):
                break
            is_last = attempt == MAX_ATTEMPTS
            parts.append(self.pack(0, unfit) if is_last else self.pack(epoch, unfit, attempt))
            index[unfit] = num_groups + np.arange(len(unfit))
            num_groups += len(unfit)
            unfit = unfit[~parts[-1].fit(targets[unfit])]
        packs = parts[0]
        if len(parts) > 1:
            packs = Packs(*map(np.concatenate, zip(*parts, strict=True))).of_groups(index)
        sizes, _, counts = halve_largest(packs.documents_per_pack, packs.packs_per_group, targets)
        assert (counts == targets).all(), "a group has fewer documents than packs"
        return Packs(packs.documents, sizes, counts)

    def permuted(
        self, epoch: int, groups: Integers, attempt: int = 0
    ) -> tuple[NDArray[Any], NDArray[np.uint8], Integers]:
        """Permute the documents of each group, draw a random byte for each, and count them."""
        drawn = None
        if self._drawing is None:
            documents_per_group = self._documents_per_group[groups]
        else:
            drawn = [self._drawing.documents(epoch, group) for group in groups.tolist()]
            documents_per_group = np.array([len(documents) for documents in drawn], np.int64)
        bounds = bounds_of(documents_per_group).tolist()
        documents = np.empty(bounds[-1], np.int32 if len(self._lengths) < 2**31 else np.int64)
        noise = np.empty(bounds[-1], np.uint8)
        for index, (group, start, stop) in enumerate(
            zip(groups.tolist(), bounds[:-1], bounds[1:], strict=True)
        ):
            stream = GROUP_BITS + int(self._random_streams[group]) * MAX_ATTEMPTS + attempt
            raw = bit_generator(self._seed, epoch, stream).random_raw(stop - start)
            # The order is decided by the high bits.
            order = raw.argsort()
            noise[start:stop] = (raw & np.uint64(255))[order]
            if drawn is None:
                np.add(order, self._starts[group], out=documents[start:stop], casting="unsafe")
            else:
                documents[start:stop] = drawn[index][order]
        return documents, noise, documents_per_group

    def _windows_per_group(self, documents_per_group: Integers) -> Integers:
        """Count the windows of groups of some documents: a pure function of the lengths."""
        num_documents = len(self._lengths)
        if not num_documents:
            return np.ones(len(documents_per_group), np.int64)
        num_packs = max(
            float(self._lengths[:, field].sum() / limit)
            for field, limit in enumerate(self._capacity.tolist())
        )
        packs_per_document = max(num_packs, num_documents / self._max_documents) / num_documents
        mean_windows = documents_per_group * packs_per_document / _WINDOW_PACKS
        num_windows: Integers = np.maximum(1, np.rint(mean_windows)).astype(np.int64)
        return num_windows

    def _pack_windows(
        self,
        documents: NDArray[Any],
        noise: NDArray[np.uint8],
        starts: Integers,
        sizes: Integers,
    ) -> tuple[NDArray[Any], Integers, Integers]:
        """Pack some windows.

        Returns:
            The documents pack after pack, the documents of each pack, and the packs of each window.
        """
        if not sizes.any():
            return documents[:0], np.zeros(0, np.int64), np.zeros(len(sizes), np.int64)
        # (windows, documents of the longest window)
        columns = np.arange(int(sizes.max()))
        is_document = columns < sizes[:, None]
        index = np.minimum(starts[:, None] + columns, len(documents) - 1)
        lengths = self._lengths[documents[index]]
        lengths[~is_document] = 0
        keys = lengths[..., 0] * (_JITTER + noise[index].astype(np.int64))
        by_length = np.argsort(-keys, axis=1)
        lengths = np.take_along_axis(lengths, by_length[..., None], axis=1)
        packs, documents_per_pack = best_fit(lengths, self._capacity, self._max_documents)
        # Columns after the last document are sorted last.
        by_pack = np.take_along_axis(by_length, np.argsort(packs, axis=1, kind="stable"), axis=1)
        packed = documents[np.take_along_axis(index, by_pack, axis=1)[is_document]]
        is_used = documents_per_pack > 0
        return packed, documents_per_pack[is_used], is_used.sum(axis=1)


def _windows(documents_per_group: Integers, num_windows: Integers) -> tuple[Integers, Integers]:
    """Divide the documents of each group evenly: where windows start, and their sizes."""
    window = index_in_group(num_windows)
    documents = np.repeat(documents_per_group, num_windows)
    windows = np.repeat(num_windows, num_windows)
    sizes = (window + 1) * documents // windows - window * documents // windows
    return starts_of(sizes), sizes


def best_fit(
    lengths: NDArray[Any], capacity: Integers, max_documents: int
) -> tuple[NDArray[np.int32], Integers]:
    """Assign the documents of several windows to packs, in the order of the documents.

    Args:
        lengths: Integers of shape (windows, documents, fields), 0 after the last one of a window.
        capacity: The most that a pack holds of each field, int64 of shape (fields,).
        max_documents: The most documents of a pack.

    Returns:
        The pack of each document, int32 of shape (windows, documents), 2**31 - 1 after the last
        one; and the number of documents of each pack, int64 of shape (windows, packs).
    """
    num_windows, num_documents, num_fields = lengths.shape
    # (documents, windows) for each field
    columns = [np.ascontiguousarray(lengths[..., f].T) for f in range(num_fields)]
    num_packs = 4 + max(
        int(column.sum(axis=0).max()) // int(limit)
        for column, limit in zip(columns, capacity, strict=True)
    )
    num_packs = max(num_packs, ceil_div(num_documents, max_documents))
    is_limited = max_documents < num_documents
    room = _Room(capacity, num_windows, num_packs)
    packs = np.empty((num_documents, num_windows), np.int32)
    documents_per_pack = np.zeros((num_windows, num_packs), np.int32)
    windows = np.arange(num_windows)
    for document in range(num_documents):
        needed = [column[document] for column in columns]
        packs[document] = pack = room.best(needed)
        if (num_added := room.num_packs - documents_per_pack.shape[1]) > 0:
            documents_per_pack = np.pad(documents_per_pack, ((0, 0), (0, num_added)))
        documents_per_pack[windows, pack] += needed[0] > 0
        if is_limited:
            room.close(documents_per_pack[windows, pack] >= max_documents, windows, pack)
    packs[columns[0] == 0] = np.iinfo(np.int32).max
    return packs.T, documents_per_pack.astype(np.int64)


class _Room:
    """The free space of the packs of several windows, of shape (windows, packs) for each field."""

    # Unsigned: a negative remainder, where a document doesn't fit, is a huge number.

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
        """Place a document in each window, and return its pack: the fullest with room for it."""
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
        """Close packs that have the most documents."""
        self._free[0][windows[is_full], pack[is_full]] = 0


def halve_largest(
    sizes: Integers, counts: Integers, targets: Integers, is_first_larger: bool = True
) -> tuple[Integers, Integers, Integers]:
    """Halve the largest elements of each group, until it has enough of them or all are 1.

    Args:
        sizes: The size of each element, group after group.
        counts: Elements of each group, int64 of shape (groups,).
        targets: The fewest elements that each group should have, int64 of shape (groups,).
        is_first_larger: Whether the first half of an odd size is the larger one.

    Returns:
        The new sizes, the element that each one is a part of, and the new counts.
    """
    source = np.arange(len(sizes))
    while (counts < targets).any():
        group = group_of(counts)
        by_size = np.lexsort((-sizes, group))
        is_halved = np.zeros(len(sizes), bool)
        is_halved[by_size] = index_in_group(counts) < (targets - counts)[group]
        is_halved &= sizes > 1
        if not is_halved.any():
            break
        num_parts = 1 + is_halved
        first = np.where(is_halved, (sizes + is_first_larger) // 2, sizes)
        halved = np.repeat(sizes - first, num_parts)
        halved[starts_of(num_parts)] = first
        source = np.repeat(source, num_parts)
        counts = group_sums(num_parts, counts)
        sizes = halved
    return sizes, source, counts


def layered(packs_per_shard: Integers, costs: NDArray[Any], bits: np.random.Philox) -> Integers:
    """Order the packs of all shards by layers of similar cost, which are permuted at random.

    A layer is one pack of each shard, at neighbouring positions of the epoch.

    Args:
        packs_per_shard: int64 of shape (C,). The first shards may have one pack more.
        costs: The cost of each pack, shard after shard.
        bits: Random bits of the order of layers.

    Returns:
        The packs in their new order, shard after shard.
    """
    # Packs are ranked by their cost in each shard. Layer j takes the packs of rank order[j], plus a
    # shift that differs between groups of shards, so that groups of neighbouring positions differ.
    num_shards = len(packs_per_shard)
    num_layers = int(packs_per_shard[-1])
    alike = max(d for d in range(1, min(_MAX_ALIKE, num_shards) + 1) if num_shards % d == 0)
    zero = np.zeros(1, np.int64)
    order = permuted(np.array([max(1, num_layers)]), bits).grid(0, num_layers, zero, zero)
    arranged = np.empty(len(costs), np.int64)
    for shard, (start, stop) in enumerate(pairwise(bounds_of(packs_per_shard).tolist())):
        by_cost = start + np.argsort(-costs[start:stop], kind="stable")
        shift = int(shard // alike * _GOLDEN_RATIO % 1 * num_layers)
        arranged[start : start + num_layers] = by_cost[(order + shift) % max(1, num_layers)]
        arranged[start + num_layers : stop] = by_cost[num_layers:]
    return arranged


class PackedPieces(NamedTuple):
    """Pieces of documents, pack after pack."""

    packs: Packs
    """The document of each piece, the pieces of each pack, and the packs of each group."""
    starts: NDArray[Any]
    """The first token of each piece in its document, of shape (pieces,)."""
    lengths: NDArray[Any]
    """The length of each piece, of shape (pieces,)."""


def concatenate_and_cut(
    lengths: NDArray[Any],
    order: NDArray[Any],
    documents_per_group: Integers,
    packs_per_group: Integers,
    length: int,
) -> PackedPieces:
    """Concatenate the documents of each group, and cut them at multiples of a length.

    Documents of 5 3 7 tokens, in 2 packs of 8 tokens: 5 3 | 7. In 3 packs, the last packs are
    shorter: 5 3 | 4 | 3.

    Args:
        lengths: The length of each document, group after group.
        order: The documents of each group in their order.
        documents_per_group: int64 of shape (groups,).
        packs_per_group: Packs to make, at most the tokens of a group: int64 of shape (groups,).
        length: Tokens of a pack.
    """
    ordered = lengths[order].astype(np.int64)
    tokens_per_group = group_sums(ordered, documents_per_group)
    # The start of each pack in its group. The last packs share the rest.
    pack_in_group = index_in_group(packs_per_group)
    tokens = np.repeat(tokens_per_group, packs_per_group)
    num_packs = np.repeat(packs_per_group, packs_per_group)
    min_tokens = np.maximum(1, np.minimum(length // 2, tokens // np.maximum(1, num_packs)))
    starts = np.minimum(pack_in_group * length, tokens - (num_packs - pack_in_group) * min_tokens)
    starts += np.repeat(starts_of(tokens_per_group), packs_per_group)
    documents, piece_starts, piece_lengths, pieces_per_pack = cut_line(ordered, starts)
    packs = Packs(order[documents], pieces_per_pack, packs_per_group)
    return PackedPieces(packs, piece_starts, piece_lengths)


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
    documents = np.searchsorted(stops, cuts, side="right")
    piece_lengths = np.diff(cuts, append=stops[-1:])
    pieces_per_section = np.diff(np.searchsorted(cuts, starts), append=len(cuts))
    return documents, cuts - document_starts[documents], piece_lengths, pieces_per_section
