"""Packed sequences: a position of the epoch is a pack of several documents.

The packs of an epoch are planned for all shards before its first step, from the lengths of the
documents. Documents are rows. They are dealt to shards by length, so that each shard fills equally
many packs. 7 documents of 9 8 6 5 4 3 1 tokens in 2 shards, in packs of 10 tokens::

    shard 0     9     5 4     1      dealt to and fro: 0 1 1 0 0 1 1, or 1 0 0 1 1 0 0
    shard 1       8 6     3
    packs       9 1 | 5 4    and   8 | 6 3
    positions   9 1 | 8 | 5 4 | 6 3      position p is a pack of shard p % 2

With ``split=True``, the documents of a shard are concatenated and cut at multiples of the length.
In blocks (``shuffle_block``), a pack has documents of one block. In both cases, shards are ranges
of the files with equally many tokens; see documents.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from lightning_memmap.errors import ReprAsCall, check_integer
from lightning_memmap.integers import (
    Integers,
    bounds_of,
    ceil_div,
    distinct,
    elements_of,
    group_of,
    group_sums,
    index_in_group,
    num_strided,
    ranges,
    starts_of,
)
from lightning_memmap.sampling.documents import (
    Documents,
    PackOptions,
    deal,
    divide,
    divide_sets,
    weights_of,
)
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.mixture import Mixture, check_sets
from lightning_memmap.sampling.packing import (
    GROUP_BITS,
    LAYER_BITS,
    MAX_ATTEMPTS,
    BlockDrawing,
    Cut,
    Drawing,
    Packer,
    concatenate_and_cut,
    layered,
)
from lightning_memmap.sampling.permutations import bit_generator
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import JoinedRows, WindowedRows, shard_rows
from lightning_memmap.sampling.sampler import Sampler, cached_per_epoch, derive_seed

_OVERFLOWS = ("error", "split", "truncate", "drop")
#: The number of documents for which a batch has room is a multiple of this.
_DOCUMENTS_MULTIPLE = 8
_NO_LIMIT = 2**40
#: Fraction of padding from which a user is told that larger blocks have less.
_MUCH_PADDING = 0.05
#: The packs of a mixture are this many times those that its first epoch needs.
_MIXTURE_MARGIN = 1.02
#: Derives the seed by which documents of training sets are drawn.
_DRAWING_SEED = 1


@dataclass(eq=False, repr=False)
class Packed(ReprAsCall, SamplerFactory):
    """Packs several rows into each sequence, for ``MemmapDataModule(sampler=...)``.

    A position of the epoch is a pack, and ``batch_size`` counts packs. Each epoch has other packs,
    and holds each row exactly once. The packs of an epoch are a function of the seed, the epoch,
    the lengths, ``num_shards`` and ``shuffle_block``, whatever the number of devices. A batch has
    the packed fields, of shape (B, length), and a `lightning_memmap.loading.Packing` under the key
    ``packing``.

    Fields whose rows have the same lengths as the named field are packed in the same way. Samples
    must be dicts.

    With ``shuffle_block``, which ``residency="stream"`` needs, a pack has documents of one block:
    about ``shuffle_block`` consecutive rows of each shard. All blocks have equally many packs, so
    that a block may leave a pack or two of each shard unused.

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
            ``length``, as for pre-training. Only the last pack of a shard needs padding.
        shares: The share of each training set by its name in ``train_dataset``, as for `Mixture`.
            An epoch then has as many tokens as all sets together, and the rows of a set are read
            again and again, in each shard about equally often. If a set has only a few rows in
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
            self.training_sets = tuple(self.shares)
        if self.shares_of not in ("tokens", "documents"):
            raise ValueError(f"Packed: shares_of={self.shares_of!r}: choose tokens or documents")
        if self.shares is None and self.shares_of != "tokens":
            raise ValueError(
                f"Packed: shares_of={self.shares_of!r} has no effect without shares: pass the share"
                " of each training set, or omit shares_of"
            )
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
        if self.split:
            return self._make_from_line(pool, seed, fields, None)
        lengths = self._lengths(pool, fields)
        kept = self._check_lengths(lengths, pool)
        set_of_row = None if self.shares is None else self._set_of_row(pool)
        pool, lengths, set_of_row = deal(pool, lengths, kept, set_of_row)
        documents = Documents.of(lengths, pool.sizes, self._options)
        if set_of_row is not None:
            documents = self._plan_draws(documents, set_of_row, _set_names(pool))
        return _plan(pool, seed, self._options, documents)

    @override
    def make_in_blocks(self, pool: Pool, seed: int, fields: Fields, block: int) -> "PackedSampler":
        """Make the sampler in blocks of ``block`` consecutive rows of each shard, on average.

        Raises:
            ValueError: As for `make`; or a block has fewer rows than packs.
        """
        return self._make_from_line(pool, seed, fields, block)

    def _make_from_line(
        self, pool: Pool, seed: int, fields: Fields, block: int | None
    ) -> "PackedSampler":
        """Make the sampler from the documents in the order of the files."""
        pool = Pool.of(pool.rows, pool.num_shards, is_striped=False)
        lengths = self._lengths(pool, fields)
        kept = self._check_lengths(lengths, pool)
        options = self._options
        set_of_row = None if self.shares is None else self._set_of_row(pool)
        if kept is not None:
            lengths = lengths[kept]
            set_of_row = None if set_of_row is None else set_of_row[kept]
        if not lengths[:, 0].any():
            raise _no_token_error(self.field)
        line = Documents.of(lengths, np.array([len(lengths)]), options)
        weights = weights_of(line.lengths.array, options)
        if set_of_row is None:
            divide_by = partial(divide, pool, kept, line, options)
            return _plan_from_line(
                pool, seed, options, divide_by, int(weights.sum()), len(lengths), block
            )
        names = _set_names(pool)
        num_drawn, rows_per_set = self._num_drawn(lengths, set_of_row, names)
        readings = num_drawn / np.maximum(1, rows_per_set)
        divided = divide_sets(pool, kept, line, set_of_row, readings, options)
        self._check_sets(names, readings, divided[1].documents_per_set)
        total = math.ceil((weights * readings[set_of_row]).sum())
        divide_by = partial(_repeat_random_streams, *divided)
        return _plan_from_line(pool, seed, options, divide_by, total, len(lengths), block)

    def _set_of_row(self, pool: Pool) -> Integers:
        """Return the index of the training set of each row of a pool."""
        assert self.shares is not None
        return group_of(check_sets(pool.rows, self.shares, self).rows_per_set)

    def _plan_draws(
        self, documents: "Documents", set_of_row: Integers, names: Sequence[str]
    ) -> "Documents":
        """Decide how many documents of each shard and training set an epoch draws."""
        num_drawn, _ = self._num_drawn(documents.lengths.array, set_of_row, names)
        num_sets = len(names)
        num_shards = len(documents.documents_per_group)
        bounds = bounds_of(np.maximum(num_drawn > 0, np.rint(num_drawn)).astype(np.int64))
        # The documents of an epoch, set after set, are dealt to the shards in turn.
        shards = np.arange(num_shards)[:, None]
        drawn_per_set = np.diff(num_strided(bounds, shards, num_shards), axis=1)
        index = group_of(documents.documents_per_group) * num_sets + set_of_row
        counts = np.bincount(index, minlength=num_shards * num_sets).reshape(num_shards, num_sets)
        self._check_sets(names, drawn_per_set, counts)
        return replace(documents, documents_per_set=counts, drawn_per_set=drawn_per_set)

    def _num_drawn(
        self, lengths: NDArray[Any], set_of_row: Integers, names: Sequence[str]
    ) -> tuple[NDArray[np.float64], Integers]:
        """Return how many documents of each set an epoch draws, and how many there are."""
        assert self.shares is not None
        num_sets = len(names)
        tokens = lengths[:, 0].astype(np.float64)
        shares = np.array([self.shares[name] for name in names])
        shares /= shares.sum()
        rows_per_set = np.bincount(set_of_row, minlength=num_sets)
        if len(empty := np.flatnonzero((shares > 0) & (rows_per_set == 0))):
            raise ValueError(f"{self!r}: the training set {names[empty[0]]!r} has no row to pack")
        if self.shares_of == "documents":
            return shares * len(tokens), rows_per_set
        means = np.bincount(set_of_row, tokens, num_sets) / np.maximum(1, rows_per_set)
        return shares * tokens.sum() / np.maximum(1, means), rows_per_set

    def _check_sets(
        self, names: Sequence[str], drawn: NDArray[Any], counts: Integers | None
    ) -> None:
        """Check that each shard has documents of each set that is drawn from."""
        assert counts is not None
        lacking = np.argwhere((drawn > 0) & (counts == 0))
        if len(lacking):
            raise ValueError(
                f"num_shards={len(counts)}: the training set {names[lacking[0][1]]!r} has no row in"
                " one of the shards: set a smaller num_shards"
            )

    def make_evaluated(
        self, pool: Pool, fields: Fields, is_predicted: bool, block: int | None = None
    ) -> "PackedSampler":
        """Make the order of a split that is evaluated: the same packs in every epoch.

        A split to predict on has a single document in each pack, in dataset order.
        """
        packed = self
        if not isinstance(pool.rows, JoinedRows):  # Evaluated sets are not mixed.
            packed = replace(self, shares=None, shares_of="tokens")
        if is_predicted:
            in_order = packed.make_in_order(pool, fields)
            return in_order if block is None else in_order.in_blocks(block)
        if block is None:
            return replace(packed.make(pool, 0, fields), is_fixed=True)
        return replace(packed.make_in_blocks(pool, 0, fields, block), is_fixed=True)

    def make_in_order(self, pool: Pool, fields: Fields) -> "UnpackedSampler":
        """Make an order with a single document in each pack, in dataset order.

        Raises:
            ValueError: A row is longer than ``length``, except under ``overflow="truncate"``.
        """
        pool = Pool.of(pool.rows, pool.num_shards, True)
        lengths = self._lengths(pool, fields)
        if self.overflow != "truncate":
            replace(self, split=False, overflow="error")._check_lengths(lengths, pool)
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
        limits = tuple(self.limits.items())
        return PackOptions(
            limits, self.overflow, self.max_documents, self.split, shares, self.shares_of
        )

    def _lengths(self, pool: Pool, fields: Fields) -> NDArray[Any]:
        """Return the lengths of the rows of a pool by its index, of shape (rows, fields)."""
        if isinstance(pool.rows, WindowedRows):
            raise ValueError(f"{self!r}: the rows are windows, which have one length: omit sampler")
        rows = pool.dataset_rows(pool.indices())
        columns = [fields.lengths(name) for name in self.limits]
        longest = max(int(column.max(initial=0)) for column in columns)
        dtype = np.int32 if longest < 2**31 else np.int64
        lengths = np.empty((len(rows), len(columns)), dtype)
        for index, column in enumerate(columns):
            lengths[:, index] = column[rows]
        return lengths

    def _check_lengths(self, lengths: NDArray[Any], pool: Pool) -> Integers | None:
        """Check the lengths of rows, and return the indices of the rows to keep, None for all."""
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
        # Rows of several fields, or of mixed sets, can't all be cut.
        choices = "'truncate' or 'drop'" if self.shares else "'split', 'truncate' or 'drop'"
        choices = "'drop'" if len(self.limits) > 1 else choices
        raise ValueError(
            f"{self!r}: row {row} has {lengths[index, which]} items of field {name!r}, and"
            f" {np.count_nonzero(is_long.any(axis=1))} of {len(lengths)} rows exceed length:"
            f" increase length, or use overflow={choices}"
        )


