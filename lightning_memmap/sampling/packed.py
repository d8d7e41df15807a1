"""Packed sequences: a position of the epoch is a pack of several documents.

The packs of an epoch are planned for all shards before its first step, from the lengths of the
documents. Documents are rows. They are dealt to shards by length, so that each shard fills equally
many packs. 7 documents of 9 8 6 5 4 3 1 tokens in 2 shards, in packs of 10 tokens::

    shard 0     9     5 4     1      dealt to and fro: 0 1 1 0 0 1 1, or 1 0 0 1 1 0 0
    shard 1       8 6     3
    packs       9 1 | 5 4    and   8 | 6 3
    positions   9 1 | 8 | 5 4 | 6 3      position p is a pack of shard p % 2

With ``split=True``, the documents of a shard are concatenated and cut at multiples of the length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.errors import ReprAsCall, check_integer
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.mixture import Mixture
from lightning_memmap.sampling.packing import (
    MAX_ATTEMPTS,
    Cut,
    Drawing,
    Packer,
    concatenate_and_cut,
    layered,
    totals,
)
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import (
    Integers,
    JoinedRows,
    Shards,
    WindowedRows,
    ranges,
    starts_of,
)
from lightning_memmap.sampling.sampler import Sampler, cached_per_epoch, derive_seed

_OVERFLOWS = ("error", "split", "truncate", "drop")
#: The number of documents for which a batch has room is a multiple of this.
_DOCUMENTS_MULTIPLE = 8
_NO_LIMIT = 2**40
#: The packs of a mixture are this many times those that its first epoch needs.
_MIXTURE_MARGIN = 1.02
#: Derives the seed by which documents of training sets are drawn.
_DRAWING_SEED = 1


@dataclass(eq=False, repr=False)
class Packed(ReprAsCall, SamplerFactory):
    """Packs several rows into each sequence, for ``MemmapDataModule(sampler=...)``.

    A position of the epoch is a pack, and ``batch_size`` counts packs. Each epoch has other packs,
    and holds each row exactly once. The packs of an epoch are a function of the seed, the epoch and
    the lengths, whatever the number of devices. A batch has the packed fields, of shape
    (B, length), and a `lightning_memmap.loading.Packing` under the key ``packing``.

    Fields whose rows have the same lengths as the named field are packed in the same way. Samples
    must be dicts.

    Args:
        field: The name of a field of variable length, such as ``"tokens"``.
        length: Tokens of a pack. Or the most of each of several fields, such as
            ``{"tokens": 8192, "patches": 16384}``, which must include ``field``.
        overflow: How to handle rows longer than ``length``: ``"error"`` raises; ``"split"`` cuts
            them into sequences of ``length`` and a rest; ``"truncate"`` cuts off the rest;
            ``"drop"`` omits the rows. With several fields, ``"error"`` or ``"drop"``.
        max_documents: The most documents of a pack. By default, packs have as many as fit, and
            batches have room for a quarter more than the most that a pack of the first epoch has.
        split: Concatenate the rows of a shard in a random order, and cut them at multiples of
            ``length``, as for pre-training. Only a shard's last packs need padding.
        shares: The share of each training set by its name in ``train_dataset``, as for `Mixture`.
            An epoch then has as many tokens as all sets together, and the rows of a set are read
            again and again, in each shard equally often within 1. If a set has only a few rows in
            each shard, some come up to twice as often as others: choose a smaller ``num_shards``.
        shares_of: Whether these are shares of ``"tokens"`` or of ``"documents"``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A number is below 1, or two arguments exclude each other.
    """

    field: str
    length: int | dict[str, int]
    overflow: str = "error"
    max_documents: int | None = None
    split: bool = False
    shares: dict[str, float] | None = None
    shares_of: str = "tokens"

    def __post_init__(self) -> None:
        if self.shares is not None:
            # It checks the shares.
            self.shares = Mixture(self.shares).shares
            self.stores = tuple(self.shares)
        if self.shares_of not in ("tokens", "documents"):
            raise ValueError(f"Packed: shares_of={self.shares_of!r}: choose tokens or documents")
        if not isinstance(self.field, str):
            raise TypeError(f"Packed: field={self.field!r}: pass the name of a field")
        if isinstance(self.length, Mapping):
            self.length = {
                name: check_integer(f"Packed: length[{name!r}]", value, 1)
                for name, value in self.length.items()
            }
            if self.field not in self.length:
                raise ValueError(
                    f"Packed: length={self.length}: set a length for field {self.field!r} too"
                )
        else:
            self.length = check_integer("Packed: length", self.length, 1)
        if self.overflow not in _OVERFLOWS:
            raise ValueError(
                f"Packed: overflow={self.overflow!r}: choose one of {', '.join(_OVERFLOWS)}"
            )
        if not isinstance(self.split, bool):
            raise TypeError(f"Packed: split={self.split!r}: pass True or False")
        if self.max_documents is not None:
            self.max_documents = check_integer("Packed: max_documents", self.max_documents, 1)
        if self.split and self.overflow != "error":
            raise ValueError(
                f"Packed: split=True with overflow={self.overflow!r}: rows of any length are"
                " concatenated and cut, so omit overflow"
            )
        if self.split or self.overflow in ("split", "truncate"):
            self._check_cut("split=True" if self.split else f"overflow={self.overflow!r}")

    def _check_cut(self, option: str) -> None:
        """Check that the other arguments suit rows that an option cuts."""
        for is_set, reason in (
            (len(self.limits) > 1, f"lengths of {', '.join(self.limits)}: they can't be cut alike"),
            (
                self.shares is not None and self.overflow != "truncate",
                "shares: shares are of whole documents",
            ),
        ):
            if is_set:
                raise ValueError(
                    f"Packed: {option} cuts rows, with {reason}: pack whole rows, by"
                    " overflow='error' or 'drop' without split"
                )

    @property
    def limits(self) -> dict[str, int]:
        """The most tokens of a pack, by field, ``field`` first."""
        if not isinstance(self.length, dict):
            return {self.field: self.length}
        return {self.field: self.length[self.field], **self.length}

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "PackedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: A row is longer than ``length`` under ``overflow="error"``, a pack would
                have more documents than ``max_documents`` under ``split=True``, all rows of a field
                have one length, or the rows are windows.
        """
        lengths = self._lengths(pool, fields)
        kept = self._kept(lengths, pool)
        sets = None if self.shares is None else self._sets(pool)
        pool, lengths, sets = _deal(pool, lengths, kept, sets)
        documents = Documents.of(lengths, pool.sizes, self._options)
        if sets is not None:
            assert isinstance(pool.rows, JoinedRows)
            documents = self._draw(documents, sets, pool.rows.stores)
        return _plan(pool, seed, self._options, documents)

    def _sets(self, pool: Pool) -> Integers:
        """Return the training set of each row of a pool, by its index."""
        rows = pool.rows
        assert self.shares is not None
        if not isinstance(rows, JoinedRows) or {*rows.stores} != {*self.shares}:
            names = rows.stores if isinstance(rows, JoinedRows) else "one set without a name"
            raise ValueError(f"{self!r}: the training sets are {names}; set a share for each")
        return np.repeat(np.arange(len(rows.stores)), rows.member_sizes)

    def _draw(self, documents: "Documents", sets: Integers, names: Sequence[str]) -> "Documents":
        """Decide how many documents of each set and shard an epoch has."""
        assert self.shares is not None
        num_sets = len(self.shares)
        num_shards = len(documents.counts)
        lengths = documents.lengths.array[:, 0].astype(np.float64)
        shares = np.array([self.shares[name] for name in names])
        shares /= shares.sum()
        set_counts = np.bincount(sets, minlength=num_sets)
        if empty := [n for n, s, c in zip(names, shares, set_counts, strict=True) if s and not c]:
            raise ValueError(f"{self!r}: the training set {empty[0]!r} has no row to pack")
        if self.shares_of == "tokens":
            means = np.bincount(sets, lengths, num_sets) / np.maximum(1, set_counts)
            num_drawn = shares * lengths.sum() / np.maximum(1, means)
        else:
            num_drawn = shares * len(lengths)
        stops = np.cumsum(np.maximum(shares > 0, np.rint(num_drawn))).astype(np.int64)
        # The documents of an epoch, set after set, are dealt to the shards in turn.
        shards = np.arange(num_shards)[:, None]
        before = -(-(np.append(0, stops) - shards) // num_shards)
        drawn = np.diff(before, axis=1)
        home = np.repeat(np.arange(num_shards), documents.counts)
        counts = np.bincount(home * num_sets + sets, minlength=num_shards * num_sets)
        counts = counts.reshape(num_shards, num_sets)
        if ((drawn > 0) & (counts == 0)).any():
            name = names[int(np.argwhere((drawn > 0) & (counts == 0))[0][1])]
            raise ValueError(
                f"num_shards={num_shards}: the training set {name!r} has fewer rows than shards:"
                " set a smaller num_shards"
            )
        return replace(documents, set_counts=counts, drawn=drawn)

    def make_fixed(
        self, split: str, pool: Pool, fields: Fields, block: int | None = None
    ) -> "PackedSampler":
        """Make the order of a split that is evaluated: the same packs in every epoch.

        A split to predict on has a single document in each pack, in dataset order.
        """
        # Evaluated sets are not mixed.
        shares = self.shares if isinstance(pool.rows, JoinedRows) else None
        alone = replace(self, shares=shares)
        if split == "predict":
            sampler: PackedSampler = alone.make_in_order(pool, fields)
        else:
            sampler = replace(alone.make(pool, 0, fields), is_fixed=True)
        return sampler if block is None else sampler.in_blocks(block)

    def make_in_order(self, pool: Pool, fields: Fields) -> "UnpackedSampler":
        """Make an order with a single document in each pack, in dataset order.

        Raises:
            ValueError: A row is longer than ``length``, except under ``overflow="truncate"``.
        """
        pool = Pool.of(pool.rows, pool.num_shards, True)
        lengths = self._lengths(pool, fields)
        if self.overflow != "truncate":
            replace(self, split=False, overflow="error")._kept(lengths, pool)
        documents = Documents.of(lengths, pool.sizes, self._options)
        return UnpackedSampler(
            pool,
            options=self._options,
            documents=documents,
            num_packs=pool.num_rows,
            max_documents=1,
        )

    @property
    def _options(self) -> "PackOptions":
        shares = None if self.shares is None else tuple(self.shares.items())
        return PackOptions(
            tuple(self.limits.items()),
            self.overflow,
            self.max_documents,
            self.split,
            shares,
            self.shares_of,
        )

    def _lengths(self, pool: Pool, fields: Fields) -> NDArray[Any]:
        """Return the lengths of the rows of a pool by its index, of shape (rows, fields)."""
        if isinstance(pool.rows, WindowedRows):
            raise ValueError(f"{self!r}: the rows are windows, which have one length: omit sampler")
        rows = pool.dataset_rows(pool.index())
        columns = [fields.lengths(name) for name in self.limits]
        longest = max(int(column.max(initial=0)) for column in columns)
        dtype = np.int32 if longest < 2**31 else np.int64
        lengths = np.empty((len(rows), len(columns)), dtype)
        for index, column in enumerate(columns):
            lengths[:, index] = column[rows]
        return lengths

    def _kept(self, lengths: NDArray[Any], pool: Pool) -> Integers | None:
        """Return the indices of the rows to keep, or None for all of them."""
        if self.split or self.overflow in ("split", "truncate"):
            return None
        is_long = lengths > self._options.capacity
        if not is_long.any():
            return None
        if self.overflow == "drop":
            kept = np.flatnonzero(~is_long.any(axis=1))
            if not len(kept):
                raise ValueError(f"{self!r}: all rows are longer than length")
            return kept
        index, which = np.argwhere(is_long)[0].tolist()
        name = [*self.limits][which]
        row = int(pool.dataset_rows(np.array([index]))[0])
        raise ValueError(
            f"{self!r}: row {row} has {lengths[index, which]} items of field {name!r}, and"
            f" {np.count_nonzero(is_long.any(axis=1))} of {len(lengths)} rows exceed length:"
            " increase length, or use overflow='split', 'truncate' or 'drop'"
        )


def _deal(
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
    """The documents to pack: rows of a pool, or pieces of long rows.

    Args:
        lengths: The length of each document by field, shard after shard, (documents, fields).
        counts: Documents of each shard, int64 of shape (C,).
        rows: The index in the pool of each document's row, or None if each row is a document.
        starts: The first item of each document in its row, or None for 0.
        streams: A number below C for each shard, by which its random bits are chosen.
        set_counts: Documents of each shard and training set, int64 of shape (C, sets), or None.
        drawn: Documents of each shard and training set in an epoch, or None.
    """

    lengths: Numbers
    counts: Integers
    rows: NDArray[Any] | None
    starts: NDArray[Any] | None
    streams: Integers
    set_counts: Integers | None = None
    drawn: Integers | None = None

    @classmethod
    def of(cls, lengths: NDArray[Any], sizes: Integers, options: "PackOptions") -> "Documents":
        """Make the documents from the lengths of rows, shard after shard."""
        streams = np.arange(len(sizes))
        limit = options.length
        if options.overflow == "truncate":
            lengths = np.minimum(lengths, limit)
        if options.overflow != "split" or not (lengths[:, 0] > limit).any():
            return cls(Numbers(lengths), sizes, None, None, streams)
        num_chunks = np.maximum(1, -(-lengths[:, 0].astype(np.int64) // limit))
        rows = np.repeat(np.arange(len(lengths)), num_chunks)
        starts = ranges(np.zeros_like(num_chunks), num_chunks) * limit
        chunk_lengths = np.minimum(limit, lengths[rows, 0] - starts)[:, None]
        shards = np.repeat(np.arange(len(sizes)), sizes)
        counts = np.bincount(shards, num_chunks, len(sizes)).astype(np.int64)
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
    def shard_starts(self) -> Integers:
        """The first document of each shard, int64 of shape (C,)."""
        return starts_of(self.counts)

    def reordered(self, pool: Pool, shards: Integers) -> "tuple[Pool, Documents]":
        """Renumber the shards: shard ``shards[c]`` becomes shard ``c``."""
        assert isinstance(pool.chosen, np.ndarray)
        index = ranges(pool.starts[shards], pool.sizes[shards])
        reordered = pool.choose(pool.sizes[shards], pool.chosen[index])
        here = ranges(self.shard_starts[shards], self.counts[shards])
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
        """Documents of each shard in an epoch, int64 of shape (C,)."""
        return self.counts if self.drawn is None else self.drawn.sum(axis=1)

    def with_at_least(self, count: int) -> "Documents":
        """Halve the longest documents of shards that have fewer than ``count``."""
        if (self.counts >= count).all() or self.rows is None or self.starts is None:
            return self
        parts: list[tuple[Any, ...]] = []
        counts = self.counts.copy()
        for shard, start in enumerate(self.shard_starts.tolist()):
            here = slice(start, start + int(counts[shard]))
            lengths = self.lengths.array[here, 0]
            rows = self.rows[here]
            starts = self.starts[here]
            while len(lengths) < count and lengths.max(initial=0) > 1:
                is_cut = np.zeros(len(lengths), bool)
                is_cut[np.argsort(-lengths, kind="stable")[: count - len(lengths)]] = True
                is_cut &= lengths > 1
                num_parts = 1 + is_cut
                is_second = ranges(np.zeros_like(num_parts), num_parts) == 1
                halves = np.repeat(lengths // 2, num_parts)
                rows = np.repeat(rows, num_parts)
                starts = np.repeat(starts, num_parts) + np.where(is_second, halves, 0)
                repeated = np.repeat(lengths, num_parts)
                is_first = np.repeat(is_cut, num_parts) & ~is_second
                lengths = np.where(is_second, repeated - halves, repeated)
                lengths = np.where(is_first, halves, lengths)
            counts[shard] = len(lengths)
            parts.append((lengths, rows, starts))
        lengths, rows, starts = map(np.concatenate, zip(*parts, strict=True))
        return Documents(Numbers(lengths[:, None]), counts, rows, starts, self.streams)


def _plan(pool: Pool, seed: int, options: PackOptions, documents: Documents) -> "PackedSampler":
    """Decide how many packs each shard has, from the packs of the first epoch."""
    limit = _NO_LIMIT if options.max_documents is None else options.max_documents
    draft = PackedSampler(
        pool, seed, options=options, documents=documents, num_packs=1, max_documents=limit
    )
    needed, largest = draft.needed_packs()
    if not needed.any():
        raise ValueError(f"Packed: field {options.field!r} has no token in any of the rows")
    if options.overflow == "split" and (documents.counts < needed.max()).any():
        documents = documents.with_at_least(int(needed.max()))
        needed, largest = replace(draft, documents=documents).needed_packs()
    # Shards that need the most packs come first, since the first have one pack more than others.
    tokens = totals(documents.lengths.array[:, 0], documents.counts)
    order = np.lexsort((-tokens, -documents.num_available, -needed))
    pool, documents = documents.reordered(pool, order)
    most = int(needed.max())
    if options.shares is not None:
        # Other epochs draw other documents, which may have more tokens.
        enough = min(math.ceil(_MIXTURE_MARGIN * most) + 1, int(documents.num_available.min()))
        most = max(most, enough)
        needed = np.full_like(needed, most)
    num_packs = (most - 1) * pool.num_shards + int(np.count_nonzero(needed == most))
    sampler = replace(draft, pool=pool, documents=documents, num_packs=num_packs)
    available = tokens[order] if options.split else documents.num_available
    if (available < sampler.counts).any():
        raise ValueError(
            f"num_shards={pool.num_shards}: one shard of the {pool.num_rows} rows needs {most}"
            f" packs of {options.length} tokens, and another one has only {available.min()}"
            f" {'tokens' if options.split else 'documents'}: set a smaller num_shards"
        )
    if options.split:
        largest = int(sampler.packs(0).sizes.max())
    if options.max_documents is None:
        room = -(-(largest + largest // 4) // _DOCUMENTS_MULTIPLE) * _DOCUMENTS_MULTIPLE
        return replace(sampler, max_documents=room)
    if largest > options.max_documents:
        raise ValueError(
            f"Packed: max_documents={options.max_documents}: with split=True, a pack of the first"
            f" epoch has {largest} documents: increase max_documents, or decrease length"
        )
    return sampler


class Pieces(NamedTuple):
    """The documents of some packs, pack after pack: rows, or pieces of rows."""

    pool_index: Integers
    """The row of each document, as an index in the pool: int64 of shape (documents,)."""
    starts: Integers | None
    """The first item of each document in its row, int64 of shape (documents,); None for 0."""
    lengths: NDArray[Any]
    """The length of each document by field, integers of shape (documents, fields)."""
    counts: Integers
    """Documents of each pack, int64 of shape (packs,)."""


class EpochPacks(NamedTuple):
    """The packs of an epoch, shard after shard, in the order of their positions."""

    starts: Integers
    """The first document of each pack, and the number of all documents: int64 (packs + 1,)."""
    documents: NDArray[Any]
    """The documents, pack after pack, as an index in `Documents`."""
    piece_starts: NDArray[Any] | None = None
    """With ``split=True``, where each piece starts in its document."""
    piece_lengths: NDArray[Any] | None = None
    """With ``split=True``, the length of each piece."""

    @property
    def sizes(self) -> Integers:
        """Documents of each pack, int64 of shape (packs,)."""
        return np.diff(self.starts)


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

    def needed_packs(self) -> tuple[Integers, int]:
        """Return the packs that each shard needs in epoch 0, int64 of shape (C,), and the most
        documents of a pack, which is 0 with ``split=True``.
        """
        if self.options.split:
            tokens = totals(self.documents.lengths.array[:, 0], self.documents.counts)
            return -(-tokens // self.options.length), 0
        packs = self._packer.pack(0, np.arange(self.num_shards))
        return packs.counts, int(packs.sizes.max(initial=0))

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
            documents.counts,
            self.options.capacity,
            self.max_documents,
            self.seed,
            documents.streams,
            self._drawing,
        )

    @property
    def _drawing(self) -> Drawing | None:
        documents = self.documents
        if documents.set_counts is None or documents.drawn is None:
            return None
        seed = derive_seed(self.seed, _DRAWING_SEED)
        return Drawing(documents.set_counts, documents.drawn, seed, documents.streams)

    def packs(self, epoch: int) -> EpochPacks:
        """Return the packs of an epoch, which are planned for all shards at once."""
        return self._epoch_packs(0 if self.is_fixed else epoch)

    @cached_per_epoch
    def _epoch_packs(self, epoch: int) -> EpochPacks:
        cut = self._cut(epoch) if self.options.split else None
        packs = self._packer.pack_all(epoch, self.counts) if cut is None else cut.packs
        lengths = self.documents.lengths.array[packs.items, 0] if cut is None else cut.lengths
        # The cost of attention.
        costs = totals(lengths.astype(np.int64) ** 2, packs.sizes)
        order = layered(self.counts, costs, self.seed, epoch)
        sizes = packs.sizes[order]
        index = ranges(starts_of(packs.sizes)[order], sizes)
        starts = np.append(0, np.cumsum(sizes))
        if cut is None:
            return EpochPacks(starts, packs.items[index])
        return EpochPacks(starts, packs.items[index], cut.starts[index], cut.lengths[index])

    def _cut(self, epoch: int) -> Cut:
        """Concatenate the documents of all shards in another order in each epoch, and cut them."""
        documents = self.documents
        shards = np.arange(self.num_shards)
        for attempt in range(MAX_ATTEMPTS):
            order, _ = self._packer.permuted(epoch, shards, attempt)
            cut = concatenate_and_cut(
                documents.lengths.array[:, 0],
                order,
                documents.counts,
                self.counts,
                self.options.length,
            )
            largest = int(cut.packs.sizes.max())
            if largest <= self.max_documents:
                return cut
        raise ValueError(
            f"Packed: max_documents={self.max_documents}: with split=True, a pack of epoch {epoch}"
            f" has {largest} documents: increase max_documents, or decrease length"
        )

    def num_targets(self, epoch: int, positions: range) -> NDArray[Any]:
        """Count the tokens of each pack that predict the next one of their document.

        Args:
            epoch: Epoch, counted from 0.
            positions: Positions in ``[0, num_positions)``.

        Returns:
            Integers of shape (len(positions),).
        """
        pieces = self.pieces(epoch, np.asarray(positions, np.int64))
        return totals(np.maximum(0, pieces.lengths[:, 0].astype(np.int64) - 1), pieces.counts)

    @override
    def sums_at(self, values: NDArray[Any], epoch: int, positions: range) -> NDArray[Any]:
        pieces = self.pieces(epoch, np.asarray(positions, np.int64))
        packs = np.repeat(np.arange(len(positions)), pieces.counts)
        return np.bincount(packs, values[pieces.pool_index], len(positions))

    @property
    def unused(self) -> float:
        """The fraction of the packs of the first epoch that is padding."""
        lengths = self.documents.lengths.array[:, 0]
        if self.documents.drawn is not None:
            lengths = lengths[self.packs(0).documents]
        tokens = int(lengths.sum(dtype=np.int64))
        return 1 - tokens / (self.num_positions * self.options.length)

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

    def pieces(self, epoch: int, positions: Integers) -> Pieces:
        """Look up the documents of the packs at these positions.

        Args:
            epoch: Epoch, counted from 0.
            positions: Positions in ``[0, num_positions)`` in any order, int64 of shape (packs,).
        """
        packs = self.packs(epoch)
        rounds, shards = np.divmod(positions, self.num_shards)
        numbers = starts_of(self.counts)[shards] + rounds
        starts = packs.starts[numbers]
        counts = packs.starts[numbers + 1] - starts
        here = ranges(starts, counts)
        documents = packs.documents[here].astype(np.int64)
        lengths = self.documents.lengths.array[documents]
        row_starts: Integers | None = None
        index = documents
        if packs.piece_starts is not None and packs.piece_lengths is not None:
            row_starts = packs.piece_starts[here].astype(np.int64)
            lengths = packs.piece_lengths[here, None]
        elif self.documents.rows is not None and self.documents.starts is not None:
            row_starts = self.documents.starts[documents].astype(np.int64)
            index = self.documents.rows[documents].astype(np.int64)
        return Pieces(index, row_starts, lengths, counts)

    @override
    def row_numbers(self, epoch: int, positions: range) -> Integers:
        pieces = self.pieces(epoch, np.asarray(positions, np.int64))
        numbers = np.full((len(positions), self.max_documents), -1, np.int64)
        pack = np.repeat(np.arange(len(positions)), pieces.counts)
        column = ranges(np.zeros_like(pieces.counts), pieces.counts)
        numbers[pack, column] = self.pool.dataset_rows(pieces.pool_index)
        return numbers

    @override
    def num_rows_at(self, epoch: int, positions: Integers) -> Integers:
        return self.pieces(epoch, positions).counts

    @override
    def dataset_rows(self, epoch: int, positions: range) -> Integers:
        pieces = self.pieces(epoch, np.asarray(positions, np.int64))
        return self.pool.dataset_rows(pieces.pool_index)

    @override
    def grid(
        self, epoch: int, start: int, stop: int, shards: Integers, shard_starts: Integers
    ) -> Integers:
        """Look up the first row of each pack; see `Sampler.grid`."""
        last = np.maximum(0, self.counts[shards] - 1)
        rounds = np.minimum(np.arange(start, stop)[:, None], last)
        positions = (rounds * self.num_shards + shards).ravel()
        pieces = self.pieces(epoch, np.minimum(positions, self.num_packs - 1))
        firsts = pieces.pool_index[starts_of(pieces.counts)]
        shifts = shard_starts - self.pool.starts[shards]
        grid: Integers = firsts + np.tile(shifts, stop - start)
        return grid

    @override
    def in_blocks(self, block: int) -> Self:
        raise ValueError(
            f"shuffle_block={block}, set or computed for residency='stream': packs are planned over"
            " all rows of a shard, and can't be divided into blocks: omit shuffle_block, and use"
            " residency='mmap' or 'host'"
        )


@dataclass(frozen=True, kw_only=True)
class UnpackedSampler(PackedSampler):
    """A single document in each pack, in dataset order."""

    is_sequential: ClassVar[bool] = True

    @override
    def packs(self, epoch: int) -> EpochPacks:
        return self._packs_in_order

    @cached_property
    def _packs_in_order(self) -> EpochPacks:
        documents = np.arange(self.pool.num_rows + 1)
        return EpochPacks(documents, documents[:-1])
