"""Rows of similar length come together, so that little of a padded batch is padding."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.errors import call_text, check_integer
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.permutations import permutation, random_bits
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.shards import Integers


class Bucketed(SamplerFactory):
    """Puts rows of similar length into one step, for ``MemmapDataModule(sampler=...)``.

    In each epoch all rows are shuffled, and come exactly once. The rows of a window, that is
    ``num_buckets * bucket_size`` consecutive positions, are then sorted by length and divided into
    buckets, which come in random order. Within a bucket, rows ascend in length.

    Args:
        lengths: The name of a field whose rows differ in length; where several dimensions differ, a
            length is their product. Or one length for each row of the dataset, in its order: a
            tensor, an array or a sequence of integers, not negative.
        bucket_size: Rows of a bucket: those of a step over all devices, ``batch_size`` times the
            number of devices, or a multiple of it. With another number, some steps have rows of two
            buckets, and more padding.
        num_buckets: Buckets of a window. With more of them, a bucket has rows of more equal length;
            with one, the rows of a bucket are all rows that are near each other.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is below 1.
    """

    def __init__(self, lengths: Any, bucket_size: int, num_buckets: int = 100) -> None:
        self.lengths = lengths
        self.bucket_size = check_integer("bucket_size", bucket_size, 1)
        self.num_buckets = check_integer("num_buckets", num_buckets, 1)

    @override
    def __repr__(self) -> str:
        counts = {"bucket_size": self.bucket_size, "num_buckets": self.num_buckets}
        return call_text("Bucketed", lengths=self.lengths, **counts)

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "BucketedSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            TypeError: The lengths are not integers.
            ValueError: There is not one length for each row, one is negative, or the rows of the
                field do not differ in length.
        """
        found = self._lengths(fields)[pool.dataset_rows(*pool.all_offsets())]
        lengths = Numbers(found.astype(np.min_scalar_type(int(found.max(initial=0)))))
        counts = {"bucket_size": self.bucket_size, "num_buckets": self.num_buckets}
        return BucketedSampler(pool, seed, lengths=lengths, **counts)

    def _lengths(self, fields: Fields) -> Integers:
        """The length of each row of the dataset."""
        if isinstance(self.lengths, str):
            return fields.lengths(self.lengths)
        given = np.asarray(self.lengths)
        if given.shape != (fields.num_rows,):
            raise ValueError(
                f"Bucketed: lengths of shape {given.shape}, and the dataset has {fields.num_rows}"
                " rows: give one for each, or the name of a field"
            )
        if not np.issubdtype(given.dtype, np.integer):
            raise TypeError(f"Bucketed: lengths of {given.dtype}: give integers")
        wrong = np.flatnonzero(given < 0)
        if len(wrong):
            raise ValueError(
                f"Bucketed: row {wrong[0]} has the length {given[wrong[0]]}: lengths are 0 or more"
            )
        return given.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class BucketedSampler(Sampler):
    """A shuffled epoch whose rows are sorted by length within windows, bucket by bucket.

    A bucket is ``bucket_size`` consecutive positions, and a window ``num_buckets`` buckets. The
    buckets of a window are ranked at random. Each shard, by itself, has its rows of the window
    sorted by length, and its positions by the ranks of their buckets; the first row is at the first
    position, and so on. Shards are alike in their lengths, since their rows are shuffled: so rows
    of a bucket are of similar length whichever shard they are of.

    Args:
        pool: The rows of each shard.
        lengths: The length of each row, shard after shard, unsigned integers of shape (rows,).
        bucket_size: Rows of a bucket.
        num_buckets: Buckets of a window.
        seed: As for `Sampler`.
        shuffle_window: As there.

    Raises:
        ValueError: An argument is out of range.
    """

    lengths: Numbers
    bucket_size: int
    num_buckets: int

    @override
    def arrange(self, epoch: int, shard: int, offsets: Integers) -> Integers:
        positions = np.arange(len(offsets), dtype=np.int64) * self.num_shards + shard
        buckets = positions // self.bucket_size
        windows = buckets // self.num_buckets
        count = -(-self.num_positions // self.bucket_size)
        with self._tables.lock:
            ranks = self._tables.get(
                "ranks", epoch, lambda: permutation(count, random_bits(self.seed, epoch, 1))
            )
        lengths = self.lengths.array[self.pool.starts[shard] + offsets]
        found = np.empty_like(offsets)
        found[np.lexsort((ranks[buckets], windows))] = offsets[np.lexsort((lengths, windows))]
        return found