def _set_names(pool: Pool) -> tuple[str, ...]:
    assert isinstance(pool.rows, JoinedRows)
    return pool.rows.set_names


def _no_token_error(field: str) -> ValueError:
    return ValueError(f"Packed: field {field!r} has no token in any of the rows")


def _plan(pool: Pool, seed: int, options: PackOptions, documents: Documents) -> "PackedSampler":
    """Make an order whose shards have as many packs as the first epoch needs."""
    draft = PackedSampler(
        pool,
        seed,
        options=options,
        documents=documents,
        num_packs=1,
        max_documents=options.max_documents or _NO_LIMIT,
    )
    needs = draft.needs()
    most = needs.packs_per_group.max()
    if not most:
        raise _no_token_error(options.field)
    if options.overflow == "split" and (documents.documents_per_group < most).any():
        documents = documents.halve_longest(np.full_like(needs.packs_per_group, most))
        needs = replace(draft, documents=documents).needs()
    # Shards that need the most packs come first, since the first have one pack more than others.
    by_need = np.lexsort(
        (-documents.tokens_per_group, -documents.drawn_per_group, -needs.packs_per_group)
    )
    pool, documents = documents.reordered(pool, by_need)
    num_packs = _count_packs(needs.packs_per_group, documents.drawn_per_group, options)
    sampler = replace(draft, pool=pool, documents=documents, num_packs=num_packs)
    where = f"num_shards={pool.num_shards}: a shard of the {pool.num_rows} rows"
    _check_available(documents.drawn_per_group, sampler.positions_per_shard, options, where)
    return _with_room(sampler, needs.max_documents)


