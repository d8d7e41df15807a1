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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import ReprAsCall, check_integer
from lightning_memmap.integers import (
    Integers,
    bounds_of,
    group_of,
    num_strided,
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
from lightning_memmap.sampling.pack_plan import no_token_error, plan_dealt, plan_from_line
from lightning_memmap.sampling.packed_sampler import (
    PackedSampler,
    UnpackedSampler,
)
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import JoinedRows, WindowedRows

_OVERFLOWS = ("error", "split", "truncate", "drop")


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
    def make(self, pool: Pool, seed: int, fields: Fields) -> PackedSampler:
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
        return plan_dealt(pool, seed, self._options, documents)

    @override
    def make_in_blocks(self, pool: Pool, seed: int, fields: Fields, block: int) -> PackedSampler:
        """Make the sampler in blocks of ``block`` consecutive rows of each shard, on average.

        Raises:
            ValueError: As for `make`; or a block has fewer rows than packs.
        """
        return self._make_from_line(pool, seed, fields, block)

    def _make_from_line(
        self, pool: Pool, seed: int, fields: Fields, block: int | None
    ) -> PackedSampler:
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
            raise no_token_error(self.field)
        line = Documents.of(lengths, np.array([len(lengths)]), options)
        weights = weights_of(line.lengths.array, options)
        if set_of_row is None:
            divide_by = partial(divide, pool, kept, line, options)
            return plan_from_line(
                pool, seed, options, divide_by, int(weights.sum()), len(lengths), block
            )
        names = _set_names(pool)
        num_drawn, rows_per_set = self._num_drawn(lengths, set_of_row, names)
        readings = num_drawn / np.maximum(1, rows_per_set)
        divided = divide_sets(pool, kept, line, set_of_row, readings, options)
        self._check_sets(names, readings, divided[1].documents_per_set)
        total = math.ceil((weights * readings[set_of_row]).sum())
        divide_by = partial(_repeat_random_streams, *divided)
        return plan_from_line(pool, seed, options, divide_by, total, len(lengths), block)

    def _set_of_row(self, pool: Pool) -> Integers:
        """Return the index of the training set of each row of a pool."""
        assert self.shares is not None
        return group_of(check_sets(pool.rows, self.shares, self).rows_per_set)

    def _plan_draws(
        self, documents: Documents, set_of_row: Integers, names: Sequence[str]
    ) -> Documents:
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
    ) -> PackedSampler:
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

    def make_in_order(self, pool: Pool, fields: Fields) -> UnpackedSampler:
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
    def _options(self) -> PackOptions:
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


def _repeat_random_streams(
    pool: Pool, documents: Documents, packs_per_block: Integers
) -> tuple[Pool, Documents]:
    """Return documents that don't depend on the packs of blocks, with a stream for each group."""
    return pool, replace(documents, random_streams=np.arange(packs_per_block.size))
