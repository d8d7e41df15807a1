"""How much of padded batches is padding, shuffled and in buckets of similar length.

    python tests/programs/benchmarks/padding.py
    python tests/programs/benchmarks/padding.py --store stores/train --field tokens --batch 64

No value is read: only lengths and the order count. Without a store, the lengths are drawn at
random: even ones, and log-normal ones, whose longest rows are many times their median, as in
speech and text.
"""

import argparse
from collections.abc import Iterator
from statistics import median
from time import perf_counter

import numpy as np

from lightning_memmap import open_store
from lightning_memmap.sampling import Bucketed, Pool, Sampler, ShuffledSampler
from lightning_memmap.sampling.rows import Shards, StoreRows


class Lengths:
    """A dataset of which only lengths are known."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.num_rows = len(lengths)
        self._lengths = lengths

    def lengths(self, field: str) -> np.ndarray:
        """The lengths."""
        return self._lengths


def drawn() -> Iterator[tuple[str, np.ndarray]]:
    """Lengths at random."""
    generator = np.random.default_rng(0)
    yield "even, 128 to 512", generator.integers(128, 513, 100_000)
    yield "log-normal, sigma 0.7", np.exp(generator.normal(5, 0.7, 100_000)).astype(np.int64) + 1


def padding(lengths: np.ndarray, sampler: Sampler, batch: int) -> float:
    """The share of an epoch's padded batches that is padding."""
    found = lengths[sampler.dataset_rows(0, range(sampler.num_positions))]
    starts = np.arange(0, len(found), batch)
    rows = np.diff(np.append(starts, len(found)))
    return float(1 - found.sum() / (np.maximum.reduceat(found, starts) * rows).sum())


def row_ns(sampler: Sampler, rounds: int) -> float:
    """Nanoseconds that the order of a row takes, the set-up of the epoch included."""
    times = []
    for epoch in range(1, rounds + 1):
        start = perf_counter()
        sampler.dataset_rows(epoch, range(sampler.num_positions))
        times.append(perf_counter() - start)
    return 1e9 * median(times) / sampler.num_positions


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", help="a store with a field whose rows differ in length")
    parser.add_argument("--field", help="its name")
    parser.add_argument("--batch", type=int, default=256, help="rows of a step")
    parser.add_argument("--shards", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.store is None:
        sets = list(drawn())
    else:
        sets = [(f"{args.field} of {args.store}", open_store(args.store).lengths(args.field))]
    print(f"steps of {args.batch} rows, {args.shards} shards")
    print(f"{'lengths':<26} {'order':<26} {'padding':>8} {'padded items':>14} {'ns a row':>10}")
    for name, lengths in sets:
        rows, fields = StoreRows(Shards(len(lengths), args.shards)), Lengths(lengths)
        pool = Pool.of(rows, args.shards)
        orders: dict[str, Sampler] = {"shuffled": ShuffledSampler(pool, 0)}
        for size, buckets in ((1, 10), (1, 100), (8, 100)):
            factory = Bucketed("x", size * args.batch, num_buckets=buckets)
            words = f"{buckets} buckets of {size} step{'s'[: size > 1]}"
            orders[words] = factory.make(pool, 0, fields)
        whole = 1 / (1 - padding(lengths, orders["shuffled"], args.batch))
        for order, sampler in orders.items():
            share = padding(lengths, sampler, args.batch)
            print(
                f"{name:<26} {order:<26} {share:>8.3f} {1 / (1 - share) / whole:>14.2f}"
                f" {row_ns(sampler, args.rounds):>10.0f}"
            )


if __name__ == "__main__":
    main()