def _count_packs(packs_per_shard: Integers, drawn_per_shard: Integers, options: PackOptions) -> int:
    """Count the packs of all shards, which differ by at most one pack."""
    most = int(packs_per_shard.max())
    num_longest = int(np.count_nonzero(packs_per_shard == most))
    if options.shares is not None:
        # Other epochs draw other documents, which may have more tokens.
        with_margin = math.ceil(_MIXTURE_MARGIN * most) + 1
        most = max(most, min(with_margin, int(drawn_per_shard.min())))
        num_longest = len(packs_per_shard)
    return (most - 1) * len(packs_per_shard) + num_longest


def _with_room(sampler: "PackedSampler", max_documents: int) -> "PackedSampler":
    """Decide for how many documents batches have room, from the largest pack of epoch 0."""
    options = sampler.options
    if options.split:
        max_documents = int(sampler.packs(0).documents_per_pack.max())
    if options.max_documents is None:
        with_margin = max_documents + max_documents // 4
        room = ceil_div(with_margin, _DOCUMENTS_MULTIPLE) * _DOCUMENTS_MULTIPLE
        return replace(sampler, max_documents=room)
    return sampler


def _repeat_random_streams(
    pool: Pool, documents: Documents, packs_per_block: Integers
) -> tuple[Pool, Documents]:
    """Return documents that don't depend on the packs of blocks, with a stream for each group."""
    return pool, replace(documents, random_streams=np.arange(packs_per_block.size))


def _plan_from_line(
    pool: Pool,
    seed: int,
    options: PackOptions,
    divide_by: Callable[[Integers], tuple[Pool, Documents]],
    num_tokens: int,
    num_rows: int,
    block: int | None,
) -> "PackedSampler":
    """Find the fewest packs, equally many in each block, in which the documents of blocks fit.

    Args:
        pool: The pool of all rows.
        seed: Seed of the order.
        options: The options of the packing.
        divide_by: Returns a pool and its documents for the packs of each shard and block.
        num_tokens: Tokens of the packs that the documents of an epoch fill.
        num_rows: Rows of an epoch.
        block: Rows of a shard in a block; None for a single block.
    """
    num_shards = pool.num_shards
    num_packs = max(min(num_shards, num_rows), ceil_div(num_tokens, options.length))
    num_blocks = 1
    if block is not None:
        num_blocks = max(1, min(ceil_div(num_rows, num_shards * block), num_packs // num_shards))
    while True:
        # Packs of a shard in a block.
        size = ceil_div(num_packs, num_shards * num_blocks)
        shuffle_block = None if block is None else size
        packs_per_block = _packs_per_block(num_packs, num_shards, shuffle_block)
        targets = packs_per_block.ravel()
        divided, documents = divide_by(packs_per_block)
        if options.overflow == "split":
            documents = documents.halve_longest(targets)
        sampler = PackedSampler(
            divided,
            seed,
            options=options,
            documents=documents,
            num_packs=num_packs,
            max_documents=options.max_documents or _NO_LIMIT,
            shuffle_block=shuffle_block,
        )
        needs = sampler.needs()
        if block is None:
            _check_available(needs.available, targets, options, f"num_shards={num_shards}: a shard")
        else:
            where = f"shuffle_block={block}, set or computed for streaming: a block of one shard"
            remedy = "set a larger shuffle_block, a smaller num_shards, or split=True"
            _check_available(needs.available, targets, options, where, remedy)
        # Other epochs draw other documents, which may need more packs.
        margin = 1 if options.shares is None else _MIXTURE_MARGIN
        excess = int((np.ceil(margin * needs.packs_per_group) - targets).max())
        if excess <= 0:
            return _with_room(sampler, needs.max_documents)
        more = num_shards * num_blocks * (size + excess // 2)
        num_packs = more if more > num_packs else num_shards * num_blocks * (size + 1)


def _packs_per_block(num_packs: int, num_shards: int, shuffle_block: int | None) -> Integers:
    packs_per_shard = shard_rows(num_packs, num_shards)[:, None]
    most = int(packs_per_shard.max())
    size = shuffle_block or most
    packs: Integers = np.clip(packs_per_shard - np.arange(0, most, size), 0, size)
    return packs


def _check_available(
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
        return _packs_per_block(self.num_packs, self.num_shards, self.shuffle_block)

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
        _check_available(available, order.positions_per_shard, self.options, where)
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

    def _cut(self, epoch: int) -> Cut:
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
    def row_numbers(self, epoch: int, positions: range) -> Integers:
        packed = self.documents_at(epoch, np.asarray(positions, np.int64))
        packs = group_of(packed.documents_per_pack)
        columns = index_in_group(packed.documents_per_pack)
        row_numbers = np.full((len(positions), self.max_documents), -1, np.int64)
        row_numbers[packs, columns] = self.pool.dataset_rows(packed.pool_index)
        return row_numbers

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
